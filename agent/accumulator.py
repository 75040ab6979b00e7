"""The sum of the vectors that have arrived, in one file: the hub needs neither memory nor disk for a cohort of them.

A vector is gathered in a file of its own, checked, added, and removed. Adding is not repeatable, so a note beside the sum says
which vectors are in it and which one is being added. A hub that was killed goes on from the note; where it was killed while
adding, or where the machine has restarted (the sum is never flushed to disk), the sum begins anew and the sites, which keep
their vectors until the round is over, send them again.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from agent import clock, files
from fedpool import parallel
from fedpool.parallel import Range
from fedpool.secagg import masks
from fedpool.secagg.ring import Words
from fedpool.secagg.vector import VectorLayout

HEAD_BYTES = 64


class _Note(msgspec.Struct):
    """What is in the sum."""

    boot: str
    added: list[int] = []
    adding: int = 0


class Accumulator:
    """The sum of one attempt at one round.

    Args:
        directory: of the attempt.
        layout: of its vectors.
        workers: threads.

    Attributes:
        added: indices of the sites whose vectors are in the sum.
    """

    def __init__(self, directory: Path, layout: VectorLayout, workers: int) -> None:
        self.path = directory / "sum"
        self._note_path = directory / "sum.json"
        self._directory = directory
        self._layout = layout
        self._workers = workers
        self._adding = asyncio.Lock()
        # The sum is in words as they lie in memory; a ring of 24 bits takes four bytes there.
        self._tail_start = -(-layout.parameters * layout.ring.word_bytes // 8) * 8
        self._note = self._read()

    @property
    def added(self) -> set[int]:
        """See the class."""
        return set(self._note.added)

    def vector(self, index: int) -> Path:
        """Where a site's masked vector is gathered."""
        return self._directory / f"vector-{index}"

    def head(self, index: int) -> bytes:
        """The first bytes of a vector that was added, or b"": what an auditor may see of it."""
        path = self._directory / f"head-{index}"
        return path.read_bytes() if path.exists() else b""

    def digest(self, index: int) -> bytes:
        """The digest of a vector that was gathered in full."""
        with files.mapped(self.vector(index)) as vector:
            return self._layout.digest_of(vector, self._workers)

    def _read(self) -> _Note:
        new = _Note(clock.boot())
        if self._note_path.exists():
            note = msgspec.json.decode(self._note_path.read_bytes(), type=_Note)
            if note.boot == new.boot and not note.adding and self.path.exists():
                return note
        files.reserve(self.path, self._tail_start + 8 * self._layout.tail_words)
        return new

    def _write(self, adding: int) -> None:
        self._note.adding = adding
        arriving = self._note_path.with_suffix(".part")
        arriving.write_bytes(msgspec.json.encode(self._note))
        arriving.replace(self._note_path)

    async def add(self, index: int) -> None:
        """Add a vector that was gathered and checked, then remove its file."""
        async with self._adding:
            if index not in self._note.added:
                await asyncio.to_thread(self._add, index)

    def _add(self, index: int) -> None:
        self._write(index)
        path, layout = self.vector(index), self._layout
        width = layout.ring.word_bytes
        with files.mapped(path) as vector, files.Pieces(self.path) as total:

            def work(piece: Range) -> None:
                octets = total.read(piece.start * width, (piece.stop - piece.start) * width)
                masks.add(octets.view(layout.ring.dtype), layout.ring.read(layout.body(vector, piece)))
                total.write(piece.start * width, octets)

            parallel.over(layout.chunks(), work, self._workers)
            octets = total.read(self._tail_start, 8 * layout.tail_words)
            masks.add(octets.view("<u8"), layout.tail(vector))
            total.write(self._tail_start, octets)
            (self._directory / f"head-{index}").write_bytes(vector[:HEAD_BYTES].tobytes())
        self._note.added.append(index)
        self._write(0)
        path.unlink()

    def _words(self, total: files.Mapped, piece: Range) -> Words:
        width = self._layout.ring.word_bytes
        words: Words = total[piece.start * width : piece.stop * width].view(self._layout.ring.dtype)
        return words

    def _tail(self, total: files.Mapped) -> Words:
        tail: Words = total[self._tail_start :].view("<u8")
        return tail

    def words(self, total: files.Mapped, piece: Range) -> Words:
        """A copy of some of the sum's words, to take masks off."""
        return self._words(total, piece).copy()

    def tail(self, total: files.Mapped) -> Words:
        """A copy of the tail's words."""
        return self._tail(total).copy()
