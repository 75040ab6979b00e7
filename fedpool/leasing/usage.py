"""Who used which devices when, from a site's records alone: what a report is made of."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from fedpool.leasing import lease as life
from fedpool.ledger.records import Granted, LeaseDevices, LeaseSaid, Record
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
            use = held.use = LeaseUse(said.lease, said.tenant, said.time, records=held.records)
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
