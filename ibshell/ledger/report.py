"""A report of who used which GPUs when, from the sites' ledgers, as Markdown, HTML or JSON.

Every line names the records it rests on; the checkpoints at the end say of which ledgers, so `ibshell ledger prove` and `verify`
can be held against it.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from fedpool.leasing.usage import LeaseUse, Outflow
from ibshell.render import cell

FORMS = ("markdown", "html", "json")
HOUR_MS = 3_600_000
COLUMNS = ("tenant", "lease", "site", "gpus", "from", "until", "gpu_hours", "ended", "policy", "records")
LEFT = ("tenant", "run", "site", "rounds", "bytes", "form", "cohort_min", "plan", "records")


def stamp(time_ms: int | None) -> str:
    """Milliseconds of Unix as ISO 8601, whole seconds; "" for none."""
    if time_ms is None:
        return ""
    return datetime.fromtimestamp(time_ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def rows(uses: Mapping[str, Iterable[LeaseUse]], tenant: str) -> list[dict[str, Any]]:
    """Lines of the report, by time.

    Args:
        uses: {site: what was used there}.
        tenant: only this one's, or "" for all.
    """
    found = [
        {
            "tenant": use.tenant,
            "lease": use.lease,
            "site": site,
            "gpus": len(use.devices),
            "from": stamp(use.started_ms),
            "until": stamp(use.ended_ms),
            "gpu_hours": round(use.device_ms / HOUR_MS, 4),
            "ended": use.state if use.ended_ms is not None else "",
            "reason": use.reason,
            "devices": use.devices,
            "policy": use.policy[:16],
            "records": use.records,
        }
        for site, of_site in uses.items()
        for use in of_site
        if not tenant or use.tenant == tenant
    ]
    return sorted(found, key=lambda row: (row["from"], row["lease"], row["site"]))


def outflows(found: Mapping[str, Iterable[Outflow]], tenant: str) -> list[dict[str, Any]]:
    """What left which site in which federation, in what form.

    Args:
        found: {site: what left it}.
        tenant: only this one's, or "" for all.
    """
    return [
        {"site": site, **msgspec.to_builtins(one), "plan": one.plan[:16]}
        for site, of_site in sorted(found.items())
        for one in of_site
        if not tenant or one.tenant == tenant
    ]


def totals(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """GPU hours and leases by tenant and site."""
    sums: dict[tuple[str, str], dict[str, Any]] = {}
    for line in lines:
        key = (line["tenant"], line["site"])
        found = sums.setdefault(key, {"tenant": key[0], "site": key[1], "leases": 0, "gpu_hours": 0.0})
        found["leases"] += 1
        found["gpu_hours"] = round(found["gpu_hours"] + line["gpu_hours"], 4)
    return [sums[key] for key in sorted(sums)]


def document(
    title: str,
    lines: Sequence[Mapping[str, Any]],
    left: Sequence[Mapping[str, Any]],
    ledgers: Sequence[Mapping[str, Any]],
    form: str,
) -> str:
    """The report.

    Args:
        title: its heading.
        lines: from `rows`.
        left: from `outflows`.
        ledgers: of each site `site`, `records`, `root`, `key`, `checkpoint` and `missing`.
        form: markdown, html or json.
    """
    if form == "json":
        found = {"title": title, "uses": lines, "totals": totals(lines), "federations": left, "ledgers": ledgers}
        return json.dumps(found, indent=2) + "\n"
    parts = [
        ("Totals", _table(("tenant", "site", "leases", "gpu_hours"), totals(lines))),
        ("Leases", _table(COLUMNS, lines)),
        ("Federations: what left the sites", _table(LEFT, left)),
        ("Ledgers", _table(("site", "records", "root", "key", "missing"), ledgers)),
    ]
    return _markdown(title, parts) if form == "markdown" else _html(title, parts)


def _table(columns: Sequence[str], items: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    return [
        [column.replace("_", " ") for column in columns],
        *([_said(column, item.get(column)) for column in columns] for item in items),
    ]


def _said(column: str, value: Any) -> str:
    if column == "records" and isinstance(value, list):
        return f"{value[0]}–{value[-1]}" if value else "-"
    return cell(column, value)


def _markdown(title: str, parts: Sequence[tuple[str, list[list[str]]]]) -> str:
    out = [f"# {_plain(title)}"]
    for heading, table in parts:
        out += ["", f"## {heading}", ""]
        head, *body = ["| " + " | ".join(_plain(text) for text in row) + " |" for row in table]
        out += [head, "|" + " --- |" * len(table[0]), *body]
    return "\n".join(out) + "\n"


def _plain(text: str) -> str:
    """Text that is only text in Markdown, whoever wrote it."""
    return "".join(f"\\{c}" if c in "\\`*_{}[]<>#|!~" else c for c in text)


def _html(title: str, parts: Sequence[tuple[str, list[list[str]]]]) -> str:
    out = [
        '<!doctype html><html lang="en"><meta charset="utf-8">',
        f"<title>{html.escape(title)}</title>",
        "<style>body{font:15px/1.5 sans-serif;margin:2em;max-width:80em}table{border-collapse:collapse}"
        "td,th{padding:.2em .8em;border-bottom:1px solid #ccc;text-align:left}</style>",
        f"<h1>{html.escape(title)}</h1>",
    ]
    for heading, table in parts:
        out.append(f"<h2>{heading}</h2><table>")
        for number, row in enumerate(table):
            mark = "td" if number else "th"
            out.append("<tr>" + "".join(f"<{mark}>{html.escape(text)}</{mark}>" for text in row) + "</tr>")
        out.append("</table>")
    return "\n".join([*out, "</html>"]) + "\n"
