"""Ends the processes of leases whose time is over, apart from the agent: it does so even while the agent hangs or is stopped.

A process of its own, told over a pipe: one line a change, `MARK DEADLINE` in seconds of CLOCK_BOOTTIME, or `MARK -` when there
is nothing to watch any more. It outlives its agent as long as there are processes to watch, and it does nothing but kill: devices
are given back by the agent alone, once it has seen for itself that nothing is left.
"""

import os
import selectors
import signal
import subprocess
import sys

from agent import clock
from agent.launchers import local

# The agent comes first; the watchdog only where the agent did not.
SLACK_S = 2.0
# Once the agent is gone: how often it looks whether there is anything left to watch.
LOOK_S = 5.0


class Watchdog:
    """The agent's end of it; started with the first deadline, and again should it end."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._deadlines: dict[str, float] = {}

    def guard(self, mark: str, deadline: float | None) -> None:
        """See `Launcher.guard`."""
        if deadline is None:
            if self._deadlines.pop(mark, None) is None:
                return
            self._tell(mark, "-")
        else:
            self._deadlines[mark] = deadline
            self._tell(mark, f"{deadline + SLACK_S:.3f}")

    def _tell(self, mark: str, what: str) -> None:
        if self._process is not None and self._process.poll() is None:
            try:
                assert self._process.stdin is not None
                os.write(self._process.stdin.fileno(), f"{mark} {what}\n".encode())
                return
            except OSError:  # it has just ended, or takes nothing: a new one is told everything
                self._process.kill()
        self._start()

    def _start(self) -> None:
        # In a session of its own: what ends the agent's does not end it.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "agent.launchers.watchdog"], stdin=subprocess.PIPE, start_new_session=True
        )
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        lines = "".join(f"{mark} {deadline + SLACK_S:.3f}\n" for mark, deadline in self._deadlines.items())
        os.write(self._process.stdin.fileno(), lines.encode())


def _kill(mark: str) -> bool:
    """Kill every process that bears a mark; returns whether there was any."""
    pids = list(local.scan().get(mark, {}))
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return bool(pids)


def main() -> None:
    """Watch until there is nothing left to watch and nobody left to tell."""
    os.environ.pop(local.LEASE_VARIABLE, None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    deadlines: dict[str, float] = {}
    buffer, told = b"", True
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        while told or deadlines:
            first = min(deadlines.values(), default=None)
            wait = None if first is None else max(0.01, first - clock.now())
            wait = wait if told or wait is None else min(wait, LOOK_S)
            if selector.select(wait):  # with nothing registered it is a sleep
                data = os.read(0, 65536)
                if not data:
                    told = False
                    selector.unregister(0)
                *lines, buffer = (buffer + data).split(b"\n")
                for line in lines:
                    mark, _, deadline = line.decode().rpartition(" ")
                    if deadline == "-":
                        deadlines.pop(mark, None)
                    else:
                        deadlines[mark] = float(deadline)
            for mark in [mark for mark, deadline in deadlines.items() if deadline <= clock.now()]:
                if not _kill(mark):
                    del deadlines[mark]
            if deadlines and not told:
                left = local.scan()
                deadlines = {mark: deadline for mark, deadline in deadlines.items() if mark in left}


if __name__ == "__main__":
    main()
