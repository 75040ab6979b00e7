"""How a site's masked vector lies in its file, on the wire and in the hub's accumulator.

    body: parameters in the round's ring, `wire_bytes` each | zeros up to a multiple of 8 | tail: integers modulo 2^64

The tail holds the weight, the number of clipped values and the metrics. Body and tail have keystreams of their own. The vector's
digest is taken over the digests of its chunks, so that threads can make it, and a damaged chunk is known by its place.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedpool import parallel
from fedpool.parallel import Range
from fedpool.secagg import ring, transcript
from fedpool.secagg.ring import Bytes, Ring

# Specification constant: values a chunk; of 1 MiB in the usual ring.
CHUNK_VALUES = 1 << 18
TAIL_BITS = 64
_ALIGNMENT = 8

WEIGHT = 0
SATURATED = 1
METRICS = 2


class VectorLayout(NamedTuple):
    """Where everything is.

    Attributes:
        ring: of the body.
        parameters: words of the body.
        metrics: metrics in the tail.
    """

    ring: Ring
    parameters: int
    metrics: int

    @property
    def tail_words(self) -> int:
        """Words of the tail."""
        return METRICS + self.metrics

    @property
    def tail_start(self) -> int:
        """Offset of the tail, bytes."""
        return -(-self.parameters * self.ring.wire_bytes // _ALIGNMENT) * _ALIGNMENT

    @property
    def size(self) -> int:
        """Bytes of the whole vector."""
        return self.tail_start + self.tail_words * TAIL_BITS // 8

    def chunks(self) -> list[Range]:
        """The body's chunks, in words."""
        return parallel.ranges(self.parameters, CHUNK_VALUES)

    def body(self, file: Bytes, piece: Range) -> Bytes:
        """The bytes of some of the body's words."""
        return file[piece.start * self.ring.wire_bytes : piece.stop * self.ring.wire_bytes]

    def tail(self, file: Bytes) -> NDArray[np.uint64]:
        """The tail's words, a view."""
        return file[self.tail_start : self.size].view("<u8")

    @property
    def body_size(self) -> int:
        """Bytes of the body."""
        return self.parameters * self.ring.wire_bytes

    def digest(self, chunks: list[bytes], rest: Bytes) -> bytes:
        """The vector's digest.

        Args:
            chunks: SHA-256 of every chunk of the body.
            rest: uint8[size - body_size], what follows the body.
        """
        end = hashlib.sha256(rest.data).digest()
        return transcript.digest(transcript.LABEL_VECTOR, transcript.u64(self.size), *chunks, end)

    def digest_of(self, file: Bytes, workers: int) -> bytes:
        """The digest of a vector that lies there complete."""

        def work(piece: Range) -> bytes:
            return hashlib.sha256(self.body(file, piece).data).digest()

        return self.digest(parallel.over(self.chunks(), work, workers), file[self.body_size :])


def layout(ring_bits: int, parameters: int, metrics: int) -> VectorLayout:
    """The layout of a round's vectors.

    Raises:
        UsageError: there is no such ring.
    """
    return VectorLayout(ring.of(ring_bits), parameters, metrics)
