"""A blocking control channel over a Unix socket: for commands and programs, which need neither asyncio nor asyncssh."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, TypeVar

from fedpool.errors import IbshellError, NotAuthorised, PeerProtocolError, TimedOut, Unreachable
from fedpool.wire.session import Ready, Response, Session, from_body

if TYPE_CHECKING:
    from fedpool.identity.requests import RequestSigner

Answer = TypeVar("Answer")
READ_BYTES = 256 * 1024


class Pipe(Protocol):
    """Blocking bytes both ways: a connected socket is one."""

    def sendall(self, data: bytes, /) -> None:
        """Send everything."""
        ...

    def recv(self, size: int, /) -> bytes:
        """The next bytes, b"" at the end."""
        ...

    def settimeout(self, seconds: float | None, /) -> None:
        """Longest a call may block."""
        ...

    def close(self) -> None:
        """Give it up."""
        ...


class Connection:
    """One control channel.

    Args:
        pipe: what carries it.
        role: client or program.
        name: who speaks.
        where: what to call the other end in messages.

    Attributes:
        signer: signs what changes something; None where the pool does not ask for that.
    """

    signer: RequestSigner | None = None

    def __init__(self, pipe: Pipe, role: str, name: str, where: str) -> None:
        self._pipe = pipe
        self._session = Session(role, name)
        self._where = where
        pipe.settimeout(10.0)
        self._send(self._session.start())
        self._ready = False
        while not self._ready:
            self._receive()

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the channel."""
        self._pipe.close()

    def _send(self, data: bytes) -> None:
        try:
            self._pipe.sendall(data)
        except OSError as error:
            raise Unreachable(f"the connection to {self._where} broke: {error}") from None

    def _receive(self) -> list[Response]:
        try:
            data = self._pipe.recv(READ_BYTES)
        except TimeoutError:
            raise TimedOut(f"{self._where} does not answer in time", "is it overloaded? its log may say") from None
        except OSError as error:
            raise Unreachable(f"the connection to {self._where} broke: {error}") from None
        events = self._session.receive(data)
        if not data:
            raise Unreachable(f"{self._where} closed the connection", "its log says why")
        self._ready = self._ready or any(isinstance(event, Ready) for event in events)
        return [event for event in events if isinstance(event, Response)]

    def call(
        self, method: str, body: object, expect: type[Answer], timeout_s: float | None = 90.0, key: str = ""
    ) -> Answer:
        """Ask the other side; see `fedpool.transport.peer.Peer.call`."""
        request_id, data = self._session.request(method, body, timeout_s, key)
        self._pipe.settimeout(timeout_s)
        self._send(data)
        while True:
            for response in self._receive():
                if response.id != request_id:
                    raise PeerProtocolError(f"{self._where} answered a question that was not asked")
                if response.error is not None:
                    raise response.error
                return from_body(response.body, expect, method)


def connect(path: Path, role: str = "client", where: str = "the hub") -> Connection:
    """Connect to a hub's or a site's Unix socket.

    Raises:
        Unreachable: nobody listens there.
        NotAuthorised: this user may not.
    """
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(5.0)
        sock.connect(os.fspath(path))
        return Connection(sock, role, os.environ.get("USER", "") or str(os.getuid()), where)
    except PermissionError:
        sock.close()
        raise NotAuthorised(f"the socket {path} belongs to another user") from None
    except OSError as error:
        sock.close()
        raise Unreachable(f"nobody answers on {path}: {error.strerror or error}") from None
    except IbshellError:
        sock.close()
        raise
