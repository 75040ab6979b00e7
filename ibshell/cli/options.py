"""Options that many commands share, the connection they all use, and the one way a listing is printed."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from fedpool.client.connection import Connection, connect
from fedpool.errors import NotFound, Refused, UsageError
from fedpool.wire.messages import Listing, Nothing
from ibshell import contexts, diagnostics, render, settings
from ibshell.pool import LocalPool

Output = Annotated[
    str | None, typer.Option("-o", "--output", help="table, wide, json, ndjson, yaml, csv or name.", metavar="FORM")
]
Strict = Annotated[bool, typer.Option("--strict", help="Fail when a site is missing from the answer.")]
Watch = Annotated[bool, typer.Option("--watch", "-w", help="Go on showing it until Ctrl-C.")]
PARTIAL = 6
WATCH_S = 1.0
PASSING = ("since_s", "seen", "device_hours")  # what changes by itself as time passes


def hub() -> Connection:
    """A channel to the hub of the chosen pool.

    IBSHELL_POOL is the name of a pool on this machine or of one that was joined, `unix:///path/of/hub.sock`, or `ssh://HOST:PORT`.

    Raises:
        Unreachable: it does not answer.
    """
    name = settings.pool_name()
    if name.startswith("unix://"):
        return connect(Path(name.removeprefix("unix://")))
    if not name.startswith("ssh://"):
        pool = LocalPool(name)
        joined = contexts.joined_directory(name).exists()
        return contexts.connect(name) if joined and not pool.has_hub else pool.connect()
    from fedpool.client.remote import connect_ssh
    from fedpool.identity.keys import parse_public

    line = os.environ.get("IBSHELL_HUB_KEY", "")
    if not line:
        raise UsageError(
            f"the key of the hub at {name} is not known",
            "set IBSHELL_HUB_KEY to the line its operator gave you: ssh-ed25519 AAAA…",
        )
    key = Path(os.environ.get("IBSHELL_KEY") or settings.config_directory() / "identity")
    return connect_ssh(name.removeprefix("ssh://"), parse_public(line, "IBSHELL_HUB_KEY"), key)


def ask_listing(method: str) -> dict[str, Any]:
    """A listing from the hub, as plain data."""
    with hub() as connection:
        return as_data(connection.call(method, Nothing(), Listing))


def as_data(value: object) -> dict[str, Any]:
    """A Struct as plain data."""
    data = msgspec.to_builtins(value)
    assert isinstance(data, dict)
    return data


def show_listing(
    ask: Callable[[], dict[str, Any]],
    columns: Sequence[render.Column],
    name_key: str,
    form: str | None,
    strict: bool,
    watch: bool,
) -> None:
    """Print a listing, and say on stderr what is missing from it; or go on showing it until Ctrl-C."""
    if watch:
        _watch(ask, columns, name_key, form)
    answer = ask()
    render.write(render.listing(answer, columns, name_key, form, render.on_terminal()))
    if form not in ("json", "yaml"):
        for error in answer["errors"]:
            diagnostics.say(f"missing: {error['site']}: {error['message']}")
    if strict and answer["errors"]:
        raise typer.Exit(PARTIAL)


def pick(answer: dict[str, Any], key: str, wanted: str, noun: str) -> dict[str, Any]:
    """The item whose key is `wanted`.

    Raises:
        NotFound: none; the nearest name is suggested.
    """
    import difflib

    names = [str(item[key]) for item in answer["items"]]
    for item in answer["items"]:
        if item[key] == wanted:
            found: dict[str, Any] = item
            return found
    near = difflib.get_close_matches(wanted, names, 1)
    hint = f"did you mean {near[0]}?" if near else f"ibshell {noun} list shows them"
    raise NotFound(f"no {noun} {wanted!r}", hint)


def confirm(what: str, yes: bool) -> None:
    """Ask on a terminal before something is destroyed; refuse elsewhere unless `yes`.

    Raises:
        Refused: it is not wanted, or nobody can be asked.
    """
    if yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise Refused(f"not asked for: {what}", "say --yes")
    print(f"{what}? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise Refused(f"not done: {what}")


def _watch(ask: Callable[[], dict[str, Any]], columns: Sequence[Any], name_key: str, output: str | None) -> None:
    """Show a listing again and again: in place on a terminal, only what changed with `-o ndjson`."""
    if output not in (None, "table", "wide", "ndjson"):
        raise UsageError(f"--watch with -o {output}", "it shows a table, or changes with -o ndjson")
    before: dict[str, Any] = {}
    shown = ""
    while True:
        answer = ask()
        if output == "ndjson":
            now = {item[name_key]: item for item in answer["items"]}
            changed = [item for name, item in now.items() if _lasting(item) != _lasting(before.get(name, {}))]
            gone = [{name_key: name, "state": "gone"} for name in before if name not in now]
            for item in (*changed, *gone):
                render.write(msgspec.json.encode(item).decode() + "\n")
            before = now
        else:
            text = render.listing(answer, columns, name_key, output, render.on_terminal())
            if render.on_terminal():
                render.write(f"\x1b[H\x1b[2J{text}")
            elif text != shown:
                render.write(text)
            shown = text
        sys.stdout.flush()
        time.sleep(WATCH_S)


def _lasting(item: Mapping[str, Any]) -> dict[str, Any]:
    """Without what changes by itself as time passes."""
    return {key: value for key, value in item.items() if not key.endswith("_in_s") and key not in PASSING}
