"""What a site's ledger says about its leases: from entries to records, and from records back to whether the rules were kept.

A record says what has changed, not everything, so that a lease costs its ledger little; whoever replays the records knows the rest.
"""

from __future__ import annotations

import base64
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec

from fedpool.identity.authorities import authority_fingerprint
from fedpool.identity.trust import Trust
from fedpool.leasing import lease as life
from fedpool.leasing.entries import CordonChanged, GrantEntry, LeaseChanged, Restarted, TermObeyed
from fedpool.ledger.records import (
    TEXT_MAX,
    Cordoned,
    DevicesSaid,
    Granted,
    HubObeyed,
    LeaseDevices,
    LeaseSaid,
    OfKind,
    Record,
    Refusal,
    Requested,
    SiteStarted,
    Uncordoned,
)
from fedpool.records import WHOLE_MILLI, Device, Grant, Signed, SiteLease

REFUSALS_A_MINUTE = 20
DEVICES_MAX = 1000  # in one record, so that it stays below what a bundle of entries takes
CARRIED = "carried"

_EVENTS = {
    (state, after): event
    for (state, event), after in life.TRANSITIONS.items()
    if state != after and state != "requested"
}


def records_of(
    leases: Mapping[str, SiteLease], entry: GrantEntry, now: float, software: str, trust: Trust | None = None
) -> list[Record]:
    """What the ledger says about an entry.

    Args:
        leases: as they were before it.
        entry: of the site's machine.
        now: CLOCK_BOOTTIME, in seconds, as the lease's deadline is.
        software: the agent's version.
        trust: whose requests the site obeys.
    """
    match entry:
        case LeaseChanged():
            return lease_records(leases.get(entry.lease.id), entry.lease, entry.term, now)
        case CordonChanged(reason=None):
            return [Uncordoned(what=entry.what, term=entry.term)]
        case CordonChanged():
            return [Cordoned(what=entry.what, reason=(entry.reason or "")[:TEXT_MAX], term=entry.term)]
        case TermObeyed():
            return [HubObeyed(term=entry.term)]
        case Restarted():
            return [
                SiteStarted(
                    epoch=entry.epoch,
                    software=software,
                    pool=trust.pool if trust is not None else "",
                    authorities=tuple(authority_fingerprint(key) for key in trust.authorities)
                    if trust is not None
                    else (),
                )
            ]
        case _:
            return []


def lease_records(
    before: SiteLease | None, lease: SiteLease, term: int, now: float, event: str | None = None
) -> list[Record]:
    """A lease's change; the first record of a lease, or of a new attempt to place it, says all of it."""
    if before is not None and lease.attempt > before.attempt:
        before = None
    grants = _grouped(lease.grants) if before is None or before.grants != lease.grants else None
    pieces = list(_pieces(grants or ()))
    said = LeaseSaid(
        lease=lease.id,
        tenant=lease.tenant,
        event=event or _event(before, lease),
        state=lease.state,
        version=lease.version,
        term=term,
        for_ms=_left_ms(before, lease, now),
        grants=None if grants is None else pieces[0] if pieces else (),
        more=max(0, len(pieces) - 1),
        leaving=lease.leaving if lease.leaving != (before.leaving if before is not None else ()) else None,
        reason=(lease.notice or lease.reason)[:TEXT_MAX],
        next_tenant=lease.next_tenant,
    )
    return [said, *(LeaseDevices(lease=lease.id, grants=piece) for piece in pieces[1:])]


def devices_said(devices: Iterable[Device]) -> list[DevicesSaid]:
    """What a site has, as records."""
    by_kind = sorted((device.kind, device.uuid) for device in devices)
    lots = [by_kind[at : at + DEVICES_MAX] for at in range(0, len(by_kind), DEVICES_MAX)] or [[]]
    found = []
    for number, lot in enumerate(lots):
        kinds = tuple(
            OfKind(kind, tuple(uuid for _, uuid in group)) for kind, group in itertools.groupby(lot, lambda one: one[0])
        )
        found.append(DevicesSaid(kinds=kinds, continued=number > 0))
    return found


