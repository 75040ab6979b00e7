"""Large objects by offset over a bulk channel: what one side wants, the other sends, as often as the connection breaks."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from fedpool.errors import NotFound, Unreachable
from fedpool.transport.stream import Stream
from fedpool.wire import bulk


class Source(Protocol):
    """An object that can be sent from any offset."""

    async def read(self, offset: int, size: int) -> bytes:
        """Up to `size` bytes from `offset`."""
        ...

    @property
    def size(self) -> int:
        """Length in bytes."""
        ...


class Sink(Protocol):
    """Where an object is gathered."""

    @property
    def received(self) -> int:
        """Bytes already there; the transfer goes on from here."""
        ...

    def write(self, offset: int, data: bytes) -> None:
        """Append bytes at `offset`, which is `received`."""
        ...


class BulkChannel:
    """One end of a bulk channel.

    Args:
        stream: what carries it.
        source: finds an object that this side offers, waiting until it is ready.

    Attributes:
        sent, received: bytes of payload moved, for the books.
    """

    def __init__(self, stream: Stream, source: Callable[[bytes], Awaitable[Source]]) -> None:
        self._stream = stream
        self._source = source
        self._wanted: dict[bytes, tuple[Sink, asyncio.Future[None]]] = {}
        self._write = asyncio.Lock()
        self.sent = 0
        self.received = 0

    async def run(self) -> None:
        """Serve until the channel ends."""
        reader = bulk.BulkReader()
        error = Unreachable("the bulk connection ended")
        try:
            async with asyncio.TaskGroup() as sends:
                while data := await self._stream.read():
                    for frame in reader.receive(data):
                        if frame.kind == bulk.WANT:
                            sends.create_task(self._send(frame.object_id, frame.offset))
                        else:
                            self._take(frame)
                raise error
        except* Unreachable:
            pass
        finally:
            self._stream.close()
            for _, future in self._wanted.values():
                if not future.done():
                    future.set_exception(error)

    async def fetch(self, object_id: bytes, sink: Sink) -> None:
        """Get an object, from what the sink already has onwards.

        Raises:
            Unreachable: the channel ended; fetch again over the next one, nothing received is lost.
            NotFound: the other side does not offer it.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._wanted[object_id] = (sink, future)
        try:
            async with self._write:
                await self._stream.write(bulk.write(bulk.Frame(bulk.WANT, object_id, sink.received)))
            await future
        finally:
            self._wanted.pop(object_id, None)

    def close(self) -> None:
        """End the channel."""
        self._stream.close()

    def _take(self, frame: bulk.Frame) -> None:
        wanted = self._wanted.get(frame.object_id)
        if wanted is None:
            return
        sink, future = wanted
        if future.done():
            return
        if frame.kind == bulk.MISSING:
            future.set_exception(NotFound("the other side no longer offers that object"))
            return
        if frame.offset != sink.received:
            return  # left over from a request before this one
        try:
            sink.write(frame.offset, frame.payload)
        except OSError as error:
            future.set_exception(error)
            return
        self.received += len(frame.payload)
        if frame.last:
            future.set_result(None)

    async def _send(self, object_id: bytes, offset: int) -> None:
        try:
            source = await self._source(object_id)
        except NotFound:
            async with self._write:
                await self._stream.write(bulk.write(bulk.Frame(bulk.MISSING, object_id, offset)))
            return
        while True:
            data = await source.read(offset, bulk.CHUNK_BYTES)
            last = offset + len(data) >= source.size
            async with self._write:
                await self._stream.write(bulk.write(bulk.Frame(bulk.DATA, object_id, offset, data, last)))
            offset += len(data)
            self.sent += len(data)
            if last:
                return
