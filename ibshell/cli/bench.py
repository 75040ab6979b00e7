"""`ibshell bench`: the project's own measurements on this machine."""

from __future__ import annotations

import importlib
from typing import Annotated

import msgspec
import typer

from fedpool.errors import UsageError
from ibshell import render
from ibshell.cli import options
from ibshell.render import Column

app = typer.Typer()

BENCHES = ("secagg", "rounds", "lease", "planner", "ledger", "start")
COLUMNS = [
    Column("CASE", "case"),
    Column("VALUE", "value"),
    Column("UNIT", "unit"),
    Column("PEER", "peer"),
    Column("PEER_VALUE", "peer_value"),
    Column("RATIO", "ratio"),
    Column("LIMIT", "limit"),
    Column("LIMIT_VALUE", "limit_value"),
]


@app.command()
def bench(
    names: Annotated[list[str] | None, typer.Argument(help=f"Which: {', '.join(BENCHES)} (default: all).")] = None,
    output: options.Output = None,
) -> None:
    """Measure on this machine, beside the peers and the physical limit in the same run.

    Examples: ibshell bench | ibshell bench secagg -o json
    """
    items = []
    for name in names or BENCHES:
        if name not in BENCHES:
            raise UsageError(f"no bench {name!r}", f"known: {', '.join(BENCHES)}")
        items += [
            msgspec.to_builtins(figure) for figure in importlib.import_module(f"ibshell.measure.{name}").measure()
        ]
    answer = {"items": items, "errors": [], "as_of": {}}
    render.write(render.listing(answer, COLUMNS, "case", output, render.on_terminal()))
