"""Why a request waits, in words: the quota, the promise, the policy, or what there is, who has it and where none is given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from fedpool.errors import IbshellError, Insufficient
from fedpool.leasing.queue import Queue
from fedpool.leasing.tenants import ANY, Tenants, in_words
from fedpool.placement.capacity import Capacity
from fedpool.records import Lease, Quota
from fedpool.units import format_duration

Rows: TypeAlias = slice | list[int]

NAMED_MAX = 3  # sites or leases in one sentence


class Reasons:
    """Reads the hub's picture of the pool.

    Args:
        capacity: what there is.
        tenants: what each holds.
        queue: who waits, and what is promised to whom.
        running: {id: lease that has devices}.
    """

    def __init__(self, capacity: Capacity, tenants: Tenants, queue: Queue, running: Mapping[str, Lease]) -> None:
        self._capacity = capacity
        self._tenants = tenants
        self._queue = queue
        self._running = running

    def why(self, lease: Lease, failure: IbshellError | None, now: float, who: bool) -> str:
        """What a waiting lease waits for.

        Args:
            lease: that waits.
            failure: what a site said when it was asked last, if it refused.
            now: the clock.
            who: name the leases that have what it waits for, which takes a look at all that run.
        """
        demand = lease.demand
        if demand.not_before > now:
            return f"it is to start in {format_duration(demand.not_before - now)}"
        for quota in self._full_quotas(lease):
            held = self._tenants.holds(lease.tenant, quota.kind, quota.site)
            return f"{in_words(lease.tenant, held, quota)}; {demand.gpus} asked for"
        if failure is not None and not isinstance(failure, Insufficient):
            return failure.message  # a site will not have it, whatever is free
        columns = self._capacity.columns(demand.shape)
        rows = [self._capacity.row[name] for name in demand.site_names] or slice(None)
        free = max((int(self._capacity.available(demand.shape, c)[rows].sum()) for c in columns), default=0)
        total = sum(int(self._capacity.total[rows, column].sum()) for column in columns)
        kind = " or ".join(demand.shape.kinds) or "GPU"
        if free >= demand.gpus:
            promise = next(
                (p for p in self._queue.timeline.promises if p.lease != lease.id and p.column in columns), None
            )
            if promise is not None:
                when = format_duration(max(0.0, promise.start - now))
                return f"{free} of {total} {kind} are free, but lease {promise.lease} is promised them in {when}"
            sites = len(demand.site_names) or demand.sites
            over = f" over {sites} sites" if sites else ""
            return (
                f"{demand.gpus} {kind} asked for{over}; {free} of {total} are free, but not where and how it wants them"
            )
        said = [f"{demand.gpus} {kind} asked for; {free} of {total} are free", *self._out_of_reach(rows, columns)]
        return "; ".join([*said, *(self._holders(rows, columns) if who else ())])

    def _full_quotas(self, lease: Lease) -> Iterable[Quota]:
        for quota in self._tenants.limits(lease.tenant):
            kinds = lease.demand.shape.kinds
            if quota.limit is None or (quota.kind != ANY and kinds and quota.kind not in kinds):
                continue
            if quota.site != ANY and quota.site not in lease.demand.site_names:
                continue
            if self._tenants.holds(lease.tenant, quota.kind, quota.site) + lease.demand.gpus > quota.limit:
                yield quota

    def _out_of_reach(self, rows: Rows, columns: Sequence[int]) -> Iterable[str]:
        """Devices that are there and are given to nobody at the moment."""
        for counts, why in ((self._capacity.closed, "drained or cordoned"), (self._capacity.silent, "out of reach")):
            found = counts[rows][:, columns].sum(axis=1)
            if found.any():
                at = dict(zip(self._names(rows), found.tolist(), strict=True))
                yield f"{int(found.sum())} {why} ({_most(at)})"

    def _names(self, rows: Rows) -> list[str]:
        names = self._capacity.names
        return names[rows] if isinstance(rows, slice) else [names[row] for row in rows]

    def _holders(self, rows: Rows, columns: Sequence[int]) -> Iterable[str]:
        """Who has most of what it waits for."""
        sites = set(self._names(rows))
        kinds = {self._capacity.kinds[column] for column in columns}
        held = {
            f"lease {lease.id} of {lease.tenant}": sum(
                part.gpus for part in lease.parts if part.is_live and part.site in sites and part.kind in kinds
            )
            for lease in self._running.values()
        }
        if any(held.values()):
            yield f"held by {_most(held)}"


def _most(counts: Mapping[str, int]) -> str:
    """The largest few by name, and how many more there are."""
    ordered = sorted(((count, name) for name, count in counts.items() if count), key=lambda pair: (-pair[0], pair[1]))
    shown = [f"{name}: {count}" for count, name in ordered[:NAMED_MAX]]
    return ", ".join([*shown, *([f"{len(ordered) - NAMED_MAX} more"] if len(ordered) > NAMED_MAX else [])])
