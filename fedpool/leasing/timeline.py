"""What will be free when: the ends of what runs, and what is promised to whom from when on.

A promise is made to advance reservations and to the first request that has to wait (EASY backfill): whatever starts earlier and
would still run then may only use what the promise leaves over, so nothing behind the first delays it. Times are the hub's
CLOCK_BOOTTIME; ends are estimates, on the late side, since a site frees devices only after its guard.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from fedpool.leasing.grants import GUARD_FRACTION, GUARD_S
from fedpool.placement.capacity import Capacity, Counts
from fedpool.placement.spread import spread
from fedpool.records import Demand, Lease, Part, Shape

SETTLE_S = 2.0  # between the end of a lease and its devices being free: killing, confirming, telling


def length(duration_s: float) -> float:
    """How long a lease of this duration keeps its devices at most."""
    return duration_s * (1 + GUARD_FRACTION) + GUARD_S + SETTLE_S


def end_of(lease: Lease, now: float) -> float:
    """When a lease's devices will be free at the latest, if it is not renewed."""
    if lease.state == "ending":
        return now + SETTLE_S
    if lease.state == "active":
        return max(now, lease.deadline + length(lease.duration_s) - lease.duration_s)
    return now + length(lease.duration_s)


@dataclass
class Promise:
    """Devices that belong to a waiting lease from a time on."""

    lease: str
    start: float
    end: float
    column: int
    counts: Counts
    reserved: bool


@dataclass(frozen=True)
class Placement:
    """Where a gang would be: devices of one kind, {row: count}, from a time on."""

    column: int
    shares: dict[int, int]
    start: float


