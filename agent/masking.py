"""A site's arithmetic of a round: the update encoded and masked into a file, a chunk at a time, whatever the model's size.

Masks do not depend on the data: while the program still trains they are written into the vector's file, and the encoding is added
to what is there once it has submitted. Chunks that had no time get both in one pass. Several threads work on a chunk each.
"""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path
from typing import NamedTuple

import numpy as np

from agent import files
from fedpool import parallel
from fedpool.errors import ProgramFailed
from fedpool.federation import parameters
from fedpool.federation.parameters import Layout, Values
from fedpool.parallel import Range
from fedpool.secagg import masks, vector
from fedpool.secagg.client import MaskVector
from fedpool.secagg.encoding import FixedPoint
from fedpool.secagg.manifest import Manifest
from fedpool.secagg.ring import Bytes, Floats, Words
from fedpool.wire.messages import Submission


class Encoding(NamedTuple):
    """A range of the vector's values and their fixed point."""

    piece: Range
    fixed: FixedPoint


def encodings(manifest: Manifest) -> list[Encoding]:
    """The fixed points of a vector's values, in their order."""
    found, start = [], 0
    for part in manifest.ranges:
        found.append(Encoding(Range(start, start + part.values), manifest.value_encoding(part.clip)))
        start += part.values
    return found


def within(found: list[Encoding], piece: Range) -> list[Encoding]:
    """What of the encodings lies in a piece of the vector."""
    return [
        Encoding(Range(max(e.piece.start, piece.start), min(e.piece.stop, piece.stop)), e.fixed)
        for e in found
        if e.piece.start < piece.stop and piece.start < e.piece.stop
    ]


