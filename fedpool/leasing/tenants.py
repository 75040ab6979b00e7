"""Tenants: what belongs to them, what they hold, and how much of the pool they have had lately.

A quota line guarantees devices of a kind at a site; what its tenant leaves idle others may borrow, up to their limits, and it is
taken back when its owner wants it. What was used decays by half every `HALF_LIFE_S`; a lease is charged in full when it starts
and credited with what it did not use when it ends, so that one decision in a batch already counts for the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from fedpool.errors import NotFound, Refused, UsageError
from fedpool.leasing.demand import nearest, rank
from fedpool.names import NAME, RULE
from fedpool.records import PRIORITIES, Lease, Part, Quota, Signed, Tenant

HALF_LIFE_S = 7 * 86400.0
ANY = "*"


class TenantRecorded(msgspec.Struct, frozen=True, tag="tenant.recorded"):
    """A tenant as it is from now on."""

    tenant: Tenant
    signed: Signed | None = None


class TenantRemoved(msgspec.Struct, frozen=True, tag="tenant.removed"):
    """No longer a tenant."""

    name: str
    signed: Signed | None = None


class Use(msgspec.Struct, frozen=True, array_like=True):
    """Device-seconds a tenant has been charged, decayed to the time they were last touched."""

    tenant: str
    device_s: float
    at: float


class Tenants:
    """All tenants, and what each holds.

    Attributes:
        known: {name: tenant}; while it is empty the pool is open to everybody.
        held: {(tenant, kind, site): devices}.
        signed: {name: what an operator has signed about it last}, also of those who are tenants no longer.
    """

    def __init__(self) -> None:
        self.known: dict[str, Tenant] = {}
        self.held: dict[tuple[str, str, str], int] = {}
        self.signed: dict[str, Signed] = {}
        self._used: dict[str, Use] = {}

    def apply(self, entry: TenantRecorded | TenantRemoved) -> None:
        """Fold one durable entry into the state."""
        if isinstance(entry, TenantRecorded):
            name = entry.tenant.name
            self.known[name] = entry.tenant
        else:
            name = entry.name
            self.known.pop(name, None)
        if entry.signed is not None:
            self.signed[name] = entry.signed

    def require(self, name: str, priority: str = "normal") -> Tenant:
        """A tenant that may ask at this priority.

        Raises:
            NotFound: there is none of that name; the nearest is named.
            Refused: the priority is above its highest.
        """
        if not NAME.fullmatch(name):
            raise UsageError(f"tenant {name!r} is no name: {RULE}")
        if not self.known:
            return Tenant(name, highest=PRIORITIES[-1])
        tenant = self.known.get(name)
        if tenant is None:
            raise NotFound(f"no tenant {name!r}", nearest(name, self.known, "ibshell tenant list shows them"))
        if rank(priority) > rank(tenant.highest):
            raise Refused(
                f"priority {priority} for tenant {name}, whose highest is {tenant.highest}",
                "ask at that one, or the operator",
            )
        return tenant

    # --- what is held

    def take(self, lease: Lease, sign: int) -> None:
        """Count a lease's live parts as held (1), or no longer (-1); one that changes hands counts for both until it has."""
        for part in lease.parts:
            if part.is_live:
                for tenant in holders(lease):
                    self.count(tenant, part, sign * part.gpus)

    def count(self, tenant: str, part: Part, gpus: int) -> None:
        """Count so many devices more, or fewer, of a part's kind at its site as held."""
        key = (tenant, part.kind, part.site)
        left = self.held.get(key, 0) + gpus
        if left:
            self.held[key] = left
        else:
            self.held.pop(key, None)

    def holds(self, tenant: str, kind: str = ANY, site: str = ANY) -> int:
        """Devices a tenant holds of a kind at a site."""
        return sum(
            count
            for (who, what, where), count in self.held.items()
            if who == tenant and kind in (ANY, what) and site in (ANY, where)
        )

    def require_room(self, tenant: str, more: Iterable[Part]) -> None:
        """A tenant's limits leave room for these parts beside what it holds.

        Raises:
            Refused: they do not; the quota is named.
        """
        parts = list(more)
        for quota in self.limits(tenant):
            asked = sum(
                part.gpus for part in parts if quota.kind in (ANY, part.kind) and quota.site in (ANY, part.site)
            )
            held = self.holds(tenant, quota.kind, quota.site)
            assert quota.limit is not None
            if asked and held + asked > quota.limit:
                raise Refused(
                    f"{in_words(tenant, held, quota)}; {asked} more asked for", "release some, or ask for less"
                )

    def guaranteed(self, tenant: str, kind: str) -> int:
        """Devices of a kind, over all sites, that belong to a tenant."""
        return sum(quota.gpus for quota in self.quotas(tenant) if quota.kind in (ANY, kind))

    def borrowed(self, tenant: str, kind: str) -> int:
        """Devices of a kind that a tenant holds beyond what belongs to it."""
        return max(0, self.holds(tenant, kind) - self.guaranteed(tenant, kind))

    def quotas(self, tenant: str) -> tuple[Quota, ...]:
        """The quota lines of a tenant."""
        known = self.known.get(tenant)
        return known.quotas if known else ()

    def limits(self, tenant: str) -> Iterator[Quota]:
        """Those that have a limit."""
        return (quota for quota in self.quotas(tenant) if quota.limit is not None)

    # --- what was used

    def charge(self, lease: Lease, device_s: float, now: float) -> None:
        """Charge (or, negative, credit) device-seconds."""
        self._used[lease.tenant] = Use(lease.tenant, max(0.0, self.used(lease.tenant, now) + device_s), now)

    def used(self, tenant: str, now: float) -> float:
        """Device-seconds a tenant has been charged, decayed to now."""
        use = self._used.get(tenant)
        return use.device_s * 0.5 ** (max(0.0, now - use.at) / HALF_LIFE_S) if use else 0.0

    def share(self, tenant: str, now: float) -> float:
        """What decides who comes first: use by weight, the least first."""
        known = self.known.get(tenant)
        return self.used(tenant, now) / (known.weight if known else 1.0)

    def uses(self) -> tuple[Use, ...]:
        """For a snapshot."""
        return tuple(self._used.values())

    def restore(self, uses: Iterable[Use]) -> None:
        """From a snapshot."""
        self._used = {use.tenant: use for use in uses}


def holders(lease: Lease) -> tuple[str, ...]:
    """The tenants for whom a lease counts."""
    return (lease.tenant, lease.next_tenant) if lease.next_tenant not in ("", lease.tenant) else (lease.tenant,)


def in_words(tenant: str, held: int, quota: Quota) -> str:
    """What a tenant holds of a quota with a limit."""
    where = "all sites" if quota.site == ANY else quota.site
    kind = "GPUs" if quota.kind == ANY else quota.kind
    return f"tenant {tenant} holds {held} of at most {quota.limit} {kind} at {where}"


def require_quota(quota: Quota) -> Quota:
    """A quota line that makes sense.

    Raises:
        UsageError: naming the value and the limit.
    """
    if quota.gpus < 0:
        raise UsageError(f"a quota of {quota.gpus} GPUs", "0 or more")
    if quota.limit is not None and quota.limit < quota.gpus:
        raise UsageError(
            f"a quota of {quota.gpus} GPUs with a limit of {quota.limit}", "the limit is at least the quota"
        )
    return quota
