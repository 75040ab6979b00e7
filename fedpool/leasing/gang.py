"""The hub's side of a lease over several sites: all of them or none, as a machine without input or output.

Once the queue has placed it the hub asks every site for a hold, in parallel; when all have one it records the decision, then
commits each until it acknowledges. One refusal before the decision gives every hold up and the lease waits again (or is over,
if nobody waits for it); one after it (a hold that lapsed while the hub was away) releases the others. "Active" is said only when
every site has acknowledged, so nobody is ever told of part of a gang. Holds lapse by themselves, so a hub that never comes back
strands nothing; what was never decided is placed anew after a restart, what was decided is carried on.

Only decisions are entries. What a site has is the site's to say: its answers, its notices and what it reports after a
reconnection are one event, `Reported`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import msgspec

from fedpool.errors import IbshellError, NotFound, Recovering, Refused, StaleToken, StorageFailed, Unreachable
from fedpool.leasing import lease as life
from fedpool.leasing.grants import GUARD_FRACTION, GUARD_S
from fedpool.leasing.requests import Abort, Commit, Hold, LeaseEvent, Notify, Release, Resize, Transfer
from fedpool.records import Lease, Part, Shape, SiteLease
from fedpool.step import Decision

HOLD_TTL_S = 15.0
RETRY_S = 0.5
# What a site says when it may say something else in a moment: it is asked again.
PASSING = (Unreachable, Recovering, StorageFailed)


class Placed(msgspec.Struct, frozen=True):
    """The queue has found sites for it."""

    parts: tuple[Part, ...]
    attempt: int


class Reported(msgspec.Struct, frozen=True):
    """What a site says of its part: an answer, a notice, or its list after a reconnection (None: it has no such lease)."""

    site: str
    lease: SiteLease | None


class PartFailed(msgspec.Struct, frozen=True):
    """A site refused what it was asked, or did not answer."""

    site: str
    asked: LeaseEvent
    error: IbshellError


class EndAsked(msgspec.Struct, frozen=True):
    """Somebody wants the lease to end; the reason begins with the final state it leads to."""

    reason: str


class Unplaceable(msgspec.Struct, frozen=True):
    """The queue could not place it now; it waits on, or is over where it may not wait."""

    reason: str
    over: bool


class NoticeAsked(msgspec.Struct, frozen=True):
    """It is to end after a grace, for somebody else's sake."""

    reason: str
    grace_s: float


class ResizeAsked(msgspec.Struct, frozen=True):
    """It is to have so many devices at each of these sites.

    Attributes:
        gpus: {site: how many}.
        grace_s: how long the processes on those too many have.
        versions: {site: version of the lease there on which this rests}; filled in by the pool.
        most: how many it may grow to by itself from now on, 0 for as many as before.
    """

    gpus: Mapping[str, int]
    grace_s: float
    versions: Mapping[str, int] = {}
    most: int = 0


class Renewed(msgspec.Struct, frozen=True):
    """Every site has renewed it; counted from when they were asked."""

    duration_s: float
    asked_at: float


class Offered(msgspec.Struct, frozen=True):
    """Its holder offers it to another tenant, or takes the offer back ("")."""

    tenant: str


class Accepted(msgspec.Struct, frozen=True):
    """The other tenant takes the offer."""


class Unconfirmed(msgspec.Struct, frozen=True):
    """Its time is long over at sites that are silent: their own watchdogs have ended it."""

    sites: tuple[str, ...]


class Interrupted(msgspec.Struct, frozen=True):
    """The hub restarted."""


GangEvent: TypeAlias = (
    Placed
    | Reported
    | PartFailed
    | EndAsked
    | Unplaceable
    | NoticeAsked
    | ResizeAsked
    | Renewed
    | Offered
    | Accepted
    | Unconfirmed
    | Interrupted
)


