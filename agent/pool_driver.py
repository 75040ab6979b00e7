"""Drives the hub's machine: every decision durable before anybody hears of it, the sites' answers the next events."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from agent.journal import Journal
from agent.links import SiteLink
from agent.ports import Clock, Store, instant
from fedpool.errors import (
    IbshellError,
    NotFound,
    Refused,
    StaleToken,
    StorageFailed,
    TimedOut,
    Unreachable,
)
from fedpool.leasing.gang import (
    Ask,
    LeaseRecorded,
    PartFailed,
    Reported,
    Unconfirmed,
    surely_over,
)
from fedpool.leasing.grants import EPOCHS_A_SECOND
from fedpool.leasing.pool import (
    ForLease,
    PlanWanted,
    Pool,
    PoolDecision,
    PoolEntry,
    PoolEvent,
    PoolRestarted,
)
from fedpool.leasing.requests import Hold, LeaseEvent
from fedpool.records import Lease, SiteLease
from fedpool.step import Decision
from fedpool.wire.messages import DescriptionWanted

log = logging.getLogger(__name__)

STREAM = "leases"
TERM_STREAM = "term"
HOLD_TIMEOUT_S = 10.0
SILENT_CHECK_S = 5.0
REREAD_S = 1.0
SHORTEST_S = 0.001  # to sleep: the loop and the clock may differ a little


class TermBegan(msgspec.Struct, frozen=True, tag="term.began"):
    """This hub's run: a larger term than any before it, which sites hold against its predecessors."""

    term: int


