"""Drives the hub's leases: every decision durable before the sites hear of it, their answers the next events."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from agent.links import SiteLink
from agent.ports import Clock, Store, instant
from fedpool.errors import (
    IbshellError,
    Insufficient,
    NotFound,
    Refused,
    StorageFailed,
    TimedOut,
    Unreachable,
    UsageError,
    from_wire,
)
from fedpool.leasing import lease as life
from fedpool.leasing.gang import (
    Accepted,
    Ask,
    EndAsked,
    LeaseRecorded,
    NoticeAsked,
    Offered,
    PartFailed,
    Renewed,
    Reported,
    ResizeAsked,
    Unconfirmed,
    surely_over,
)
from fedpool.leasing.pool import (
    ForLease,
    PlanWanted,
    Pool,
    PoolDecision,
    PoolEntry,
    PoolEvent,
    PoolRestarted,
    Submitted,
)
from fedpool.leasing.requests import Hold, Renew
from fedpool.names import require_id
from fedpool.records import Demand, Lease, Part, Shape, SiteLease
from fedpool.step import Decision
from fedpool.wire.messages import LeaseView, LeaseWanted

log = logging.getLogger(__name__)

STREAM = "leases"
TERM_STREAM = "term"
HOLD_TIMEOUT_S = 10.0
ACTIVATION_TIMEOUT_S = 60.0
END_TIMEOUT_S = 60.0
SILENT_CHECK_S = 5.0
REREAD_S = 1.0
SNAPSHOT_EVERY = 20_000  # entries
SHORTEST_S = 0.001  # to sleep: the loop and the clock may differ a little
WAITS = ("requested", "queued")


class TermBegan(msgspec.Struct, frozen=True, tag="term.began"):
    """This hub's run: a larger term than any before it, which sites hold against its predecessors."""

    term: int


