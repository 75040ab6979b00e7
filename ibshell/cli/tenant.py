"""`ibshell tenant`: who may lease, and how much of the pool belongs to whom."""

from typing import Annotated

import msgspec
import typer

from fedpool.client.acting import act
from fedpool.errors import NotFound, Refused, UsageError
from fedpool.records import Quota, Tenant
from fedpool.wire.messages import TenantNamed, TenantView
from ibshell import render
from ibshell.cli import options
from ibshell.render import Column

app = typer.Typer(no_args_is_help=True, help="Who may lease, and how much of the pool belongs to whom.")

COLUMNS = [
    Column("TENANT", "name"),
    Column("HELD", "gpus_held"),
    Column("GUARANTEED", "gpus_guaranteed"),
    Column("BORROWED", "gpus_borrowed"),
    Column("DEVICE_HOURS", "device_hours"),
    Column("WEIGHT", "weight"),
    Column("HIGHEST", "highest", wide=True),
    Column("QUOTAS", "quotas", wide=True),
]
Name = Annotated[str, typer.Argument(help="Name of the tenant.")]
Weight = Annotated[float | None, typer.Option("--weight", help="Its part in the fair share.")]
Highest = Annotated[str | None, typer.Option("--highest", help="Highest priority it may ask for.")]


def _print(view: TenantView, output: str | None) -> None:
    data = options.as_data(view)
    data = {**data.pop("tenant"), **data}
    if output in (None, "table", "wide"):
        data["quotas"] = [
            f"{q['kind']}@{q['site']}={q['gpus']}{'' if q['limit'] is None else '..' + str(q['limit'])}"
            for q in data["quotas"]
        ]
    render.write(render.record(data, output, "name"))


@app.command()
def add(name: Name, weight: Weight = None, highest: Highest = None, output: options.Output = None) -> None:
    """Add a tenant. Until the first one is added the pool is open to everybody.

    Example: ibshell tenant add oncology --weight 2
    """
    with options.hub() as connection:
        try:
            connection.call("tenant.show", TenantNamed(name), TenantView)
        except NotFound:
            tenant = Tenant(name, 1.0 if weight is None else weight, highest or "high")
            _print(act(connection, "tenant.set", tenant, TenantView), output)
            return
    raise Refused(f"tenant {name} is there already", f"ibshell tenant show {name}")


@app.command("list")
def list_(output: options.Output = None, strict: options.Strict = False, watch: options.Watch = False) -> None:
    """List the tenants.

    Examples: ibshell tenant list | ibshell tenant list -o wide
    """
    options.show_listing(lambda: options.ask_listing("tenant.list"), COLUMNS, "name", output, strict, watch)


@app.command()
def show(name: Name, output: options.Output = None) -> None:
    """Show a tenant: its quotas, what it holds and what it has used.

    Example: ibshell tenant show oncology
    """
    with options.hub() as connection:
        _print(connection.call("tenant.show", TenantNamed(name), TenantView), output)


@app.command()
def quota(
    name: Name,
    gpus: Annotated[int, typer.Option("--gpus", "-g", min=0, help="Devices that belong to it.")],
    kind: Annotated[str, typer.Option("--gpu-type", help="Of this type, * for all.")] = "*",
    site: Annotated[str, typer.Option("--site", help="At this site, * for all.")] = "*",
    limit: Annotated[int | None, typer.Option("--limit", help="Most it may hold with what it borrows.")] = None,
    output: options.Output = None,
) -> None:
    """Set how much of the pool belongs to a tenant. What it leaves idle others may borrow.

    Example: ibshell tenant quota oncology --gpus 64 --gpu-type h100 --site shanghai --limit 96
    """
    if limit is not None and limit < gpus:
        raise UsageError(f"--limit {limit} with --gpus {gpus}", "the limit is at least the quota")
    with options.hub() as connection:
        tenant = connection.call("tenant.show", TenantNamed(name), TenantView).tenant
        others = tuple(line for line in tenant.quotas if (line.kind, line.site) != (kind, site))
        changed = msgspec.structs.replace(tenant, quotas=(*others, Quota(kind, site, gpus, limit)))
        _print(act(connection, "tenant.set", changed, TenantView), output)


@app.command()
def remove(name: Name, output: options.Output = None) -> None:
    """Remove a tenant that holds no lease.

    Example: ibshell tenant remove oncology
    """
    with options.hub() as connection:
        view = act(connection, "tenant.remove", TenantNamed(name), TenantView)
    if output is None:
        render.write(f"tenant {name} is removed\n")
    else:
        _print(view, output)
