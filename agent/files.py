"""Files as the bulk channel sees them: read from any offset, gathered in order, hashed, replaced whole or not at all."""

from __future__ import annotations

import asyncio
import hashlib
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedpool.errors import IntegrityError, StorageFailed

HASH_CHUNK_BYTES = 1 << 20

Mapped: TypeAlias = NDArray[np.uint8]


class FileSource:
    """A file that can be sent from any offset."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.size = path.stat().st_size

    async def read(self, offset: int, size: int) -> bytes:
        """See `fedpool.transport.bulk.Source.read`."""
        with self._path.open("rb") as file:
            return os.pread(file.fileno(), size, offset)


class FileSink:
    """A file being gathered; what is there already counts."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self.received = os.fstat(self._descriptor).st_size

    def write(self, offset: int, data: bytes) -> None:
        """See `fedpool.transport.bulk.Sink.write`."""
        os.pwrite(self._descriptor, data, offset)
        self.received = offset + len(data)

    def close(self) -> None:
        """Done gathering."""
        os.close(self._descriptor)


def sha256(path: Path) -> bytes:
    """Hash of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.digest()


async def verified(path: Path, expected: bytes, what: str) -> None:
    """Check a file against its hash; a wrong one is removed, so that it is fetched anew.

    Raises:
        IntegrityError: it is another file.
    """
    found = await asyncio.to_thread(sha256, path)
    if found != expected:
        path.unlink()
        raise IntegrityError(f"{what} arrived with hash {found.hex()[:16]}, {expected.hex()[:16]} expected")


class Pieces:
    """A file read and written a piece at a time, from any thread.

    Writing so is several times cheaper than through a mapping, where the kernel is entered for every page.

    Args:
        path: of the file, which is there.

    Raises:
        StorageFailed: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._descriptor = os.open(path, os.O_RDWR)
        except OSError as error:
            raise StorageFailed(f"{path} cannot be opened: {error.strerror}") from None

    def __enter__(self) -> Pieces:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    def read(self, offset: int, size: int) -> Mapped:
        """Bytes of the file; fewer where it ends."""
        piece = np.empty(size, np.uint8)
        return piece[: os.preadv(self._descriptor, [piece.data], offset)] if size else piece

    def write(self, offset: int, piece: Mapped) -> None:
        """Bytes into the file."""
        while len(piece):
            count = os.pwrite(self._descriptor, piece.data, offset)
            piece, offset = piece[count:], offset + count


@contextmanager
def mapped(path: Path, writable: bool = False, flush: bool = True) -> Iterator[Mapped]:
    """A file's bytes, mapped; an empty file is an empty array.

    Args:
        path: of the file.
        writable: whether the array may be written to.
        flush: whether what was written is to be on the disk at the end; not needed for what can be made again.

    Raises:
        StorageFailed: it cannot be opened.
    """
    try:
        with path.open("r+b" if writable else "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                yield np.zeros(0, np.uint8)
                return
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            memory = mmap.mmap(file.fileno(), 0, access=access)
    except OSError as error:
        raise StorageFailed(f"{path} cannot be opened: {error.strerror}") from None
    # The mapping goes when the last array over it goes; closing it here would break a view that somebody still holds.
    array = np.frombuffer(memory, np.uint8)
    yield array
    if writable and flush:
        memory.flush()


def reserve(path: Path, size: int) -> None:
    """Make a file of that size with its blocks allocated, so that a full disk shows now and not in the middle of a page.

    Raises:
        StorageFailed: there is no room.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            if size:
                os.posix_fallocate(descriptor, 0, size)
        finally:
            os.close(descriptor)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise StorageFailed(f"no room for {size} bytes at {path}: {error.strerror}", "make room on that disk") from None


def sync_directory(path: Path) -> None:
    """Make names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