class Gangs:
    """All leases of the hub.

    Args:
        store: where decisions go.
        links: {site: link}.
        sites: their names.
        changed: told of every lease that took a new state, once that is durable.
        clock: the machine's.
        chance: makes ids.
    """

    def __init__(
        self,
        store: Store,
        links: Mapping[str, SiteLink],
        sites: list[str],
        changed: Callable[[Lease], None],
        clock: Clock,
        chance: random.Random,
    ) -> None:
        self.machine = Pool(sites)
        self.clock = clock
        self._chance = chance
        self._store = store
        self._links = links
        self._changed = changed
        self._settled = asyncio.Event()  # clear while the decisions are read again
        self._settled.set()
        self._watched: dict[str, list[asyncio.Event]] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._plan_due = asyncio.Event()
        self._plan_at: float | None = None
        self._since_snapshot = 0

    @property
    def term(self) -> int:
        """The hub's term."""
        return self.machine.term

    async def recover(self, tasks: asyncio.TaskGroup) -> None:
        """Read the decisions back, begin a new term, and carry on what was decided."""
        self._tasks = tasks
        clock = self.clock
        terms = await self._store.read(TERM_STREAM, TermBegan)
        for entry in await self._store.read(STREAM, PoolEntry):
            self.machine.apply(entry)
        shift = (await self._store.last_written()).shift(instant(clock))
        if shift:
            await self._commit(Decision([PoolRestarted(shift)]))
        self.machine.term = 1 + max((entry.term for entry in terms), default=0)
        await self._store.append(TERM_STREAM, [TermBegan(self.term)])
        for decision in self.machine.interrupted(clock.now()):
            await self._commit(decision)
        tasks.create_task(self._keep_planning())
        tasks.create_task(self._watch_silent())

    def leases(self) -> list[Lease]:
        """All leases, oldest first."""
        return [gang.lease for gang in self.machine.gangs.values()]

    def get(self, lease_id: str) -> Lease | None:
        """A lease by its whole id; None where there is none, or it is long over and forgotten."""
        gang = self.machine.gangs.get(lease_id)
        return None if gang is None else gang.lease

    def find(self, prefix: str) -> Lease:
        """A lease by id or unique prefix.

        Raises:
            NotFound: none or several.
        """
        matching = [gang.lease for key, gang in self.machine.gangs.items() if key.startswith(prefix)]
        if not matching:
            raise NotFound(f"no lease {prefix}", "ibshell lease list shows them")
        if len(matching) > 1:
            raise NotFound(f"{prefix} could be {', '.join(lease.id for lease in matching[:5])}", "give more digits")
        return matching[0]

    def view(self, lease: Lease) -> LeaseView:
        """A lease with what people want to know beside it."""
        now = self.clock.now()
        left = max(0.0, lease.deadline - now) if lease.state == "active" else None
        silent = {
            part.site: self._links[part.site].seen
            for part in lease.parts
            if lease.state in life.LIVE and part.site in self._links and not self._links[part.site].is_up
        }
        if lease.state not in WAITS:
            return LeaseView(lease, left, silent)
        machine = self.machine
        starts = machine.expected_start(lease, now)
        return LeaseView(lease, left, silent, machine.why(lease, now), starts, machine.ahead(lease, now))

    # --- asking for a lease

    def lease_of(self, wanted: LeaseWanted) -> Lease:
        """A request as a lease that is not there yet."""
        demand = Demand(
            gpus=wanted.gpus,
            gpus_max=wanted.gpus_max,
            shape=Shape(
                kinds=tuple(wanted.gpu_type.split(",")) if wanted.gpu_type else (),
                memory_min_bytes=wanted.memory_min_bytes,
                memory_max_bytes=wanted.memory_max_bytes,
                milli=wanted.milli,
                devices=tuple(self._uuid(name) for name in wanted.devices),
                same_leaf=wanted.same_leaf,
                spread=wanted.spread,
                avoid=tuple(wanted.avoid),
            ),
            sites=wanted.sites,
            site_names=tuple(wanted.site_names),
            per_site_min=wanted.per_site_min,
            priority=wanted.priority,
            not_before=self.clock.now() + wanted.starts_in_s if wanted.starts_in_s else 0.0,
            max_wait_s=wanted.max_wait_s,
        )
        if wanted.starts_in_s < 0:
            raise UsageError(f"a start {-wanted.starts_in_s:.0f} s ago", "name a time that is still to come")
        new = require_id(wanted.id, "lease") if wanted.id else self._new_id()
        starts_at = self.clock.wall(wanted.starts_in_s) if wanted.starts_in_s else ""
        return Lease(
            new,
            wanted.tenant,
            "requested",
            demand,
            wanted.duration_s,
            self.clock.wall(),
            submitted=self.clock.now(),
            starts_at=starts_at,
        )

    def _new_id(self) -> str:
        while (new := f"{self._chance.getrandbits(32):08x}") in self.machine.gangs:
            pass
        return new

    def _uuid(self, name: str) -> str:
        """A device by UUID or as SITE:NODE/INDEX.

        Raises:
            NotFound: no site has it.
        """
        for site in self.machine.capacity.sites.values():
            for device in site.devices:
                if name in (device.uuid, f"{site.name}:{device.node}/{device.label}"):
                    return device.uuid
        raise NotFound(f"no device {name!r}", "ibshell gpu list shows them")

    def foresee(self, wanted: LeaseWanted) -> LeaseView:
        """What a request would meet, without asking.

        Raises:
            IbshellError: it would be refused, and why.
        """
        lease, now = self.lease_of(wanted), self.clock.now()
        self.machine.step(Submitted(lease), now)
        found = self.machine.queue.earliest(lease, now)
        starts = None if found is None else max(0.0, found.start - now)
        return LeaseView(lease, None, {}, "" if starts == 0 else self.machine.why(lease, now), starts)

    async def request(self, wanted: LeaseWanted) -> Lease:
        """Lease devices at several sites, all or none; returns when the lease is active, or waits where it may.

        Raises:
            IbshellError: there is no lease, and no device is held for it.
        """
        lease = self.lease_of(wanted)
        known = self.machine.gangs.get(lease.id)
        if known is None:
            await self._step(Submitted(lease))
        elif not _same(known.lease, lease):
            raise Refused(
                f"lease {lease.id} is there already and was asked for differently", "use a new key for a new request"
            )
        try:
            final = await self._wait(
                lease.id,
                lambda found: (
                    found.state not in ("requested", "held")
                    and not (found.state == "queued" and self.machine.gangs[lease.id].placing)
                ),
                ACTIVATION_TIMEOUT_S,
            )
        except TimedOut:
            await self._step(ForLease(lease.id, EndAsked("failed: not every site answered in time")))
            raise
        if final.state not in ("active", "queued") and not final.started:
            failure = self.machine.gangs[lease.id].failure
            if failure is not None:
                raise from_wire(failure.code, failure.message, failure.hint)
            if final.state == "aborted":
                raise Insufficient(final.reason, "ibshell lease list shows who has them; --wait 1h waits for them")
            raise Refused(f"lease {lease.id} was not granted: {final.reason}")
        return final

    async def wait(self, lease_id: str, state: str, wait_s: float) -> Lease:
        """A lease once it is in another state than this one, or as it is after so many seconds."""
        try:
            return await self._wait(lease_id, lambda found: found.state != state, wait_s)
        except TimedOut:
            return await self._told(lease_id)

    # --- changing one

    async def renew(self, lease: Lease, duration_s: float) -> Lease:
        """Let a lease end `duration_s` seconds from now, at every site.

        Raises:
            Refused: it is not active, a site refused, or the devices are promised to a reservation.
            Unreachable: a site is silent; the others are renewed, and asking again is safe.
        """
        if duration_s <= 0:
            raise UsageError(f"a renewal of {duration_s} s", "name a positive duration, for example --for 1h")
        if lease.state != "active":
            raise Refused(f"lease {lease.id} is {lease.state}{f': {lease.reason}' if lease.reason else ''}, not active")
        sent = self.clock.now()
        blocking = self.machine.queue.timeline.blocks(lease, sent + duration_s)
        if blocking is not None:
            at = self.machine.gangs[blocking].lease.starts_at
            raise Refused(
                f"lease {lease.id} cannot go on for so long: its devices are reserved for lease {blocking} at {at}",
                "renew for less",
            )
        refused: dict[str, IbshellError] = {}
        async with asyncio.TaskGroup() as asks:
            answers = {part.site: asks.create_task(self._renew_part(lease, part, duration_s)) for part in lease.parts}
        for site, answer in answers.items():
            error = answer.result()
            if error is not None:
                refused[site] = error
        if refused:
            words = "; ".join(f"{site}: {error.message}" for site, error in refused.items())
            kind = Unreachable if any(isinstance(error, Unreachable) for error in refused.values()) else Refused
            raise kind(
                f"lease {lease.id} was renewed at {len(answers) - len(refused)} of {len(answers)} sites ({words})",
                "ask again when they answer: a renewal may be repeated",
            )
        await self._step(ForLease(lease.id, Renewed(duration_s, sent)))
        return await self._told(lease.id)

    async def _renew_part(self, lease: Lease, part: Part, duration_s: float) -> IbshellError | None:
        try:
            await self._links[part.site].call("lease.renew", Renew(lease.id, duration_s, self.term), SiteLease)
        except IbshellError as error:
            return error
        return None

    async def end(self, lease: Lease, reason: str) -> Lease:
        """End a lease at every site; returns when all have confirmed that its processes are gone.

        Raises:
            TimedOut: a site is silent; the lease goes on ending and is free there at its expiry at the latest.
        """
        if lease.state in life.FINAL:
            return lease
        await self._step(ForLease(lease.id, EndAsked(reason)))
        return await self._wait(lease.id, lambda found: found.state in life.FINAL, END_TIMEOUT_S)

    async def revoke(self, lease: Lease, reason: str, grace_s: float) -> Lease:
        """End somebody's lease, at once or after a grace in which its jobs are told."""
        if grace_s > 0 and lease.state == "active":
            await self._step(ForLease(lease.id, NoticeAsked(reason, grace_s)))
            return await self._told(lease.id)
        return await self.end(lease, f"revoked: {reason}")

    async def resize(self, lease: Lease, gpus: int) -> Lease:
        """Let an elastic lease have so many devices, as even over its sites as now.

        Raises:
            Refused: it is not elastic, or not active.
        """
        demand = lease.demand
        if not demand.gpus <= gpus <= demand.most:
            raise Refused(
                f"lease {lease.id} may have {demand.gpus} to {demand.most} devices; {gpus} asked for",
                "ask for a lease with --gpus FEWEST..MOST",
            )
        left, target = gpus, {}
        for position, part in enumerate(lease.parts):
            target[part.site] = left // (len(lease.parts) - position)
            left -= target[part.site]
        await self._step(ForLease(lease.id, ResizeAsked(target, self.machine.queue.grace_s)))
        return await self.wait(lease.id, "", 0.0)

    async def offer(self, lease: Lease, tenant: str) -> Lease:
        """Offer a lease to another tenant, or take the offer back ("")."""
        if tenant:
            self.machine.tenants.require(tenant)
        await self._step(ForLease(lease.id, Offered(tenant)))
        return await self._told(lease.id)

    async def accept(self, lease: Lease, tenant: str) -> Lease:
        """Take a lease that was offered.

        Raises:
            Refused: it was not offered to this tenant.
        """
        if lease.offered_to != tenant:
            raise Refused(
                f"lease {lease.id} is not offered to {tenant}", f"its holder says: ibshell lease offer {lease.id}"
            )
        await self._step(ForLease(lease.id, Accepted()))
        return await self._wait(lease.id, lambda found: not found.next_tenant, END_TIMEOUT_S)

    # --- the sites' side

    async def site_up(self, link: SiteLink) -> None:
        """A site has connected: settle what the hub and the site see differently."""
        description = link.description
        assert description is not None
        self.machine.site_described(
            link.name, description.inventory, description.leases, description.cordons, description.epoch
        )
        reported = {lease.id: lease for lease in description.leases} | self.machine.capacity.sites[link.name].leases
        for gang in list(self.machine.gangs.values()):
            if any(part.site == link.name for part in gang.lease.parts) and not gang.placing:
                await self._step(ForLease(gang.lease.id, Reported(link.name, reported.pop(gang.lease.id, None))))
        for lease_id, lease in reported.items():
            if lease.occupies and lease_id in self.machine.gangs:
                await self._step(ForLease(lease_id, Reported(link.name, lease)))
        self._plan_due.set()

    def site_down(self, link: SiteLink) -> None:
        """A site is silent."""
        self.machine.site_lost(link.name)

    async def site_changed(self, link: SiteLink, lease: SiteLease) -> None:
        """A site tells of a lease that changed."""
        await self._step(ForLease(lease.id, Reported(link.name, lease)))

    # --- driving the machine

    async def put(self, event: PoolEvent) -> None:
        """Put an event to the machine; what it decides is durable when this returns.

        Raises:
            IbshellError: it refuses, and nothing has changed.
        """
        await self._step(event)

    async def _settle(self) -> None:
        """Wait while the decisions are read again."""
        while not self._settled.is_set():
            await self._settled.wait()

    async def _step(self, event: PoolEvent) -> None:
        await self._settle()
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
        try:
            await self._store.append(STREAM, decision.entries)
        except StorageFailed:
            await self._read_again(machine)
            raise
        except asyncio.CancelledError:  # who asked has hung up; what was decided stands and has its consequences
            self._begin(self._carry_on(machine, decision, states, moved))
            raise
        self._finish(machine, decision, states, moved)

    async def _carry_on(self, machine: Pool, decision: PoolDecision, states: list[Lease], moved: set[str]) -> None:
        try:
            await self._store.append(STREAM, ())
        except StorageFailed as error:
            log.error("what was decided could not be written: %s", error)
            await self._read_again(machine)
        else:
            self._finish(machine, decision, states, moved)

    def _finish(self, machine: Pool, decision: PoolDecision, states: list[Lease], moved: set[str]) -> None:
        """It is durable: say and do what follows from it."""
        self._since_snapshot += len(decision.entries)
        if self._since_snapshot >= SNAPSHOT_EVERY and machine is self.machine:
            self._since_snapshot = 0
            self._begin(self._snapshot())
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

    async def _snapshot(self) -> None:
        """Let the next start begin here."""
        await self._settle()
        machine = self.machine
        try:
            await self._store.append(STREAM, [machine.state()], snapshot=True)
        except StorageFailed as error:
            log.error("no snapshot was written: %s", error)
            await self._read_again(machine)

    async def _read_again(self, failed: Pool) -> None:
        """What was decided last was not written: go back to what was, and carry that on."""
        if self.machine is not failed or not self._settled.is_set():
            return  # another failure of the same time sees to it
        self._settled.clear()
        try:
            while True:
                await asyncio.sleep(
                    REREAD_S
                )  # whatever it is, it will not be over at once: nothing is decided meanwhile
                try:
                    entries = await self._store.read(STREAM, PoolEntry)
                    break
                except StorageFailed as error:
                    log.error("what was decided cannot be read again: %s", error)
            fresh = Pool(failed.capacity.sites, failed.capacity)
            for entry in entries:
                fresh.apply(entry)
            asks = fresh.take_over(failed, self.clock.now())
            self.machine = fresh
        finally:
            self._settled.set()
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
                try:
                    await link.describe()
                except (
                    IbshellError
                ) as error:  # silent: it describes itself when it is back; unwritten: all are asked again
                    log.info("%s: %s", link.name, error)

    async def _keep_planning(self) -> None:
        """Plan whenever something changed, and when time alone may change something."""
        while True:
            wait = None if self._plan_at is None else max(SHORTEST_S, self._plan_at - self.clock.now())
            try:
                await asyncio.wait_for(self._plan_due.wait(), wait)
            except TimeoutError:
                self.machine.queue.mark()
            self._plan_due.clear()
            if self._plan_at is not None and self._plan_at <= self.clock.now():
                self._plan_at = None
                self.machine.queue.mark()
            if not self.machine.queue.is_dirty:
                continue
            try:
                await self._step(PlanWanted())
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
                        await self._step(ForLease(lease.id, Unconfirmed(silent)))
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
            await self._step(ForLease(ask.lease, event))
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
            report = await link.call(f"lease.{type(ask.what).__struct_config__.tag}", ask.what, SiteLease, timeout)
        except IbshellError as error:
            return PartFailed(ask.site, ask.what, error)
        return Reported(ask.site, report)

    async def _wait(self, lease_id: str, done: Callable[[Lease], bool], timeout_s: float) -> Lease:
        with self._watching(lease_id) as moved:
            try:
                async with asyncio.timeout(timeout_s):
                    while True:
                        lease = await self._told(lease_id)
                        if done(lease):
                            return lease
                        await moved.wait()
                        moved.clear()
            except TimeoutError:
                lease = await self._told(lease_id)
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
        if not self._settled.is_set():
            raise StorageFailed("what was decided last could not be written and is taken back", "ask again")
        await self._store.append(STREAM, ())

    async def _told(self, lease_id: str) -> Lease:
        """A lease as somebody may be told of it."""
        await self._settle()
        lease = self._require(lease_id)
        await self._store.append(STREAM, ())
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


def _same(known: Lease, asked: Lease) -> bool:
    """Whether two requests ask for the same; a start is given as so many seconds from then, so it may differ a little."""
    starts = abs(known.demand.not_before - asked.demand.not_before) < 60 or not known.demand.not_before
    demand = msgspec.structs.replace(asked.demand, not_before=known.demand.not_before)
    return starts and (known.tenant, known.demand, known.duration_s) == (asked.tenant, demand, asked.duration_s)
