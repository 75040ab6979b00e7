"""What of a site's records is still in force: what a seam repeats, so that the records before it need not be kept."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator

from fedpool.leasing import lease as life
from fedpool.leasing.recorded import CARRIED
from fedpool.ledger.records import (
    AnyRecord,
    Cordoned,
    DevicesSaid,
    Kept,
    LeaseDevices,
    LeaseSaid,
    LedgerSeam,
    PolicyObeyed,
    ProgramSaid,
    Requested,
    RosterObeyed,
    SiteStarted,
    Uncordoned,
    decode,
)
from fedpool.ledger.retention import kept, text_of

_Said = tuple[int, bytes]


class InForce:
    """Follows a site's records and keeps those that still say something.

    Args:
        relied_on: numbers of the seams that may be, None for all.
    """

    def __init__(self, relied_on: Collection[int] | None = None) -> None:
        self._relied_on = relied_on
        self._token = self._term = 0
        self._to_come = 0
        self._forget()

    def _forget(self) -> None:
        self._latest: dict[str, list[_Said]] = {}  # {kind: the latest, with those that continue it}
        self._leases: dict[str, list[_Said]] = {}
        self._tenants: dict[str, _Said] = {}
        self._cordons: dict[str, list[_Said]] = {}
        self._asked: list[_Said] = []  # a request about a cordon that has not been obeyed yet

    def take(self, number: int, data: bytes) -> None:
        """One more record, or one that a seam repeats."""
        record = decode(data)
        if isinstance(record, LedgerSeam):
            if self._relied_on is not None and number not in self._relied_on:
                return
            self._forget()  # what follows says everything again
            self._to_come = record.kept
            self._token, self._term = max(self._token, record.token), max(self._term, record.term)
        elif isinstance(record, Kept):
            if self._to_come:
                self._to_come -= 1
                text = text_of(record)
                self._note(record.number, text, decode(text))
        else:
            self._note(number, data, record)

    def _note(self, number: int, data: bytes, record: AnyRecord | None) -> None:
        said = (number, data)
        self._term = max(self._term, getattr(record, "term", 0))
        for group in getattr(record, "grants", None) or ():
            self._token = max(self._token, group.token)
        match record:
            case SiteStarted():
                self._token = max(self._token, record.epoch)
                self._latest["SiteStarted"] = [said]
            case PolicyObeyed() | RosterObeyed():
                self._latest[type(record).__name__] = [said]
            case DevicesSaid():
                before = self._latest.get("DevicesSaid", []) if record.continued else []
                self._latest["DevicesSaid"] = [*before, said]
            case Requested():
                self._request(record, said)
            case Cordoned():
                self._cordons[record.what] = [*self._asked, said]
                self._asked = []
            case Uncordoned():
                self._cordons.pop(record.what, None)
                self._asked = []
            case LeaseSaid():
                before = self._leases.get(record.lease, [])
                if record.event == CARRIED:
                    before = []
                self._leases[record.lease] = [*before, said]
                if record.state in life.FINAL:
                    del self._leases[record.lease]
            case LeaseDevices():
                self._leases.setdefault(record.lease, []).append(said)
            case ProgramSaid() if record.lease in self._leases:
                self._leases[record.lease].append(said)

    def _request(self, record: Requested, said: _Said) -> None:
        payload = json.loads(record.payload)
        method = payload["method"]
        if method.startswith("tenant."):
            self._tenants[payload["body"]["name"]] = said
        elif method.startswith("site."):
            self._asked = [said]
        else:
            self._leases.setdefault(record.lease, []).append(said)

    def seam(self) -> Iterator[LedgerSeam | Kept]:
        """A seam for what has been taken so far."""
        groups = [*self._latest.values(), *self._leases.values(), *self._cordons.values()]
        found = sorted({*self._tenants.values(), *(said for group in groups for said in group)})
        yield LedgerSeam(kept=len(found), token=self._token, term=self._term)
        for number, data in found:
            yield kept(number, data)
