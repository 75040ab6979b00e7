"""The site's side of leasing: the one authority over the site's devices, as a machine without input or output.

State is the fold of the entries. A request is checked against that state alone, so a crash at any point leaves either
nothing or the whole grant. Every grant takes a new epoch, which is the fencing token of its devices: epochs only grow, are
durable before the answer, and jump at every restart, so that a token issued by a run whose last entries were lost with a
restored backup is never issued again.

Time is CLOCK_BOOTTIME in seconds, passed in. Only durations come from outside. The site counts from when it answers, plus a
guard, the holder from when it asked: the holder stops first (site/leases.md has the reasoning).

Rules for changing it: whatever decides about a device stands here; killing and looking at processes is the driver's.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from fedpool.errors import Insufficient, NotFound, Recovering, Refused, StaleToken, UsageError
from fedpool.leasing import lease as life
from fedpool.placement.policies import pack
from fedpool.records import Grant, Inventory, SiteLease
from fedpool.step import Decision

HOLD_TTL_MAX_S = 60.0
GUARD_S = 5.0
GUARD_FRACTION = 0.01
EPOCH_JUMP = 1000


class Hold(msgspec.Struct, frozen=True, tag="hold"):
    """Set devices aside for `ttl_s` seconds."""

    lease: str
    tenant: str
    gpus: int
    ttl_s: float
    term: int
    gpu_type: str | None = None


class Commit(msgspec.Struct, frozen=True, tag="commit"):
    """Turn a hold into a lease of `duration_s` seconds."""

    lease: str
    duration_s: float
    term: int


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Give up a hold."""

    lease: str
    term: int


class Renew(msgspec.Struct, frozen=True, tag="renew"):
    """Let an active lease end `duration_s` seconds from now."""

    lease: str
    duration_s: float
    term: int


class Release(msgspec.Struct, frozen=True, tag="release"):
    """End a lease: its processes are killed, then its devices are free."""

    lease: str
    term: int
    reason: str = ""


class Tick(msgspec.Struct, frozen=True, tag="tick"):
    """Time has passed."""


class ProcessesGone(msgspec.Struct, frozen=True, tag="gone"):
    """The driver has seen that no process of an ending lease is left."""

    lease: str


GrantEvent: TypeAlias = Hold | Commit | Abort | Renew | Release | Tick | ProcessesGone


class LeaseChanged(msgspec.Struct, frozen=True, tag="lease.changed"):
    """A lease took a new state; the whole record, so that the fold is an assignment."""

    lease: SiteLease
    epoch: int
    term: int


class Restarted(msgspec.Struct, frozen=True, tag="site.restarted"):
    """The agent started: epochs jump; after a reboot of the machine its clock began anew and deadlines shift with it."""

    epoch: int
    shift_s: float
    boot: str


GrantEntry: TypeAlias = LeaseChanged | Restarted


class EndProcesses(msgspec.Struct, frozen=True):
    """Kill every process of this lease and report when none is left."""

    lease: str


GrantDecision: TypeAlias = Decision[GrantEntry, SiteLease, EndProcesses]


