"""`ibshell site`: the pool's sites."""

from pathlib import Path
from typing import Annotated

import typer

from fedpool.client.acting import act
from fedpool.errors import NotFound
from fedpool.wire.membership import SiteNamed
from fedpool.wire.messages import CordonState, CordonWanted, PolicyText
from ibshell import diagnostics, render
from ibshell.cli import options
from ibshell.render import Column

REFUSED = 5

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
    Column("CERTIFICATE", "certificate_expires_in_s", wide=True),
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
    from ibshell.cli.pools import invite_one

    invite_one(require_principal(site_principal(site)), site, for_)
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


@app.command()
def route(
    host: Annotated[str, typer.Argument(help="As ssh takes it: [user@]host.")],
    config: Annotated[str, typer.Option("-F", "--config", help="Configuration of ssh instead of your own.")] = "",
    output: options.Output = None,
) -> None:
    """Show how a site of mode `ssh` would be reached: by which jump hosts, and what known_hosts says. Nothing is connected.

    Examples: ibshell site route gpu07 | ibshell site route gpu07 -F ./ssh_config -o json
    """
    import asyncio

    from fedpool.transport import openssh

    found = asyncio.run(openssh.route(host, config))
    data = {
        "host": host,
        "target": str(found.target),
        "hops": [str(hop) for hop in found.hops],
        "proxy_command": found.proxy_command,
        "known_hosts": list(found.files),
        "revoked_on_another_port": [f"{entry.shown} ({entry.where})" for entry in openssh.refused_keys(found)],
    }
    render.write(render.record(data, output, "target"))


policy_app = typer.Typer(no_args_is_help=True, help="Sites' policies: who may have what, when and how long.")
app.add_typer(policy_app, name="policy")


@policy_app.command("show")
def policy_show(site: Annotated[str, typer.Argument(help="Name of the site.")]) -> None:
    """Print a site's policy as it is in force.

    Example: ibshell site policy show hospital-07
    """
    with options.hub() as connection:
        found = connection.call("site.policy", SiteNamed(site), PolicyText)
    render.write(found.text or "# everything is allowed\n")


@policy_app.command("check")
def policy_check(
    file: Annotated[Path, typer.Argument(help="A policy, TOML.")],
    request: Annotated[
        list[str] | None,
        typer.Option(
            "--request", help="tenant=NAME gpus=4 type=h100 for=2h at=2026-12-02T22:00Z program='…' data=TAG."
        ),
    ] = None,
    output: options.Output = None,
) -> None:
    """Try a policy: whether it can be read, and what it says to a request; exits with 5 where that is refused.

    Examples: ibshell site policy check policy.toml
              ibshell site policy check policy.toml --request "tenant=oncology gpus=4 type=h100 for=2h"
    """
    from ibshell.policy_trial import tried

    try:
        text = file.read_text()
    except FileNotFoundError:
        raise NotFound(f"no policy at {file}") from None
    rows = [tried(text, str(file), words) for words in request or ()]
    if not rows:
        tried(text, str(file), "")
        render.write(f"{file} can be read\n")
        return
    answer = {"items": rows, "errors": [], "as_of": {}}
    columns = [Column("REQUEST", "request"), Column("ALLOWED", "allowed"), Column("WHY NOT", "problems")]
    render.write(render.listing(answer, columns, "request", output, render.on_terminal()))
    if not all(row["allowed"] for row in rows):
        raise typer.Exit(REFUSED)
