"""The tenant's program at a site: started under a lease, spoken to over a Unix socket, fed and emptied through mapped files."""

import asyncio
import os
import shutil
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agent.launchers import local
from fedpool.errors import IbshellError, ProgramFailed, Refused, TimedOut, UsageError
from fedpool.transport import local as unix
from fedpool.transport.peer import Peer
from fedpool.transport.stream import AsyncioStream
from fedpool.wire.messages import Joined, NextRound, Nothing, Submission, TaskWanted
from fedpool.wire.session import Request, from_body

SOCKET_VARIABLE = "IBSHELL_TASK"

# Takes a submission, the file of the global parameters and the file of the update; raises `UsageError` naming what is wrong.
UpdateCheck = Callable[[Submission, Path, Path], Awaitable[None]]


class Task:
    """One program of one run.

    Args:
        site: name of the site.
        wanted: what to start.
        mark: of its lease, which its processes bear.
        devices: UUIDs of the devices it is to use.
        directory: its own, private.
        socket: path of the Unix socket it is spoken to over.
        data: directory it gets as `{data}`.
        check: checks an update's file before the program is told that it was taken.
        ended: told how the program ended, once it has.

    Attributes:
        failure: why the program is of no use any more, or "".
    """

    def __init__(
        self,
        site: str,
        wanted: TaskWanted,
        mark: str,
        devices: Sequence[str],
        directory: Path,
        socket: Path,
        data: str,
        check: UpdateCheck,
        ended: Callable[[str], None],
    ) -> None:
        self.wanted = wanted
        self.directory = directory
        self.failure = ""
        self._site = site
        self._mark = mark
        self._devices = devices
        self._socket = socket
        self._data = data
        self._check = check
        self._ended = ended
        self._offered: NextRound | None = None
        self._taken = 0
        self._changed = asyncio.Condition()
        self._submitted: dict[int, Submission] = {}
        self._server: asyncio.Server | None = None
        self._program: local.Program | None = None
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the program.

        Raises:
            ProgramFailed: it cannot be started.
        """
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        values = {"data": self._data, "site": self._site, "python": sys.executable}
        argv = [fill(argument, values) for argument in self.wanted.program]
        self._server = await unix.listen(self._socket, self._connected)
        environment = {
            "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
            "HOME": str(self.directory),
            "LANG": "C.UTF-8",
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            "PYTHONUNBUFFERED": "1",
            # One site of many on this machine must not start a thread per core for every small product.
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "OPENBLAS_NUM_THREADS": os.environ.get("OPENBLAS_NUM_THREADS", "1"),
            SOCKET_VARIABLE: str(self._socket),
        }
        if shutil.which(argv[0], path=environment["PATH"]) is None:
            self._server.close()
            raise ProgramFailed(
                f"the program {argv[0]!r} does not exist at {self._site}",
                "name one that is installed there, or a full path",
            )
        try:
            self._program = await local.start(self._mark, self._devices, argv, environment, self.directory)
        except IbshellError:
            self._server.close()
            raise
        self._watch = asyncio.get_running_loop().create_task(self._watch_end())

    async def _watch_end(self) -> None:
        assert self._program is not None
        how = await self._program.wait()
        async with self._changed:
            self.failure = self.failure or how or "the program ended before the plan did"
            self._changed.notify_all()
        self._ended(how or "it ended by itself")

    @property
    def pid(self) -> int:
        """Process id of the program."""
        assert self._program is not None
        return self._program.pid

    async def offer(self, offered: NextRound) -> None:
        """Give the program a round to train or to evaluate; one it has not taken yet is replaced."""
        async with self._changed:
            if self._offered is None or self._offered.round != offered.round:
                self._submitted.pop(offered.round, None)
                self._offered = offered
                self._changed.notify_all()

    async def update(self, number: int, timeout_s: float) -> Submission:
        """The program's submission for a round.

        Raises:
            ProgramFailed: it ended, or its submission cannot be used.
            TimedOut: it is still at it.
        """
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: number in self._submitted or self.failure)
        except TimeoutError:
            raise TimedOut(
                f"the program at {self._site} had not submitted round {number} within {timeout_s:.0f} s"
            ) from None
        if number not in self._submitted:
            raise ProgramFailed(
                f"{self._site}: {self.failure}", f"its output is in {self.directory / 'output.log'} there"
            )
        return self._submitted[number]

    async def finish(self, reason: str) -> None:
        """Tell the program that there are no more rounds, give it a moment to end, then see that it is gone."""
        async with self._changed:
            self._offered = NextRound(0, reason=reason)
            self._changed.notify_all()
        if self._watch is not None:
            await asyncio.wait([self._watch], timeout=5.0)
        await self.kill()

    async def kill(self) -> None:
        """End the program at once."""
        await local.end(self._mark, local.Scanner())
        if self._watch is not None:
            await self._watch
        if self._server is not None:
            self._server.close()
        self._socket.unlink(missing_ok=True)

    async def _connected(self, stream: AsyncioStream) -> None:
        peer = Peer(stream, "site", self._site, serve=self._serve)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(peer.run())
            await peer.start()

    async def _serve(self, request: Request) -> object:
        match request.method:
            case "program.join":
                return Joined(self._site, self.wanted.run, self.wanted.config)
            case "program.next":
                return await self._next()
            case "program.submit":
                return await self._submit(from_body(request.body, Submission, request.method))
            case _:
                raise UsageError(f"a program cannot ask for {request.method}")

    async def _next(self) -> NextRound:
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._offered is not None and (self._offered.round == 0 or self._offered.round > self._taken)
            )
            assert self._offered is not None
            self._taken = max(self._taken, self._offered.round)
            return self._offered

    async def _submit(self, submission: Submission) -> Nothing:
        offered = self._offered
        if offered is None or offered.round != submission.round:
            raise Refused(
                f"round {submission.round} is closed; {offered.round if offered else 'none'} is open",
                "ask for the next round: the update came too late",
            )
        try:
            await self._check(submission, Path(offered.parameters), Path(offered.update))
        except Refused:
            raise  # it came too late, which says nothing against the program
        except IbshellError as error:
            async with self._changed:
                self.failure = error.message
                self._changed.notify_all()
            raise
        async with self._changed:
            self._submitted[submission.round] = submission
            self._changed.notify_all()
        return Nothing()


def fill(argument: str, values: Mapping[str, Any]) -> str:
    """Fill `{data}`, `{site}` and `{python}` into an argument; other braces stay."""
    for key, value in values.items():
        argument = argument.replace("{" + key + "}", str(value))
    return argument
