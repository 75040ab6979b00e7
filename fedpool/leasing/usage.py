"""Who used which devices when, from a site's records alone: what a report is made of."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from fedpool.leasing import lease as life
from fedpool.ledger.records import Granted, LeaseDevices, LeaseSaid, PolicyObeyed, Record, RoundSaid
from fedpool.records import WHOLE_MILLI

USING = ("active", "ending")  # a hold is not yet use; devices of an ending lease are not yet free


class LeaseUse(msgspec.Struct):
    """What one tenant had under one lease at one site.

    Attributes:
        started_ms: when it became active here, or when its tenant took it over; milliseconds of Unix.
        ended_ms: when its devices were free again, or None while they are not.
        state: the latest.
        reason: why it ended, or "".
        devices: UUIDs of all devices it ever had.
        device_ms: whole devices times milliseconds within the time asked for.
        records: numbers of the records that say so.
        policy: digest of the site's policy when it began, "" where it had none.
    """

    lease: str
    tenant: str
    started_ms: int
    ended_ms: int | None = None
    state: str = "active"
    reason: str = ""
    devices: list[str] = []
    device_ms: int = 0
    records: list[int] = []
    policy: str = ""


class Outflow(msgspec.Struct):
    """What left a site in one federation, under one lease.

    Attributes:
        rounds: in which something was sent.
        bytes: that were sent.
        form: in which.
        cohort_min: fewest sites whose updates are in a sum that this site's shares unmasked; 0 where there is none yet.
        plan: hexadecimal SHA-256 of the plan.
        records: numbers of the records that say so.
    """

    run: str
    lease: str
    tenant: str
    plan: str
    rounds: int = 0
    bytes: int = 0
    form: str = ""
    cohort_min: int = 0
    records: list[int] = []


class _Held(msgspec.Struct):
    """A lease that lives: what it has now, since when that has been counted, and which records speak of it."""

    state: str
    milli: dict[str, int] = {}
    counted_ms: int = 0
    records: list[int] = []
    use: LeaseUse | None = None


class Usage:
    """Folds a site's records, in order.

    Args:
        since_ms: what was before is not counted, in milliseconds of Unix.
        until_ms: nor what comes later.
    """

    def __init__(self, since_ms: int, until_ms: int) -> None:
        self._since_ms = since_ms
        self._until_ms = until_ms
        self._held: dict[str, _Held] = {}
        self._uses: list[LeaseUse] = []
        self._policy = ""
        self._outflows: dict[tuple[str, str], Outflow] = {}

    def take(self, number: int, record: Record) -> None:
        """One more record."""
        match record:
            case LeaseDevices():
                held = self._held.get(record.lease)
                if held is not None:
                    held.records.append(number)
                    self._give(held, record.grants)
            case LeaseSaid():
                self._said(number, record)
            case PolicyObeyed():
                self._policy = record.digest
            case RoundSaid() if self._since_ms <= record.time < self._until_ms:
                self._left(number, record)

    def _left(self, number: int, said: RoundSaid) -> None:
        held = self._held.get(said.lease)
        tenant = held.use.tenant if held is not None and held.use is not None else ""
        found = self._outflows.setdefault((said.run, said.lease), Outflow(said.run, said.lease, tenant, said.plan))
        found.records.append(number)
        if said.event == "sent":
            found.rounds += 1
            found.bytes += said.bytes
            found.form = said.form
        elif not found.cohort_min or len(said.cohort) < found.cohort_min:
            found.cohort_min = len(said.cohort)

    def outflows(self) -> list[Outflow]:
        """What left the site within the time asked for, a federation and lease each."""
        return list(self._outflows.values())

    def _said(self, number: int, said: LeaseSaid) -> None:
        if said.event in ("hold", "carried"):
            self._held[said.lease] = _Held(said.state)
        held = self._held.get(said.lease)
        if held is None:
            return  # its beginning is in no record, which verification names
        self._count(held, said.time)
        held.records.append(number)
        held.state = said.state
        if said.grants is not None:
            held.milli = {}
            self._give(held, said.grants)
        use = held.use
        if said.state in USING and (use is None or use.tenant != said.tenant):
            if use is not None:
                use.ended_ms, use.state, use.reason = said.time, "transferred", f"to {said.tenant}"
            use = held.use = LeaseUse(said.lease, said.tenant, said.time, records=held.records, policy=self._policy)
            use.devices = list(held.milli)
            self._uses.append(use)
        if use is not None:
            use.state = said.state
            use.reason = said.reason or use.reason
            if said.state in life.FINAL:
                use.ended_ms = said.time
        if said.state in life.FINAL:
            del self._held[said.lease]

    def _give(self, held: _Held, grants: Iterable[Granted]) -> None:
        for group in grants:
            held.milli |= dict.fromkeys(group.devices, group.milli)
        if held.use is not None:
            held.use.devices = list(dict.fromkeys([*held.use.devices, *held.milli]))

    def _count(self, held: _Held, now_ms: int) -> None:
        """What it has had up to now."""
        if held.use is not None and held.state in USING:
            began, ended = max(held.counted_ms, self._since_ms), min(now_ms, self._until_ms)
            held.use.device_ms += max(0, ended - began) * sum(held.milli.values()) // WHOLE_MILLI
        held.counted_ms = now_ms

    def uses(self, now_ms: int) -> list[LeaseUse]:
        """All that fall into the time asked for, those that go on counted up to now."""
        for held in self._held.values():
            self._count(held, now_ms)
        return [
            use
            for use in self._uses
            if use.started_ms < self._until_ms and (use.ended_ms is None or use.ended_ms > self._since_ms)
        ]
