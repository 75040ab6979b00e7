"""The rings in which vectors are added: integers modulo 2^16, 2^24, 2^32 or 2^64, and how their words lie.

A ring of 24 bits is computed in words of 32 bits whose upper eight mean nothing (addition never carries downwards) and packed
to three bytes where it leaves the site: little-endian like all words.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedpool.errors import UsageError

Words: TypeAlias = NDArray[np.uint16] | NDArray[np.uint32] | NDArray[np.uint64]
Floats: TypeAlias = NDArray[np.float32]
Bytes: TypeAlias = NDArray[np.uint8]

WIDTHS = (16, 24, 32, 64)
_WORDS: dict[int, Any] = {16: np.uint16, 24: np.uint32, 32: np.uint32, 64: np.uint64}


class Ring(NamedTuple):
    """Integers modulo 2^bits."""

    bits: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of a word in memory."""
        found: np.dtype[Any] = np.dtype(_WORDS[self.bits]).newbyteorder("<")
        return found

    @property
    def word_bytes(self) -> int:
        """Bytes of a word in memory, and of keystream a word takes."""
        return self.dtype.itemsize

    @property
    def wire_bytes(self) -> int:
        """Bytes of a word in a file or on the wire."""
        return self.bits // 8

    @property
    def lift(self) -> int:
        """Upper bits of a word that mean nothing."""
        return 8 * self.word_bytes - self.bits

    @property
    def largest(self) -> int:
        """Largest magnitude that a sum may reach without wrapping around."""
        return (1 << (self.bits - 1)) - 1

    def zeros(self, count: int) -> Words:
        """A vector of zeros."""
        zeros: Words = np.zeros(count, self.dtype)
        return zeros

    def read(self, wire: Bytes) -> Words:
        """Words from their bytes; a view where they lie as in memory.

        Args:
            wire: uint8[n * wire_bytes].

        Returns:
            words[n]; writing to them changes the bytes only where they are a view (every ring but 24 bits).
        """
        if not self.lift:
            view: Words = wire.view(self.dtype)
            return view
        words = np.zeros((len(wire) // self.wire_bytes, self.word_bytes), np.uint8)
        words[:, : self.wire_bytes] = wire.reshape(-1, self.wire_bytes)
        unpacked: Words = words.reshape(-1).view(self.dtype)
        return unpacked

    def packed(self, words: Words) -> Bytes:
        """The words' bytes; a view where they lie as on the wire."""
        if not self.lift:
            return words.view(np.uint8)
        wire = np.empty(len(words) * self.wire_bytes, np.uint8)
        self.write(words, wire)
        return wire

    def write(self, words: Words, wire: Bytes) -> None:
        """Words into their bytes.

        Args:
            words: words[n].
            wire: uint8[n * wire_bytes], written.
        """
        if not self.lift:
            wire[:] = words.view(np.uint8)
            return
        octets = words.view(np.uint8).reshape(-1, self.word_bytes)
        wire.reshape(-1, self.wire_bytes)[:] = octets[:, : self.wire_bytes]


def of(bits: int) -> Ring:
    """The ring of that width.

    Raises:
        UsageError: there is none.
    """
    if bits not in WIDTHS:
        raise UsageError(
            f"a ring of {bits} bits", f"it may have {', '.join(str(w) for w in WIDTHS)}; 32 is the usual one"
        )
    return Ring(bits)
