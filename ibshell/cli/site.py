"""`ibshell site`: the pool's sites."""

from typing import Annotated

import typer

from fedpool.client.acting import act
from fedpool.units import parse_duration
from fedpool.wire.messages import CordonState, CordonWanted
from ibshell import diagnostics, render
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
    Column("KEY EXCHANGE", "key_exchange", wide=True),
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


@app.command()
def invite(
    site: Annotated[str, typer.Argument(help="The name under which it joins.")],
    for_: Annotated[str, typer.Option("--for", help="How long the invitation holds.")] = "24h",
) -> None:
    """Invite a site: prints one line, with which it joins and which works once.

    Example: ibshell site invite hospital-07
    """
    from fedpool.identity.principals import require_principal, site_principal
    from ibshell.cli.pools import hub_address, operator

    role = require_principal(site_principal(site))
    with options.hub() as connection:
        token = operator().invite(connection, hub_address(), role, site, parse_duration(for_))
    render.write(token.line() + "\n")
    diagnostics.say(f"at the site: ibshell-agent join TOKEN; then here: ibshell site approve {site}")


@app.command()
def approve(
    site: Annotated[str, typer.Argument(help="The site that asks to join.")],
    for_: Annotated[str, typer.Option("--for", help="How long its certificate holds (24h).")] = "",
    refuse: Annotated[str, typer.Option("--refuse", help="Do not let it in, with this reason.")] = "",
) -> None:
    """Let in a site that asks to join; only with the token of an invitation that is possible.

    Example: ibshell site approve hospital-07
    """
    from ibshell.cli.pools import approve_one

    approve_one(site, for_, refuse)


@app.command()
def remove(
    site: Annotated[str, typer.Argument(help="A site that has joined.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Let a site belong to the pool no longer; its key is believed no longer. Its agent goes on until its leases end.

    Example: ibshell site remove hospital-07 --yes
    """
    from ibshell.cli.pools import operator

    options.confirm(f"remove {site} from the pool", yes)
    with options.hub() as connection:
        operator().remove_site(connection, site)
    render.write(f"{site} belongs to the pool no longer\n")
