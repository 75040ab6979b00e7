"""`ibshell site`: the pool's sites."""

from typing import Annotated

import typer

from ibshell import render
from ibshell.cli import options
from ibshell.render import Column

app = typer.Typer(no_args_is_help=True, help="The sites of the pool.")

COLUMNS = [
    Column("SITE", "name"),
    Column("STATE", "state"),
    Column("NODES", "nodes"),
    Column("GPUS", "gpus"),
    Column("FREE", "gpus_free"),
    Column("TYPES", "types"),
    Column("SINCE", "since_s"),
    Column("MODE", "mode"),
    Column("ADDRESS", "address", wide=True),
    Column("BACKEND", "backend", wide=True),
    Column("CIPHER", "cipher", wide=True),
    Column("IDENTITY", "identity", wide=True),
]


@app.command("list")
def list_(output: options.Output = None, strict: options.Strict = False) -> None:
    """List the sites.

    Examples: ibshell site list | ibshell site list -o wide | ibshell site list -o json
    """
    options.show_listing(options.ask_listing("site.list"), COLUMNS, "name", output, strict)


@app.command()
def show(site: Annotated[str, typer.Argument(help="Name of the site.")], output: options.Output = None) -> None:
    """Show one site: its link, keys, devices and state.

    Example: ibshell site show hospital-07
    """
    item = options.pick(options.ask_listing("site.list"), "name", site, "site")
    render.write(render.record(item, output, "name"))
