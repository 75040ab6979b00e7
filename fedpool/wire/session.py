"""One end of a control channel: versions, request ids, deadlines, cancellation. No input or output, no clock.

The first frame each way is `hello`. After it both sides may send requests; a response carries its request's id. What
arrives comes out as events; what is to be sent comes out as bytes.
"""

from typing import Any, TypeAlias, TypeVar

import msgspec

from fedpool import __version__
from fedpool.errors import IbshellError, LocalProtocolError, PeerProtocolError, VersionMismatch, from_wire
from fedpool.wire import frames

VERSIONS = (1,)
Body = TypeVar("Body")


class Hello(msgspec.Struct, frozen=True):
    """Who speaks.

    Attributes:
        versions: protocol versions spoken, ascending.
        role: hub, site, client or program.
        name: of the hub's pool, the site, the user or the task.
        software: release, for people.
    """

    versions: tuple[int, ...]
    role: str
    name: str
    software: str = __version__


class Ready(msgspec.Struct, frozen=True):
    """The peer has introduced itself and a common version was found."""

    hello: Hello
    version: int


class Request(msgspec.Struct, frozen=True):
    """The peer asks for something.

    Attributes:
        id: to be named in the response.
        method: what.
        body: undecoded; see `messages`.
        deadline_s: seconds from now after which the peer no longer waits, or None.
        key: idempotency key, or "".
    """

    id: int
    method: str
    body: Any
    deadline_s: float | None
    key: str


class Response(msgspec.Struct, frozen=True):
    """The peer answered request `id`: a body or an error."""

    id: int
    body: Any
    error: IbshellError | None


class Notice(msgspec.Struct, frozen=True):
    """The peer tells something and expects no answer."""

    method: str
    body: Any


class Cancelled(msgspec.Struct, frozen=True):
    """The peer no longer wants request `id`."""

    id: int


Event: TypeAlias = Ready | Request | Response | Notice | Cancelled


class _Frame(msgspec.Struct, frozen=True):
    v: int
    kind: str
    id: int = 0
    method: str = ""
    body: Any = None
    error: dict[str, str] | None = None
    deadline_ms: float | None = None
    key: str = ""
    pieces: int = 0


def to_body(value: object) -> Any:
    """A Struct as msgpack can carry it."""
    return msgspec.to_builtins(value, builtin_types=(bytes,))


