"""Programs as child processes of the agent, bound to a lease.

Every process carries a mark in its environment, which names site and lease (several sites may share a machine), and the kernel
kills the child when the agent dies. Ending a lease kills each process that bears its mark, wherever it has wandered (its own
session included), until a scan of /proc finds none: only then may the devices be given to somebody else. A program is started with
CUDA_VISIBLE_DEVICES, the UUIDs of its devices; where a lease gives back some of them, a process that names only others stays.
"""

import asyncio
import ctypes
import os
import signal
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from agent import clock
from fedpool.errors import ProgramFailed, TimedOut

LEASE_VARIABLE = "IBSHELL_LEASE"
DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"
# {mark: {process that bears it: devices it sees, or None where it does not name them}}
Marked: TypeAlias = dict[str, dict[int, frozenset[str] | None]]
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)

POLL_S = 0.02
LOG_TAIL_BYTES = 2000


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Program:
    """A running program.

    Attributes:
        log: file with its output.
    """

    def __init__(self, process: asyncio.subprocess.Process, log: Path, argv: Sequence[str]) -> None:
        self._process = process
        self.log = log
        self._argv = argv

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    async def wait(self) -> str:
        """Wait for its end; returns what to tell people, "" when it ended well."""
        status = await self._process.wait()
        if status == 0:
            return ""
        how = f"was ended by signal {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
        tail = last_line(self.log)
        return f"{Path(self._argv[0]).name} {how}{f': {tail}' if tail else ''}"


def last_line(log: Path) -> str:
    """The last line a program wrote that says something, cleaned of control characters."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LOG_TAIL_BYTES))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return ""
    said = [line.strip() for line in lines if line.strip()]
    return "".join(c if c.isprintable() else "?" for c in said[-1])[:300] if said else ""


async def start(
    mark: str, devices: Sequence[str], argv: Sequence[str], environment: Mapping[str, str], directory: Path
) -> Program:
    """Start a program bound to a lease and to some of its devices, its output going to `output.log` in its directory.

    Raises:
        ProgramFailed: it cannot be started.
    """
    log = directory / "output.log"
    try:
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *argv,
                cwd=directory,
                env={**environment, LEASE_VARIABLE: mark, DEVICES_VARIABLE: ",".join(devices)},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
    except FileNotFoundError:
        raise ProgramFailed(
            f"the program {argv[0]!r} does not exist at this site", "name one that does, or a full path"
        ) from None
    except OSError as error:
        raise ProgramFailed(f"the program {argv[0]!r} cannot be started: {error.strerror}") from None
    return Program(process, log, argv)


def scan() -> Marked:
    """The processes that bear marks, of this user (of everybody where the agent is root)."""
    found: Marked = {}
    prefix = f"{LEASE_VARIABLE}=".encode()
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            with open(f"{entry.path}/environ", "rb", buffering=0) as file:
                environment = file.read()
            if prefix not in environment or _is_dead(entry.path):
                continue
        except OSError:
            continue  # ended meanwhile, or another user's
        variables = environment.split(b"\0")
        for variable in variables:
            if variable.startswith(prefix):
                mark = variable[len(prefix) :].decode(errors="replace")
                found.setdefault(mark, {})[int(entry.name)] = _devices(variables)
    return found


def _devices(variables: Sequence[bytes]) -> frozenset[str] | None:
    """What a process sees; None where it may be any: positions on the node are no names."""
    prefix = f"{DEVICES_VARIABLE}=".encode()
    value = next((v[len(prefix) :].decode(errors="replace") for v in variables if v.startswith(prefix)), "")
    named = value.split(",")
    return frozenset(named) if all(name.startswith(("GPU-", "MIG-")) for name in named) else None


def users(marked: Marked, mark: str, devices: Collection[str]) -> list[int]:
    """The processes that bear a mark and, where devices are named, may use one of them."""
    return [
        pid for pid, seen in marked.get(mark, {}).items() if not devices or seen is None or not seen.isdisjoint(devices)
    ]


def _is_dead(process: str) -> bool:
    return Path(process, "stat").read_text().rpartition(")")[2].split()[0] == "Z"


class Scanner:
    """Scans shared by all who ask for one before it begins: whoever asks gets one that began after he asked."""

    def __init__(self) -> None:
        self._one_at_a_time = asyncio.Lock()
        self._next: asyncio.Task[Marked] | None = None

    async def scan(self) -> Marked:
        """See `scan`."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_task(self._run())
        return await asyncio.shield(self._next)

    async def _run(self) -> Marked:
        async with self._one_at_a_time:
            self._next = None
            return await asyncio.to_thread(scan)


async def warn(mark: str, scanner: Scanner, devices: Collection[str] = ()) -> None:
    """Tell every process that bears a mark (and may use one of the devices) that they go: SIGTERM, which it may catch."""
    for pid in users(await scanner.scan(), mark, devices):
        try:
            os.kill(pid, signal.SIGTERM)
        except ProcessLookupError:
            continue


async def end(mark: str, scanner: Scanner, devices: Collection[str] = (), patience_s: float = 30.0) -> None:
    """Kill every process that bears a mark (and may use one of the devices) and return when none is left.

    Raises:
        TimedOut: one does not die; its process id is named. The devices must stay occupied.
    """
    deadline = clock.now() + patience_s
    while True:
        left = users(await scanner.scan(), mark, devices)
        if not left:
            return
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if clock.now() > deadline:
            raise TimedOut(f"processes {left} of lease {mark} do not die", "look at them; they may hang in a driver")
        await asyncio.sleep(POLL_S)
