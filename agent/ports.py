"""What agents ask of the machine they run on. The real parts stand in `agent`; the simulation in `tests` has its own."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import msgspec

from agent.config import SiteEntry
from fedpool.step import Instant
from fedpool.transport.stream import Stream


class Clock(Protocol):
    """See `agent.clock`, the real one."""

    def now(self) -> float:
        """Seconds since boot, suspended time included."""
        ...

    def boot(self) -> str:
        """An id of this boot."""
        ...

    def unix(self) -> float:
        """The time of day in seconds since 1970."""
        ...

    def wall(self, later_s: float = 0.0) -> str:
        """The time of day, or so many seconds later: ISO 8601, UTC, whole seconds."""
        ...


def instant(clock: Clock) -> Instant:
    """What a machine's clocks show now."""
    return Instant(clock.now(), clock.boot(), clock.unix())


class Store(Protocol):
    """Durable entries in streams; a stream is the history of one thing and its state is the fold of it.

    `append` takes what it is given in the order of the calls, so a caller may decide the next thing on top of what is not yet
    durable. After a failure the stream therefore takes nothing more until it has been read again: what was decided meanwhile
    rested on what was never written.
    """

    async def append(
        self,
        stream: str,
        entries: Sequence[msgspec.Struct],
        *,
        snapshot: bool = False,
        records: Sequence[bytes] = (),
    ) -> None:
        """Write entries, all or none; when it returns they and everything appended to the stream before are durable.

        Args:
            stream: which.
            entries: tagged Structs; with none it waits for those before.
            snapshot: the first of them holds the whole state: `read` begins with it from now on.
            records: what the ledger says about them, written with them or not at all; over all streams they are one sequence, in
                the order of the calls, and no snapshot ends it.

        Raises:
            StorageFailed: nothing was written.
        """
        ...

    async def read(self, stream: str, kinds: Any) -> list[Any]:
        """Every entry of a stream from its latest snapshot on, in order.

        Args:
            stream: which.
            kinds: the tagged Struct type, or union of them.
        """
        ...

    async def streams(self, prefix: str) -> list[str]:
        """The streams whose name begins with a prefix, oldest first."""
        ...

    async def recorded(self) -> int:
        """How many records there are."""
        ...

    async def records(self, first: int, count: int) -> list[bytes]:
        """So many records from number `first` on, the first of all being 0; fewer where there are no more."""
        ...

    async def replace_records(self, first: int, records: Sequence[bytes]) -> None:
        """Put these in the place of the records from number `first` on, all or none: what is forgotten leaves its hash.

        Raises:
            StorageFailed: nothing has changed.
        """
        ...

    async def last_written(self) -> Instant:
        """What the clocks showed when the latest entry was written."""
        ...

    async def lost(self) -> None:
        """Wait until nothing can be written any more: the disk broke, or another agent has taken over.

        Raises:
            StorageFailed: that has happened; the agent must end.
        """
        ...

    async def close(self) -> None:
        """Finish what is queued and close."""
        ...


class Launcher(Protocol):
    """Ends the processes of leases; see `agent.launchers.local`, the real one."""

    async def marks(self, scope: str) -> list[str]:
        """The marks of all processes that run under leases of one site, which begin with its scope."""
        ...

    async def warn(self, mark: str, devices: Collection[str] = ()) -> None:
        """Tell every process that bears a mark (and may use one of the devices) that its lease is about to end or to shrink."""
        ...

    async def uses(self, mark: str, devices: Collection[str]) -> bool:
        """Whether any process that bears a mark may use one of the devices."""
        ...

    async def end(self, mark: str, devices: Collection[str] = ()) -> None:
        """Kill every process that bears a mark (and may use one of the devices) and return when none is left.

        Raises:
            TimedOut: one does not die; the devices must stay occupied.
        """
        ...

    def guard(self, mark: str, deadline: float | None) -> None:
        """Have its processes killed at that time of CLOCK_BOOTTIME even if this agent cannot; None: no longer."""
        ...


class Dialler(Protocol):
    """Reaches sites; see `agent.links.SshDialler`, the real one."""

    def connect(self, entry: SiteEntry, subsystem: str) -> AbstractAsyncContextManager[tuple[Stream, dict[str, str]]]:
        """A channel to a site's subsystem and what its link agreed on; the connection ends with the context.

        Raises:
            IbshellError: why it cannot be reached.
        """
        ...
