"""Whose devices may be taken back for whom.

Three rights, all with a grace period: a tenant within its guarantee takes back what others borrowed; anybody may take what
scavengers use, and what an elastic lease of no higher class has beyond its fewest; `urgent` takes from lower classes. As few
devices as will do are taken, from elastic leases first, then from the lowest class, the largest borrower, the latest start.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np

from fedpool.leasing.demand import rank
from fedpool.leasing.tenants import Tenants
from fedpool.placement.capacity import Capacity, Counts
from fedpool.placement.spread import spread
from fedpool.records import PRIORITIES, Lease


class Victim(msgspec.Struct, frozen=True):
    """A lease that is to end, or to shrink, for another's sake.

    Attributes:
        lease: whose.
        reason: for whom and by which right.
        keep: {site: devices it keeps}, or empty where it ends.
    """

    lease: str
    reason: str
    keep: dict[str, int] = {}


class _Candidate(msgspec.Struct, frozen=True):
    order: tuple[float, ...]
    lease: Lease
    reason: str
    counts: dict[int, int]
    shrinks: bool


def victims(
    lease: Lease,
    capacity: Capacity,
    tenants: Tenants,
    running: Iterable[Lease],
    caps: dict[int, Counts],
    rows: list[int] | None,
    leaving: set[str],
) -> list[Victim]:
    """Who has to go so that a lease can be placed; empty where that is nobody's duty, or already under way.

    Args:
        lease: that waits.
        capacity: the pool.
        tenants: who owns what.
        running: leases that have devices.
        caps: {column: [site] what the waiting tenant's limits leave}.
        rows: its sites, or None.
        leaving: leases that this plan already ends.
    """
    alive = [other for other in running if other.state in ("active", "ending")]
    for column in capacity.columns(lease.demand.shape):
        free = capacity.available(lease.demand.shape, column)
        for other in alive:
            if other.state == "ending" or other.notice or other.id in leaving:
                _add(free, _counts(other, column, capacity))
        cap = caps.get(column)
        if _fits(free, cap, lease, rows):
            return []  # it only has to wait for those who are leaving
        chosen: list[_Candidate] = []
        for candidate in sorted(_candidates(lease, column, capacity, tenants, alive, leaving), key=lambda c: c.order):
            if rows is not None and not set(rows) & candidate.counts.keys():
                continue
            shrunk = next((c for c in chosen if c.lease.id == candidate.lease.id), None)
            if shrunk is not None:  # it ends whole instead of shrinking
                _add(free, shrunk.counts, -1)
                chosen.remove(shrunk)
            _add(free, candidate.counts)
            chosen.append(candidate)
            if _fits(free, cap, lease, rows):
                return [_victim(c, capacity) for c in _fewest(chosen, free, cap, lease, rows)]
    return []


def _fits(free: Counts, cap: Counts | None, lease: Lease, rows: list[int] | None) -> bool:
    """Whether it could start with so much free, within its tenant's limits."""
    within = free if cap is None else np.minimum(free, cap)
    return spread(within, lease.demand, lease.demand.gpus, rows) is not None


def _fewest(
    chosen: list[_Candidate], free: Counts, cap: Counts | None, lease: Lease, rows: list[int] | None
) -> list[_Candidate]:
    """Without those that turn out not to be needed."""
    needed = list(chosen)
    for candidate in chosen[:-1]:
        _add(free, candidate.counts, -1)
        if _fits(free, cap, lease, rows):
            needed.remove(candidate)
        else:
            _add(free, candidate.counts)
    return needed


def _add(free: Counts, counts: dict[int, int], sign: int = 1) -> None:
    for row, count in counts.items():
        free[row] += sign * count


def _counts(lease: Lease, column: int, capacity: Capacity) -> dict[int, int]:
    return {
        capacity.row[part.site]: part.gpus
        for part in lease.parts
        if part.is_live and capacity.column.get(part.kind) == column and capacity.sites[part.site].up
    }


def _surplus(lease: Lease, column: int, capacity: Capacity) -> dict[int, int]:
    """What an elastic lease has beyond its fewest, from where it has most."""
    extra = lease.gpus - lease.demand.gpus
    found: dict[int, int] = {}
    counts = _counts(lease, column, capacity)
    for row, count in sorted(counts.items(), key=lambda item: -item[1]):
        take = min(extra, count - lease.demand.per_site_min)
        if take > 0:
            found[row] = take
            extra -= take
    return found


def _candidates(
    lease: Lease, column: int, capacity: Capacity, tenants: Tenants, alive: list[Lease], leaving: set[str]
) -> Iterable[_Candidate]:
    kind = capacity.kinds[column]
    mine = rank(lease.demand.priority)
    reclaims = tenants.holds(lease.tenant, kind) + lease.demand.gpus <= tenants.guaranteed(lease.tenant, kind)
    borrowed: dict[str, int] = {}
    # The latest start of a borrower is what it borrowed: what it had before belongs to it.
    for other in sorted(alive, key=lambda other: (-other.started, other.id)):
        if other.state != "active" or other.notice or other.id in leaving or other.id == lease.id:
            continue
        theirs = rank(other.demand.priority)
        surplus = _surplus(other, column, capacity) if theirs <= mine else {}
        if surplus:
            yield _Candidate(
                (0, theirs, -other.started),
                other,
                f"lease {lease.id} needs what it has beyond its fewest",
                surplus,
                True,
            )
        counts = _counts(other, column, capacity)
        if not counts:
            continue
        over = borrowed.setdefault(other.tenant, tenants.borrowed(other.tenant, kind))
        if theirs < mine and (theirs == 0 or lease.demand.priority == PRIORITIES[-1]):
            yield _Candidate(
                (1, theirs, -over, -other.started),
                other,
                f"lease {lease.id} has priority {lease.demand.priority}",
                counts,
                False,
            )
        elif reclaims and over > 0 and other.tenant != lease.tenant and theirs <= mine:
            borrowed[other.tenant] = over - sum(counts.values())
            yield _Candidate(
                (1, theirs, -over, -other.started),
                other,
                f"tenant {lease.tenant} takes back the {kind} that belong to it, for lease {lease.id}",
                counts,
                False,
            )


def _victim(candidate: _Candidate, capacity: Capacity) -> Victim:
    if not candidate.shrinks:
        return Victim(candidate.lease.id, candidate.reason)
    keep = {
        part.site: part.gpus - candidate.counts[capacity.row[part.site]]
        for part in candidate.lease.parts
        if capacity.row[part.site] in candidate.counts
    }
    return Victim(candidate.lease.id, candidate.reason, keep)
