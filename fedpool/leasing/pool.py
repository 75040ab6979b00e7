"""The hub's side of leasing as one machine without input or output: tenants, queue and gangs decide together.

Quota, order and placement are one decision, so two requests never count the same device or the same quota. State is the fold of
the entries; what sites said last is kept beside it as hints, since the sites decide. While a lease is being placed nothing durable
hangs on it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import msgspec

from fedpool.errors import Insufficient, NotFound, Refused, StaleToken, Unreachable, UsageError
from fedpool.leasing import lease as life
from fedpool.leasing.demand import nearest, require_known, require_sound
from fedpool.leasing.entries import LeasesForgotten
from fedpool.leasing.gang import (
    PASSING,
    Accepted,
    Ask,
    EndAsked,
    Gang,
    GangEvent,
    Interrupted,
    LeaseRecorded,
    NoticeAsked,
    PartFailed,
    Placed,
    Reported,
    ResizeAsked,
    Unplaceable,
)
from fedpool.leasing.kept import KeptRequests, RequestKept
from fedpool.leasing.queue import Growth, Plan, Queue
from fedpool.leasing.reasons import Reasons
from fedpool.leasing.requests import Resize
from fedpool.leasing.tenants import ANY, TenantRecorded, TenantRemoved, Tenants, Use, holders, require_quota
from fedpool.names import NAME, RULE
from fedpool.placement.capacity import Capacity
from fedpool.placement.spread import resized
from fedpool.records import Inventory, Lease, Part, Signed, SiteLease, Tenant
from fedpool.step import Decision
from fedpool.units import format_duration

RETRY_S = 0.125  # after a site has refused, twice that and then doubling
RETRY_LAST_S = 30.0

# A lease that is over is listed so long, and at most so many of them, with at most so many parts in all.
REMEMBER_S = 7 * 86400.0
REMEMBER_MAX = 10_000
REMEMBER_PARTS_MAX = 20_000


class PoolState(msgspec.Struct, frozen=True, tag="pool.state"):
    """Everything at once: a snapshot."""

    leases: tuple[Lease, ...]
    tenants: tuple[Tenant, ...]
    uses: tuple[Use, ...]
    requests: tuple[RequestKept, ...] = ()
    signed: dict[str, Signed] = {}


class PoolRestarted(msgspec.Struct, frozen=True, tag="pool.restarted"):
    """The hub started after a reboot of its machine: its clock began anew, and all times shift with it."""

    shift_s: float


PoolEntry: TypeAlias = (
    LeaseRecorded | RequestKept | LeasesForgotten | TenantRecorded | TenantRemoved | PoolState | PoolRestarted
)
PoolDecision: TypeAlias = Decision[PoolEntry, Lease | Tenant, Ask]


class Submitted(msgspec.Struct, frozen=True):
    """Somebody asks for a lease, and may have signed that."""

    lease: Lease
    kept: tuple[RequestKept, ...] = ()


class ForLease(msgspec.Struct, frozen=True):
    """Something happened to one lease; where somebody has signed that it may, what they signed."""

    lease: str
    event: GangEvent
    kept: tuple[RequestKept, ...] = ()


class Adopted(msgspec.Struct, frozen=True):
    """Sites hold a lease that the hub does not know: from now on it does."""

    lease: Lease


class PlanWanted(msgspec.Struct, frozen=True):
    """See what can start now."""


class TenantSet(msgspec.Struct, frozen=True):
    """A tenant as it is to be."""

    tenant: Tenant
    signed: Signed | None = None


class TenantDropped(msgspec.Struct, frozen=True):
    """A tenant is to be one no longer."""

    name: str
    signed: Signed | None = None


PoolEvent: TypeAlias = Submitted | Adopted | ForLease | PlanWanted | TenantSet | TenantDropped


class Pool:
    """All tenants and leases of the hub.

    Args:
        sites: their names.
        capacity: what they said to a machine before this one, or None.

    Attributes:
        gangs: {lease: its machine}.
        capacity: what the sites last said.
        requests: what was signed about leases that live.
    """

    def __init__(self, sites: Iterable[str], capacity: Capacity | None = None) -> None:
        self.term = 0
        self.gangs: dict[str, Gang] = {}
        self.capacity = capacity or Capacity()
        self.tenants = Tenants()
        self.running: dict[str, Lease] = {}
        self.requests = KeptRequests()
        self._placing: dict[str, tuple[Part, ...]] = {}
        # What sites have been asked to add to a lease and have not answered.
        self._growing: dict[tuple[str, str], Growth] = {}
        self.queue = Queue(self.capacity, self.tenants, self.running, self._growing)
        self._over_parts = 0
        self._over: dict[str, float] = {}  # when they ended, the earliest first
        for name in sites:
            self.capacity.add(name)

    # --- the fold

    def apply(self, entry: PoolEntry) -> None:
        """Fold one durable entry into the state."""
        match entry:
            case LeaseRecorded():
                self._put(entry)
            case RequestKept():
                self.requests.apply(entry)
            case LeasesForgotten():
                for lease_id in entry.ids:
                    gone = self.gangs.pop(lease_id)
                    if self._over.pop(lease_id, None) is not None:
                        self._over_parts -= len(gone.lease.parts)
            case TenantRecorded() | TenantRemoved():
                self.tenants.apply(entry)
                self.queue.mark()
            case PoolState():
                self._restore(entry)
            case PoolRestarted():
                self._restore(_shifted(self.state(), entry.shift_s))

    def state(self) -> PoolState:
        """A snapshot: folding it alone gives this state."""
        leases = tuple(gang.recorded for gang in self.gangs.values())
        tenants = self.tenants
        return PoolState(
            leases, tuple(tenants.known.values()), tenants.uses(), self.requests.state(), dict(tenants.signed)
        )

    def _restore(self, state: PoolState) -> None:
        for name in list(self.queue.waiting):
            self.queue.remove(name)
        self._over_parts = 0
        for kept in (self.gangs, self.running, self._over, self._placing, self._growing):
            kept.clear()
        self.tenants.held.clear()
        self.tenants.known = {tenant.name: tenant for tenant in state.tenants}
        self.tenants.signed = dict(state.signed)
        for lease in state.leases:
            self._put(LeaseRecorded(lease))
        self.requests.restore(state.requests)
        self.tenants.restore(state.uses)
        self.queue.mark()

    def _put(self, entry: LeaseRecorded) -> None:
        lease = entry.lease
        gang = self.gangs.get(lease.id)
        if gang is None:
            gang = self.gangs[lease.id] = Gang(lease, self.term)
        gang.apply(entry)
        if lease.state in life.FINAL:
            self._over_parts += len(lease.parts) if lease.id not in self._over else 0
            self._over[lease.id] = lease.ended
            self.requests.drop(lease.id)
            for part in lease.parts:
                self._settle_growth(lease.id, part.site)
        before = self.running.pop(lease.id, None)
        if before is not None:
            self.tenants.take(before, -1)
        if lease.state in ("held", "active", "ending"):
            self.running[lease.id] = lease
            self.tenants.take(lease, 1)
        self._charge(before, lease)
        if lease.state in ("requested", "queued"):
            self.queue.add(lease)
        else:
            self.queue.remove(lease.id)
        renewed = before is not None and before.started and lease.deadline != before.deadline
        if before is not None and (lease.state in life.FINAL or lease.gpus != before.gpus or renewed):
            for part in before.parts:
                self.queue.mark(part.kind)

    def _charge(self, before: Lease | None, lease: Lease) -> None:
        """A lease is charged to its end when it starts and when it is renewed, and credited with what it did not use."""
        charged = before.gpus * before.deadline if before is not None and before.started else 0.0
        if lease.state == "active":
            at = lease.started
            charged = charged or lease.gpus * at
            self.tenants.charge(lease, lease.gpus * lease.deadline - charged, at)
        elif before is not None and before.started and lease.state in life.FINAL:
            self.tenants.charge(lease, before.gpus * min(0.0, lease.ended - before.deadline), lease.ended)

    def check(self) -> None:
        """Assert the invariants: what tenants hold is what their leases say, and each waits or runs, never both."""
        held: dict[tuple[str, str, str], int] = {}
        for lease in self.running.values():
            for part in lease.parts:
                if part.is_live:
                    for tenant in holders(lease):
                        key = (tenant, part.kind, part.site)
                        held[key] = held.get(key, 0) + part.gpus
        for growth in self._growing.values():
            key = (growth.tenant, growth.part.kind, growth.part.site)
            held[key] = held.get(key, 0) + growth.part.gpus
        for lease_id, parts in self._placing.items():
            for part in parts:
                key = (self.gangs[lease_id].lease.tenant, part.kind, part.site)
                held[key] = held.get(key, 0) + part.gpus
        assert held == self.tenants.held, f"{held} is held; the tenants' account says {self.tenants.held}"
        assert not self.running.keys() & self.queue.waiting.keys(), "a lease waits and runs"

    # --- what the sites say; hints, not entries

    def site_described(
        self,
        name: str,
        inventory: Inventory,
        leases: Sequence[SiteLease],
        cordons: Mapping[str, str],
        epoch: int = 0,
        known: Mapping[str, int] | None = None,
    ) -> None:
        """A site is up and has said everything about itself; see `SitePicture.describe`."""
        site = self.capacity.add(name)
        site.up = True
        site.describe(inventory, leases, cordons, epoch, known)
        for lease_id in [lease_id for lease_id, parts in self._placing.items() if any(p.site == name for p in parts)]:
            self.capacity.settle(lease_id, name)
        self.capacity.refresh(name)
        self.queue.rested()
        self.queue.mark()

    def site_lost(self, name: str) -> None:
        """A site is silent: nothing of it is free."""
        self.capacity.sites[name].up = False
        self.capacity.refresh(name)

    def _see(self, site: str, lease: SiteLease) -> None:
        touched = self.capacity.sites[site].note(lease)
        self.capacity.settle(lease.id, site)
        self.capacity.refresh(site)
        if not lease.occupies:
            for kind in touched:
                self.queue.mark(kind)

    # --- decisions

    def step(self, event: PoolEvent, now: float) -> PoolDecision:
        """Decide what follows from an event; see `fedpool.step`.

        Raises:
            IbshellError: the event is refused and nothing has changed.
        """
        match event:
            case Submitted():
                return _keeping(self._submitted(event.lease, now), event.kept)
            case Adopted():
                self.tenants.require(event.lease.tenant)
                return Decision(entries=(LeaseRecorded(event.lease),), replies=(event.lease,))
            case ForLease():
                return _keeping(self._for_lease(event.lease, event.event, now), event.kept)
            case PlanWanted():
                return self._plan(now)
            case TenantSet():
                return self._tenant_set(event.tenant, event.signed)
            case TenantDropped():
                return self._tenant_dropped(event.name, event.signed)

    def _submitted(self, lease: Lease, now: float) -> PoolDecision:
        demand = lease.demand
        self.tenants.require(lease.tenant, demand.priority)
        require_sound(demand, lease.duration_s)
        require_known(demand, self.capacity.kinds, self.capacity.sites)
        if demand.not_before and demand.not_before < now:
            raise UsageError(
                f"a start {format_duration(now - demand.not_before)} ago", "name a time that is still to come"
            )
        for name in demand.site_names:
            if not self.capacity.sites[name].up and demand.max_wait_s == 0 and not demand.not_before:
                raise Unreachable(f"{name} cannot be reached", "ask again when it is back, or wait for it: --wait 1h")
        total = sum(int(self.capacity.total[:, column].sum()) for column in self.capacity.columns(demand.shape))
        kind = " or ".join(demand.shape.kinds) or "GPU"
        if total < demand.gpus:
            raise Insufficient(
                f"{demand.gpus} {kind} asked for; the pool has {total}", "ask for fewer, or another type"
            )
        entry = LeaseRecorded(lease)
        return Decision(entries=(entry,), replies=(lease,))

    def _for_lease(self, lease_id: str, event: GangEvent, now: float) -> PoolDecision:
        if isinstance(event, Reported) and event.lease is not None:
            if self.capacity.sites[event.site].is_stale(event.lease):
                return Decision()
            self._see(event.site, event.lease)
        gang = self.gangs.get(lease_id)
        if gang is None:
            return Decision()
        if isinstance(event, Accepted):
            self.tenants.require_room(gang.lease.offered_to, (part for part in gang.lease.parts if part.is_live))
        if isinstance(event, ResizeAsked):
            self._require_resizable(gang.lease, event)
            event = msgspec.structs.replace(event, versions=self._versions(lease_id, event.gpus))
        decision = gang.step(event, now)
        if isinstance(event, ResizeAsked):
            for part in _additions(gang.lease, event):
                self.tenants.count(gang.lease.tenant, part, part.gpus)
            self._grow(gang.lease, event)
        self._grown(lease_id, event)
        if not gang.placing or any(e.lease.state not in ("requested", "queued") for e in decision.entries):
            self._unplace(lease_id)
        wake_at = decision.wake_at
        waits = gang.lease.state in ("requested", "queued") and not gang.placing
        if (
            waits
            and lease_id not in self.queue.waiting
            and not any(e.lease.state == "aborted" for e in decision.entries)
        ):
            wake_at = now + min(RETRY_LAST_S, RETRY_S * 2.0 ** min(gang.failures, 10))
            self.queue.rest(gang.lease, wake_at)
        return Decision(decision.entries, decision.replies, decision.effects, wake_at)

    def share(self, lease: Lease, gpus: int) -> dict[str, int]:
        """{site: devices} for an active lease that is to have so many in all, as far as what is free allows."""
        free: dict[str, int] = {}
        for part in lease.parts:
            column = self.capacity.column.get(part.kind)
            if column is not None:
                shape = msgspec.structs.replace(lease.demand.shape, kinds=(part.kind,))
                row = self.capacity.row[part.site]
                free[part.site] = int(self.capacity.available(shape, column, [row])[row])
        have = {part.site: part.gpus for part in lease.parts}
        return resized(have, gpus, free, lease.demand.per_site_min)

    def _require_resizable(self, lease: Lease, event: ResizeAsked) -> None:
        for site in event.gpus:
            if lease.state == "active" and lease.id not in self.capacity.sites[site].leases:
                raise Unreachable(f"{site} has not said yet what lease {lease.id} has there", "try again when it is up")
            if (lease.id, site) in self._growing:
                raise Refused(f"lease {lease.id} is growing at {site}", "try again in a moment")
        self.tenants.require_room(lease.tenant, _additions(lease, event))

    def _versions(self, lease_id: str, sites: Iterable[str]) -> dict[str, int]:
        """As what the hub has seen a lease at sites; a site that has not said anything of it yet is left out."""
        seen = {site: self.capacity.sites[site].leases.get(lease_id) for site in sites}
        return {site: lease.version for site, lease in seen.items() if lease is not None}

    def _grow(self, lease: Lease, event: ResizeAsked) -> None:
        """What a lease is to get, and is counted as held already, until the site has answered."""
        for part in _additions(lease, event):
            self._growing[lease.id, part.site] = Growth(lease.tenant, part, event.versions[part.site])

    def _grown(self, lease_id: str, event: GangEvent) -> None:
        """A lease that is seen with a later version has grown or will not: a resize holds for one version."""
        match event:
            case Reported():
                growth, report = self._growing.get((lease_id, event.site)), event.lease
                if growth is not None and (report is None or report.version > growth.version):
                    self._settle_growth(lease_id, event.site)
            case PartFailed() if isinstance(event.asked, Resize):
                if isinstance(event.error, StaleToken):
                    self.queue.mark()  # decided on what has changed since: the report of it is here or on its way
                elif isinstance(event.error, (Refused, NotFound, UsageError)) and not isinstance(event.error, PASSING):
                    self._settle_growth(lease_id, event.site)

    def _settle_growth(self, lease_id: str, site: str) -> None:
        growth = self._growing.pop((lease_id, site), None)
        if growth is not None:
            self.tenants.count(growth.tenant, growth.part, -growth.part.gpus)
            if self.capacity.settle(lease_id, site):
                self.capacity.refresh(site)

    def _unplace(self, lease_id: str) -> None:
        """It is no longer being placed: either its own record counts from now on, or it waits again."""
        parts = self._placing.pop(lease_id, ())
        tenant = self.gangs[lease_id].lease.tenant
        for part in parts:
            self.tenants.count(tenant, part, -part.gpus)
            if self.capacity.settle(lease_id, part.site):
                self.capacity.refresh(part.site)

    def _plan(self, now: float) -> PoolDecision:
        plan = self.queue.plan(now)
        entries: list[PoolEntry] = self._forget(now)
        replies: list[Lease | Tenant] = []
        effects: list[Ask] = []
        for lease_id, event in self._proposals(plan, now):
            gang = self.gangs[lease_id]
            if isinstance(event, Placed):
                self._placing[lease_id] = event.parts
                self.queue.remove(lease_id)
            decision = gang.step(event, now)
            if isinstance(event, ResizeAsked):
                self._grow(gang.lease, event)
            entries += decision.entries
            replies += decision.replies
            effects += decision.effects
        return Decision(entries, replies, effects, self._wake(now))

    def _forget(self, now: float) -> list[PoolEntry]:
        """What has been over for long, in batches: a request that is repeated later finds nothing."""
        leases, parts = len(self._over), self._over_parts
        found: list[str] = []
        for lease_id, ended in self._over.items():
            if leases <= REMEMBER_MAX and parts <= REMEMBER_PARTS_MAX and now < ended + REMEMBER_S:
                break
            found.append(lease_id)
            leases -= 1
            parts -= len(self.gangs[lease_id].lease.parts)
        enough = len(found) >= REMEMBER_MAX // 10 or self._over_parts - parts >= REMEMBER_PARTS_MAX // 10
        return [LeasesForgotten(tuple(found))] if enough else []

    def _proposals(self, plan: Plan, now: float) -> Iterable[tuple[str, GangEvent]]:
        for lease_id, parts in plan.starts:
            yield lease_id, Placed(parts, (self.term << 20) + (self.gangs[lease_id].lease.attempt & 0xFFFFF) + 1)
        for lease_id in plan.unplaced:
            lease = self.gangs[lease_id].lease
            over = now >= lease.waits_until
            if lease.state == "requested" or over:
                yield lease_id, Unplaceable(self.why(lease, now), over)
        for victim in plan.notices:
            if victim.keep:
                versions = self._versions(victim.lease, victim.keep)
                keep = {site: victim.keep[site] for site in versions}
                yield victim.lease, ResizeAsked(keep, self.queue.grace_s, versions)
            else:
                yield victim.lease, NoticeAsked(victim.reason, self.queue.grace_s)
        for lease_id, target in plan.growths:
            yield lease_id, ResizeAsked(target, 0.0, self._versions(lease_id, target))

    def _wake(self, now: float) -> float | None:
        """When time alone may change something for those that wait."""
        times = [lease.demand.not_before for lease in self.queue.waiting.values() if lease.demand.not_before > now]
        times += [*(lease.waits_until for lease in self.queue.waiting.values()), *self.queue.due()]
        return min((time for time in times if now < time < math.inf), default=None)

    def _tenant_set(self, tenant: Tenant, signed: Signed | None) -> PoolDecision:
        if not NAME.fullmatch(tenant.name):
            raise UsageError(f"tenant {tenant.name!r} is no name: {RULE}")
        if not tenant.weight > 0:
            raise UsageError(f"a weight of {tenant.weight:g}", "it is larger than 0")
        for quota in tenant.quotas:
            require_quota(quota)
            if quota.site != ANY and quota.site not in self.capacity.sites:
                raise NotFound(f"no site {quota.site!r}", nearest(quota.site, self.capacity.sites, "ibshell site list"))
            if quota.kind != ANY and self.capacity.kinds and quota.kind not in self.capacity.kinds:
                raise NotFound(
                    f"no site has a {quota.kind!r} GPU", nearest(quota.kind, self.capacity.kinds, "ibshell gpu list")
                )
        return Decision(entries=(TenantRecorded(tenant, signed),), replies=(tenant,))

    def _tenant_dropped(self, name: str, signed: Signed | None) -> PoolDecision:
        if name not in self.tenants.known:
            raise NotFound(f"no tenant {name!r}", nearest(name, self.tenants.known, "ibshell tenant list shows them"))
        live = [g.lease.id for g in self.gangs.values() if g.lease.tenant == name and g.lease.state in life.LIVE]
        if live:
            raise Refused(
                f"tenant {name} has {len(live)} leases: {', '.join(live[:5])}", "release or revoke them first"
            )
        return Decision(entries=(TenantRemoved(name, signed),), replies=(self.tenants.known[name],))

    def interrupted(self, now: float) -> list[PoolDecision]:
        """After a restart: what was decided is carried on; who does not wait and was not decided is over."""
        decisions: list[PoolDecision] = []
        for gang in self.gangs.values():
            gang.term = self.term
            event: GangEvent = Interrupted()
            if gang.lease.state == "requested" and gang.lease.demand.max_wait_s == 0:
                event = EndAsked("the hub restarted before it had decided")
            if gang.lease.state in life.LIVE:
                decision = gang.step(event, now)
                decisions.append(Decision(decision.entries, decision.replies, decision.effects))
        return decisions

    def take_over(self, failed: Pool, now: float) -> list[Ask]:
        """Go on from the entries alone where a machine had decided more than could be written.

        Args:
            failed: the machine; what it asked sites for is not repeated under the same attempt.
            now: the clock.
        """
        self.term = failed.term
        for (lease_id, site), growth in failed._growing.items():
            if lease_id in self.running:
                self._growing[lease_id, site] = growth
                self.tenants.count(growth.tenant, growth.part, growth.part.gpus)
        asks: list[Ask] = []
        for lease_id, gang in self.gangs.items():
            gang.term = self.term
            known = failed.gangs.get(lease_id)
            if known is not None and known.lease.attempt > gang.lease.attempt:
                gang.lease = msgspec.structs.replace(gang.lease, attempt=known.lease.attempt)
            if gang.lease.state in life.LIVE:
                asks += gang.step(Interrupted(), now).effects
        self.capacity.settle_all()
        self.queue.mark()
        return asks

    # --- why

    def why(self, lease: Lease, now: float, who: bool = False) -> str:
        """What a waiting lease waits for, in words; `who` names those that have it."""
        gang = self.gangs.get(lease.id)
        reasons = Reasons(self.capacity, self.tenants, self.queue, self.running)
        return reasons.why(lease, gang.failure if gang else None, now, who)

    def expected_start(self, lease: Lease, now: float) -> float | None:
        """Seconds until a waiting lease starts at the earliest, if nothing is renewed; None where nothing that ends will do."""
        promise = next((p for p in self.queue.timeline.promises if p.lease == lease.id), None)
        if promise is not None:
            return max(0.0, promise.start - now)
        found = self.queue.earliest(lease, now)
        return None if found is None else max(0.0, found.start - now)

    def ahead(self, lease: Lease, now: float) -> int:
        """How many requests come before a waiting one."""
        return self.queue.position(lease.id, now)


def _shifted(state: PoolState, shift_s: float) -> PoolState:
    """A state whose times are those of another clock; 0 stands for never and stays."""

    def shifted(at: float) -> float:
        return at + shift_s if at else at

    leases = tuple(
        msgspec.structs.replace(
            lease,
            submitted=shifted(lease.submitted),
            started=shifted(lease.started),
            deadline=shifted(lease.deadline),
            ended=shifted(lease.ended),
            demand=msgspec.structs.replace(lease.demand, not_before=shifted(lease.demand.not_before)),
        )
        for lease in state.leases
    )
    uses = tuple(Use(use.tenant, use.device_s, use.at + shift_s) for use in state.uses)
    return msgspec.structs.replace(state, leases=leases, uses=uses)


def _additions(lease: Lease, event: ResizeAsked) -> list[Part]:
    """What a lease is to get beyond what it has, by site."""
    return [
        Part(part.site, event.gpus[part.site] - part.gpus, kind=part.kind)
        for part in lease.parts
        if event.gpus.get(part.site, 0) > part.gpus
    ]


def _keeping(decision: PoolDecision, kept: Sequence[RequestKept]) -> PoolDecision:
    """A decision with what was signed about it; before it, so that what it lets sites be asked is covered."""
    return dataclasses.replace(decision, entries=(*kept, *decision.entries)) if kept else decision
