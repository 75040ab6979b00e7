"""Whether tenants kept within their limits, as the sites' ledgers tell: who held how many devices when, over all sites.

The limits are what an operator has signed; sites record it. Each site's own holdings are compared with them exactly. Over several
sites clocks differ: there a device counts until `CLOCKS_S` twice over before it was given back, so that what was given back at one
site and granted at another is never taken for both. What is over a limit for less than that is not seen.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from fedpool.errors import UsageError
from fedpool.identity import requests
from fedpool.leasing.tenants import ANY, in_words
from fedpool.ledger.records import DevicesSaid, LeaseDevices, LeaseSaid, Record, Requested
from fedpool.ledger.verification import Finding
from fedpool.records import Quota, Signed, Tenant
from fedpool.wire.messages import TenantNamed

CLOCKS_S = 60.0
# A changed limit counts for what was asked before it: a request waits so long on its way at most.
CHANGE_S = requests.SKEW_S
_HOLDING = ("held", "active")
_MARK = '"method":"tenant.'


class Held(msgspec.Struct, array_like=True):
    """Devices of one kind that a lease has had from some time on.

    Attributes:
        count: how many.
        since: milliseconds of Unix, by the site's clock.
        record: that granted them.
        until: when they were given back; None while they are not.
    """

    tenant: str
    kind: str
    count: int
    since: int
    record: int
    until: int | None = None


class LimitSaid(msgspec.Struct, array_like=True):
    """The quota lines of a tenant from some time on."""

    tenant: str
    since: int
    quotas: tuple[Quota, ...]


class LeaseHeld(msgspec.Struct, array_like=True):
    """What a lease has.

    Attributes:
        granted: {kind: devices}, with those it is to give back.
        leaving: UUIDs of those.
        parts: what counts.
    """

    granted: dict[str, int] = {}
    leaving: tuple[str, ...] = ()
    parts: list[Held] = []


class HoldingsState(msgspec.Struct):
    """Where a site's holdings are after its records so far."""

    kinds: dict[str, str] = {}
    leases: dict[str, LeaseHeld] = {}
    over: list[Held] = []
    limits: list[LimitSaid] = []
    time: int = 0


class _Coming(msgspec.Struct):
    """A lease whose devices take several records."""

    said: LeaseSaid
    record: int
    counts: Counter[str]
    more: int


class Holdings:
    """Follows one site's records.

    Args:
        state: where an earlier one ended.

    Attributes:
        since: milliseconds of Unix of the latest record before: what is older has been compared.
    """

    def __init__(self, state: HoldingsState | None = None) -> None:
        self._state = state or HoldingsState()
        self.since = self._state.time
        self._coming: _Coming | None = None

    def state(self) -> HoldingsState:
        """Where it is; what is long over is left out."""
        recent = self._state.time - round(2000 * CLOCKS_S)
        over = [held for held in self._state.over if (held.until or 0) >= recent]
        return msgspec.structs.replace(self._state, over=over)

    def held(self) -> Iterator[Held]:
        """All that matters, begun and over."""
        yield from self._state.over
        for lease in self._state.leases.values():
            yield from lease.parts

    def limits(self) -> list[LimitSaid]:
        """What the site has been told of tenants' limits."""
        return self._state.limits

    def take(self, number: int, record: Record) -> None:
        """One more record."""
        self._state.time = record.time
        match record:
            case Requested() if _MARK in record.payload:
                self._limit(record)
            case DevicesSaid():
                if not record.continued:
                    self._state.kinds = {}
                self._state.kinds |= {uuid: one.kind for one in record.kinds for uuid in one.devices}
            case LeaseSaid():
                self._said(number, record)
            case LeaseDevices() if self._coming is not None:
                coming = self._coming
                coming.counts += self._kinds(uuid for group in record.grants for uuid in group.devices)
                coming.more -= 1
                if coming.more <= 0:
                    self._coming = None
                    self._have(coming.said, coming.counts, coming.record)

    def _limit(self, record: Requested) -> None:
        try:
            payload = requests.read(Signed(record.payload.encode(), b""))
            if payload.method == "tenant.set":
                tenant = msgspec.convert(payload.body, Tenant, str_keys=True)
            else:
                tenant = Tenant(msgspec.convert(payload.body, TenantNamed, str_keys=True).name)
        except (UsageError, msgspec.ValidationError):
            return  # whoever checks what was signed says so
        self._state.limits.append(LimitSaid(tenant.name, payload.time_ms, tenant.quotas))

    def _said(self, number: int, said: LeaseSaid) -> None:
        if said.state not in _HOLDING:
            self._give_back(self._state.leases.pop(said.lease, LeaseHeld()).parts, said.time)
            return
        known = self._state.leases.get(said.lease, LeaseHeld())
        if said.grants is None and said.leaving is None and all(part.tenant == said.tenant for part in known.parts):
            return
        counts = Counter(known.granted)
        if said.grants is not None:
            counts = self._kinds(uuid for group in said.grants for uuid in group.devices)
        if said.more:
            self._coming = _Coming(said, number, counts, said.more)
        else:
            self._have(said, counts, number)

    def _kinds(self, uuids: Iterable[str]) -> Counter[str]:
        return Counter(self._state.kinds.get(uuid, "") for uuid in uuids)

    def _give_back(self, parts: Iterable[Held], time: int) -> None:
        self._state.over += [msgspec.structs.replace(part, until=time) for part in parts]

    def _have(self, said: LeaseSaid, granted: Counter[str], number: int) -> None:
        """A lease has just these devices from now on; what it had before it has had since."""
        known = self._state.leases.get(said.lease, LeaseHeld())
        leaving = said.leaving if said.leaving is not None else known.leaving
        counts = granted - self._kinds(leaving)
        kept: list[Held] = []
        for part in known.parts:
            stays = min(part.count, counts[part.kind]) if part.tenant == said.tenant else 0
            if stays < part.count:
                self._give_back([msgspec.structs.replace(part, count=part.count - stays)], said.time)
            if stays:
                counts[part.kind] -= stays
                kept.append(msgspec.structs.replace(part, count=stays))
        kept += [Held(said.tenant, kind, count, said.time, number) for kind, count in counts.items() if count > 0]
        self._state.leases[said.lease] = LeaseHeld(dict(granted), leaving, kept)


