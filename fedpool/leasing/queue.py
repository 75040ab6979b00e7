"""Who gets what next: priority classes, fair share between tenants, EASY backfill, advance reservations, preemption.

Order. Higher priority first; waiting `AGE_S` counts as one class, so nobody waits for ever. Within a class the tenant that has
used least for its weight, then who asked first. The first request that devices are missing for is promised the earliest time at
which they can be there; whatever comes after it may start now only where that promise still holds. One promise for each kind of
device, up to `PROMISES_MAX`. A request that its own quota holds back is promised nothing and holds up nobody.

Decisions are made in batches, and only about what may have changed: a request is looked at when it is new, when devices of a
kind that would do came free, when its tenant's quota or use changed, or when its time has come.

The planner proposes; `pool.py` makes its proposals entries, and the sites have the last word.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from fedpool.leasing.demand import rank
from fedpool.leasing.preemption import Victim, victims
from fedpool.leasing.tenants import ANY, Tenants
from fedpool.leasing.timeline import Placement, Timeline, parts_of
from fedpool.placement.capacity import Capacity, Counts
from fedpool.placement.spread import spread
from fedpool.records import PRIORITIES, Demand, Lease, Part

AGE_S = 6 * 3600.0
PROMISES_MAX = 16
GRACE_S = 60.0


@dataclass
class Plan:
    """What the planner proposes.

    Attributes:
        starts: (lease, where).
        notices: who has to go for whom.
        growths: elastic leases and how many devices they are to have at which sites.
        unplaced: leases that cannot start now.
        evaluated: how many requests a place was sought for; the others' answer cannot have changed.
    """

    starts: list[tuple[str, tuple[Part, ...]]] = field(default_factory=list)
    notices: list[Victim] = field(default_factory=list)
    growths: list[tuple[str, dict[str, int]]] = field(default_factory=list)
    unplaced: list[str] = field(default_factory=list)
    evaluated: int = 0


@dataclass(frozen=True)
class Growth:
    """What a site has been asked to add to a lease.

    Attributes:
        tenant: who gets it.
        part: where, and how much more.
        version: of the lease at the site, on which it rests; it is over when a later one is seen.
    """

    tenant: str
    part: Part
    version: int


class Queue:
    """Requests that wait, and what may be done about them.

    Args:
        capacity: the pool as the hub sees it.
        tenants: quotas and use.
        running: {id: lease that has devices}; kept by the caller.
        growing: {(lease, site): what is on its way}; kept by the caller.

    Attributes:
        waiting: {id: lease that waits}.
        grace_s: how long a preempted lease has.
    """

    def __init__(
        self,
        capacity: Capacity,
        tenants: Tenants,
        running: dict[str, Lease],
        growing: Mapping[tuple[str, str], Growth],
        grace_s: float = GRACE_S,
    ) -> None:
        self.capacity = capacity
        self.tenants = tenants
        self.running = running
        self.growing = growing
        self.grace_s = grace_s
        self.waiting: dict[str, Lease] = {}
        self.timeline = Timeline(capacity, (), 0.0)
        self._new: set[str] = set()
        self._changed: set[str] = set()  # kinds; ANY for all
        self._quota_only: set[str] = set()  # waiting requests that only their quota is in the way of
        self._shares: dict[str, float] = {}
        self._rests: dict[str, float] = {}  # {request that a site has refused: when it is tried again}
        self._first: set[int] = set()  # kinds whose first waiting request has had its promise in this plan

    # --- what changed

    def add(self, lease: Lease) -> None:
        """A request that waits (again)."""
        self.waiting[lease.id] = lease
        self._new.add(lease.id)

    def remove(self, lease_id: str) -> None:
        """It no longer waits."""
        if self.waiting.pop(lease_id, None) is not None:
            self._new.discard(lease_id)
            self._quota_only.discard(lease_id)
            self._rests.pop(lease_id, None)
            for promise in self.timeline.promises:
                if promise.lease == lease_id:  # what was kept for it is there for those behind
                    self.mark(self.capacity.kinds[promise.column])

    def rest(self, lease: Lease, until: float) -> None:
        """A request waits again that a site has refused for a reason that the hub cannot see: it is not tried before that time.

        What other sites give back for it, or for another, is no reason to try.
        """
        self.waiting[lease.id] = lease
        self._rests[lease.id] = until

    def rested(self) -> None:
        """A site has said anew what it has and allows: what was refused may be tried again."""
        self._rests.clear()

    def due(self) -> Iterator[float]:
        """When requests that rest are to be tried again."""
        return iter(self._rests.values())

    def mark(self, kind: str = ANY) -> None:
        """Devices of a kind came free, or everything is to be looked at anew."""
        self._changed.add(kind)

    @property
    def is_dirty(self) -> bool:
        """Whether a plan could say anything new."""
        return bool(self._new or (self._changed and (self.waiting or self._elastic())))

    def _elastic(self) -> list[Lease]:
        return [
            lease
            for lease in self.running.values()
            if lease.state == "active" and lease.gpus < lease.demand.most and not lease.notice
        ]

    # --- planning

    def plan(self, now: float) -> Plan:
        """Propose what to start, and what to end for it."""
        plan = Plan()
        new, changed = self._new, self._changed
        self._new, self._changed = set(), set()
        self.timeline = timeline = Timeline(self.capacity, list(self.running.values()), now)
        self._promise_reservations(timeline, now)
        self._first = set()
        nothing_free = self._nothing_fits()
        for lease in self._order(now):
            if lease.demand.not_before > now:
                if lease.id in new:
                    plan.unplaced.append(lease.id)
                continue
            if self._rests.get(lease.id, now) > now:
                if now >= lease.waits_until:
                    plan.unplaced.append(lease.id)
                continue
            if nothing_free and lease.id not in new and len(self._first) == len(self.capacity.kinds):
                if now >= lease.waits_until:
                    plan.unplaced.append(lease.id)
                continue
            sought = lease.id in new or self._touches(lease, changed)
            plan.evaluated += sought
            self._consider(lease, plan, timeline, sought)
        self._grow(plan, timeline)
        return plan

    def _touches(self, lease: Lease, changed: set[str]) -> bool:
        """Whether what changed may let a request start that could not before."""
        if ANY in changed or any(limit.kind == ANY for limit in self.tenants.limits(lease.tenant)):
            return bool(changed)
        return any(self.capacity.kinds[column] in changed for column in self.capacity.columns(lease.demand.shape))

    def _nothing_fits(self) -> bool:
        """Whether no waiting request could start whatever the order: then only promises are to be renewed."""
        if not self.waiting or not self.capacity.kinds:
            return True
        most = int(self.capacity.free.sum(axis=0).max(initial=0))
        fractional = any(lease.demand.shape.milli < 1000 for lease in self.waiting.values())
        return not fractional and all(lease.demand.gpus > most for lease in self.waiting.values())

    def _promise_reservations(self, timeline: Timeline, now: float) -> None:
        booked = [lease for lease in self.waiting.values() if lease.demand.not_before]
        for lease in sorted(booked, key=lambda lease: (lease.submitted, lease.id)):
            placement = self.reserve(lease, timeline, now)
            if placement is not None and placement.start > now:
                timeline.promise(lease, placement, reserved=True)

    def reserve(self, lease: Lease, timeline: Timeline, now: float) -> Placement | None:
        """Where an advance reservation can have its devices at its time; None if it cannot."""
        at = max(now, lease.demand.not_before)
        found = timeline.earliest(lease, self._rows(lease.demand), self._caps(lease), at)
        return found if found is not None and found.start <= at + 1.0 else None

    def klass(self, lease: Lease, now: float) -> int:
        """Its priority class with what it has waited; a reservation whose time has come is before everybody."""
        if lease.demand.not_before and lease.demand.not_before <= now:
            return 1_000_000
        return rank(lease.demand.priority) + int((now - lease.submitted) / AGE_S)

    def _order(self, now: float) -> Iterator[Lease]:
        """Waiting requests, first come first; a tenant that is given something moves back for the rest of the batch."""
        by_tenant: dict[str, list[tuple[int, float, str]]] = {}
        for lease in self.waiting.values():
            by_tenant.setdefault(lease.tenant, []).append((-self.klass(lease, now), lease.submitted, lease.id))
        self._shares = {tenant: self.tenants.share(tenant, now) for tenant in by_tenant}
        heap: list[tuple[int, float, float, str, str]] = []
        queues = {}
        for tenant, rows in by_tenant.items():
            rows.sort(reverse=True)
            queues[tenant] = rows
            self._push(heap, tenant, rows)
        while heap:
            _, _, _, lease_id, tenant = heapq.heappop(heap)
            yield self.waiting[lease_id]
            self._push(heap, tenant, queues[tenant])

    def _push(
        self, heap: list[tuple[int, float, float, str, str]], tenant: str, rows: list[tuple[int, float, str]]
    ) -> None:
        if rows:
            klass, submitted, lease_id = rows.pop()
            heapq.heappush(heap, (klass, self._shares[tenant], submitted, lease_id, tenant))

    def _rows(self, demand: Demand) -> list[int] | None:
        if demand.site_names:
            return [self.capacity.row[name] for name in demand.site_names if name in self.capacity.row]
        return None

    def _caps(self, lease: Lease) -> dict[int, Counts]:
        """{column: [site] what the tenant's limits leave}, only where there are limits."""
        limits = list(self.tenants.limits(lease.tenant))
        caps: dict[int, Counts] = {}
        if not limits:
            return caps
        for column in self.capacity.columns(lease.demand.shape):
            kind = self.capacity.kinds[column]
            cap = np.full(len(self.capacity.names), np.iinfo(np.int64).max // 2, np.int64)
            for quota in limits:
                if quota.kind not in (ANY, kind):
                    continue
                assert quota.limit is not None
                left = max(0, quota.limit - self.tenants.holds(lease.tenant, quota.kind, quota.site))
                rows = slice(None) if quota.site == ANY else self.capacity.row.get(quota.site)
                if rows is None:
                    continue
                if quota.site == ANY and left < lease.demand.gpus:
                    left = 0  # the whole gang must fit under a limit over all sites
                cap[rows] = np.minimum(cap[rows], left)
            caps[column] = cap
        return caps

    def _place(self, lease: Lease, timeline: Timeline, caps: dict[int, Counts]) -> tuple[Placement | None, bool]:
        """Where it can start now, and whether only its quota is in the way."""
        demand, rows = lease.demand, self._rows(lease.demand)
        best: tuple[int, int, Placement] | None = None
        quota_only = False
        for column in self.capacity.columns(demand.shape):
            if demand.shape.is_plain and int(self.capacity.free[:, column].sum()) < demand.gpus:
                continue
            free = timeline.bounded(demand, column, lease.duration_s, lease.id)
            cap = caps.get(column)
            shares = spread(free if cap is None else np.minimum(free, cap), demand, demand.gpus, rows)
            if shares is None:
                quota_only = quota_only or (cap is not None and spread(free, demand, demand.gpus, rows) is not None)
                continue
            left = int(free.sum()) - demand.gpus
            if best is None or (len(shares), left) < best[:2]:
                best = (len(shares), left, Placement(column, shares, timeline.now))
        return (best[2], False) if best else (None, quota_only)

    def _consider(self, lease: Lease, plan: Plan, timeline: Timeline, sought: bool) -> None:
        caps = self._caps(lease)
        if sought:
            placement, quota_only = self._place(lease, timeline, caps)
            if placement is not None:
                self._start(lease, placement, plan, timeline)
                return
            (self._quota_only.add if quota_only else self._quota_only.discard)(lease.id)
        quota_only = lease.id in self._quota_only
        plan.unplaced.append(lease.id)
        if quota_only or lease.demand.max_wait_s == 0:
            return
        columns = self.capacity.columns(lease.demand.shape)
        is_first = not self._first.issuperset(columns)
        owner = any(quota.gpus for quota in self.tenants.quotas(lease.tenant))
        if is_first or owner or lease.demand.priority == PRIORITIES[-1]:
            self._preempt(lease, plan, caps)
        if not is_first or len(timeline.promises) >= PROMISES_MAX:
            return
        self._first.update(columns)
        found = timeline.earliest(lease, self._rows(lease.demand), caps, timeline.now)
        if found is not None:
            timeline.promise(lease, found, reserved=False)

    def _start(self, lease: Lease, placement: Placement, plan: Plan, timeline: Timeline) -> None:
        parts = parts_of(self.capacity, lease.demand, placement)
        for part in parts:
            self.capacity.speak_for(lease.id, part.site, part.kind, part.gpus)
        timeline.taken(placement, lease.duration_s)
        weight = self.tenants.known[lease.tenant].weight if lease.tenant in self.tenants.known else 1.0
        self._shares[lease.tenant] = self._shares.get(lease.tenant, 0.0) + lease.demand.gpus * lease.duration_s / weight
        # Counted as held at once, so that the next of the same batch meets the quota with this one in it.
        for part in parts:
            self.tenants.count(lease.tenant, part, part.gpus)
        plan.starts.append((lease.id, parts))

    def _preempt(self, lease: Lease, plan: Plan, caps: dict[int, Counts]) -> None:
        if not self.running:
            return
        leaving = {victim.lease for victim in plan.notices}
        found = victims(
            lease, self.capacity, self.tenants, self.running.values(), caps, self._rows(lease.demand), leaving
        )
        plan.notices += found

    def _grow(self, plan: Plan, timeline: Timeline) -> None:
        """Elastic gangs take what nobody waits for."""
        wanted = {promise.column for promise in timeline.promises}
        starting = dict(plan.starts)
        for index, (lease_id, parts) in enumerate(plan.starts):
            lease = self.waiting[lease_id]
            more = self._growth(lease, parts, wanted, timeline)
            if more:
                for part in parts:
                    self.tenants.count(lease.tenant, part, more.get(part.site, 0))
                plan.starts[index] = (
                    lease_id,
                    tuple(Part(p.site, p.gpus + more.get(p.site, 0), kind=p.kind, devices=p.devices) for p in parts),
                )
        for lease in self._elastic():
            if lease.id not in starting:
                more = self._growth(lease, lease.parts, wanted, timeline)
                if more:
                    for part in lease.parts:
                        self.tenants.count(lease.tenant, part, more.get(part.site, 0))
                    target = {part.site: part.gpus + more[part.site] for part in lease.parts if part.site in more}
                    plan.growths.append((lease.id, target))

    def _growth(self, lease: Lease, parts: Iterable[Part], wanted: set[int], timeline: Timeline) -> dict[str, int]:
        parts = list(parts)
        missing = lease.demand.most - sum(part.gpus for part in parts)
        column = self.capacity.column.get(parts[0].kind) if parts else None
        if missing <= 0 or column is None or column in wanted:
            return {}
        more: dict[str, int] = {}
        for part in parts:
            if (lease.id, part.site) in self.growing or (
                part.state != "requested" and lease.id not in self.capacity.sites[part.site].leases
            ):
                continue  # one growth after the other, each resting on what the site last said
            row = self.capacity.row[part.site]
            room = int(timeline.bounded(lease.demand, column, lease.duration_s, lease.id)[row])
            room = min(room, missing, self._room(lease.tenant, part, more))
            if room > 0:
                more[part.site] = room
                missing -= room
                already = part.gpus if part.state == "requested" else 0  # spoken for with the start itself
                self.capacity.settle(lease.id, part.site)
                self.capacity.free[row, column] += already
                self.capacity.speak_for(lease.id, part.site, part.kind, already + room)
        return more

    def _room(self, tenant: str, part: Part, more: dict[str, int]) -> int:
        """What a tenant's limits leave for a part, beside what it is to get elsewhere with it."""
        room = np.iinfo(np.int64).max
        for quota in self.tenants.limits(tenant):
            if quota.kind in (ANY, part.kind) and quota.site in (ANY, part.site):
                assert quota.limit is not None
                elsewhere = sum(more.values()) if quota.site == ANY else 0
                room = min(room, quota.limit - self.tenants.holds(tenant, quota.kind, quota.site) - elsewhere)
        return max(0, int(room))

    # --- for people

    def position(self, lease_id: str, now: float) -> int:
        """How many requests come before one."""
        for count, lease in enumerate(self._order(now)):
            if lease.id == lease_id:
                return count
        return 0

    def earliest(self, lease: Lease, now: float) -> Placement | None:
        """When and where a request could start after the promises of the latest plan, if nothing is renewed."""
        timeline = Timeline(self.capacity, list(self.running.values()), now)
        timeline.promises = [promise for promise in self.timeline.promises if promise.lease != lease.id]
        return timeline.earliest(lease, self._rows(lease.demand), self._caps(lease), max(now, lease.demand.not_before))
