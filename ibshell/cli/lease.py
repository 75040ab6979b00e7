"""`ibshell lease`: devices across sites, all or none, until a time."""

from typing import Annotated, Any

import typer

from fedpool.errors import UsageError
from fedpool.units import format_duration, parse_duration
from fedpool.wire.messages import ById, LeaseRenewal, LeaseView, LeaseWanted
from ibshell import diagnostics, render
from ibshell.cli import options
from ibshell.render import Column

app = typer.Typer(no_args_is_help=True, help="Take, show, renew and release GPUs across sites.")

COLUMNS = [
    Column("LEASE", "id"),
    Column("TENANT", "tenant"),
    Column("STATE", "state"),
    Column("GPUS", "gpus"),
    Column("SITES", "sites"),
    Column("EXPIRES", "expires_in_s"),
    Column("REQUESTED", "requested_at", wide=True),
    Column("REASON", "reason"),
    Column("AT", "site_names", wide=True),
]
LeaseArgument = Annotated[str, typer.Argument(help="Lease id or a unique beginning of it.")]
Key = Annotated[
    str, typer.Option("--idempotency-key", help="Repeating a request with the same key returns the first answer.")
]


def _data(view: LeaseView) -> dict[str, Any]:
    data: dict[str, Any] = options.as_data(view)
    lease: dict[str, Any] = data["lease"]
    lease.pop("deadline")
    expires = data["expires_in_s"]
    lease["expires_in_s"] = None if expires is None else round(expires, 1)
    lease["gpus"] = view.lease.gpus
    lease["silent_sites"] = data["silent_sites"]
    return lease


def _show(view: LeaseView, output: str | None) -> None:
    data = _data(view)
    if output not in (None, "table", "wide"):
        render.write(render.record(data, output))
        return
    parts = data.pop("parts")
    render.write(render.record({k: v for k, v in data.items() if v not in ("", {}, None)}, output))
    rows = [
        {
            "site": part["site"],
            "state": f"unknown since {view.silent_sites[part['site']]}"
            if part["site"] in view.silent_sites
            else part["state"],
            "gpus": part["gpus"],
            "token": part["grants"][0]["token"] if part["grants"] else None,
            "reason": part["reason"],
        }
        for part in parts
    ]
    columns = [Column(key.upper(), key) for key in ("site", "state", "gpus", "token", "reason")]
    render.write("\n" + render.table(columns, rows, render.on_terminal()))


@app.command()
def request(
    tenant: Annotated[str, typer.Option("--tenant", "-t", help="Who will hold the lease.")],
    gpus: Annotated[int, typer.Option("--gpus", "-g", min=1, help="Devices over all sites.")],
    for_: Annotated[str, typer.Option("--for", help="How long: 30m, 4h, 2d.")] = "1h",
    sites: Annotated[int, typer.Option("--sites", min=0, help="Over how many sites (0: as few as possible).")] = 0,
    at: Annotated[list[str] | None, typer.Option("--site", help="Exactly this site; may be repeated.")] = None,
    gpu_type: Annotated[str | None, typer.Option("--gpu-type", help="Only devices of this type.")] = None,
    output: options.Output = None,
    idempotency_key: Key = "",
) -> None:
    """Take devices at all the sites or at none.

    Examples: ibshell lease request --tenant oncology --gpus 32 --sites 16 --for 1h
              ibshell lease request -t oncology -g 4 --site shanghai --site zurich --for 30m
    """
    if at and sites and sites != len(at):
        raise UsageError(f"--sites {sites} with {len(at)} times --site", "leave --sites out")
    wanted = LeaseWanted(tenant, gpus, parse_duration(for_), sites, at or [], gpu_type)
    with options.hub() as connection:
        view = connection.call("lease.request", wanted, LeaseView, key=idempotency_key)
    _show(view, output)
    if output is None:
        diagnostics.say(
            f"next: ibshell lease renew {view.lease.id[:4]} --for 1h, ibshell lease release {view.lease.id[:4]}"
        )


@app.command("list")
def list_(
    everything: Annotated[bool, typer.Option("--all", "-a", help="Also those that are over.")] = False,
    output: options.Output = None,
    strict: options.Strict = False,
) -> None:
    """List the leases that are not over.

    Examples: ibshell lease list | ibshell lease list --all -o json
    """
    answer = options.ask_listing("lease.list")
    if not everything:
        over = ("released", "expired", "revoked", "failed", "aborted")
        answer["items"] = [item for item in answer["items"] if item["state"] not in over]
    options.show_listing(answer, COLUMNS, "id", output, strict)


@app.command()
def show(lease: LeaseArgument, output: options.Output = None) -> None:
    """Show one lease, site by site.

    Example: ibshell lease show 7f3a
    """
    with options.hub() as connection:
        _show(connection.call("lease.show", ById(lease), LeaseView), output)


@app.command()
def renew(
    lease: LeaseArgument,
    for_: Annotated[str, typer.Option("--for", help="How long from now: 30m, 4h, 2d.")] = "1h",
    output: options.Output = None,
    idempotency_key: Key = "",
) -> None:
    """Let a lease end later (or sooner): so long from now.

    Example: ibshell lease renew 7f3a --for 2h
    """
    with options.hub() as connection:
        view = connection.call("lease.renew", LeaseRenewal(lease, parse_duration(for_)), LeaseView, key=idempotency_key)
    if output is None:
        render.write(f"lease {view.lease.id} ends in {format_duration(view.expires_in_s or 0)}\n")
    else:
        _show(view, output)


@app.command()
def release(lease: LeaseArgument, output: options.Output = None) -> None:
    """Give a lease back: its processes end at every site, then its devices are free.

    Example: ibshell lease release 7f3a
    """
    with options.hub() as connection:
        view = connection.call("lease.release", ById(lease), LeaseView)
    if output is None:
        render.write(f"lease {view.lease.id} is {view.lease.state}\n")
    else:
        _show(view, output)
