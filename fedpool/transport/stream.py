"""A byte channel, whatever carries it: a Unix socket, an SSH channel, a pair of pipes."""

import asyncio
from typing import Protocol

import asyncssh

from fedpool.errors import Unreachable

READ_BYTES = 256 * 1024


class Stream(Protocol):
    """Bytes both ways, with back-pressure on writing."""

    async def read(self) -> bytes:
        """The next bytes, b"" at the end.

        Raises:
            Unreachable: the connection broke.
        """
        ...

    async def write(self, data: bytes) -> None:
        """Send bytes; returns when the carrier takes more.

        Raises:
            Unreachable: the connection broke.
        """
        ...

    def close(self) -> None:
        """Give the channel up."""
        ...


class AsyncioStream:
    """A pair of asyncio streams: sockets and pipes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def read(self) -> bytes:
        """See `Stream.read`."""
        try:
            return await self._reader.read(READ_BYTES)
        except OSError as error:
            raise Unreachable(f"the connection broke: {error}") from None

    async def read_line(self) -> bytes:
        """Bytes up to and including the next newline; what there is at the end of the stream or after 64 KiB."""
        try:
            return await self._reader.readline()
        except (OSError, ValueError) as error:
            raise Unreachable(f"the connection broke: {error}") from None

    async def write(self, data: bytes) -> None:
        """See `Stream.write`."""
        try:
            self._writer.write(data)
            await self._writer.drain()
        except OSError as error:
            raise Unreachable(f"the connection broke: {error}") from None

    def close(self) -> None:
        """See `Stream.close`."""
        self._writer.close()


class SshStream:
    """An SSH session channel."""

    def __init__(self, reader: asyncssh.SSHReader[bytes], writer: asyncssh.SSHWriter[bytes]) -> None:
        self._reader, self._writer = reader, writer

    async def read(self) -> bytes:
        """See `Stream.read`."""
        try:
            return await self._reader.read(READ_BYTES)
        except (asyncssh.Error, OSError) as error:
            raise Unreachable(f"the SSH connection broke: {error}") from None

    async def write(self, data: bytes) -> None:
        """See `Stream.write`."""
        try:
            self._writer.write(data)
            await self._writer.drain()
        except (asyncssh.Error, OSError) as error:
            raise Unreachable(f"the SSH connection broke: {error}") from None

    def close(self) -> None:
        """See `Stream.close`."""
        self._writer.channel.close()
