"""The other end of a control channel: calls with deadlines out, requests to a handler in."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from fedpool.errors import Failed, IbshellError, TimedOut, Unreachable
from fedpool.transport.stream import Stream
from fedpool.wire.session import Cancelled, Hello, Notice, Ready, Request, Response, Session, from_body

log = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 10.0
# A peer that asks without waiting for answers gets no more than this many served at once.
REQUESTS_AT_ONCE = 256

Answer = TypeVar("Answer")
Handler = Callable[[Request], Awaitable[object]]


class Peer:
    """One end of a control channel over a stream.

    Args:
        stream: what carries it; closed with the peer.
        role: this side's role.
        name: this side's name.
        serve: answers the other side's requests with a Struct, or raises an `IbshellError`.
        notice: takes the other side's notices.
    """

    def __init__(
        self,
        stream: Stream,
        role: str,
        name: str,
        serve: Handler | None = None,
        notice: Callable[[Notice], None] | None = None,
    ) -> None:
        self._stream = stream
        self._session = Session(role, name)
        self._serve = serve
        self._notice = notice
        self._waiting: dict[int, asyncio.Future[Response]] = {}
        self._serving: dict[int, asyncio.Task[None]] = {}
        self._ready: asyncio.Future[Hello] = asyncio.get_running_loop().create_future()
        self._closed = asyncio.Event()

    async def start(self) -> Hello:
        """Exchange hellos; `run` must already be running.

        Raises:
            Unreachable, VersionMismatch, PeerProtocolError: the other side is silent or no peer of ours.
        """
        await self._stream.write(self._session.start())
        try:
            return await asyncio.wait_for(asyncio.shield(self._ready), HELLO_TIMEOUT_S)
        except TimeoutError:
            raise TimedOut(f"no hello within {HELLO_TIMEOUT_S:.0f} s") from None

    async def call(
        self, method: str, body: object, expect: type[Answer], timeout_s: float | None = 30.0, key: str = ""
    ) -> Answer:
        """Ask the other side.

        Args:
            method: what.
            body: a Struct.
            expect: type of the answer.
            timeout_s: seconds to wait, or None to wait as long as the connection lives.
            key: idempotency key, or "".

        Raises:
            Unreachable: the connection ended first.
            TimedOut: no answer in time; the other side is told that it is no longer wanted.
            IbshellError: whatever the other side answered.
        """
        if self._closed.is_set():
            raise Unreachable(f"the connection ended before {method} was asked")
        request_id, data = self._session.request(method, body, timeout_s, key)
        future: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = future
        try:
            await self._stream.write(data)
            response = await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            await self._stream.write(self._session.cancel(request_id))
            raise TimedOut(f"no answer to {method} within {timeout_s:g} s") from None
        finally:
            self._waiting.pop(request_id, None)
        if response.error is not None:
            raise response.error
        return from_body(response.body, expect, method)

    async def notify(self, method: str, body: object) -> None:
        """Tell the other side something."""
        await self._stream.write(self._session.notify(method, body))

    def close(self) -> None:
        """End the channel."""
        self._stream.close()

    async def run(self) -> None:
        """Read until the channel ends; every call still waiting then fails.

        Raises:
            PeerProtocolError, VersionMismatch: the other side broke the protocol; the channel is closed.
        """
        ended: IbshellError = Unreachable("the connection ended")
        try:
            while data := await self._stream.read():
                for event in self._session.receive(data):
                    self._dispatch(event)
            self._session.receive(b"")
        except IbshellError as error:
            ended = error
            if not isinstance(error, Unreachable):
                raise
        finally:
            self._end(ended)

    def _end(self, error: IbshellError) -> None:
        self._closed.set()
        self._stream.close()
        for task in self._serving.values():
            task.cancel()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(Unreachable(f"the connection ended: {error.message}", error.hint))
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # nobody need be waiting for it

    def _dispatch(self, event: Ready | Request | Response | Notice | Cancelled) -> None:
        match event:
            case Ready():
                self._ready.set_result(event.hello)
            case Response():
                future = self._waiting.get(event.id)
                if future is not None and not future.done():
                    future.set_result(event)
            case Notice():
                if self._notice is not None:
                    self._notice(event)
            case Cancelled():
                task = self._serving.get(event.id)
                if task is not None:
                    task.cancel()
            case Request():
                task = asyncio.get_running_loop().create_task(self._answer(event))
                self._serving[event.id] = task
                task.add_done_callback(lambda _: self._serving.pop(event.id, None))

    async def _answer(self, request: Request) -> None:
        try:
            try:
                if len(self._serving) > REQUESTS_AT_ONCE:
                    raise Failed(f"more than {REQUESTS_AT_ONCE} requests at once on one channel")
                if self._serve is None:
                    raise Failed(f"this side answers no requests, {request.method} among them")
                async with asyncio.timeout(request.deadline_s):
                    body = await self._serve(request)
            except TimeoutError:
                data = self._session.refuse(request.id, TimedOut(f"{request.method} was not done by its deadline"))
            except IbshellError as error:
                data = self._session.refuse(request.id, error)
            except Exception:  # a task root: the peer gets an answer, the log the traceback
                log.exception("%s failed", request.method)
                data = self._session.refuse(
                    request.id, Failed(f"{request.method} failed inside the agent; its log says why")
                )
            else:
                data = self._session.respond(request.id, body)
            await self._stream.write(data)
        except Unreachable:
            log.debug("the answer to %s found nobody", request.method)
