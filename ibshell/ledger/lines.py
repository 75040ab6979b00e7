"""A ledger's records as lines of a listing. Not every site that writes them is honest: what cannot be read is said to be so."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from fedpool.errors import IbshellError
from fedpool.identity import requests
from fedpool.ledger.records import (
    AnyRecord,
    DevicesSaid,
    Kept,
    LeaseDevices,
    LeaseSaid,
    LedgerSeam,
    LoggedIn,
    PolicyObeyed,
    ProgramSaid,
    Refusal,
    Requested,
    RosterObeyed,
    RoundSaid,
    decode,
    kind_of,
    time_of,
)
from fedpool.records import Signed
from ibshell import render


def line(site: str, number: int, data: bytes) -> dict[str, Any]:
    """A record as a line, with the whole of it beside (`said`)."""
    item: dict[str, Any] = {"id": f"{site}:{number}", "time": "-", "site": site, "record": number, "kind": "?"}
    item |= {"tenant": "", "lease": "", "gpus": None, "what": "", "said": {}}
    try:
        record = decode(data)
        item["said"] = json.loads(data)
        item["time"], item["kind"] = _stamp(time_of(data)), kind_of(data)
    except (IbshellError, ValueError) as error:
        item["what"] = f"cannot be read: {error}"
        return item
    if record is None:
        return item
    item["lease"], item["tenant"] = getattr(record, "lease", ""), getattr(record, "tenant", "")
    if isinstance(record, LeaseSaid | ProgramSaid | RoundSaid):
        item["kind"] = f"{item['kind']}.{record.event}"
    if isinstance(record, LeaseSaid | LeaseDevices):
        item["gpus"] = sum(len(group.devices) for group in record.grants or ()) or None
    if isinstance(record, Requested):
        item["what"], item["tenant"] = _request(record)
    else:
        item["what"] = _what(record)
    return item


def _stamp(time_ms: int) -> str:
    try:
        return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="milliseconds")[:-6] + "Z"
    except (OverflowError, OSError, ValueError):
        return str(time_ms)


def _request(record: Requested) -> tuple[str, str]:
    """What was asked by whom, and the tenant it concerns."""
    try:
        payload = requests.read(Signed(record.payload.encode(), b""))
    except IbshellError as error:
        return f"cannot be read: {error}", ""
    tenant = payload.principal.partition("/")[2]
    if payload.method.startswith("tenant.") and isinstance(payload.body, dict):
        tenant = str(payload.body.get("name", ""))
    return f"{payload.method} signed by {payload.principal}", tenant


def _what(record: AnyRecord) -> str:
    """The rest of it, in words."""
    match record:
        case LeaseSaid() if record.next_tenant:
            return f"to {record.next_tenant}"
        case LeaseSaid() if not record.reason and record.for_ms is not None:
            return f"for {render.cell('for_s', record.for_ms / 1000)}"
        case RoundSaid():
            bytes_and_form = f"{record.bytes} bytes, {record.form}"
            return f"round {record.round}: {record.event}, {bytes_and_form}, {len(record.cohort)} sites"
        case LoggedIn():
            return f"{record.who} with {record.software}"
        case DevicesSaid():
            return ", ".join(f"{len(one.devices)} {one.kind}" for one in record.kinds) or "none"
        case LedgerSeam():
            return f"repeats {record.kept} records"
        case Kept():
            return f"record {record.number} again"
        case PolicyObeyed():
            return record.digest[:16]
        case RosterObeyed():
            return f"{record.number} {record.digest[:16]}"
        case Refusal() if record.more:
            return f"{record.reason} (and {record.more} more before)"
        case _:
            return getattr(record, "reason", "") or getattr(record, "what", "")
