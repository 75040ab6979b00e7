"""Listings and records as table, wide, json, ndjson, yaml, csv or name. Snapshot in, text out.

On a terminal a listing is a table; in a pipe it is tab-separated lines with a heading; JSON only when asked for.
"""

import csv
import io
import json
import os
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from fedpool.errors import UsageError
from fedpool.units import format_duration, format_memory

FORMATS = ("table", "wide", "json", "ndjson", "yaml", "csv", "name")


class Column(msgspec.Struct, frozen=True):
    """One column: its heading, the item's key, whether it only shows with `-o wide`."""

    heading: str
    key: str
    wide: bool = False


def cell(key: str, value: Any) -> str:
    """One value as people read it; the key's unit decides."""
    if value is None or value == "":
        return "-"
    if key.endswith("_s") and isinstance(value, int | float):
        return format_duration(value)
    if key == "memory_bytes":
        return format_memory(value)
    if key == "used_milli":
        return f"{value / 10:g} %" if value else "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return " ".join(f"{k}={cell(k, v)}" for k, v in value.items()) or "-"
    if isinstance(value, list | tuple):
        return ",".join(str(v) for v in value) or "-"
    # Names come from other institutions: nothing of theirs may move the cursor.
    return "".join(c if c.isprintable() else "?" for c in str(value))


def width(text: str) -> int:
    """Terminal cells a text takes."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def table(columns: Sequence[Column], items: Sequence[Mapping[str, Any]], on_terminal: bool) -> str:
    """Aligned columns on a terminal, tab-separated lines elsewhere."""
    rows = [[c.heading for c in columns]]
    rows += [[cell(c.key, item.get(c.key)) for c in columns] for item in items]
    if not on_terminal:
        return "".join("\t".join(row) + "\n" for row in rows)
    widths = [max(width(row[i]) for row in rows) for i in range(len(columns))]
    lines = []
    for row in rows:
        padded = [text + " " * (size - width(text)) for text, size in zip(row, widths, strict=True)]
        lines.append("  ".join(padded).rstrip() + "\n")
    return "".join(lines)


def listing(
    answer: Mapping[str, Any], columns: Sequence[Column], name_key: str, form: str | None, on_terminal: bool
) -> str:
    """A listing in the form asked for.

    Args:
        answer: `{"items": …, "errors": …, "as_of": …}`.
        columns: for table, wide and csv.
        name_key: the item's key that `-o name` prints.
        form: one of FORMATS, or None.
        on_terminal: whether stdout is one.

    Raises:
        UsageError: no such form.
    """
    items = answer["items"]
    shown = [c for c in columns if form == "wide" or not c.wide]
    match form:
        case None | "table" | "wide":
            return table(shown, items, on_terminal)
        case "json":
            return json.dumps(answer, indent=2) + "\n"
        case "ndjson":
            return "".join(json.dumps(item) + "\n" for item in items)
        case "yaml":
            return yaml(answer)
        case "csv":
            out = io.StringIO()
            writer = csv.writer(out, lineterminator="\n")
            writer.writerow([c.key for c in columns])
            writer.writerows([_scalar(item.get(c.key)) for c in columns] for item in items)
            return out.getvalue()
        case "name":
            return "".join(f"{item[name_key]}\n" for item in items)
        case _:
            raise UsageError(f"no output form {form!r}", f"known: {', '.join(FORMATS)}")


def record(item: Mapping[str, Any], form: str | None, name_key: str = "id") -> str:
    """One object in the form asked for: lines of `key: value` where none is."""
    match form:
        case None | "table" | "wide":
            keys = max(len(key) for key in item)
            return "".join(f"{key + ':':{keys + 1}} {cell(key, value)}\n" for key, value in item.items())
        case "json":
            return json.dumps(item, indent=2) + "\n"
        case "ndjson":
            return json.dumps(item) + "\n"
        case "yaml":
            return yaml(item)
        case "csv":
            out = io.StringIO()
            writer = csv.writer(out, lineterminator="\n")
            writer.writerow(item)
            writer.writerow([_scalar(value) for value in item.values()])
            return out.getvalue()
        case "name":
            return f"{item[name_key]}\n"
        case _:
            raise UsageError(f"no output form {form!r}", f"known: {', '.join(FORMATS)}")


def _scalar(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, dict | list) else value


def yaml(value: Any, indent: int = 0) -> str:
    """YAML of plain data; every text is quoted as JSON, which YAML reads alike."""
    pad = "  " * indent
    if isinstance(value, Mapping):
        if not value:
            return f"{pad}{{}}\n"
        return "".join(
            f"{pad}{key}: {json.dumps(v)}\n"
            if not isinstance(v, dict | list) or not v
            else f"{pad}{key}:\n{yaml(v, indent + 1)}"
            for key, v in value.items()
        )
    if isinstance(value, list):
        return "".join(
            f"{pad}- {json.dumps(v)}\n" if not isinstance(v, dict | list) or not v else f"{pad}-\n{yaml(v, indent + 1)}"
            for v in value
        )
    return f"{pad}{json.dumps(value)}\n"


def write(text: str) -> None:
    """Print a result; a reader that has gone is no error."""
    from ibshell.diagnostics import quiet_pipe

    try:
        encoding = sys.stdout.encoding or "ascii"
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        quiet_pipe()


def on_terminal() -> bool:
    """Whether stdout is a terminal."""
    return os.isatty(sys.stdout.fileno()) if hasattr(sys.stdout, "fileno") else False
