"""The hub's or site's Unix socket: the same frames, the peer known by its user id."""

import asyncio
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path

from fedpool.errors import NotAuthorised, Unreachable
from fedpool.transport.stream import AsyncioStream

SOCKET_PATH_MAX = 107  # sun_path of Linux, less its terminating zero


def peer_uid(sock: socket.socket) -> int:
    """User id of the process at the other end (SO_PEERCRED)."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])


async def listen(path: Path, serve: Callable[[AsyncioStream], Awaitable[None]]) -> asyncio.Server:
    """Listen on a Unix socket that only this user (and root) may speak to.

    Args:
        path: of the socket; a stale one is replaced.
        serve: gets each connection; it closes when it returns.

    Raises:
        Unreachable: the path is too long or taken by a living process.
    """
    if len(os.fsencode(path)) > SOCKET_PATH_MAX:
        raise Unreachable(f"the socket path {path} is longer than {SOCKET_PATH_MAX} bytes", "set IBSHELL_RUNTIME_DIR")
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if path.exists():
        probe = socket.socket(socket.AF_UNIX)
        try:
            probe.connect(os.fspath(path))
        except OSError:
            path.unlink(missing_ok=True)
        else:
            raise Unreachable(f"another agent already listens on {path}", "stop it first: ibshell down")
        finally:
            probe.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stream = AsyncioStream(reader, writer)
        try:
            if peer_uid(writer.get_extra_info("socket")) in (0, os.getuid()):
                await serve(stream)
        finally:
            stream.close()

    server = await asyncio.start_unix_server(connected, path=os.fspath(path))
    path.chmod(0o600)
    return server


async def dial(path: Path) -> AsyncioStream:
    """Connect to a Unix socket.

    Raises:
        Unreachable: nobody listens there.
        NotAuthorised: this user may not.
    """
    try:
        reader, writer = await asyncio.open_unix_connection(os.fspath(path))
    except PermissionError:
        raise NotAuthorised(f"{path} belongs to another user") from None
    except OSError as error:
        raise Unreachable(f"nobody listens on {path}: {error.strerror}", "is the agent running?") from None
    return AsyncioStream(reader, writer)
