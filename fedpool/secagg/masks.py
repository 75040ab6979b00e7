"""Masking and unmasking of ring vectors, block by block.

A mask is the keystream of AES-256-CTR whose counter is the absolute byte offset divided by 16, so any chunk of a vector can be
masked alone and in any order. Each block is encoded and then takes every mask while it lies in the processor's cache: memory
is passed over once. Where the processor has vector AES the keystream is added in registers (ext/fedpool/secagg/_ctr.h);
elsewhere it comes from the `cryptography` package through a buffer. Without a compiler the loops are numpy's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from fedpool import kernels
from fedpool.secagg import _masks_reference, transcript
from fedpool.secagg.ring import Floats, Ring, Words

_kernel = kernels.chosen(_masks_reference)

AES_BLOCK_BYTES = 16
ROUNDING_BYTES = 2
# Tuning: a block, its values and the keystream's buffer fit together into a 512 KiB second-level cache.
BLOCK_BYTES = 128 * 1024
_ZEROS = bytes(BLOCK_BYTES)


class Stream(NamedTuple):
    """A mask: the keystream of a key, added (+1) or subtracted (-1)."""

    key: bytes
    sign: int


class Masks(NamedTuple):
    """The masks of a vector's two parts."""

    body: tuple[Stream, ...]
    tail: tuple[Stream, ...]


def expand(seed: bytes, context: bytes, label: bytes, sign: int) -> Masks:
    """The masks that follow from one seed.

    Args:
        seed: of a site's own mask, or of a pair's.
        context: digest of manifest and all public keys of the round.
        label: what the seed is for.
        sign: +1 adds, -1 subtracts.
    """
    body, tail = (keystream_key(seed, context, label, part) for part in (b"body", b"tail"))
    return Masks((Stream(body, sign),), (Stream(tail, sign),))


def joined(parts: Iterable[Masks]) -> Masks:
    """All masks of several seeds."""
    found = list(parts)
    return Masks(tuple(s for m in found for s in m.body), tuple(s for m in found for s in m.tail))


def is_compiled() -> bool:
    """Whether the compiled kernels serve."""
    return _kernel is not _masks_reference


def keystream_key(seed: bytes, context: bytes, label: bytes, part: bytes) -> bytes:
    """The AES key of one mask, bound to the round's context, the mask's purpose and the vector's part."""
    return transcript.expand(seed, transcript.digest(transcript.LABEL_KEYSTREAM, context, label, part))


class CipherStreams:
    """Masks from the `cryptography` package, one block of words after the other.

    Args:
        streams: the masks.
        offset: in bytes, of the first word.
    """

    def __init__(self, streams: Sequence[Stream], offset: int) -> None:
        block, skip = divmod(offset, AES_BLOCK_BYTES)
        nonce = block.to_bytes(AES_BLOCK_BYTES, "big")
        self._ciphers = [(Cipher(algorithms.AES(s.key), modes.CTR(nonce)).encryptor(), s.sign) for s in streams]
        self._buffer = bytearray(BLOCK_BYTES + AES_BLOCK_BYTES)
        for cipher, _ in self._ciphers:
            cipher.update(bytes(skip))

    def add(self, words: Words) -> None:
        """Add every mask to the next words, at most BLOCK_BYTES of them."""
        size = words.nbytes
        mask = np.frombuffer(self._buffer, words.dtype, len(words))
        for cipher, sign in self._ciphers:
            cipher.update_into(memoryview(_ZEROS)[:size], self._buffer)
            if sign > 0:
                _kernel.add(words, mask)
            else:
                _kernel.subtract(words, mask)


class RegisterStreams:
    """Masks from the compiled kernel: no keystream touches memory. The same words as `CipherStreams`, to the bit."""

    def __init__(self, streams: Sequence[Stream], offset: int) -> None:
        self._keys = b"".join(stream.key for stream in streams)
        self._signs = np.array([stream.sign for stream in streams], np.int8)
        self._offset = offset

    def add(self, words: Words) -> None:
        """Add every mask to the next words."""
        _kernel.keystream(words, self._keys, self._signs, self._offset)
        self._offset += words.nbytes


Streams: type[CipherStreams] | type[RegisterStreams] = RegisterStreams if _kernel.has_keystream() else CipherStreams


class Bad(NamedTuple):
    """What encoding found: how many values were clipped, and the index of the first NaN or infinity or -1."""

    saturated: int
    first: int


def mask(
    values: Floats,
    base: Floats | None,
    clip: float,
    factor: float,
    rounding_key: bytes,
    streams: Sequence[Stream],
    offset: int,
    out: Words,
) -> Bad:
    """Add the encoding of values (minus base) and every mask to ring words, with stochastic rounding.

    Args:
        values: float32[n].
        base: float32[n] to subtract first, or None.
        clip: largest magnitude kept.
        factor: multiplier after clipping (`FixedPoint.factor`).
        rounding_key: AES key of the rounding's randomness; 16 bits a value, so a rounding's bias is under 2^-17 step.
        streams: the masks; none for the bare encoding.
        offset: index of the first value in the whole vector.
        out: words[n], changed.

    Returns:
        What was found. With a bad value the words must not be used: they hold all blocks before it.
    """
    rounding, found = (
        Streams([Stream(rounding_key, 1)], ROUNDING_BYTES * offset),
        Streams(streams, out.itemsize * offset),
    )
    block = BLOCK_BYTES // out.itemsize
    random = np.empty(min(block, len(values)), np.uint16)
    saturated = 0
    for start in range(0, len(values), block):
        stop = min(start + block, len(values))
        part = random[: stop - start]
        part[:] = 0
        rounding.add(part)
        from_base = None if base is None else base[start:stop]
        count, bad = _kernel.encode(values[start:stop], from_base, part, clip, factor, out[start:stop])
        if bad >= 0:
            return Bad(saturated, start + bad)
        saturated += count
        found.add(out[start:stop])
    return Bad(saturated, -1)


def apply(words: Words, streams: Sequence[Stream], offset: int) -> None:
    """Add and subtract masks in place.

    Args:
        words: words[n], changed.
        streams: the masks.
        offset: index of words[0] in the whole vector.
    """
    found = Streams(streams, words.itemsize * offset)
    block = BLOCK_BYTES // words.itemsize
    for start in range(0, len(words), block):
        found.add(words[start : start + block])


def add(words: Words, other: Words) -> None:
    """Add a vector of ring words in place."""
    _kernel.add(words, other)


def subtract(words: Words, other: Words) -> None:
    """Subtract a vector of ring words in place."""
    _kernel.subtract(words, other)


def decode(ring: Ring, words: Words, base: Floats | None, factor: float, out: Floats) -> None:
    """Write base + centred(words) * factor.

    Args:
        ring: of the words.
        words: words[n], a sum in the ring.
        base: float32[n] or None.
        factor: what one step is worth (`FixedPoint.unit` / summed weights).
        out: float32[n], written.
    """
    _kernel.decode(words, base, ring.lift, factor, out)
