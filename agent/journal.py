"""A machine and the stream it is the fold of: decided at once, durable before anybody is told, taken back if it cannot be written.

The same at a hub and at a site. Whoever decides applies the entries to `machine` and hands them to `write` without awaiting
anything in between, so the stream keeps the order of the decisions.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from agent.ports import Store
from fedpool.errors import StorageFailed

log = logging.getLogger(__name__)

RETRY_S = 1.0
SNAPSHOT_EVERY = 20_000  # entries


class Folded(Protocol):
    """A machine whose state is the fold of entries."""

    def apply(self, entry: Any) -> None:
        """Fold one durable entry into the state."""
        ...

    def state(self) -> msgspec.Struct:
        """A snapshot: folding it alone gives this state."""
        ...


Machine = TypeVar("Machine", bound=Folded)


class Journal(Generic[Machine]):
    """See the module.

    Args:
        store: where entries go.
        stream: under which name.
        kinds: the union of the entries' types.
        machine: before any entry.
        replace: makes the machine that goes on, from the one that decided too much and the entries that stand.
        resumed: told when it has.
        begin: runs something in the background.
        pause_s: how long nothing is decided after a failure, before what stands is read.
    """

    def __init__(
        self,
        store: Store,
        stream: str,
        kinds: Any,
        machine: Machine,
        replace: Callable[[Machine, Iterable[Any]], Machine],
        resumed: Callable[[], None],
        begin: Callable[[Coroutine[Any, Any, None]], None],
        pause_s: float = 0.0,
    ) -> None:
        self.machine = machine
        self._store = store
        self._stream = stream
        self._kinds = kinds
        self._replace = replace
        self._resumed = resumed
        self._begin = begin
        self._pause_s = pause_s
        self._settled = asyncio.Event()  # clear while the entries are read again
        self._settled.set()
        self._since_snapshot = 0

    @property
    def is_settled(self) -> bool:
        """Whether the machine may be asked: the entries are not being read again."""
        return self._settled.is_set()

    async def recover(self) -> None:
        """Fold what stands."""
        for entry in await self._store.read(self._stream, self._kinds):
            self.machine.apply(entry)

    async def settle(self) -> None:
        """Wait while the entries are read again."""
        while not self._settled.is_set():
            await self._settled.wait()

    async def flushed(self) -> None:
        """Wait until everything written so far is durable.

        Raises:
            StorageFailed: it will not be, and is taken back.
        """
        await self._store.append(self._stream, ())

    async def write(
        self,
        entries: Sequence[msgspec.Struct],
        finish: Callable[[bool], None],
        records: Sequence[bytes] = (),
    ) -> None:
        """Make entries durable that have been applied already.

        Args:
            entries: of one decision; with none it waits for those before.
            finish: says and does what follows, once they are durable; told whether who asked still waits for the answer.
            records: what the ledger says about them.

        Raises:
            StorageFailed: they are taken back, with everything decided since.
        """
        machine = self.machine
        try:
            await self._store.append(self._stream, entries, records=records)
        except StorageFailed:
            await self._read_again(machine)
            raise
        except asyncio.CancelledError:  # who asked has hung up; what was decided stands and has its consequences
            self._begin(self._carry_on(machine, entries, finish))
            raise
        self._finish(machine, entries, finish, True)

    async def _carry_on(
        self, machine: Machine, entries: Sequence[msgspec.Struct], finish: Callable[[bool], None]
    ) -> None:
        try:
            await self.flushed()
        except StorageFailed as error:
            log.error("what was decided could not be written: %s", error)
            await self._read_again(machine)
        else:
            self._finish(machine, entries, finish, False)

    def _finish(
        self, machine: Machine, entries: Sequence[msgspec.Struct], finish: Callable[[bool], None], awaited: bool
    ) -> None:
        self._since_snapshot += len(entries)
        if self._since_snapshot >= SNAPSHOT_EVERY and machine is self.machine:
            self._since_snapshot = 0
            self._begin(self._snapshot())
        finish(awaited)

    async def _snapshot(self) -> None:
        """Let the next start begin here."""
        await self.settle()
        machine = self.machine
        try:
            await self._store.append(self._stream, [machine.state()], snapshot=True)
        except StorageFailed as error:
            log.error("no snapshot was written: %s", error)
            await self._read_again(machine)

    async def _read_again(self, failed: Machine) -> None:
        """What was decided last was not written: go back to what was, and carry that on."""
        if self.machine is not failed or not self._settled.is_set():
            return  # another failure of the same time sees to it
        self._settled.clear()
        try:
            if self._pause_s:
                await asyncio.sleep(self._pause_s)
            self.machine = self._replace(failed, await self._read())
        finally:
            self._settled.set()
        self._resumed()

    async def _read(self) -> list[Any]:
        while True:
            try:
                return await self._store.read(self._stream, self._kinds)
            except StorageFailed as error:
                log.error("what was decided cannot be read again: %s", error)
                await asyncio.sleep(RETRY_S)