class PoolDriver:
    """The hub's machine with its store, its links and its clock.

    Args:
        store: where decisions go.
        links: {site: link}.
        sites: their names.
        changed: told of every lease that took a new state, once that is durable.
        clock: the machine's.
        chance: makes ids.
        strict: whether only a site's own word ends a lease there.
    """

    def __init__(
        self,
        store: Store,
        links: Mapping[str, SiteLink],
        sites: list[str],
        changed: Callable[[Lease], None],
        clock: Clock,
        chance: random.Random,
        strict: bool = False,
    ) -> None:
        self._journal = Journal(
            store, STREAM, PoolEntry, Pool(sites), self._replaced, self._resumed, self._begin, REREAD_S
        )
        self.clock = clock
        self._chance = chance
        self._strict = strict
        self._store = store
        self._links = links
        self._changed = changed
        self._watched: dict[str, list[asyncio.Event]] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._plan_due = asyncio.Event()
        self._plan_at: float | None = None
        self._resumed_asks: list[Ask] = []

    @property
    def machine(self) -> Pool:
        """What decides."""
        return self._journal.machine

    @property
    def term(self) -> int:
        """The hub's term."""
        return self.machine.term

    async def recover(self, tasks: asyncio.TaskGroup) -> None:
        """Read the decisions back, begin a new term, and carry on what was decided."""
        self._tasks = tasks
        clock = self.clock
        terms = await self._store.read(TERM_STREAM, TermBegan)
        await self._journal.recover()
        shift = (await self._store.last_written()).shift(instant(clock))
        if shift:
            await self._commit(Decision([PoolRestarted(shift)]))
        # Sites refuse a term before one they have obeyed. A hub whose database was lost or restored goes by the time of day.
        last = max((entry.term for entry in terms), default=0)
        self.machine.term = max(last + 1, int(clock.unix() * EPOCHS_A_SECOND))
        await self._store.append(TERM_STREAM, [TermBegan(self.term)])
        for decision in self.machine.interrupted(clock.now()):
            await self._commit(decision)
        tasks.create_task(self._keep_planning())
        if not self._strict:
            tasks.create_task(self._watch_silent())

    def get(self, lease_id: str) -> Lease | None:
        """A lease by its whole id; None where there is none, or it is long over and forgotten."""
        gang = self.machine.gangs.get(lease_id)
        return None if gang is None else gang.lease

    # --- the sites' side

    def description_wanted(self, site: str) -> DescriptionWanted:
        """How a site is asked to describe itself."""
        machine = self.machine
        mine = [lease.id for lease in machine.running.values() if any(part.site == site for part in lease.parts)]
        known = dict.fromkeys(mine, 0)
        known |= {lease.id: lease.version for lease in machine.capacity.sites[site].leases.values()}
        return DescriptionWanted(self.term, known)

    async def site_up(self, link: SiteLink) -> None:
        """A site has connected: settle what the hub and the site see differently."""
        description = link.description
        assert description is not None
        self.machine.site_described(
            link.name,
            description.inventory,
            description.leases,
            description.cordons,
            description.epoch,
            description.known,
        )
        reported = {lease.id: lease for lease in description.leases} | self.machine.capacity.sites[link.name].leases
        for running in list(self.machine.running.values()):
            if any(part.site == link.name for part in running.parts):
                await self.put(ForLease(running.id, Reported(link.name, reported.pop(running.id, None))))
        for lease_id, lease in reported.items():
            if lease.occupies and lease_id in self.machine.gangs:
                await self.put(ForLease(lease_id, Reported(link.name, lease)))
        self._plan_due.set()

    def site_down(self, link: SiteLink) -> None:
        """A site is silent."""
        self.machine.site_lost(link.name)

    async def site_changed(self, link: SiteLink, lease: SiteLease) -> None:
        """A site tells of a lease that changed."""
        await self.put(ForLease(lease.id, Reported(link.name, lease)))

    # --- driving the machine

    async def put(self, event: PoolEvent) -> None:
        """Put an event to the machine; what it decides is durable when this returns.

        Raises:
            IbshellError: it refuses, and nothing has changed.
        """
        await self._journal.settle()
        await self._commit(self.machine.step(event, self.clock.now()), event)

    async def _commit(self, decision: PoolDecision, event: PoolEvent | None = None) -> None:
        """Fold what was decided at once, so that the next decision builds on it; say and do nothing before it is durable."""
        machine = self.machine
        moved = {event.lease} if isinstance(event, ForLease) else set()
        states = []
        for entry in decision.entries:
            before = machine.gangs.get(entry.lease.id) if isinstance(entry, LeaseRecorded) else None
            state = before.lease.state if before else ""
            machine.apply(entry)
            if isinstance(entry, LeaseRecorded):
                moved.add(entry.lease.id)
                states += [entry.lease] if entry.lease.state != state else []
        await self._journal.write(decision.entries, lambda _: self._finish(decision, states, moved))

    def _finish(self, decision: PoolDecision, states: list[Lease], moved: set[str]) -> None:
        """It is durable: say and do what follows from it."""
        for lease in states:
            self._changed(lease)
        for effect in decision.effects:
            self._ask(effect)
        if decision.wake_at is not None and (self._plan_at is None or decision.wake_at < self._plan_at):
            self._plan_at = decision.wake_at
        if self.machine.queue.is_dirty or decision.wake_at is not None:
            self._plan_due.set()
        for lease_id in moved:
            for watcher in self._watched.get(lease_id, ()):
                watcher.set()

    def _replaced(self, failed: Pool, entries: Iterable[PoolEntry]) -> Pool:
        fresh = Pool(failed.capacity.sites, failed.capacity)
        for entry in entries:
            fresh.apply(entry)
        self._resumed_asks = fresh.take_over(failed, self.clock.now())
        return fresh

    def _resumed(self) -> None:
        """What was decided last was not written: carry on what was."""
        asks, self._resumed_asks = self._resumed_asks, []
        for ask in asks:
            self._ask(ask)
        self._begin(self._ask_all())
        for watchers in self._watched.values():
            for watcher in watchers:
                watcher.set()
        self._plan_due.set()

    async def _ask_all(self) -> None:
        """What sites said meanwhile was not written either: they say it again."""
        await asyncio.sleep(REREAD_S)
        for link in self._links.values():
            if link.is_up:
                await self._look_again(link)

    async def _keep_planning(self) -> None:
        """Plan whenever something changed, and when time alone may change something."""
        while True:
            wait = None if self._plan_at is None else max(SHORTEST_S, self._plan_at - self.clock.now())
            try:
                async with asyncio.timeout(wait):  # not wait_for; see `SiteLeases.run`
                    await self._plan_due.wait()
            except TimeoutError:
                self.machine.queue.mark()
            self._plan_due.clear()
            if self._plan_at is not None and self._plan_at <= self.clock.now():
                self._plan_at = None
                self.machine.queue.mark()
            if not self.machine.queue.is_dirty:
                continue
            try:
                await self.put(PlanWanted())
            except IbshellError as error:
                log.error("what was planned could not be recorded: %s", error)
                self._plan_at = self.clock.now() + 1.0

    async def _watch_silent(self) -> None:
        """A lease whose time is long over at a silent site is over: that site's agent has ended it by itself."""
        while True:
            await asyncio.sleep(SILENT_CHECK_S)
            for lease in list(self.machine.running.values()):
                silent = tuple(p.site for p in lease.parts if p.is_live and not self.machine.capacity.sites[p.site].up)
                if silent and lease.started and self.clock.now() > surely_over(lease):
                    try:
                        await self.put(ForLease(lease.id, Unconfirmed(silent)))
                    except IbshellError as error:  # tried again at the next look; the hub goes on
                        log.error("lease %s: %s", lease.id, error)

    def _ask(self, ask: Ask) -> None:
        self._begin(self._carry_out(ask))

    def _begin(self, coroutine: Coroutine[Any, Any, None]) -> None:
        assert self._tasks is not None
        try:
            self._tasks.create_task(coroutine)
        except RuntimeError:  # the hub is ending; its next run carries on
            coroutine.close()

    async def _carry_out(self, ask: Ask) -> None:
        if ask.after_s:
            await asyncio.sleep(ask.after_s)
        event = await self._question(ask)
        try:
            await self.put(ForLease(ask.lease, event))
        except Refused as error:
            log.info("lease %s: %s", ask.lease, error)
        except IbshellError as error:
            log.error("lease %s at %s: %s", ask.lease, ask.site, error)

    async def _question(self, ask: Ask) -> Reported | PartFailed:
        link = self._links.get(ask.site)
        if link is None:
            return Reported(ask.site, None)
        timeout = HOLD_TIMEOUT_S if isinstance(ask.what, Hold) else 30.0
        try:
            return Reported(ask.site, await self.tell(ask.site, ask.what, timeout))
        except IbshellError as error:
            return PartFailed(ask.site, ask.what, error)

    async def tell(self, site: str, what: LeaseEvent, timeout_s: float = 30.0) -> SiteLease:
        """Tell a site what to do with a lease; returns what has become of it there.

        Raises:
            IbshellError: why not. Where the answer was not heard, or the lease is not there what it is here, the site is asked to
                describe itself again.
        """
        link = self._links.get(site)
        if link is None:
            raise Unreachable(f"{site} belongs to the pool no longer")
        try:
            asked = self.machine.requests.shown(what)
            return await link.call(f"lease.{type(what).__struct_config__.tag}", asked, SiteLease, timeout_s)
        except (TimedOut, StaleToken):
            self._begin(self._look_again(link))
            raise

    async def _look_again(self, link: SiteLink) -> None:
        try:
            await link.describe()
        except IbshellError as error:  # silent: it describes itself when it is back
            log.info("%s: %s", link.name, error)

    async def wait_until(self, lease_id: str, done: Callable[[Lease], bool], timeout_s: float) -> Lease:
        """A lease once something holds for it.

        Raises:
            TimedOut: it did not in time.
            NotFound: the lease is long over.
        """
        with self._watching(lease_id) as moved:
            try:
                async with asyncio.timeout(timeout_s):
                    while True:
                        lease = await self.told(lease_id)
                        if done(lease):
                            return lease
                        await moved.wait()
                        moved.clear()
            except TimeoutError:
                lease = await self.told(lease_id)
                waiting = [part.site for part in lease.parts if part.is_live]
                raise TimedOut(
                    f"lease {lease_id} is still {lease.state} after {timeout_s:.0f} s; waiting for {', '.join(waiting)}",
                    f"look again later: ibshell lease show {lease_id}",
                ) from None

    async def durable(self) -> None:
        """Wait until everything decided so far is durable: before it, nobody is told.

        Raises:
            StorageFailed: it will not be, and is taken back.
        """
        if not self._journal.is_settled:
            raise StorageFailed("what was decided last could not be written and is taken back", "ask again")
        await self._journal.flushed()

    async def told(self, lease_id: str) -> Lease:
        """A lease as somebody may be told of it."""
        await self._journal.settle()
        lease = self._require(lease_id)
        await self._journal.flushed()
        return lease

    def _require(self, lease_id: str) -> Lease:
        lease = self.get(lease_id)
        if lease is None:
            raise NotFound(f"no lease {lease_id}", "ibshell lease list shows them")
        return lease

    @contextmanager
    def _watching(self, lease_id: str) -> Iterator[asyncio.Event]:
        """An event that is set whenever a lease has moved."""
        moved = asyncio.Event()
        watchers = self._watched.setdefault(lease_id, [])
        watchers.append(moved)
        try:
            yield moved
        finally:
            watchers.remove(moved)
            if not watchers:
                self._watched.pop(lease_id, None)