def requested(lease: str, signed: Signed) -> Requested:
    """What somebody has signed, as a record."""
    return Requested(
        lease=lease,
        payload=signed.payload.decode(),
        signature=base64.b64encode(signed.signature).decode(),
    )


class Refusals:
    """Which refusals are recorded: so many a minute, lest a hub fill the ledger; the others are counted."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=REFUSALS_A_MINUTE)
        self._more = 0

    def record(self, asked: str, lease: str, reason: str, now: float) -> Refusal | None:
        """A refusal as a record, or None where it is only counted."""
        if len(self._times) == REFUSALS_A_MINUTE and now - self._times[0] < 60.0:
            self._more += 1
            return None
        self._times.append(now)
        more, self._more = self._more, 0
        return Refusal(asked=asked[:TEXT_MAX], lease=lease[:TEXT_MAX], reason=reason[:TEXT_MAX], more=more)


def _event(before: SiteLease | None, lease: SiteLease) -> str:
    if before is None:
        return "hold"
    if before.state != lease.state:
        return _EVENTS.get((before.state, lease.state), lease.state)
    if before.tenant != lease.tenant or before.next_tenant != lease.next_tenant:
        return "transfer"
    if before.notice != lease.notice:
        return "notify"
    return "renew" if before.deadline != lease.deadline else "resize"


def _left_ms(before: SiteLease | None, lease: SiteLease, now: float) -> int | None:
    if lease.state not in ("held", "active") or (before is not None and before.deadline == lease.deadline):
        return None
    return max(0, round((lease.deadline - now) * 1000))


def _grouped(grants: Iterable[Grant]) -> list[Granted]:
    groups: dict[tuple[int, int], list[str]] = {}
    for grant in grants:
        groups.setdefault((grant.token, grant.milli), []).append(grant.uuid)
    return [Granted(tuple(devices), token, milli) for (token, milli), devices in groups.items()]


def _pieces(grants: Iterable[Granted]) -> Iterator[tuple[Granted, ...]]:
    """Groups in lots of at most `DEVICES_MAX` devices."""
    lot: list[Granted] = []
    room = DEVICES_MAX
    for group in grants:
        devices = group.devices
        while devices:
            taken, devices = devices[:room], devices[room:]
            lot.append(Granted(taken, group.token, group.milli))
            room -= len(taken)
            if not room:
                yield tuple(lot)
                lot, room = [], DEVICES_MAX
    if lot:
        yield tuple(lot)


# --- replay


class Known(msgspec.Struct):
    """A lease that lives, as the records so far have it.

    Attributes:
        grants: {UUID: (token, thousandths)}.
    """

    state: str
    version: int
    grants: dict[str, tuple[int, int]] = {}


class ReplayState(msgspec.Struct):
    """How far a replay has come, from which it goes on another time."""

    leases: int = 0
    token: int = 0
    term: int = 0
    cordons: set[str] = set()
    known: dict[str, Known] = {}


@dataclass
class _Grant:
    """What the records say is being granted; one that is large takes several."""

    lease: str
    floor: int  # the largest token before it
    carried: bool = False
    before: dict[str, tuple[int, int]] = field(default_factory=dict)
    to_come: int = 0


class Replay:
    """Follows a site's records and says where they break a rule.

    Args:
        state: where an earlier replay of the same ledger ended, or None for its beginning.

    Attributes:
        leases: how many became active.
    """

    def __init__(self, state: ReplayState | None = None) -> None:
        state = state or ReplayState()
        self.leases = state.leases
        self._known = dict(state.known)
        self._used: dict[str, int] = {}  # {UUID: thousandths taken}
        for known in self._known.values():
            for uuid, (_, milli) in known.grants.items():
                self._used[uuid] = self._used.get(uuid, 0) + milli
        self._token = state.token  # the largest so far
        self._term = state.term
        self._cordons = set(state.cordons)
        self._grant = _Grant("", 0)

    def state(self) -> ReplayState:
        """Where it is; between the records of one lease there is no place to go on from."""
        return ReplayState(self.leases, self._token, self._term, set(self._cordons), dict(self._known))

    def stands_at(self, token: int, term: int) -> None:
        """Tokens and terms had come so far where the records begin."""
        self._token, self._term = max(self._token, token), max(self._term, term)

    def held(self) -> dict[str, int]:
        """{UUID: thousandths taken} after the records so far."""
        return dict(self._used)

    def take(self, record: Record) -> list[str]:
        """One more record; returns what is wrong with it."""
        found = []
        if self._grant.to_come and not isinstance(record, LeaseDevices):
            found.append(
                f"{self._grant.to_come} records with devices of lease {self._grant.lease} are missing before it"
            )
            self._grant.to_come = 0
        match record:
            case LeaseSaid():
                found += [*self._obeyed(record.term), *self._lease_said(record)]
            case LeaseDevices():
                found += self._more_devices(record)
            case SiteStarted():
                if record.epoch < self._token:
                    found.append(f"the site starts with token {record.epoch}; it has given {self._token} before")
                self._token = max(self._token, record.epoch)
            case HubObeyed():
                found += self._obeyed(record.term)
            case Cordoned():
                self._cordons.add(record.what)
                found += self._obeyed(record.term)
            case Uncordoned():
                self._cordons.discard(record.what)
                found += self._obeyed(record.term)
        return found

    def _obeyed(self, term: int) -> list[str]:
        if term and term < self._term:
            return [f"a hub of term {term} is obeyed after one of term {self._term}"]
        self._term = max(self._term, term)
        return []

    def _lease_said(self, said: LeaseSaid) -> list[str]:
        known = self._known.get(said.lease)
        found = []
        if said.event in ("hold", CARRIED):
            if known is not None and known.state != "held":  # a later attempt may take the place of a hold
                found.append(f"lease {said.lease} is granted again while it is {known.state}")
            if known is not None:
                self._free(known)
            known = self._known[said.lease] = Known(said.state, said.version)
        elif known is None:
            return [f"lease {said.lease} does not live, and yet there is {said.event}"]
        else:
            if life.after(known.state, said.event) != said.state:
                found.append(f"lease {said.lease} is {known.state}; {said.event} does not make it {said.state}")
            if said.version <= known.version:
                found.append(f"lease {said.lease} has version {said.version} after {known.version}")
            known.state, known.version = said.state, said.version
        self.leases += said.event == "commit"
        if said.grants is not None:
            self._grant = _Grant(said.lease, self._token, said.event == CARRIED, dict(known.grants), said.more)
            self._free(known)
            found += self._take(known, said.grants)
        if said.state in life.FINAL:
            self._free(known)
            del self._known[said.lease]
        return found

    def _more_devices(self, record: LeaseDevices) -> list[str]:
        known = self._known.get(record.lease)
        if not self._grant.to_come or record.lease != self._grant.lease or known is None:
            return [f"devices of lease {record.lease} that no record announced"]
        self._grant.to_come -= 1
        return self._take(known, record.grants)

    def _free(self, known: Known) -> None:
        for uuid, (_, milli) in known.grants.items():
            self._used[uuid] -= milli
            if not self._used[uuid]:
                del self._used[uuid]
        known.grants = {}

    def _take(self, known: Known, grants: Iterable[Granted]) -> list[str]:
        grant, found = self._grant, []
        for group in grants:
            for uuid in group.devices:
                had = grant.before.get(uuid)
                is_new = not grant.carried and (had is None or had[0] != group.token)
                if is_new and group.token <= grant.floor:
                    found.append(
                        f"lease {grant.lease} gets {uuid} with token {group.token}; {grant.floor} was given before"
                    )
                if is_new and had is None and self._cordons & {uuid, ""}:
                    found.append(f"lease {grant.lease} gets {uuid}, which is cordoned")
                used = self._used[uuid] = self._used.get(uuid, 0) + group.milli
                if used > WHOLE_MILLI:
                    found.append(f"lease {grant.lease} gets {uuid}: {used} thousandths of it are taken then")
                known.grants[uuid] = (group.token, group.milli)
            self._token = max(self._token, group.token)
        return found