class LeaseRecorded(msgspec.Struct, frozen=True, tag="lease.recorded"):
    """A decision about a lease: the whole record, so that the fold is an assignment."""

    lease: Lease


class Ask(msgspec.Struct, frozen=True):
    """Put this to a site, so many seconds from now; its answer is the next event."""

    lease: str
    site: str
    what: LeaseEvent
    after_s: float = 0.0


GangDecision: TypeAlias = Decision[LeaseRecorded, Lease, Ask]


class Gang:
    """One lease at the hub.

    Args:
        lease: as asked for, or as folded from the entries.
        term: the hub's.

    Attributes:
        lease: with what sites have said of it so far.
        recorded: as it was recorded last.
        placing: whether sites are being asked for holds now.
        failure: why it could not be placed the last time, or None.
        failures: how often sites have refused it since this hub began, although the hub thought they would not.
    """

    def __init__(self, lease: Lease, term: int) -> None:
        self.lease = self.recorded = lease
        self.term = term
        self.placing = False
        self.failure: IbshellError | None = None
        self.failures = 0

    def apply(self, entry: LeaseRecorded) -> None:
        """Fold one durable entry into the state."""
        self.lease = self.recorded = entry.lease
        if entry.lease.state not in ("requested", "queued"):
            self.placing = False

    def step(self, event: GangEvent, now: float) -> GangDecision:
        """Decide what follows from an event; see `fedpool.step`. The durable state changes only by `apply`.

        Raises:
            Refused: the lease's state does not allow it.
        """
        match event:
            case Placed():
                return self._placed(event)
            case Reported():
                return self._reported(event, now)
            case PartFailed():
                return self._failed(event, now)
            case EndAsked():
                return self._end_asked(event.reason, now)
            case Unplaceable():
                return self._unplaceable(event, now)
            case NoticeAsked():
                return self._notice_asked(event)
            case ResizeAsked():
                effects = self._resizes(event)
                if event.most in (0, self.lease.demand.most):
                    return Decision(effects=effects)
                demand = msgspec.structs.replace(self.lease.demand, gpus_max=event.most)
                return self._record(msgspec.structs.replace(self.lease, demand=demand), effects, reply=True)
            case Renewed():
                deadline = event.asked_at + event.duration_s
                moved = self._moved(self.lease, "renew", duration_s=event.duration_s, deadline=deadline)
                return self._record(moved, reply=True)
            case Offered():
                moved = self._moved(self.lease, "transfer", offered_to=event.tenant)
                return self._record(moved, reply=True)
            case Accepted():
                moved = self._moved(self.lease, "transfer", offered_to="", next_tenant=self.lease.offered_to)
                return self._record(moved, self._transfers(moved), reply=True)
            case Unconfirmed():
                return self._unconfirmed(event, now)
            case Interrupted():
                return Decision(effects=self._unfinished(self.lease))

    # --- shorthand

    def _record(self, lease: Lease, effects: tuple[Ask, ...] = (), *, reply: bool = False) -> GangDecision:
        return Decision(entries=(LeaseRecorded(lease),), replies=(lease,) if reply else (), effects=effects)

    def _moved(self, lease: Lease, event: str, **changes: object) -> Lease:
        state = life.after(lease.state, event)
        if state is None:
            raise Refused(
                f"lease {lease.id} is {lease.state}{f' ({lease.reason})' if lease.reason else ''}: it cannot {event}"
            )
        return msgspec.structs.replace(lease, state=state, **changes)

    def _with_part(self, site: str, **changes: object) -> Lease:
        parts = tuple(msgspec.structs.replace(p, **changes) if p.site == site else p for p in self.lease.parts)
        return msgspec.structs.replace(self.lease, parts=parts)

    def _part(self, site: str) -> Part | None:
        return next((part for part in self.lease.parts if part.site == site), None)

    def _ask(self, site: str, what: LeaseEvent, after_s: float = 0.0) -> Ask:
        return Ask(self.lease.id, site, what, after_s)

    def _releases(self, lease: Lease) -> tuple[Ask, ...]:
        what = Release(lease.id, self.term, lease.reason)
        return tuple(self._ask(part.site, what) for part in lease.parts if part.is_live)

    def _aborts(self, *, but: str = "") -> tuple[Ask, ...]:
        what = Abort(self.lease.id, self.term, self.lease.attempt)
        return tuple(self._ask(part.site, what) for part in self.lease.parts if part.site != but and part.is_live)

    def _transfers(self, lease: Lease) -> tuple[Ask, ...]:
        what = Transfer(lease.id, lease.next_tenant, self.term)
        return tuple(self._ask(part.site, what) for part in lease.parts if part.is_live)

    def _commit(self, lease: Lease) -> Commit:
        return Commit(lease.id, lease.duration_s, self.term, lease.attempt)

    def _unfinished(self, lease: Lease) -> tuple[Ask, ...]:
        """What the sites must still be asked, so that what was decided comes to its end."""
        match lease.state:
            case "held":
                return tuple(self._ask(part.site, self._commit(lease)) for part in lease.parts)
            case "ending":
                return self._releases(lease)
            case "active" if lease.next_tenant:
                return self._transfers(lease)
            case "active" if lease.notice:
                return tuple(self._ask(p.site, Notify(lease.id, 0.0, lease.notice, self.term)) for p in lease.parts)
            case _:
                return ()

    # --- placing

    def _placed(self, event: Placed) -> GangDecision:
        lease = self.lease
        if lease.state not in ("requested", "queued") or self.placing:
            raise Refused(f"lease {lease.id} is {lease.state} and cannot be placed")
        self.lease = lease = msgspec.structs.replace(lease, parts=event.parts, attempt=event.attempt)
        self.placing, self.failure = True, None
        return Decision(
            effects=tuple(
                self._ask(
                    part.site,
                    Hold(
                        lease=lease.id,
                        tenant=lease.tenant,
                        gpus=part.gpus,
                        ttl_s=HOLD_TTL_S,
                        term=self.term,
                        shape=_narrowed(lease, part),
                        duration_s=lease.duration_s,
                        attempt=event.attempt,
                    ),
                )
                for part in event.parts
            )
        )

    def _unplaceable(self, event: Unplaceable, now: float) -> GangDecision:
        if event.over:
            return self._record(self._moved(self.lease, "abort", reason=event.reason, ended=now), reply=True)
        if self.lease.state == "queued":
            return Decision()
        return self._record(self._moved(self.lease, "wait"), reply=True)

    def _give_up(self, error: IbshellError, but: str, now: float) -> GangDecision:
        """No site keeps its hold; the lease waits again."""
        asks = self._aborts(but=but)
        self.placing, self.failure, self.failures = False, error, self.failures + 1
        self.lease = msgspec.structs.replace(self.lease, parts=())
        # A site that knows of a later life of this lease will not have it again.
        if now >= self.lease.waits_until or isinstance(error, StaleToken):
            return self._record(self._moved(self.lease, "abort", reason=error.message, ended=now), asks, reply=True)
        if self.lease.state == "queued":
            return Decision(effects=asks)
        return self._record(self._moved(self.lease, "wait"), asks)

    # --- what sites say

    def _reported(self, event: Reported, now: float) -> GangDecision:
        part, report, lease = self._part(event.site), event.lease, self.lease
        if part is None or lease.state in life.FINAL or not part.is_live:
            return self._unwanted(event, part)
        if lease.state in ("requested", "queued"):
            return self._reported_placing(event, now)
        if report is None or report.state in life.FINAL:
            reason = f"failed: {event.site} does not know the lease" if report is None else report.reason
            return self._part_over(event.site, reason, now)
        if report.attempt != lease.attempt:
            return Decision()
        match lease.state, report.state:
            case "held", "held":
                return Decision(effects=(self._ask(event.site, self._commit(lease)),))
            case "held", "active":
                return self._committed(event.site, report, now)
            case "active", "active":
                return self._refreshed(event.site, report)
            case "ending", "held" | "active":
                return Decision(effects=(self._ask(event.site, Release(lease.id, self.term, lease.reason)),))
            case _:
                return Decision()

    def _unwanted(self, event: Reported, part: Part | None) -> GangDecision:
        """What a site still has of a lease that does not want it."""
        report = event.lease
        if report is None or not report.occupies or report.state == "ending":
            return Decision()
        if self.lease.state in ("requested", "queued", "held") and report.attempt > self.lease.attempt:
            return Decision()
        if report.state == "held":
            return Decision(effects=(self._ask(event.site, Abort(self.lease.id, self.term, report.attempt)),))
        return Decision(
            effects=(self._ask(event.site, Release(self.lease.id, self.term, self.lease.reason or "released")),)
        )

    def _reported_placing(self, event: Reported, now: float) -> GangDecision:
        report, lease = event.lease, self.lease
        if report is None or report.attempt != lease.attempt or report.state != "held":
            if report is not None and report.attempt == lease.attempt and report.state == "aborted":
                return self._give_up(Refused(f"{event.site}: {report.reason}"), event.site, now)
            return Decision()
        self.lease = lease = self._with_part(event.site, state="held", grants=report.grants)
        if any(part.state != "held" for part in lease.parts):
            return Decision()  # not a decision: nothing durable hangs on it
        moved = self._moved(lease, "hold", reason="")
        return self._record(moved, tuple(self._ask(part.site, self._commit(moved)) for part in moved.parts))

    def _committed(self, site: str, report: SiteLease, now: float) -> GangDecision:
        lease = self._with_part(site, state="active", grants=report.grants)
        if any(part.state != "active" for part in lease.parts):
            self.lease = lease
            return Decision()
        moved = self._moved(lease, "commit", started=now, deadline=now + lease.duration_s)
        return self._record(moved, reply=True)

    def _refreshed(self, site: str, report: SiteLease) -> GangDecision:
        """An active part may have grown, shrunk or changed hands."""
        part = self._part(site)
        assert part is not None
        lease = self.lease
        if lease.notice and not report.notice:
            return Decision(effects=(self._ask(site, Notify(lease.id, 0.0, lease.notice, self.term)),))
        grants = tuple(grant for grant in report.grants if grant.uuid not in report.leaving)
        changed = self._with_part(site, grants=report.grants, gpus=len(grants))
        if lease.next_tenant and report.tenant != lease.next_tenant:
            return Decision(
                effects=()
                if report.next_tenant
                else (self._ask(site, Transfer(lease.id, lease.next_tenant, self.term)),)
            )
        if lease.next_tenant:
            changed = self._with_part(site, grants=report.grants, gpus=len(grants), reason=f"to {report.tenant}")
            if all(part.reason == f"to {lease.next_tenant}" for part in changed.parts):
                parts = tuple(msgspec.structs.replace(part, reason="") for part in changed.parts)
                changed = msgspec.structs.replace(changed, parts=parts, tenant=lease.next_tenant, next_tenant="")
        if changed == lease:
            return Decision()
        return self._record(self._moved(changed, "resize"), reply=True)

    def _failed(self, event: PartFailed, now: float) -> GangDecision:
        lease, error, asked = self.lease, event.error, event.asked
        part = self._part(event.site)
        match asked:
            case Hold() if self.placing and asked.attempt == lease.attempt:
                # A site that did not answer may have the hold all the same: it is given up too.
                return self._give_up(error, event.site if not isinstance(error, Unreachable) else "", now)
            case Commit() if isinstance(error, PASSING) and lease.state == "held":
                return Decision(effects=(self._ask(event.site, asked, RETRY_S),))
            case Commit() if lease.state == "held" and part is not None:
                return self._part_over(event.site, f"failed: {error.message}", now)
            case Release() if isinstance(error, NotFound) and part is not None and part.is_live:
                return self._part_over(event.site, lease.reason, now)
            case Release() | Transfer() | Notify() | Resize() if isinstance(error, PASSING):
                wanted = lease.state == "ending" if isinstance(asked, Release) else lease.state == "active"
                return Decision(effects=(self._ask(event.site, asked, RETRY_S),) if wanted else ())
            case _:
                return Decision()

    def _part_over(self, site: str, reason: str, now: float) -> GangDecision:
        lease = self._with_part(site, state="ended", reason=reason)
        if self.lease.state == "ending":
            return self._settle(lease, (), now)
        # A gang without one of its sites is no gang: the rest is given back too.
        if reason.partition(":")[0] not in life.ENDINGS:
            reason = f"failed: {reason}"
        ending = self._moved(lease, "end", reason=reason, next_tenant="", offered_to="")
        return self._settle(ending, self._releases(ending), now)

    # --- ending

    def _end_asked(self, reason: str, now: float) -> GangDecision:
        lease = self.lease
        if lease.state in ("requested", "queued"):
            asks = self._aborts() if self.placing else ()
            self.placing = False
            bare = msgspec.structs.replace(lease, parts=())
            return self._record(self._moved(bare, "abort", reason=reason, ended=now), asks, reply=True)
        if lease.state == "ending":
            return Decision(effects=self._releases(lease))
        ending = self._moved(lease, "end", reason=reason, next_tenant="", offered_to="")
        return self._settle(ending, self._releases(ending), now)

    def _settle(self, lease: Lease, asks: tuple[Ask, ...], now: float) -> GangDecision:
        """Record an ending lease; it is over once no part is live."""
        if any(part.is_live for part in lease.parts):
            return self._record(lease, asks)
        event = life.ENDINGS.get(lease.reason.partition(":")[0], "release")
        return self._record(self._moved(lease, event, ended=now), asks, reply=True)

    def _unconfirmed(self, event: Unconfirmed, now: float) -> GangDecision:
        parts = tuple(
            msgspec.structs.replace(part, state="ended", reason="expired, unconfirmed")
            if part.site in event.sites
            else part
            for part in self.lease.parts
        )
        lease = msgspec.structs.replace(self.lease, parts=parts)
        if lease.state != "ending":
            lease = self._moved(lease, "end", reason="expired", next_tenant="", offered_to="")
        return self._settle(lease, self._releases(lease), now)

    def _notice_asked(self, event: NoticeAsked) -> GangDecision:
        if self.lease.notice:
            return Decision()
        moved = self._moved(self.lease, "notify", notice=event.reason)
        asks = tuple(
            self._ask(part.site, Notify(moved.id, event.grace_s, event.reason, self.term)) for part in moved.parts
        )
        return self._record(moved, asks)

    def _resizes(self, event: ResizeAsked) -> tuple[Ask, ...]:
        if self.lease.state != "active" or self.lease.notice:
            raise Refused(f"lease {self.lease.id} is {self.lease.notice or self.lease.state}: it cannot be resized")
        return tuple(
            self._ask(site, Resize(self.lease.id, gpus, event.grace_s, self.term, event.versions[site]))
            for site, gpus in event.gpus.items()
        )


def surely_over(lease: Lease) -> float:
    """When a lease's time is over at every site, whatever they say: the hub's estimate with the sites' guard, twice."""
    return lease.deadline + 2 * (lease.duration_s * GUARD_FRACTION + GUARD_S)


def _narrowed(lease: Lease, part: Part) -> Shape:
    """The shape asked for at one site: of the kind that was chosen for the whole gang."""
    shape = lease.demand.shape
    if part.devices:
        return msgspec.structs.replace(shape, devices=part.devices)
    return msgspec.structs.replace(shape, kinds=(part.kind,))
