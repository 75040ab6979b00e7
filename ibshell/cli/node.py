"""`ibshell node`: the nodes of every site."""

from typing import Annotated

import typer

from ibshell import render
from ibshell.cli import options
from ibshell.render import Column

app = typer.Typer(no_args_is_help=True, help="The nodes of every site.")

COLUMNS = [
    Column("NODE", "node"),
    Column("STATE", "state"),
    Column("GPUS", "gpus"),
    Column("FREE", "gpus_free"),
    Column("TYPE", "type"),
    Column("LEAF", "leaf"),
]


@app.command("list")
def list_(output: options.Output = None, strict: options.Strict = False) -> None:
    """List the nodes.

    Examples: ibshell node list | ibshell node list -o name
    """
    options.show_listing(options.ask_listing("node.list"), COLUMNS, "node", output, strict)


@app.command()
def show(node: Annotated[str, typer.Argument(help="SITE:NODE")], output: options.Output = None) -> None:
    """Show one node and its GPUs.

    Example: ibshell node show hospital-07:gpu01
    """
    item = options.pick(options.ask_listing("node.list"), "node", node, "node")
    gpus = [gpu for gpu in options.ask_listing("gpu.list")["items"] if f"{gpu['site']}:{gpu['node']}" == node]
    if output in (None, "table", "wide"):
        render.write(render.record(item, output, "node"))
        from ibshell.cli.gpu import COLUMNS as GPU_COLUMNS

        shown = [column for column in GPU_COLUMNS if output == "wide" or not column.wide]
        render.write("\n" + render.table(shown, gpus, render.on_terminal()))
    else:
        render.write(render.record({**item, "devices": gpus}, output, "node"))