class Masking:
    """The masked vector of one round, in the making.

    Args:
        manifest: the round.
        effect: its masks and the randomness of its rounding.
        path: file of the vector; made here.
        workers: threads.

    Raises:
        StorageFailed: there is no room for it.
    """

    def __init__(self, manifest: Manifest, effect: MaskVector, path: Path, workers: int) -> None:
        self._manifest = manifest
        self._effect = effect
        self._path = path
        self._workers = workers
        self._layout = manifest.vector
        self._prepared = 0  # words from the start whose masks are in the file already
        self._enough = threading.Event()
        files.reserve(path, self._layout.size)

    def prepare(self) -> None:
        """Write masks into the file until all are there or `stop` is called; for a thread of its own."""
        with files.Pieces(self._path) as out:
            for piece in self._layout.chunks():
                if self._enough.is_set():
                    return
                words = self._layout.ring.zeros(piece.stop - piece.start)
                masks.apply(words, self._effect.streams.body, piece.start)
                out.write(piece.start * self._layout.ring.wire_bytes, self._layout.ring.packed(words))
                self._prepared = piece.stop

    def stop(self) -> None:
        """End `prepare` after the chunk it is at."""
        self._enough.set()

    def finish(self, model: Path, update: Path, submission: Submission) -> bytes:
        """Add the encoded update; `prepare` must be over.

        Args:
            model: file of the global parameters.
            update: file of the trained ones.
            submission: weight and metrics.

        Returns:
            The vector's digest.

        Raises:
            ProgramFailed: the update changed since it was checked.
        """
        manifest = self._manifest
        if not manifest.parameters:
            return self._finish_metrics(submission)
        with (
            files.mapped(model) as global_bytes,
            files.mapped(update) as own_bytes,
            files.Pieces(self._path) as out,
        ):
            layout = parameters.layout(global_bytes, "the model", manifest.exclude)
            base = Values(layout, global_bytes, "the model")
            trained = Values(layout, own_bytes, "the update")
            chunks = self._layout.chunks()
            scale = norm_scale(base, trained, manifest.norm_clip, chunks, self._workers)
            found = encodings(manifest)

            def work(piece: Range) -> tuple[bytes, int]:
                values, old = trained.read(piece), base.read(piece)
                words = self._prepared_words(out, piece)
                saturated = self._mask(
                    layout, words, piece, values, old, within(found, piece), submission.weight, scale
                )
                octets = self._layout.ring.packed(words)
                out.write(piece.start * self._layout.ring.wire_bytes, octets)
                return hashlib.sha256(octets.data).digest(), saturated

            done = parallel.over(chunks, work, self._workers)
            rest = self._rest(submission, sum(saturated for _, saturated in done))
            out.write(self._layout.body_size, rest)
            return self._layout.digest([digest for digest, _ in done], rest)

    def _finish_metrics(self, submission: Submission) -> bytes:
        """The vector of a round that evaluates: it has no body, and there is no update."""
        rest = self._rest(submission, 0)
        with files.Pieces(self._path) as out:
            out.write(0, rest)
        return self._layout.digest([], rest)

    def _prepared_words(self, out: files.Pieces, piece: Range) -> Words:
        """A chunk with the masks that were written while the program trained, or zeros."""
        ring = self._layout.ring
        if piece.stop > self._prepared:
            return ring.zeros(piece.stop - piece.start)
        return ring.read(out.read(piece.start * ring.wire_bytes, (piece.stop - piece.start) * ring.wire_bytes))

    def _mask(
        self,
        layout: Layout,
        words: Words,
        piece: Range,
        values: Floats,
        old: Floats,
        found: list[Encoding],
        weight: int,
        scale: float,
    ) -> int:
        """Encode a chunk onto its masks; returns how many values were clipped."""
        streams = () if piece.stop <= self._prepared else self._effect.streams.body
        saturated = 0
        for part, fixed in found:
            first, last = part.start - piece.start, part.stop - piece.start
            count, bad = masks.mask(
                values[first:last],
                old[first:last],
                fixed.clip / scale,  # the norm is scaled first: clip(x * s) = s * clip at range / s
                fixed.factor(weight) * scale,
                self._effect.rounding_key,
                streams,
                part.start,
                words[first:last],
            )
            if bad >= 0:
                place = parameters.name_of(layout, part.start + bad)
                raise ProgramFailed(f"the update changed while it was masked: {place} is not finite")
            saturated += count
        return saturated

    def _rest(self, submission: Submission, saturated: int) -> Bytes:
        """What follows the body: weight, clipped values and metrics, masked."""
        manifest = self._manifest
        rest = np.zeros(self._layout.size - self._layout.body_size, np.uint8)
        tail = rest[self._layout.tail_start - self._layout.body_size :].view("<u8")
        tail[vector.WEIGHT], tail[vector.SATURATED] = submission.weight, saturated
        metrics = np.array([submission.metrics[name] for name in manifest.metrics], np.float32)
        fixed = manifest.metric_encoding()
        factor = fixed.factor(submission.weight)
        masks.mask(metrics, None, fixed.clip, factor, self._effect.rounding_tail, (), 0, tail[vector.METRICS :])
        masks.apply(tail, self._effect.streams.tail, 0)
        return rest


def norm_scale(base: Values, trained: Values, limit: float, chunks: list[Range], workers: int) -> float:
    """What an update is multiplied by so that its Euclidean norm is at most `limit`; 1 where that is 0.

    Args:
        base: the global parameters.
        trained: the site's.
        limit: largest norm, or 0 for any.
        chunks: of the vector.
        workers: threads.
    """
    if not limit:
        return 1.0

    def square(piece: Range) -> float:
        difference = trained.read(piece).astype(np.float64) - base.read(piece)
        return float(difference @ difference)

    norm = float(np.sqrt(sum(parallel.over(chunks, square, workers))))
    return min(1.0, limit / norm) if norm else 1.0


def check(model: Path, update: Path, exclude: tuple[str, ...], workers: int) -> tuple[float, str] | None:
    """The first value of an update that is not finite and what people call its place; None where all are.

    Raises:
        UsageError: tensors are missing, unknown or of another shape or type.
    """
    with files.mapped(model) as global_bytes, files.mapped(update) as own_bytes:
        layout = parameters.layout(global_bytes, "the model", exclude)
        trained = Values(layout, own_bytes, "the update")

        def bad(piece: Range) -> int:
            finite = np.isfinite(trained.read(piece))
            return -1 if finite.all() else piece.start + int(np.argmin(finite))

        pieces = parallel.ranges(layout.parameters, vector.CHUNK_VALUES)
        first = min((place for place in parallel.over(pieces, bad, workers) if place >= 0), default=-1)
        if first < 0:
            return None
        return float(trained.read(Range(first, first + 1))[0]), parameters.name_of(layout, first)