def from_body(body: Any, expected: type[Body], method: str) -> Body:
    """Decode and validate a body; unknown fields are ignored.

    Raises:
        PeerProtocolError: it is not of that type; the message names the field.
    """
    try:
        return msgspec.convert(body, expected, builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        raise PeerProtocolError(f"the body of {method} is malformed: {error}") from None


class Session:
    """One end of a control channel.

    Args:
        role: hub, site, client or program.
        name: see `Hello`.
    """

    def __init__(self, role: str, name: str) -> None:
        self._reader = frames.FrameReader()
        self._hello = Hello(VERSIONS, role, name)
        self._open: set[int] = set()
        self._pieces: dict[int, list[bytes]] = {}  # of answers that travel in pieces
        self._next_id = 0
        self.peer: Hello | None = None

    def start(self) -> bytes:
        """The frame to send first."""
        return self._frame(kind="event", method="hello", body=to_body(self._hello))

    def receive(self, data: bytes) -> list[Event]:
        """Take in bytes; b"" means the end of the stream.

        Raises:
            PeerProtocolError: the peer broke the protocol; close the channel.
            VersionMismatch: no common version; close the channel.
        """
        if not data:
            self._reader.end()
            return []
        return [event for frame in self._reader.receive(data) for event in self._event(frame)]

    def _event(self, raw: dict[str, Any]) -> list[Event]:
        frame = from_body(raw, _Frame, "a control frame")
        if self.peer is None:
            if frame.kind != "event" or frame.method != "hello":
                raise PeerProtocolError(f"the first frame is {frame.kind} {frame.method!r}, not hello")
            hello = from_body(frame.body, Hello, "hello")
            common = set(hello.versions) & set(VERSIONS)
            if not common:
                raise VersionMismatch(
                    f"{hello.role} {hello.name} runs {hello.software} and speaks protocol versions "
                    f"{list(hello.versions)}; this {self._hello.role} runs {__version__} and speaks {list(VERSIONS)}",
                    "bring both sides to one release",
                )
            self.peer = hello
            return [Ready(hello, max(common))]
        match frame.kind:
            case "request":
                deadline = None if frame.deadline_ms is None else frame.deadline_ms / 1000
                return [Request(frame.id, frame.method, frame.body, deadline, frame.key)]
            case "response":
                if frame.id not in self._open:
                    return []  # cancelled or timed out here; the answer came all the same
                self._open.discard(frame.id)
                body = self._whole(frame)
                error = None
                if frame.error is not None:
                    e = frame.error
                    error = from_wire(e.get("code", "failed"), e.get("message", ""), e.get("hint", ""))
                return [Response(frame.id, body, error)]
            case "piece":
                self._take(frame)
                return []
            case "event":
                return [Notice(frame.method, frame.body)]
            case "cancel":
                return [Cancelled(frame.id)]
            case _:
                raise PeerProtocolError(f"a frame of unknown kind {frame.kind!r}")

    def _take(self, frame: _Frame) -> None:
        if frame.id not in self._open:
            return  # cancelled or timed out here
        if not isinstance(frame.body, bytes):
            raise PeerProtocolError("a piece of an answer is not bytes")
        self._pieces.setdefault(frame.id, []).append(frame.body)
        size = sum(len(piece) for pieces in self._pieces.values() for piece in pieces)
        if size > frames.WHOLE_BYTES_MAX:
            raise PeerProtocolError(f"pieces of answers of {size} bytes; the limit is {frames.WHOLE_BYTES_MAX}")

    def _whole(self, frame: _Frame) -> Any:
        pieces = self._pieces.pop(frame.id, [])
        if len(pieces) != frame.pieces:
            raise PeerProtocolError(f"{len(pieces)} of {frame.pieces} pieces of an answer")
        return frames.join(pieces) if pieces else frame.body

    def request(self, method: str, body: object, deadline_s: float | None = None, key: str = "") -> tuple[int, bytes]:
        """Make a request; returns its id and the bytes to send."""
        self._next_id += 1
        deadline = None if deadline_s is None else deadline_s * 1000
        data = self._frame(
            kind="request", id=self._next_id, method=method, body=to_body(body), deadline_ms=deadline, key=key
        )
        self._open.add(self._next_id)
        return self._next_id, data

    def respond(self, request_id: int, body: object) -> bytes:
        """Answer a request; an answer too large for a frame travels in pieces before it."""
        content = to_body(body)
        try:
            return self._frame(kind="response", id=request_id, body=content)
        except LocalProtocolError:
            pieces = frames.cut(content)
        sent = [self._frame(kind="piece", id=request_id, body=piece) for piece in pieces]
        return b"".join(sent) + self._frame(kind="response", id=request_id, pieces=len(pieces))

    def refuse(self, request_id: int, error: IbshellError) -> bytes:
        """Answer a request with an error."""
        detail = {"code": error.code, "message": error.message, "hint": error.hint}
        return self._frame(kind="response", id=request_id, error=detail)

    def notify(self, method: str, body: object) -> bytes:
        """Tell the peer something."""
        return self._frame(kind="event", method=method, body=to_body(body))

    def cancel(self, request_id: int) -> bytes:
        """Say that a request's answer is no longer wanted."""
        if request_id not in self._open:
            raise LocalProtocolError(f"request {request_id} is not open")
        self._open.discard(request_id)
        self._pieces.pop(request_id, None)
        return self._frame(kind="cancel", id=request_id)

    @staticmethod
    def _frame(**fields: Any) -> bytes:
        return frames.write({"v": VERSIONS[-1], **{k: v for k, v in fields.items() if v is not None and v != ""}})
