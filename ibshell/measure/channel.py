"""What one SSH channel moves with the settings of bulk transfers, between two processes that do nothing else.

`python -m ibshell.measure.channel` prints megabytes a second.
"""

import asyncio
import os
import socket
import time
from typing import Any

import asyncssh

from fedpool.transport import memory, ssh

SIZE_BYTES = 400 << 20
WRITE_BYTES = 512 * 1024
REPEAT = 3


class _Anybody(asyncssh.SSHServer):
    def begin_auth(self, username: str) -> bool:
        """Nobody has to prove anything: this listens on the loopback for a few seconds."""
        return False


async def _swallow(stdin: Any, stdout: Any, stderr: Any) -> None:
    count = 0
    while data := await stdin.read(WRITE_BYTES):
        count += len(data)
    stdout.write(b"%d" % count)
    stdout.close()


async def _serve(sock: socket.socket, key: asyncssh.SSHKey) -> None:
    async with asyncssh.listen(
        sock=sock, server_factory=_Anybody, server_host_keys=[key], session_factory=_swallow, encoding=None,
        window=ssh.BULK_WINDOW_BYTES, max_pktsize=ssh.BULK_PACKET_BYTES, **ssh.COMMON,
    ):  # fmt: skip
        await asyncio.Event().wait()


async def _send(port: int, key: asyncssh.SSHKey) -> float:
    """Seconds for SIZE_BYTES."""
    known: Any = ([key], [], [])
    async with asyncssh.connect("127.0.0.1", port, known_hosts=known, client_keys=None, **ssh.COMMON) as connection:
        writer, reader, _ = await connection.open_session(
            encoding=None, window=ssh.BULK_WINDOW_BYTES, max_pktsize=ssh.BULK_PACKET_BYTES
        )
        data = os.urandom(WRITE_BYTES)
        began = time.perf_counter()
        for _ in range(SIZE_BYTES // WRITE_BYTES):
            writer.write(data)
            await writer.drain()
        writer.write_eof()
        assert int(await reader.read()) == SIZE_BYTES
        return time.perf_counter() - began


def main() -> None:
    """Measure; the receiver is a child of this process."""
    memory.keep_big_blocks()
    key = asyncssh.generate_private_key("ssh-ed25519")
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
        child = os.fork()
        if child == 0:
            asyncio.run(_serve(sock, key))
            os._exit(0)
        try:
            times = sorted(asyncio.run(_send(port, key.convert_to_public())) for _ in range(REPEAT))
        finally:
            os.kill(child, 9)
            os.waitpid(child, 0)
    print(SIZE_BYTES / 1e6 / times[len(times) // 2])


if __name__ == "__main__":
    main()
