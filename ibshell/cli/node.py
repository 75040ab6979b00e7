"""`ibshell node`: the nodes of every site."""

from typing import Annotated

import typer

from fedpool.errors import UsageError
from ibshell import render
from ibshell.cli import options
from ibshell.cli.site import cordon as change
from ibshell.render import Column

app = typer.Typer(no_args_is_help=True, help="The nodes of every site.")

COLUMNS = [
    Column("NODE", "node"),
    Column("STATE", "state"),
    Column("GPUS", "gpus"),
    Column("FREE", "gpus_free"),
    Column("TYPE", "type"),
    Column("LEAF", "leaf"),
    Column("CORDON", "cordon"),
]


@app.command("list")
def list_(output: options.Output = None, strict: options.Strict = False, watch: options.Watch = False) -> None:
    """List the nodes.

    Examples: ibshell node list | ibshell node list -o name
    """
    options.show_listing(lambda: options.ask_listing("node.list"), COLUMNS, "node", output, strict, watch)


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


def _where(name: str) -> tuple[str, str]:
    """SITE:NODE, or SITE:UUID for one device.

    Raises:
        UsageError: neither.
    """
    site, colon, what = name.partition(":")
    if not colon or not what:
        raise UsageError(f"{name!r} names no node", "write SITE:NODE, or SITE:UUID for one device")
    return site, what


@app.command()
def cordon(
    node: Annotated[str, typer.Argument(help="SITE:NODE, or SITE:UUID for one device.")],
    reason: Annotated[str, typer.Option("--reason", help="Why; it is shown.")] = "cordoned",
    output: options.Output = None,
) -> None:
    """Grant nothing new on a node or device; what runs there goes on to its end.

    Example: ibshell node cordon hospital-07:gpu01 --reason "fan 3"
    """
    change("site.cordon", *_where(node), reason, output)


@app.command()
def uncordon(
    node: Annotated[str, typer.Argument(help="SITE:NODE, or SITE:UUID for one device.")], output: options.Output = None
) -> None:
    """Grant on it again.

    Example: ibshell node uncordon hospital-07:gpu01
    """
    change("site.uncordon", *_where(node), "", output)
