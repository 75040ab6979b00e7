"""Masking and unmasking of ring vectors, block by block.

The keystream is AES-256-CTR whose counter is the absolute byte offset divided by 16, so any chunk of a vector can be
masked alone and in any order. Blocks are small enough that accumulator and keystream stay in the processor's cache while
every neighbour's mask is added. The loops are compiled (ext/fedpool/secagg/_masks.pyx) or, without a compiler, numpy.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from fedpool import kernels
from fedpool.secagg import _masks_reference, transcript

_kernel = kernels.chosen(_masks_reference)

Words = NDArray[np.uint32]
Floats = NDArray[np.float32]

WORD_BYTES = 4
AES_BLOCK_BYTES = 16
# Tuning: accumulator, keystream and the zeros it is made from fit together into a 512 KiB second-level cache.
BLOCK_WORDS = 32 * 1024
_ZEROS = bytes(BLOCK_WORDS * WORD_BYTES + AES_BLOCK_BYTES)


class Stream(NamedTuple):
    """A mask: the keystream of a key, added (+1) or subtracted (-1)."""

    key: bytes
    sign: int


def is_compiled() -> bool:
    """Whether the compiled kernels serve."""
    return _kernel is not _masks_reference


def keystream_key(seed: bytes, context: bytes, label: bytes) -> bytes:
    """The AES key of one mask, bound to the round's context and the mask's purpose."""
    return transcript.expand(seed, transcript.digest(transcript.LABEL_KEYSTREAM, context, label))


class Keystream:
    """AES-256-CTR words from an absolute word offset onwards.

    Args:
        key: 32 bytes.
        offset: first word, >= 0.
    """

    def __init__(self, key: bytes, offset: int) -> None:
        block, skip = divmod(offset * WORD_BYTES, AES_BLOCK_BYTES)
        self._encryptor = Cipher(algorithms.AES(key), modes.CTR(block.to_bytes(16, "big"))).encryptor()
        if skip:
            self._encryptor.update(bytes(skip))

    def fill(self, buffer: bytearray, size: int) -> None:
        """Write the next `size` bytes of keystream to the start of the buffer (which has 16 bytes to spare)."""
        self._encryptor.update_into(memoryview(_ZEROS)[:size], buffer)

    def words(self, count: int) -> Words:
        """The next `count` words as a new array: for tests and small vectors."""
        return np.frombuffer(self._encryptor.update(bytes(count * WORD_BYTES)), dtype="<u4").astype(np.uint32)


def encode(
    values: Floats,
    base: Floats | None,
    clip: float,
    factor: float,
    rounding_key: bytes,
    offset: int,
    out: Words,
) -> tuple[int, int]:
    """Encode values (minus base) as ring words with stochastic rounding.

    Args:
        values: float32[n].
        base: float32[n] to subtract first, or None.
        clip: largest magnitude kept.
        factor: multiplier after clipping (`FixedPoint.factor`).
        rounding_key: AES key of the rounding's randomness; 16 bits a value, so a rounding's bias is under 2^-17 step.
        offset: index of the first value in the whole vector; even.
        out: uint32[n], written.

    Returns:
        (number of values that were clipped, index of the first NaN or infinity or -1). With a bad value nothing is written
        past the block it stands in, and the words must not be used.
    """
    assert offset % 2 == 0
    stream = Keystream(rounding_key, offset // 2)
    buffer = bytearray(BLOCK_WORDS * 2 + AES_BLOCK_BYTES)
    random = np.frombuffer(buffer, dtype="<u2")
    saturated = 0
    for start in range(0, len(values), BLOCK_WORDS):
        stop = min(start + BLOCK_WORDS, len(values))
        stream.fill(buffer, 2 * (stop - start))
        part = None if base is None else base[start:stop]
        count, bad = _kernel.encode(values[start:stop], part, random[: stop - start], clip, factor, out[start:stop])
        if bad >= 0:
            return saturated, start + bad
        saturated += count
    return saturated, -1


def apply(words: Words, streams: Sequence[Stream], offset: int) -> None:
    """Add and subtract masks in place.

    Args:
        words: uint32[n], changed.
        streams: the masks.
        offset: index of words[0] in the whole vector.
    """
    keystreams = [(Keystream(stream.key, offset), stream.sign) for stream in streams]
    buffer = bytearray(BLOCK_WORDS * WORD_BYTES + AES_BLOCK_BYTES)
    mask = np.frombuffer(buffer, dtype="<u4")
    for start in range(0, len(words), BLOCK_WORDS):
        stop = min(start + BLOCK_WORDS, len(words))
        block, part = words[start:stop], mask[: stop - start]
        for keystream, sign in keystreams:
            keystream.fill(buffer, WORD_BYTES * (stop - start))
            if sign > 0:
                _kernel.add(block, part)
            else:
                _kernel.subtract(block, part)


def add(words: Words, other: Words) -> None:
    """Add a vector of ring words in place."""
    _kernel.add(words, other)


def decode(words: Words, base: Floats | None, factor: float, out: Floats) -> None:
    """Write base + centred(words) * factor.

    Args:
        words: uint32[n], a sum in the ring.
        base: float32[n] or None.
        factor: what one step is worth (`FixedPoint.unit` / summed weights).
        out: float32[n], written.
    """
    _kernel.decode(words, base, factor, out)
