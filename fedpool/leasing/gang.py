"""The hub's side of a lease over several sites: all of them or none, as a machine without input or output.

The hub asks every site for a hold, in parallel; when all have one it records the decision, then commits each until it
acknowledges. One refusal before the decision aborts; one after it (a hold that lapsed while the hub was away) releases the
others. "Active" is said only when every site has acknowledged, so nobody is ever told of part of a gang. What was never
decided is aborted after a restart; what was decided is carried on. Holds lapse by themselves, so a hub that never comes back
strands nothing.

Only decisions are entries. What a site has is the site's to say: after a restart or a reconnection `site_says` compares.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from fedpool.errors import Refused
from fedpool.leasing import lease as life
from fedpool.records import Grant, Lease, SiteLease
from fedpool.step import Decision

HOLD_TTL_S = 15.0


class PartHeld(msgspec.Struct, frozen=True):
    """A site holds its devices."""

    site: str
    grants: tuple[Grant, ...]


class PartRefused(msgspec.Struct, frozen=True):
    """A site refused a hold or a commit, or did not answer the hold."""

    site: str
    reason: str


class PartCommitted(msgspec.Struct, frozen=True):
    """A site acknowledged the commit."""

    site: str


class PartEnded(msgspec.Struct, frozen=True):
    """A site has freed its devices, for this reason (a final state, perhaps with words)."""

    site: str
    reason: str


class EndAsked(msgspec.Struct, frozen=True):
    """Somebody wants the lease to end; the reason begins with the final state it leads to."""

    reason: str


class Interrupted(msgspec.Struct, frozen=True):
    """The hub restarted."""


GangEvent: TypeAlias = PartHeld | PartRefused | PartCommitted | PartEnded | EndAsked | Interrupted


class LeaseRecorded(msgspec.Struct, frozen=True, tag="lease.recorded"):
    """A decision about a lease: the whole record, so that the fold is an assignment."""

    lease: Lease


class Ask(msgspec.Struct, frozen=True):
    """Ask a site to `hold`, `commit`, `abort` or `release`; its answer is the next event."""

    site: str
    verb: str


GangDecision: TypeAlias = Decision[LeaseRecorded, Lease, Ask]


class Gang:
    """One lease at the hub.

    Args:
        lease: as requested, or as folded from the entries.
    """

    def __init__(self, lease: Lease) -> None:
        self.lease = lease

    def apply(self, entry: LeaseRecorded) -> None:
        """Fold one durable entry into the state."""
        self.lease = entry.lease

    def start(self) -> GangDecision:
        """Record the request, then ask every site for a hold."""
        return self._record(self.lease, [Ask(part.site, "hold") for part in self.lease.parts])

    def step(self, event: GangEvent, now: float) -> GangDecision:
        """Decide what follows from an event; see `fedpool.step`. The state changes only by `apply`.

        Raises:
            Refused: the lease is already over.
        """
        match event:
            case PartHeld():
                return self._held(event)
            case PartRefused():
                return self._refused(event)
            case PartCommitted():
                return self._committed(event, now)
            case PartEnded():
                return self._ended(event)
            case EndAsked():
                return self._end_asked(event)
            case Interrupted():
                return self._interrupted()

    def _record(self, lease: Lease, effects: list[Ask] | None = None, *, reply: bool = False) -> GangDecision:
        return Decision(
            entries=(LeaseRecorded(lease),), replies=(lease,) if reply else (), effects=tuple(effects or ())
        )

    def _with_part(self, site: str, **changes: object) -> Lease:
        parts = tuple(
            msgspec.structs.replace(part, **changes) if part.site == site else part for part in self.lease.parts
        )
        return msgspec.structs.replace(self.lease, parts=parts)

    def _moved(self, lease: Lease, event: str, **changes: object) -> Lease:
        state = life.after(lease.state, event)
        if state is None:
            raise Refused(f"lease {lease.id} is {lease.state}: it cannot {event}")
        return msgspec.structs.replace(lease, state=state, **changes)

    def _asks(self, verb: str, lease: Lease, states: tuple[str, ...]) -> list[Ask]:
        return [Ask(part.site, verb) for part in lease.parts if part.state in states]

    def _held(self, event: PartHeld) -> GangDecision:
        if self.lease.state != "requested":
            # The gang was given up while this answer was on its way.
            return Decision(effects=(Ask(event.site, "abort"),) if self.lease.state == "aborted" else ())
        lease = self._with_part(event.site, state="held", grants=event.grants)
        if any(part.state != "held" for part in lease.parts):
            self.lease = lease  # not a decision: nothing durable hangs on it
            return Decision()
        return self._record(self._moved(lease, "hold"), self._asks("commit", lease, ("held",)))

    def _refused(self, event: PartRefused) -> GangDecision:
        lease = self._with_part(event.site, state="refused", reason=event.reason)
        if self.lease.state == "requested":
            aborted = self._moved(lease, "abort", reason=event.reason)
            return self._record(aborted, self._asks("abort", lease, ("requested", "held")), reply=True)
        if self.lease.state == "held":
            ending = self._moved(lease, "end", reason=f"failed: {event.reason}")
            return self._settle(ending, self._asks("release", lease, ("held", "active")))
        if self.lease.state == "ending":
            return self._settle(lease, [])
        return Decision()

    def _committed(self, event: PartCommitted, now: float) -> GangDecision:
        if self.lease.state == "ending":
            return Decision(effects=(Ask(event.site, "release"),))
        if self.lease.state != "held":
            return Decision()
        lease = self._with_part(event.site, state="active")
        if any(part.state != "active" for part in lease.parts):
            self.lease = lease
            return Decision()
        return self._record(self._moved(lease, "commit", deadline=now + lease.duration_s), reply=True)

    def _ended(self, event: PartEnded) -> GangDecision:
        if self.lease.state in life.FINAL:
            return Decision()
        lease = self._with_part(event.site, state="ended", reason=event.reason)
        if self.lease.state in ("held", "active"):
            # A gang without one of its sites is no gang: the rest is given back too.
            reason = event.reason if event.reason.partition(":")[0] in life.ENDINGS else f"failed: {event.reason}"
            return self._settle(
                self._moved(lease, "end", reason=reason), self._asks("release", lease, ("held", "active"))
            )
        if self.lease.state == "ending":
            return self._settle(lease, [])
        self.lease = lease
        return Decision()

    def _end_asked(self, event: EndAsked) -> GangDecision:
        if self.lease.state in ("requested", "queued"):
            aborted = self._moved(self.lease, "abort", reason=event.reason)
            return self._record(aborted, self._asks("abort", self.lease, ("requested", "held")), reply=True)
        if self.lease.state == "ending":
            return Decision(effects=tuple(self._asks("release", self.lease, ("held", "active"))))
        ending = self._moved(self.lease, "end", reason=event.reason)
        return self._settle(ending, self._asks("release", ending, ("held", "active")))

    def _settle(self, lease: Lease, asks: list[Ask]) -> GangDecision:
        """Record an ending lease; it is over once no part is live."""
        if any(part.state in ("requested", "held", "active") for part in lease.parts):
            return self._record(lease, asks)
        event = life.ENDINGS.get(lease.reason.partition(":")[0], "release")
        return self._record(self._moved(lease, event), asks, reply=True)

    def _interrupted(self) -> GangDecision:
        match self.lease.state:
            case "requested" | "queued":
                return self._end_asked(EndAsked("the hub restarted before it had decided"))
            case "held":
                return Decision(effects=tuple(Ask(part.site, "commit") for part in self.lease.parts))
            case "ending":
                return Decision(effects=tuple(self._asks("release", self.lease, ("held", "active"))))
            case _:
                return Decision()


def site_says(gang: Lease, site: str, reported: SiteLease | None) -> GangEvent | Ask | None:
    """Compare a gang with what a site reports after a reconnection.

    Args:
        gang: the hub's record.
        site: which site speaks.
        reported: its record of that lease, or None if it has none.

    Returns:
        The event to step the gang with, the question to ask again, or None where both agree.
    """
    part = next(part for part in gang.parts if part.site == site)
    state = "none" if reported is None else reported.state
    if gang.state in life.FINAL:
        if reported is None or not reported.occupies:
            return None
        return Ask(site, "abort" if reported.state == "held" else "release")
    if gang.state == "ending":
        if part.state not in ("requested", "held", "active"):
            return None
        if reported is None or reported.state in life.FINAL:
            return PartEnded(site, gang.reason)
        return Ask(site, "release")
    if gang.state == "held" and state == "held":
        return Ask(site, "commit")
    if gang.state == "held" and state == "active":
        return PartCommitted(site)
    if gang.state in ("held", "active") and reported is not None and reported.state in life.FINAL:
        return PartEnded(site, reported.reason if reported.reason in life.ENDINGS else f"failed: {reported.reason}")
    if gang.state in ("held", "active") and reported is None:
        return PartEnded(site, f"failed: {site} does not know the lease")
    return None