def over_limits(sites: Mapping[str, Holdings]) -> list[Finding]:
    """What was granted over a tenant's limit, at the record that granted it; what was compared before is not compared again.

    Args:
        sites: {site: its holdings}.
    """
    said = {(one.tenant, one.since): one for holdings in sites.values() for one in holdings.limits()}
    changes: dict[str, list[LimitSaid]] = {}
    for one in sorted(said.values(), key=lambda one: one.since):
        changes.setdefault(one.tenant, []).append(one)
    by_tenant: dict[str, list[tuple[str, Held]]] = {}
    for site, holdings in sites.items():
        for held in holdings.held():
            if held.tenant in changes:
                by_tenant.setdefault(held.tenant, []).append((site, held))
    found: list[Finding] = []
    for tenant, parts in by_tenant.items():
        lines = {(quota.kind, quota.site) for one in changes[tenant] for quota in one.quotas if quota.limit is not None}
        for kind, where in sorted(lines):
            concerned = [(site, held) for site, held in parts if kind in (ANY, held.kind) and where in (ANY, site)]
            alone: dict[str, list[tuple[str, Held]]] = {}
            for site, held in concerned:
                alone.setdefault(site, []).append((site, held))
            for group in alone.values():
                found += _swept(tenant, (kind, where), group, changes[tenant], sites, 0.0)
            if len(alone) > 1:
                found += _swept(tenant, (kind, where), concerned, changes[tenant], sites, CLOCKS_S)
    return list({(one.site, one.record): one for one in found}.values())


def _swept(
    tenant: str,
    line: tuple[str, str],
    parts: Iterable[tuple[str, Held]],
    changes: Sequence[LimitSaid],
    sites: Mapping[str, Holdings],
    clocks_s: float,
) -> Iterator[Finding]:
    """Go through what a tenant held in order of time; the clocks may differ by so much."""
    margin = round(2000 * clocks_s)
    events: list[tuple[int, int, str, Held]] = []
    for site, held in parts:
        until = math.inf if held.until is None else held.until - margin
        if until > held.since:
            events.append((held.since, held.count, site, held))
            if held.until is not None:
                events.append((held.until - margin, -held.count, site, held))
    total = 0
    for time, count, site, held in sorted(events, key=lambda event: event[:3]):
        total += count
        if count < 0 or time <= sites[site].since:
            continue
        limit = _limit(changes, line, time)
        if total > limit:
            words = in_words(tenant, total, Quota(line[0], line[1], 0, int(limit)))
            yield Finding(site, held.record, f"{words}: a quota that an operator has signed")


def _limit(changes: Sequence[LimitSaid], line: tuple[str, str], time: int) -> float:
    """The largest limit that was in force around a time."""
    times = [one.since for one in changes]
    first = bisect.bisect_right(times, time - 1000 * CHANGE_S) - 1
    last = bisect.bisect_right(times, time + 1000 * CHANGE_S)
    if first < 0:
        return math.inf  # it had none before
    found = []
    for one in changes[first:last]:
        limits = [quota.limit for quota in one.quotas if (quota.kind, quota.site) == line]
        found.append(math.inf if not limits or limits[0] is None else limits[0])
    return max(found)
