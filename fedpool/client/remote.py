"""A hub on another machine, over SSH: asyncssh in a thread of its own behind the same blocking face."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Any, TypeVar

from fedpool.client.connection import Connection
from fedpool.errors import IbshellError
from fedpool.identity.principals import HUB
from fedpool.identity.trust import Trust
from fedpool.transport import ssh
from fedpool.transport.identity import Identity

Result = TypeVar("Result")


class _SshPipe:
    """An SSH channel as a `Pipe`."""

    def __init__(self, address: str, host_key: bytes | None, identity: Identity) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="ssh")
        self._thread.start()
        self._timeout: float | None = 30.0
        try:
            self._connection = self._run(
                ssh.dial(address, host_key, identity, "the hub", role=HUB if identity.trust is not None else "")
            )
            self._stream = self._run(ssh.open_channel(self._connection, ssh.CONTROL))
        except IbshellError:
            self._end_loop()
            raise

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)
        if not self._thread.is_alive():
            self._loop.close()

    def _run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        future: Future[Result] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(self._timeout)
        except FutureTimeoutError:
            future.cancel()
            raise TimeoutError from None

    def sendall(self, data: bytes, /) -> None:
        self._run(self._stream.write(data))

    def recv(self, size: int, /) -> bytes:
        return self._run(self._stream.read())

    def settimeout(self, seconds: float | None, /) -> None:
        self._timeout = seconds

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._connection.abort)
        self._end_loop()


def connect_ssh(address: str, host_key: bytes | None, key_path: Path, trust: Trust | None = None) -> Connection:
    """Connect to a hub's SSH port.

    Args:
        address: `host:port`.
        host_key: the hub's public key, which it must prove; None where a certificate of the pool's is needed.
        key_path: this user's private key, with its certificate beside it.
        trust: whose certificates are believed.

    Raises:
        NotAuthorised: another host key, or this user's key is not on the hub's list.
        Unreachable: nobody answers.
    """
    identity = Identity.load(key_path)
    identity.trust = trust
    pipe = _SshPipe(address, host_key, identity)
    return Connection(pipe, "client", key_path.name, f"the hub at {address}")
