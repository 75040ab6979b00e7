"""`ibshell site`: the pool's sites."""

from typing import Annotated

import typer

from fedpool.client.acting import act
from fedpool.wire.messages import CordonState, CordonWanted
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
def list_(output: options.Output = None, strict: options.Strict = False, watch: options.Watch = False) -> None:
    """List the sites.

    Examples: ibshell site list | ibshell site list -o wide | ibshell site list -o json
    """
    options.show_listing(lambda: options.ask_listing("site.list"), COLUMNS, "name", output, strict, watch)


@app.command()
def show(site: Annotated[str, typer.Argument(help="Name of the site.")], output: options.Output = None) -> None:
    """Show one site: its link, keys, devices and state.

    Example: ibshell site show hospital-07
    """
    item = options.pick(options.ask_listing("site.list"), "name", site, "site")
    render.write(render.record(item, output, "name"))


def cordon(method: str, site: str, what: str, reason: str, output: str | None) -> None:
    """Change what a site grants, and print what it does not."""
    with options.hub() as connection:
        state = act(connection, method, CordonWanted(site, what, reason), CordonState, sites=(site,))
    if output is not None:
        render.write(render.record(options.as_data(state), output, "site"))
    elif state.cordons:
        for name, why in state.cordons.items():
            render.write(f"{site} grants nothing new {f'on {name}' if name else 'at all'}: {why}\n")
    else:
        render.write(f"{site} grants on everything\n")


@app.command()
def drain(
    site: Annotated[str, typer.Argument(help="Name of the site.")],
    reason: Annotated[str, typer.Option("--reason", help="Why; it is shown.")] = "drained",
    output: options.Output = None,
) -> None:
    """Let a site grant nothing new; what runs there goes on to its end.

    Example: ibshell site drain hospital-07 --reason "power work on Friday"
    """
    cordon("site.cordon", site, "", reason, output)


@app.command()
def resume(site: Annotated[str, typer.Argument(help="Name of the site.")], output: options.Output = None) -> None:
    """Let a drained site grant again.

    Example: ibshell site resume hospital-07
    """
    cordon("site.uncordon", site, "", "", output)
