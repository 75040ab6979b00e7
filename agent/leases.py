"""Drives a site's lease machine: entries to disk first, then the answer, then the killing."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any
from weakref import WeakValueDictionary

from agent.house_rules import HouseRules
from agent.journal import Journal
from agent.ledger.site_ledger import SiteLedger
from agent.ports import Clock, Launcher, Store, instant
from fedpool import __version__
from fedpool.errors import Forbidden, IbshellError, NotAuthorised
from fedpool.leasing.entries import CordonChanged, GrantEntry, LeaseChanged
from fedpool.leasing.gate import Gate, unsigned
from fedpool.leasing.grants import EndProcesses, GrantDecision, SiteGrants, SiteLimits, WarnProcesses
from fedpool.leasing.recorded import CARRIED, Refusals, lease_records, records_of, requested
from fedpool.leasing.requests import Cordon, GrantEvent, LeaseEvent, Obey, ProcessesGone, Tick, Uncordon
from fedpool.ledger.records import Record
from fedpool.names import mark_of, scope_of
from fedpool.records import Inventory, Signed, SiteLease
from fedpool.step import Decision

log = logging.getLogger(__name__)

STREAM = "leases"
RETRY_S = 1.0
AT_ONCE = 100  # records, where a ledger begins
LOOK_S = 1.0  # whether devices that are to be given back are still used
SHORTEST_S = 0.001  # to sleep: the loop and the clock may differ a little


class SiteLeases:
    """The leases of this site.

    Args:
        site: its name.
        inventory: its devices.
        limits: what the site allows.
        store: where entries go.
        changed: told of every lease that changed and, with None, of every other change, after it is durable, and whether whoever
            asked for it gets it as an answer.
        clock: the machine's.
        launcher: ends and warns processes.
        ledger: the site's.
        gate: what it obeys; None where the hub is believed.
        rules: the site's policy.
    """

    def __init__(
        self,
        site: str,
        inventory: Inventory,
        limits: SiteLimits,
        store: Store,
        changed: Callable[[SiteLease | None, bool], None],
        clock: Clock,
        launcher: Launcher,
        ledger: SiteLedger,
        gate: Gate | None,
        rules: HouseRules,
    ) -> None:
        machine = SiteGrants(site, inventory, limits)
        self._journal = Journal(store, STREAM, GrantEntry, machine, _replaced, self._resumed, self._begin)
        self._store = store
        self._changed = changed
        self._clock = clock
        self._launcher = launcher
        self._ledger = ledger
        self._scope = scope_of(site, ledger.key.public)
        self._gate = gate
        self._rules = rules
        self._refusals = Refusals()
        self._wake = asyncio.Event()
        self._guarded: set[str] = set()  # leases under which something was started
        self._tasks: set[asyncio.Task[None]] = set()
        self._under_way: set[EndProcesses | WarnProcesses] = set()
        self._binding: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def mark(self, lease: str) -> str:
        """The mark that the processes of a lease bear."""
        return mark_of(self._scope, lease)

    @property
    def machine(self) -> SiteGrants:
        """What decides."""
        return self._journal.machine

    async def recover(self) -> None:
        """Read the entries back, end what a dead run of this agent left behind, then open for grants."""
        await self._journal.recover()
        if not await self._ledger.recover():
            await self._open_ledger()
        last = await self._store.last_written()
        await self._commit(Decision([self.machine.restarted(instant(self._clock), last)]))
        # A program does not outlive its agent: what is left of one belongs to a lease whose task must be started anew, or to
        # one that this agent's disk has lost.
        for mark in await self._launcher.marks(self._scope):
            await self._launcher.end(mark)
        self.machine.recovering = False
        for lease in list(self.machine.leases.values()):
            if lease.state == "ending" or lease.next_tenant:
                await self.step(ProcessesGone(lease.id))
            elif lease.leaving:
                await self.step(ProcessesGone(lease.id, lease.leaving))

    async def _open_ledger(self) -> None:
        """Begin the ledger; leases that are older than it are carried over."""
        records: list[Record] = [self._ledger.opening()]
        for lease in self.machine.leases.values():
            if lease.occupies:
                records += lease_records(None, lease, self.machine.term, self._clock.now(), CARRIED)
        for first in range(0, len(records), AT_ONCE):
            await self._store.append(STREAM, (), records=self._ledger.at(records[first : first + AT_ONCE]))

    async def run(self) -> None:
        """Let holds lapse and leases expire, until cancelled."""
        while True:
            wake_at = await self._tick()
            self._wake.clear()
            try:
                # Not wait_for: that of Python 3.11 swallows a cancellation that comes together with the event.
                async with asyncio.timeout(None if wake_at is None else max(SHORTEST_S, wake_at - self._clock.now())):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def _tick(self) -> float | None:
        try:
            return (await self._step(Tick())).wake_at
        except IbshellError as error:
            log.error("expiry could not be recorded: %s", error)
            return self._clock.now() + RETRY_S

    async def step(self, event: LeaseEvent | ProcessesGone) -> SiteLease:
        """Put an event to the machine; the answer is durable.

        Raises:
            IbshellError: see `SiteGrants.step`; nothing has changed.
        """
        decision = await self._step(event)
        self._wake.set()
        said = [reply for reply in decision.replies if isinstance(reply, SiteLease)]
        return said[-1] if said else self.machine.leases[event.lease]

    async def cordon(self, event: Cordon | Uncordon) -> None:
        """Grant nothing new on something, or again.

        Raises:
            IbshellError: see `SiteGrants.step`; nothing has changed.
        """
        await self._step(event)

    async def obey(self, term: int) -> None:
        """A hub has come: none of an earlier term is obeyed from now on.

        Raises:
            StaleToken: a later one has been here.
        """
        await self._step(Obey(term))

    @asynccontextmanager
    async def binding(self, lease_id: str, token: int) -> AsyncIterator[SiteLease]:
        """Start something under an active lease: until it stands, the lease's processes are not called gone.

        Raises:
            NotFound, Refused, StaleToken: nothing may be started under it.
        """
        lock = self._binding.setdefault(lease_id, asyncio.Lock())
        async with lock:
            await self.durable()
            yield self.machine.require(lease_id, token)
            self._guarded.add(lease_id)
            self._guard(self.machine.leases[lease_id])

    def _guard(self, lease: SiteLease) -> None:
        """Tell the watchdog until when a lease's processes may live at most, whatever becomes of this agent."""
        deadline = None
        if lease.state == "active":
            deadline = lease.deadline
        elif lease.state == "ending":
            deadline = min(lease.deadline, self._clock.now())
        else:
            self._guarded.discard(lease.id)
        self._launcher.guard(self.mark(lease.id), deadline)

    async def durable(self) -> None:
        """Wait until everything decided so far is durable: before it, nobody is told."""
        await self._journal.settle()
        await self._journal.flushed()

    async def _step(self, event: GrantEvent) -> GrantDecision:
        await self._journal.settle()
        event, shown = await self._admitted(event)
        decision = self.machine.step(event, self._clock.now())
        await self._commit(decision, shown, answered=not isinstance(event, Tick | ProcessesGone))
        return decision

    async def _admitted(self, event: GrantEvent) -> tuple[GrantEvent, list[Record]]:
        """An event as it may be obeyed, and what the ledger says about who has signed it.

        Raises:
            NotAuthorised: nobody with the right to it has; that is recorded.
            Forbidden: the site's policy says no; that is recorded.
        """
        about = getattr(event, "lease", "")
        lease = self.machine.leases.get(about)
        unix = self._clock.unix()
        shown: tuple[Signed, ...] = ()
        async with self.refusing(type(event).__struct_config__.tag, about):
            if self._gate is None:
                event = unsigned(event)
            else:
                event, shown = self._gate.admit(event, lease, self.machine.asked_ms, unix, self._clock.now())
            self._rules.require(event, lease, self.machine, unix)
        return event, [requested(about, signed) for signed in shown]

    @asynccontextmanager
    async def refusing(self, asked: object, lease: str) -> AsyncIterator[None]:
        """Record what is refused inside: nobody with the right to it had signed it, or the site's policy forbids it.

        Args:
            asked: what, as the hub put it.
            lease: about which, or "".
        """
        try:
            yield
        except (NotAuthorised, Forbidden) as error:
            log.warning("refused: %s", error)
            record = self._refusals.record(str(asked), lease, error.message, self._clock.now())
            if record is not None:
                await self.record(record)
            raise

    async def record(self, *records: Record) -> None:
        """Let the ledger say something that changes no lease."""
        await self._journal.write((), lambda _: self._ledger.wrote(), self._ledger.at(records))

    async def _commit(self, decision: GrantDecision, shown: Sequence[Record] = (), *, answered: bool = False) -> None:
        """Fold what was decided at once, so that the next decision builds on it; say and do nothing before it is durable."""
        records: list[Record] = list(shown) if decision.entries else []
        trust = self._gate.trust if self._gate is not None else None
        for entry in decision.entries:
            records += records_of(self.machine.leases, entry, self._clock.now(), __version__, trust)
            self.machine.apply(entry)
        written = self._ledger.at(records)
        await self._journal.write(
            decision.entries, lambda awaited: self._finish(decision, answered and awaited), written
        )

    def _finish(self, decision: GrantDecision, answered: bool) -> None:
        """It is durable: say and do what follows from it."""
        if decision.entries:
            self._ledger.wrote()
        for entry in decision.entries:
            if isinstance(entry, LeaseChanged):
                self._changed(entry.lease, answered)
                if entry.lease.id in self._guarded:
                    self._guard(entry.lease)
            elif isinstance(entry, CordonChanged):
                self._changed(None, False)
        self._start(decision.effects)

    def _resumed(self) -> None:
        self._wake.set()

    def _start(self, effects: Sequence[EndProcesses | WarnProcesses]) -> None:
        for effect in effects:
            if effect in self._under_way:
                continue
            self._under_way.add(effect)
            self._begin(self._carry_out(effect))

    def _begin(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry_out(self, effect: EndProcesses | WarnProcesses) -> None:
        try:
            mark = self.mark(effect.lease)
            if isinstance(effect, WarnProcesses):
                await self._launcher.warn(mark, effect.devices)
                await self._give_back(effect, mark)
            else:
                await self._end(effect, mark)
        finally:
            self._under_way.discard(effect)

    async def _give_back(self, warned: WarnProcesses, mark: str) -> None:
        """Devices that a lease is to give back are free as soon as nothing uses them, before the grace is over."""
        leaving = frozenset(warned.devices)
        while leaving:
            lease = self.machine.leases.get(warned.lease)
            if lease is None or lease.state != "active" or leaving.isdisjoint(lease.leaving):
                return
            if not await self._launcher.uses(mark, leaving):
                await self._end(EndProcesses(warned.lease, warned.devices), mark)
                return
            await asyncio.sleep(LOOK_S)

    async def _end(self, effect: EndProcesses, mark: str) -> None:
        """Kill, confirm, free; a process that does not die keeps its devices occupied."""
        while True:
            try:
                lock = self._binding.setdefault(effect.lease, asyncio.Lock())
                async with lock:  # what is being started under it is there to be ended
                    await self._launcher.end(mark, effect.devices)
                await self.step(ProcessesGone(effect.lease, effect.devices))
                return
            except IbshellError as error:
                log.error("lease %s is not free yet: %s", effect.lease, error)
                await asyncio.sleep(RETRY_S)


def _replaced(failed: SiteGrants, entries: Iterable[GrantEntry]) -> SiteGrants:
    fresh = SiteGrants(failed.site, failed.inventory, failed.limits)
    for entry in entries:
        fresh.apply(entry)
    fresh.recovering = failed.recovering
    return fresh