class Timeline:
    """Built anew for every plan.

    Args:
        capacity: the pool's.
        running: leases that have devices.
        now: the clock.
    """

    def __init__(self, capacity: Capacity, running: Iterable[Lease], now: float) -> None:
        self.now = now
        self._capacity = capacity
        self._running = running
        self.promises: list[Promise] = []
        self._ends: dict[int, tuple[list[float], list[int], list[int]]] | None = None
        self._headroom: dict[int, list[tuple[float, Counts]]] = {}

    def _releases(self, column: int) -> tuple[list[float], list[int], list[int]]:
        """Ends, rows and counts of what runs, by end."""
        if self._ends is None:
            found: dict[int, list[tuple[float, int, int]]] = {}
            for lease in self._running:
                end = end_of(lease, self.now)
                for part in lease.parts:
                    site = self._capacity.sites[part.site]
                    if part.is_live and part.kind in self._capacity.column and site.up:
                        found.setdefault(self._capacity.column[part.kind], []).append(
                            (end, self._capacity.row[part.site], site.returns(lease.id, part.gpus))
                        )
            self._ends = {}
            for key, rows in found.items():
                rows.sort()
                self._ends[key] = ([r[0] for r in rows], [r[1] for r in rows], [r[2] for r in rows])
        return self._ends.get(column, ([], [], []))

    def _free_at(self, shape: Shape, column: int, time: float) -> Counts:
        """[site] devices that will be free, promises not yet taken off."""
        free = self._capacity.available(shape, column)
        for end, row, count in zip(*self._releases(column), strict=True):
            if end > time:
                break
            free[row] += count
        return free

    def promise(self, lease: Lease, placement: Placement, reserved: bool) -> None:
        """Keep these devices for a waiting lease."""
        counts = np.zeros(len(self._capacity.names), np.int64)
        for row, count in placement.shares.items():
            counts[row] = count
        end = placement.start + length(lease.duration_s)
        self.promises.append(Promise(lease.id, placement.start, end, placement.column, counts, reserved))
        self._headroom.pop(placement.column, None)

    def bounded(self, demand: Demand, column: int, duration_s: float, own: str = "") -> Counts:
        """[site] devices that a lease of this length may take now without breaking a promise."""
        free = self._capacity.available(demand.shape, column)
        end = self.now + length(duration_s)
        for start, room in self._rooms(column, own):
            if start < end:
                np.minimum(free, room, out=free)
        return free

    def _rooms(self, column: int, own: str) -> Iterator[tuple[float, Counts]]:
        """For each moment a promise begins: when, and what is left over then."""
        if not any(promise.column == column and promise.lease != own for promise in self.promises):
            return iter(())
        mine = any(promise.lease == own for promise in self.promises)
        if mine or column not in self._headroom:
            rooms = [
                (promise.start, self._left_at(column, promise.start, own))
                for promise in self.promises
                if promise.column == column and promise.lease != own
            ]
            if mine:
                return iter(rooms)
            self._headroom[column] = rooms
        return iter(self._headroom[column])

    def _left_at(self, column: int, time: float, own: str) -> Counts:
        left = self._free_at(Shape(), column, time)
        for promise in self.promises:
            if promise.column == column and promise.lease != own and promise.start <= time < promise.end:
                left -= promise.counts
        return left

    def taken(self, placement: Placement, duration_s: float) -> None:
        """A lease starts now; what promises leave over shrinks where it still runs when they begin."""
        end = self.now + length(duration_s)
        for start, room in self._headroom.get(placement.column, ()):
            if start < end:
                for row, count in placement.shares.items():
                    room[row] -= count

    def earliest(
        self, lease: Lease, rows: list[int] | None, caps: dict[int, Counts], not_before: float
    ) -> Placement | None:
        """When and where a lease could start, if nothing is renewed; None if never.

        Args:
            lease: that waits.
            rows: its sites, or None.
            caps: {column: [site] what its quota allows}.
            not_before: earliest time.
        """
        best: Placement | None = None
        for column in self._capacity.columns(lease.demand.shape):
            found = self._earliest_of_kind(lease, column, rows, caps.get(column), not_before)
            if found is not None and (best is None or found.start < best.start):
                best = found
        return best

    def _earliest_of_kind(
        self, lease: Lease, column: int, rows: list[int] | None, cap: Counts | None, not_before: float
    ) -> Placement | None:
        demand = lease.demand
        ends, where, counts = self._releases(column)
        free = self._capacity.available(demand.shape, column, rows)
        promises = [p for p in self.promises if p.column == column and p.lease != lease.id]
        # What changes the answer: a release, or the end of a promise.
        times = sorted(
            {not_before, *(e for e in ends if e > not_before), *(p.end for p in promises if p.end > not_before)}
        )
        position = 0
        for time in times:
            while position < len(ends) and ends[position] <= time:
                free[where[position]] += counts[position]
                position += 1
            if int(free.sum()) < demand.gpus:
                continue
            left = free
            end = time + length(lease.duration_s)
            overlapping = [p for p in promises if p.start < end and p.end > time]
            if overlapping:
                left = free - np.sum([p.counts for p in overlapping], axis=0)
            if cap is not None:
                left = np.minimum(left, cap)
            shares = spread(left, demand, demand.gpus, rows)
            if shares is not None:
                return Placement(column, shares, time)
        return None

    def blocks(self, lease: Lease, end: float) -> str | None:
        """The id of an advance reservation that a lease would break by running until `end`, or None."""
        for promise in self.promises:
            if not promise.reserved or promise.start >= end or promise.lease == lease.id:
                continue
            left = self._left_at(promise.column, promise.start, "")
            if end_of(lease, self.now) <= promise.start:  # then it was counted as free by then
                for part in lease.parts:
                    if part.is_live and self._capacity.column.get(part.kind) == promise.column:
                        left[self._capacity.row[part.site]] -= part.gpus
            if (left[promise.counts > 0] < 0).any():
                return promise.lease
        return None


def parts_of(capacity: Capacity, demand: Demand, placement: Placement) -> tuple[Part, ...]:
    """A placement as the parts of a lease."""
    kind = capacity.kinds[placement.column]
    parts = []
    for row in sorted(placement.shares):
        site = capacity.names[row]
        devices = tuple(uuid for uuid in demand.shape.devices if capacity.sites[site].kind_of(uuid) is not None)
        parts.append(Part(site, placement.shares[row], kind=kind, devices=devices))
    return tuple(parts)
