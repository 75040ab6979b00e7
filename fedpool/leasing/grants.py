"""The site's side of leasing: the one authority over the site's devices, as a machine without input or output.

State is the fold of the entries. A request is checked against that state alone, so a crash at any point leaves either
nothing or the whole grant. Every grant takes a new epoch, which is the fencing token of its devices: epochs only grow, are
durable before the answer, and jump at every restart, so that a token issued by a run whose last entries were lost with a
restored backup is never issued again: to where the time of day alone would put them, if that is further.

Time is CLOCK_BOOTTIME in seconds, passed in. Only durations come from outside. The site counts from when it answers, plus a
guard, the holder from when it asked: the holder stops first (site/leases.md has the reasoning).

Rules for changing it: whatever decides about a device stands here; killing and looking at processes is the driver's.
"""

from __future__ import annotations

import heapq
import itertools
from typing import TypeAlias

import msgspec

from fedpool.errors import Insufficient, NotFound, Recovering, Refused, StaleToken, UsageError
from fedpool.leasing import lease as life
from fedpool.leasing.entries import (
    CordonChanged,
    GrantEntry,
    LeaseChanged,
    LeasesForgotten,
    Restarted,
    SiteState,
    TermObeyed,
)
from fedpool.leasing.requests import (
    Abort,
    Commit,
    Cordon,
    GrantEvent,
    Hold,
    Notify,
    Obey,
    ProcessesGone,
    Release,
    Renew,
    Resize,
    Tick,
    Transfer,
    Uncordon,
)
from fedpool.placement import policies
from fedpool.records import EPOCH_JUMP, WHOLE_MILLI, Device, Grant, Inventory, Shape, SiteLease
from fedpool.step import Decision, Instant
from fedpool.units import format_duration

HOLD_TTL_MAX_S = 60.0
GUARD_S = 5.0
GUARD_FRACTION = 0.01
SHAPES_MAX = 256
EPOCHS_A_SECOND = 1000  # more grants than a site makes
AGAIN_S = 1.0
# A lease that is over is remembered so long, for requests that are repeated and hubs that were away, and at most so many.
REMEMBER_S = 3600.0
REMEMBER_MAX = 10_000


class EndProcesses(msgspec.Struct, frozen=True):
    """Kill every process of this lease (that uses one of these devices, where some are named); report when none is left."""

    lease: str
    devices: tuple[str, ...] = ()


class WarnProcesses(msgspec.Struct, frozen=True):
    """Tell the lease's processes (that use one of these devices, where some are named) that they have so many seconds left."""

    lease: str
    reason: str
    grace_s: float
    devices: tuple[str, ...] = ()


GrantReply: TypeAlias = SiteLease | CordonChanged
GrantDecision: TypeAlias = Decision[GrantEntry, GrantReply, EndProcesses | WarnProcesses]


class SiteLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the site allows, whoever asks.

    Attributes:
        max_duration_s: longest lease and longest renewal.
    """

    max_duration_s: float = 30 * 86400.0


class SiteGrants:
    """All leases of one site.

    Args:
        site: its name, for messages.
        inventory: its devices.
        limits: what it allows.

    Attributes:
        recovering: whether entries and process scan have not yet been reconciled; nothing is granted meanwhile.
        used: {UUID: thousandths taken}.
        cordons: {node, UUID or "" for the site: why nothing new is granted there}.
        asked_ms: when the latest change of a cordon that was obeyed was signed.
    """

    def __init__(self, site: str, inventory: Inventory, limits: SiteLimits | None = None) -> None:
        self.site = site
        self.inventory = inventory
        self.limits = limits or SiteLimits()
        self.devices = inventory.devices()
        self.leases: dict[str, SiteLease] = {}
        self.cordons: dict[str, str] = {}
        self.used: dict[str, int] = {}
        self.epoch = 0
        self.term = 0
        self.asked_ms = 0
        self.recovering = True
        self._suited: dict[Shape, list[Device]] = {}  # of shapes that were asked for lately
        self._by_uuid = {device.uuid: device for device in self.devices}
        self._over: dict[str, None] = {}  # the earliest that ended first
        # When something may be due for a lease; what no longer holds is dropped when its time comes.
        self._due: list[tuple[float, str]] = []

    def apply(self, entry: GrantEntry) -> None:
        """Fold one durable entry into the state."""
        match entry:
            case LeaseChanged():
                self._put(entry.lease)
                self.epoch = max(self.epoch, entry.epoch)
                self.term = max(self.term, entry.term)
            case LeasesForgotten():
                for lease_id in entry.ids:
                    del self.leases[lease_id]
                    self._over.pop(lease_id, None)
            case CordonChanged():
                self.term = max(self.term, entry.term)
                self.asked_ms = max(self.asked_ms, entry.asked_ms)
                if entry.reason is None:
                    self.cordons.pop(entry.what, None)
                else:
                    self.cordons[entry.what] = entry.reason
            case TermObeyed():
                self.term = max(self.term, entry.term)
            case Restarted():
                self.epoch = max(self.epoch, entry.epoch)
                if entry.shift_s:
                    for lease in list(self.leases.values()):
                        self.leases[lease.id] = _shifted(lease, entry.shift_s)
                    self._due = sorted((time, lease.id) for lease in self.leases.values() for time in _times(lease))
            case SiteState():
                self.leases, self.used, self._due, self.cordons = {}, {}, [], dict(entry.cordons)
                self._over = {}
                self.epoch, self.term, self.asked_ms = entry.epoch, entry.term, entry.asked_ms
                for lease in entry.leases:
                    self._put(lease)

    def _put(self, lease: SiteLease) -> None:
        known = self.leases.get(lease.id)
        if known is not None and known.occupies:
            for grant in known.grants:
                self.used[grant.uuid] -= grant.milli
        if lease.occupies:
            for grant in lease.grants:
                self.used[grant.uuid] = self.used.get(grant.uuid, 0) + grant.milli
                assert self.used[grant.uuid] <= WHOLE_MILLI, f"{grant.uuid} is given twice, now to {lease.id}"
        self.leases[lease.id] = lease
        if lease.state in life.FINAL:
            self._over[lease.id] = None
        else:
            self._over.pop(lease.id, None)
        for time in _times(lease):
            heapq.heappush(self._due, (time, lease.id))

    def state(self) -> SiteState:
        """A snapshot: folding it alone gives this state."""
        return SiteState(tuple(self.leases.values()), dict(self.cordons), self.epoch, self.term, self.asked_ms)

    def check(self) -> None:
        """Assert the invariants: no device beyond its whole, no token above the epoch, counts as the leases say."""
        used: dict[str, int] = {}
        for lease in self.leases.values():
            for grant in lease.grants:
                assert grant.token <= self.epoch, f"token {grant.token} above epoch {self.epoch}"
                if lease.occupies:
                    used[grant.uuid] = used.get(grant.uuid, 0) + grant.milli
        assert all(milli <= WHOLE_MILLI for milli in used.values()), f"a device is given twice: {used}"
        assert used == {uuid: milli for uuid, milli in self.used.items() if milli}, "the count of what is used is wrong"

    def free(self) -> set[str]:
        """UUIDs of the devices nobody occupies."""
        return {device.uuid for device in self.devices if not self.used.get(device.uuid)}

    def taken(self) -> dict[str, int]:
        """{UUID: thousandths that cannot be granted}: what is used, and the whole of what is cordoned."""
        if not self.cordons:
            return self.used
        taken = dict(self.used)
        for device in self.devices:
            if self.cordons.keys() & {"", device.node, device.uuid}:
                taken[device.uuid] = WHOLE_MILLI
        return taken

    def restarted(self, now: Instant, last: Instant) -> Restarted:
        """The first entry of a new run of the agent.

        Args:
            now: the clocks. By the time of day nothing expires while the machine is up.
            last: what they showed when the last entry was written.
        """
        epoch = max(self.epoch + EPOCH_JUMP, int(now.unix * EPOCHS_A_SECOND))
        return Restarted(epoch, last.shift(now), now.boot or "")

    def require(self, lease_id: str, token: int | None = None) -> SiteLease:
        """An active lease, for whoever wants to use its devices.

        Raises:
            NotFound: the site has no such lease.
            Refused: it is not active.
            StaleToken: the token is not the latest one of its devices.
        """
        lease = self._find(lease_id)
        if lease.state != "active" or lease.next_tenant:
            raise Refused(
                f"lease {lease_id} at {self.site} is "
                + (f"on its way to {lease.next_tenant}" if lease.next_tenant else f"{lease.state}, not active")
            )
        if token is not None and token != lease.token:
            raise StaleToken(
                f"token {token} for lease {lease_id} at {self.site} is not the current one",
                "the devices were granted anew since; ask for the lease's state",
            )
        return lease

    def step(self, event: GrantEvent, now: float) -> GrantDecision:
        """Decide what follows from an event; see `fedpool.step`. The state changes only by `apply`.

        Raises:
            Recovering, Insufficient, Refused, StaleToken, NotFound, UsageError: nothing has changed.
        """
        match event:
            case Tick():
                return self._tick(now)
            case ProcessesGone():
                return self._gone(event, now)
        if event.term < self.term:
            raise StaleToken(
                f"coordinator term {event.term} at {self.site}, which has already obeyed term {self.term}",
                "an older hub is still running: stop it",
            )
        match event:
            case Hold():
                return self._hold(event, now)
            case Commit():
                return self._commit(event, now)
            case Abort():
                return self._abort(event, now)
            case Renew():
                return self._renew(event, now)
            case Resize():
                return self._resize(event, now)
            case Notify():
                return self._notify(event, now)
            case Transfer():
                return self._transfer(event)
            case Release():
                return self._release(event)
            case Cordon() | Uncordon():
                return self._cordon(event)
            case Obey():
                return Decision(entries=(TermObeyed(event.term),) if event.term > self.term else ())

    def _find(self, lease_id: str) -> SiteLease:
        lease = self.leases.get(lease_id)
        if lease is None:
            raise NotFound(f"{self.site} has no lease {lease_id}")
        return lease

    def _change(
        self,
        lease: SiteLease,
        *effects: EndProcesses | WarnProcesses,
        term: int = 0,
        epoch: int | None = None,
    ) -> GrantDecision:
        entry = LeaseChanged(lease, self.epoch if epoch is None else epoch, max(self.term, term))
        return Decision(entries=(entry,), replies=(lease,), effects=effects)

    def _moved(self, lease: SiteLease, event: str, **changes: object) -> SiteLease:
        state = life.after(lease.state, event)
        if state is None:
            raise Refused(
                f"lease {lease.id} at {self.site} is {lease.state}{f' ({lease.reason})' if lease.reason else ''}: "
                f"it cannot {event}"
            )
        return msgspec.structs.replace(lease, state=state, version=lease.version + 1, **changes)

    def _require_recovered(self) -> None:
        if self.recovering:
            raise Recovering(
                f"{self.site} has just restarted and is reading its own state back", "try again in a moment"
            )

    def _require_duration(self, duration_s: float) -> None:
        if duration_s > self.limits.max_duration_s:
            raise Refused(
                f"{format_duration(duration_s)} at {self.site}, whose policy allows {format_duration(self.limits.max_duration_s)}",
                "ask for less and renew",
            )

    def _hold(self, event: Hold, now: float) -> GrantDecision:
        known = self.leases.get(event.lease)
        if known is not None and event.attempt <= known.attempt:
            if event.attempt < known.attempt:
                raise StaleToken(f"attempt {event.attempt} to place lease {event.lease}, which is at {known.attempt}")
            return Decision(replies=(known,))  # the same request again: the first answer
        self._require_recovered()
        if event.gpus < 1 or not 0 < event.ttl_s <= HOLD_TTL_MAX_S:
            raise UsageError(
                f"a hold of {event.gpus} devices for {event.ttl_s} s",
                f"at least one device, and at most {HOLD_TTL_MAX_S:.0f} s",
            )
        self._require_duration(event.duration_s)
        if known is not None and known.state != "held" and known.state != "aborted":
            raise StaleToken(
                f"lease {known.id} is {known.state} at {self.site}: it cannot be placed again",
                "the hub has lost what it knew of it; ask for a new one",
            )
        own = known.grants if known is not None and known.occupies else ()
        chosen = self._choose(event.lease, event.shape, event.gpus, own)
        epoch = self.epoch + 1
        lease = SiteLease(
            id=event.lease,
            tenant=event.tenant,
            state="held",
            grants=tuple(Grant(device.uuid, epoch, event.shape.milli) for device in chosen),
            deadline=now + event.ttl_s,
            attempt=event.attempt,
            shape=event.shape,
            version=known.version + 1 if known is not None else 1,
            mandate=event.mandate,
        )
        return self._change(lease, term=event.term, epoch=epoch)

    def _choose(
        self,
        lease_id: str,
        shape: Shape,
        count: int,
        replaced: tuple[Grant, ...] = (),
        kept: tuple[Grant, ...] = (),
    ) -> list[Device]:
        """Devices for a lease, beside those it keeps: a fraction is of one card, so no card twice."""
        if "" in self.cordons:
            raise Refused(f"{self.site} grants nothing now: {self.cordons['']}", f"ibshell site resume {self.site}")
        for uuid in shape.devices:
            if uuid not in self._by_uuid:
                raise NotFound(f"{self.site} has no device {uuid}", "ibshell gpu list shows them")
        used = dict(self.taken())
        for grant in replaced:  # they become free with the same entry
            used[grant.uuid] -= grant.milli
        for grant in kept:
            used[grant.uuid] = WHOLE_MILLI
        candidates = policies.with_room(self._suiting(shape), used, shape)
        chosen = policies.choose(candidates, used, shape, count)
        if chosen is None:
            alike = self._suiting(msgspec.structs.replace(shape, avoid=()))
            kind = " or ".join(shape.kinds) or "GPUs of one type"
            raise Insufficient(
                f"lease {lease_id} needs {count} {kind} at {self.site}; "
                f"{policies.most(candidates, shape)} of {len(alike)} are free",
                "ask for fewer, wait for a release, or name other sites",
            )
        return chosen

    def _suiting(self, shape: Shape) -> list[Device]:
        """The devices that will do, taken or not."""
        if shape.avoid or shape.devices:
            avoided = self._avoided(shape)
            return [d for d in self.devices if d.node not in avoided and policies.suits(d, shape)]
        if shape not in self._suited:
            if len(self._suited) >= SHAPES_MAX:
                self._suited.clear()
            self._suited[shape] = [device for device in self.devices if policies.suits(device, shape)]
        return self._suited[shape]

    def _avoided(self, shape: Shape) -> set[str]:
        return {
            self._by_uuid[grant.uuid].node
            for lease in self.leases.values()
            if lease.occupies and lease.tenant in shape.avoid
            for grant in lease.grants
        }

    def _commit(self, event: Commit, now: float) -> GrantDecision:
        lease = self._find(event.lease)
        if event.attempt and event.attempt != lease.attempt:
            raise StaleToken(f"attempt {event.attempt} of lease {lease.id} at {self.site}, which is at {lease.attempt}")
        if lease.state == "active":
            return Decision(replies=(lease,))
        self._require_duration(event.duration_s)
        if lease.state == "held" and now >= lease.deadline:
            raise Refused(f"the hold of lease {lease.id} at {self.site} has lapsed", "ask for the lease again")
        return self._change(self._moved(lease, "commit", deadline=now + _guarded(event.duration_s)), term=event.term)

    def _abort(self, event: Abort, now: float) -> GrantDecision:
        lease = self._find(event.lease)
        if lease.state in life.FINAL or (event.attempt and event.attempt < lease.attempt):
            return Decision(replies=(lease,))
        aborted = self._moved(lease, "abort", reason="given up by the hub", deadline=now)
        return self._change(aborted, term=event.term)

    def _renew(self, event: Renew, now: float) -> GrantDecision:
        if event.duration_s <= 0:
            raise UsageError(f"a renewal of {event.duration_s} s", "name a positive duration")
        self._require_duration(event.duration_s)
        lease = self._find(event.lease)
        if lease.state == "active" and now >= lease.deadline:
            raise Refused(f"lease {lease.id} at {self.site} has expired")
        if lease.state == "active" and lease.notice:
            raise Refused(f"lease {lease.id} at {self.site} is about to end: {lease.notice}", "ask for a new one")
        moved = self._moved(
            lease, "renew", deadline=now + _guarded(event.duration_s), mandate=event.mandate or lease.mandate
        )
        return self._change(moved, term=event.term)

    def _resize(self, event: Resize, now: float) -> GrantDecision:
        lease = self._find(event.lease)
        staying = [grant for grant in lease.grants if grant.uuid not in lease.leaving]
        if event.gpus < 1:
            raise UsageError(f"{event.gpus} devices at {self.site}", "release the lease to give back all of it")
        if event.version != lease.version:
            raise StaleToken(
                f"a resize of lease {lease.id} as it was at version {event.version}; at {self.site} it is at {lease.version}",
                "it has changed since; ask for its state and decide anew",
            )
        if event.gpus < len(staying):
            # The latest go first: they were added to what the job began with.
            keep = sorted(staying, key=lambda grant: grant.token)[: event.gpus]
            leaving = tuple(grant.uuid for grant in lease.grants if grant not in keep)
            moved = self._moved(lease, "resize", leaving=leaving, leave_by=now + max(0.0, event.grace_s))
            warning = WarnProcesses(lease.id, f"{len(leaving)} devices are to be given back", event.grace_s, leaving)
            return self._change(moved, warning, term=event.term)
        if lease.notice or lease.next_tenant:
            raise Refused(f"lease {lease.id} at {self.site} is about to end: {lease.notice or 'it changes hands'}")
        self._require_recovered()
        try:
            more = self._choose(lease.id, lease.shape, event.gpus - len(staying), kept=lease.grants)
        except (Insufficient, Refused):
            return self._change(self._moved(lease, "resize"), term=event.term)
        epoch = self.epoch + 1
        mandate = event.mandate or lease.mandate
        grants = (*lease.grants, *(Grant(device.uuid, epoch, lease.shape.milli) for device in more))
        return self._change(self._moved(lease, "resize", grants=grants, mandate=mandate), term=event.term, epoch=epoch)

    def _notify(self, event: Notify, now: float) -> GrantDecision:
        lease = self._find(event.lease)
        if lease.notice or lease.state in life.FINAL or lease.state == "ending":
            return Decision(replies=(lease,))
        deadline = min(lease.deadline, now + max(0.0, event.grace_s))
        moved = self._moved(lease, "notify", notice=event.reason, deadline=deadline)
        return self._change(moved, WarnProcesses(lease.id, event.reason, deadline - now), term=event.term)

    def _transfer(self, event: Transfer) -> GrantDecision:
        lease = self._find(event.lease)
        if lease.state == "active" and event.tenant in (lease.tenant, lease.next_tenant):
            return Decision(replies=(lease,))
        if lease.notice:
            raise Refused(f"lease {lease.id} at {self.site} is about to end: {lease.notice}")
        moved = self._moved(lease, "transfer", next_tenant=event.tenant, mandate=event.mandate or lease.mandate)
        return self._change(moved, EndProcesses(lease.id), term=event.term)

    def _release(self, event: Release) -> GrantDecision:
        lease = self._find(event.lease)
        if lease.state in life.FINAL or lease.state == "ending":
            return Decision(replies=(lease,))
        ending = self._moved(lease, "end", reason=event.reason or "released", next_tenant="")
        return self._change(ending, EndProcesses(lease.id), term=event.term)

    def _cordon(self, event: Cordon | Uncordon) -> GrantDecision:
        what = event.what
        nodes = {node.name for node in self.inventory.nodes}
        if what and what not in nodes and what not in self._by_uuid:
            raise NotFound(f"{self.site} has no node or device {what!r}", "ibshell node list shows the nodes")
        reason = event.reason or "cordoned" if isinstance(event, Cordon) else None
        entry = CordonChanged(what, reason, max(self.term, event.term), event.asked_ms)
        if self.cordons.get(what) == reason:
            return Decision(replies=(entry,))
        return Decision(entries=(entry,), replies=(entry,))

    def _gone(self, event: ProcessesGone, now: float) -> GrantDecision:
        lease = self._find(event.lease)
        if lease.state == "ending" and not event.devices:
            ended = self._moved(lease, life.ENDINGS.get(lease.reason.partition(":")[0], "release"), deadline=now)
            return self._change(ended)
        if lease.state == "active" and lease.next_tenant and not event.devices:
            epoch = self.epoch + 1
            grants = tuple(msgspec.structs.replace(grant, token=epoch) for grant in lease.grants)
            moved = self._moved(lease, "transfer", tenant=lease.next_tenant, next_tenant="", grants=grants)
            return self._change(moved, epoch=epoch)
        if lease.state == "active" and event.devices:
            grants = tuple(grant for grant in lease.grants if grant.uuid not in event.devices)
            leaving = tuple(uuid for uuid in lease.leaving if uuid not in event.devices)
            if len(grants) < len(lease.grants):
                return self._change(self._moved(lease, "resize", grants=grants, leaving=leaving))
        return Decision(wake_at=self._wake())

    def _tick(self, now: float) -> GrantDecision:
        entries: list[GrantEntry] = []
        effects: list[EndProcesses | WarnProcesses] = []
        forgotten: dict[str, None] = {}
        if len(self._over) > 1.1 * REMEMBER_MAX:
            over = itertools.islice(self._over, len(self._over) - REMEMBER_MAX)
            forgotten.update(dict.fromkeys(name for name in over if _forgettable(self.leases[name]) <= now))
        due: list[tuple[float, str]] = []
        while self._due and self._due[0][0] <= now:
            due.append(heapq.heappop(self._due))
        for lease_id in dict.fromkeys(lease_id for _, lease_id in due):
            lease = self.leases.get(lease_id)
            if lease is None or not any(time <= now for time in _times(lease)):
                continue
            heapq.heappush(self._due, (now + AGAIN_S, lease_id))  # looked at again, should it not have moved on by then
            if lease.state in life.FINAL:
                forgotten[lease.id] = None
            elif lease.state == "held":
                aborted = self._moved(lease, "abort", reason="hold lapsed", deadline=now)
                entries.append(LeaseChanged(aborted, self.epoch, self.term))
            elif now >= lease.deadline:
                reason = f"revoked: {lease.notice}" if lease.notice else "expired"
                ending = self._moved(lease, "end", reason=reason, next_tenant="")
                entries.append(LeaseChanged(ending, self.epoch, self.term))
                effects.append(EndProcesses(lease.id))
            else:
                effects.append(EndProcesses(lease.id, lease.leaving))
        if forgotten:
            entries.append(LeasesForgotten(tuple(forgotten)))
        return Decision(entries=entries, effects=effects, wake_at=self._wake())

    def _wake(self) -> float | None:
        return self._due[0][0] if self._due else None


def _times(lease: SiteLease) -> list[float]:
    """When something is due for a lease: its deadline, the end of a grace, or when it may be forgotten."""
    if lease.state in life.FINAL:
        return [max(lease.deadline + REMEMBER_S, _forgettable(lease))]
    if lease.state == "ending":
        return []
    return [lease.deadline, lease.leave_by] if lease.leaving else [lease.deadline]


def _forgettable(lease: SiteLease) -> float:
    """Until when the request behind a lease that is over could be shown again: until then it must not seem new."""
    return lease.mandate.until if lease.mandate is not None else 0.0


def _shifted(lease: SiteLease, shift_s: float) -> SiteLease:
    mandate = lease.mandate
    if mandate is not None:
        mandate = msgspec.structs.replace(mandate, until=mandate.until + shift_s)
    return msgspec.structs.replace(
        lease, deadline=lease.deadline + shift_s, leave_by=lease.leave_by + shift_s, mandate=mandate
    )


def _guarded(duration_s: float) -> float:
    return duration_s * (1 + GUARD_FRACTION) + GUARD_S
