"""`ibshell-agent stdio`: what a stock sshd starts for the hub, a bridge to the site agent's Unix socket."""

import asyncio
import sys
from pathlib import Path

from fedpool.errors import UsageError
from fedpool.transport import local
from fedpool.transport.stream import READ_BYTES

SUBSYSTEMS = ("fedpool", "fedpool-bulk")


async def bridge(socket: Path, subsystem: str) -> int:
    """Carry bytes between standard input/output and the agent's socket until either side ends.

    Raises:
        Unreachable: no agent listens there.
    """
    if subsystem not in SUBSYSTEMS:
        raise UsageError(f"no subsystem {subsystem!r}", f"it may be {' or '.join(SUBSYSTEMS)}")
    stream = await local.dial(socket)
    await stream.write(subsystem.encode() + b"\n")
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=4 * READ_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, sys.stdout)
    writer = asyncio.StreamWriter(transport, protocol, None, loop)

    async def inwards() -> None:
        while data := await reader.read(READ_BYTES):
            await stream.write(data)

    async def outwards() -> None:
        while data := await stream.read():
            writer.write(data)
            await writer.drain()

    ways = {loop.create_task(inwards()), loop.create_task(outwards())}
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        stream.close()
    return 0