class SiteGrants:
    """All leases of one site.

    Args:
        site: its name, for messages.
        inventory: its devices.

    Attributes:
        recovering: whether entries and process scan have not yet been reconciled; nothing is granted meanwhile.
    """

    def __init__(self, site: str, inventory: Inventory) -> None:
        self.site = site
        self.inventory = inventory
        self.leases: dict[str, SiteLease] = {}
        self.epoch = 0
        self.term = 0
        self.recovering = True

    def apply(self, entry: GrantEntry) -> None:
        """Fold one durable entry into the state."""
        match entry:
            case LeaseChanged():
                self.leases[entry.lease.id] = entry.lease
                self.epoch = max(self.epoch, entry.epoch)
                self.term = max(self.term, entry.term)
            case Restarted():
                self.epoch = max(self.epoch, entry.epoch)
                if entry.shift_s:
                    self.leases = {
                        key: msgspec.structs.replace(lease, deadline=lease.deadline + entry.shift_s)
                        for key, lease in self.leases.items()
                    }

    def check(self) -> None:
        """Assert the invariants: no device in two leases that occupy it, no token above the epoch."""
        seen: dict[str, str] = {}
        for lease in self.leases.values():
            for grant in lease.grants:
                assert grant.token <= self.epoch, f"token {grant.token} above epoch {self.epoch}"
                if lease.occupies:
                    assert grant.uuid not in seen, f"{grant.uuid} in {seen[grant.uuid]} and {lease.id}"
                    seen[grant.uuid] = lease.id

    def holder(self, uuid: str) -> SiteLease | None:
        """The lease that occupies a device, or None."""
        for lease in self.leases.values():
            if lease.occupies and any(grant.uuid == uuid for grant in lease.grants):
                return lease
        return None

    def free(self) -> set[str]:
        """UUIDs of the devices nobody occupies."""
        taken = {grant.uuid for lease in self.leases.values() if lease.occupies for grant in lease.grants}
        return {gpu.uuid for gpu in self.inventory.gpus()} - taken

    def restarted(self, now: float, last_at: float, boot: str, last_boot: str | None) -> Restarted:
        """The first entry of a new run of the agent.

        Args:
            now: the clock.
            last_at: the clock when the last entry was written, 0 when there is none.
            boot: this boot's id.
            last_boot: the boot in which the last entry was written, or None.
        """
        shift = now - last_at if last_boot is not None and last_boot != boot else 0.0
        return Restarted(self.epoch + EPOCH_JUMP, shift, boot)

    def require(self, lease_id: str, token: int | None = None) -> SiteLease:
        """An active lease, for whoever wants to use its devices.

        Raises:
            NotFound: the site has no such lease.
            Refused: it is not active.
            StaleToken: the token is not the one of its devices.
        """
        lease = self._find(lease_id)
        if lease.state != "active":
            raise Refused(f"lease {lease_id} at {self.site} is {lease.state}, not active")
        if token is not None and any(grant.token != token for grant in lease.grants):
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
                lease = self._find(event.lease)
                if lease.state != "ending":
                    return Decision(wake_at=self._wake(now))
                return self._change(self._ended(lease))
            case _:
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
                return self._abort(event)
            case Renew():
                return self._renew(event, now)
            case Release():
                return self._release(event)

    def _find(self, lease_id: str) -> SiteLease:
        lease = self.leases.get(lease_id)
        if lease is None:
            raise NotFound(f"{self.site} has no lease {lease_id}")
        return lease

    def _change(self, lease: SiteLease, *, term: int = 0, epoch: int | None = None, end: bool = False) -> GrantDecision:
        entry = LeaseChanged(lease, self.epoch if epoch is None else epoch, max(self.term, term))
        return Decision(entries=(entry,), replies=(lease,), effects=(EndProcesses(lease.id),) if end else ())

    def _moved(self, lease: SiteLease, event: str, **changes: object) -> SiteLease:
        state = life.after(lease.state, event)
        if state is None:
            raise Refused(
                f"lease {lease.id} at {self.site} is {lease.state}{f' ({lease.reason})' if lease.reason else ''}: "
                f"it cannot {event}"
            )
        return msgspec.structs.replace(lease, state=state, **changes)

    def _hold(self, event: Hold, now: float) -> GrantDecision:
        known = self.leases.get(event.lease)
        if known is not None:  # the same request again: the first answer
            return Decision(replies=(known,))
        if self.recovering:
            raise Recovering(
                f"{self.site} has just restarted and is reading its own state back", "try again in a moment"
            )
        if event.gpus < 1 or not 0 < event.ttl_s <= HOLD_TTL_MAX_S:
            raise UsageError(
                f"a hold of {event.gpus} devices for {event.ttl_s} s",
                f"at least one device, and at most {HOLD_TTL_MAX_S:.0f} s",
            )
        free = self.free()
        chosen = pack(self.inventory, free, event.gpus, event.gpu_type)
        if chosen is None:
            kind = event.gpu_type or "GPUs of one type"
            of_type = [g for g in self.inventory.gpus() if event.gpu_type in (None, g.type)]
            usable = sum(gpu.uuid in free for gpu in of_type)
            raise Insufficient(
                f"lease {event.lease} needs {event.gpus} {kind} at {self.site}; {usable} of {len(of_type)} are free",
                "ask for fewer, wait for a release, or name other sites",
            )
        epoch = self.epoch + 1
        lease = SiteLease(
            id=event.lease,
            tenant=event.tenant,
            state="held",
            grants=tuple(Grant(gpu.uuid, epoch) for gpu in chosen),
            deadline=now + event.ttl_s,
        )
        return self._change(lease, term=event.term, epoch=epoch)

    def _commit(self, event: Commit, now: float) -> GrantDecision:
        lease = self._find(event.lease)
        if lease.state == "active":
            return Decision(replies=(lease,))
        if lease.state == "held" and now >= lease.deadline:
            raise Refused(f"the hold of lease {lease.id} at {self.site} has lapsed", "ask for the lease again")
        return self._change(self._moved(lease, "commit", deadline=now + _guarded(event.duration_s)), term=event.term)

    def _abort(self, event: Abort) -> GrantDecision:
        lease = self._find(event.lease)
        if lease.state in life.FINAL:
            return Decision(replies=(lease,))
        return self._change(self._moved(lease, "abort", reason="given up by the hub"), term=event.term)

    def _renew(self, event: Renew, now: float) -> GrantDecision:
        if event.duration_s <= 0:
            raise UsageError(f"a renewal of {event.duration_s} s", "name a positive duration")
        lease = self._find(event.lease)
        if lease.state == "active" and now >= lease.deadline:
            raise Refused(f"lease {lease.id} at {self.site} has expired")
        return self._change(self._moved(lease, "renew", deadline=now + _guarded(event.duration_s)), term=event.term)

    def _release(self, event: Release) -> GrantDecision:
        lease = self._find(event.lease)
        if lease.state in life.FINAL or lease.state == "ending":
            return Decision(replies=(lease,))
        return self._change(self._moved(lease, "end", reason=event.reason or "released"), term=event.term, end=True)

    def _ended(self, lease: SiteLease) -> SiteLease:
        event = life.ENDINGS.get(lease.reason.partition(":")[0], "release")
        return self._moved(lease, event)

    def _tick(self, now: float) -> GrantDecision:
        entries: list[GrantEntry] = []
        effects: list[EndProcesses] = []
        for lease in self.leases.values():
            if now < lease.deadline:
                continue
            if lease.state == "held":
                changed = self._moved(lease, "abort", reason="hold lapsed")
            elif lease.state == "active":
                changed = self._moved(lease, "end", reason="expired")
                effects.append(EndProcesses(lease.id))
            else:
                continue
            entries.append(LeaseChanged(changed, self.epoch, self.term))
        return Decision(entries=entries, effects=effects, wake_at=self._wake(now))

    def _wake(self, now: float) -> float | None:
        deadlines = [x.deadline for x in self.leases.values() if x.state in ("held", "active") and x.deadline > now]
        return min(deadlines, default=None)


def _guarded(duration_s: float) -> float:
    return duration_s * (1 + GUARD_FRACTION) + GUARD_S
