"""`ibshell lease`: devices across sites, all or none, until a time."""

import hashlib
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
import typer

from fedpool.client.acting import act
from fedpool.client.connection import Connection
from fedpool.errors import NotFound, Pending, Refused, UsageError
from fedpool.records import Demand, Shape
from fedpool.units import format_duration, parse_duration, parse_size
from fedpool.wire.messages import (
    ById,
    LeaseAwaited,
    LeaseEnding,
    LeaseOffer,
    LeaseRenewal,
    LeaseSize,
    LeaseView,
    LeaseWanted,
)
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
REFUSED = 5
CANCEL_S = 2.0  # how long after Ctrl-C a request may still reach the hub
Key = Annotated[
    str, typer.Option("--idempotency-key", help="Repeating a request with the same key returns the first answer.")
]


def _data(view: LeaseView) -> dict[str, Any]:
    data: dict[str, Any] = options.as_data(view)
    lease: dict[str, Any] = data["lease"]
    for inner in ("deadline", "submitted", "started", "ended", "attempt"):
        lease.pop(inner, None)
    lease.setdefault("reason", "")
    for part in lease.setdefault("parts", []):
        for key, value in (("grants", []), ("state", "requested"), ("reason", "")):
            part.setdefault(key, value)
        part["grants"] = [{"uuid": uuid, "token": token, "milli": milli} for uuid, token, milli in part["grants"]]
    for key in ("waits_for", "starts_in_s", "ahead"):
        if lease["state"] in ("requested", "queued"):
            lease[key] = getattr(view, key)
    expires = data["expires_in_s"]
    lease["expires_in_s"] = None if expires is None else round(expires, 1)
    lease["gpus"] = view.lease.gpus
    lease["silent_sites"] = view.silent_sites
    return lease


def _show(view: LeaseView, output: str | None) -> None:
    data = _data(view)
    if output not in (None, "table", "wide"):
        render.write(render.record(data, output))
        return
    parts = data.pop("parts")
    data["demand"] = _in_words(view.lease.demand)
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


def _in_words(demand: Demand) -> str:
    """What was asked for, without what nobody asked for."""
    plain = {**_defaults(Demand), **_defaults(Shape)}
    wishes = {**msgspec.structs.asdict(demand), **msgspec.structs.asdict(demand.shape)}
    for key in ("gpus", "gpus_max", "shape"):
        wishes.pop(key)
    gpus = f"{demand.gpus}..{demand.most}" if demand.most > demand.gpus else f"{demand.gpus}"
    return " ".join([f"gpus={gpus}", *(f"{k}={render.cell(k, v)}" for k, v in wishes.items() if v != plain[k])])


def _defaults(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return {field.name: field.default for field in msgspec.structs.fields(kind)}


def _count(text: str) -> tuple[int, int]:
    """`32`, or `64..256` for an elastic lease.

    Raises:
        UsageError: neither.
    """
    fewest, dots, most = text.partition("..")
    if not fewest.isdigit() or (dots and not most.isdigit()) or int(fewest) < 1:
        raise UsageError(f"--gpus {text}", "a number of at least 1, or FEWEST..MOST such as 64..256")
    return int(fewest), int(most) if dots else 0


def _starts_in(at: str) -> float:
    """Seconds until an ISO 8601 time."""
    if not at:
        return 0.0
    try:
        moment = datetime.fromisoformat(at)
    except ValueError:
        raise UsageError(f"--at {at} is no time", "write it as 2026-12-24T22:00+01:00") from None
    seconds = (moment.astimezone(UTC) - datetime.now(UTC)).total_seconds()
    if seconds <= 0:
        raise UsageError(f"--at {at} is over", "name a time that is still to come")
    return seconds


class _Fate:
    """What Ctrl-C does with a request that is not finished."""

    waits = False  # it was answered and waits in the queue, as it was asked to


@contextmanager
def _interruptible(lease: str) -> Iterator[_Fate]:
    """While its id has not been said nobody could give a lease back: Ctrl-C does, or says the id of one that waits."""
    fate = _Fate()
    try:
        yield fate
    except KeyboardInterrupt:
        if fate.waits:
            diagnostics.say(f"lease {lease} goes on waiting; ibshell lease show {lease}, ibshell lease release {lease}")
        else:
            diagnostics.say(f"giving lease {lease} back; Ctrl-C again leaves it: ibshell lease release {lease}")
            _give_back(lease)
        raise


def _give_back(lease: str) -> None:
    """Release a lease whose request may still be on its way: the hub may hear of its end before it hears of it."""
    until = time.monotonic() + CANCEL_S
    with options.hub() as connection:
        while time.monotonic() < until:
            try:
                act(connection, "lease.release", ById(lease), LeaseView)
                return
            except NotFound:
                time.sleep(0.1)


def _follow(connection: Connection, view: LeaseView, wait_s: float | None) -> LeaseView:
    """Wait until a lease no longer waits."""
    # A little longer than the lease may wait: the hub's word on it comes first.
    until = None if wait_s is None else time.monotonic() + wait_s + 10.0
    said = ""
    while view.lease.state in ("requested", "queued", "held") and (until is None or time.monotonic() < until):
        if view.waits_for != said:
            said = view.waits_for
            when = "" if view.starts_in_s is None else f"; at the earliest in {format_duration(view.starts_in_s)}"
            diagnostics.say(f"lease {view.lease.id} waits, {view.ahead} before it: {said}{when}")
        left = 10.0 if until is None else max(0.0, min(10.0, until - time.monotonic()))
        asked = LeaseAwaited(view.lease.id, view.lease.state, left)
        view = connection.call("lease.wait", asked, LeaseView)
    return view


@app.command()
def request(
    tenant: Annotated[str, typer.Option("--tenant", "-t", help="Who will hold the lease.")],
    gpus: Annotated[str, typer.Option("--gpus", "-g", help="Devices over all sites: 32, or 64..256 (elastic).")] = "",
    for_: Annotated[str, typer.Option("--for", help="How long: 30m, 4h, 2d.")] = "1h",
    sites: Annotated[int, typer.Option("--sites", min=0, help="Over how many sites (0: as few as possible).")] = 0,
    site: Annotated[list[str] | None, typer.Option("--site", help="Exactly this site; may be repeated.")] = None,
    gpu_type: Annotated[
        str | None, typer.Option("--gpu-type", help="h100; h100,h200; or a slice, h100/1g.10gb.")
    ] = None,
    memory: Annotated[str, typer.Option("--memory", help="At least so much memory a device: 80GiB.")] = "",
    fraction: Annotated[int, typer.Option("--milli", help="Thousandths of one card instead of whole cards.")] = 1000,
    device: Annotated[list[str] | None, typer.Option("--device", help="Exactly this: UUID or SITE:NODE/INDEX.")] = None,
    per_site_min: Annotated[int, typer.Option("--per-site-min", help="At least so many at every site.")] = 1,
    same_leaf: Annotated[bool, typer.Option("--same-leaf", help="All under one leaf switch.")] = False,
    spread: Annotated[str, typer.Option("--spread", help="node or leaf: no two devices on one.")] = "",
    avoid: Annotated[list[str] | None, typer.Option("--avoid", help="Not on nodes of this tenant.")] = None,
    priority: Annotated[str, typer.Option("--priority", help="scavenger, normal, high or urgent.")] = "normal",
    at: Annotated[str, typer.Option("--at", help="Reserve from this time: 2026-12-24T22:00+01:00.")] = "",
    wait: Annotated[str, typer.Option("--wait", help="Wait in the queue for at most so long: 2h.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would happen.")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Say why, and when at the earliest.")] = False,
    output: options.Output = None,
    idempotency_key: Key = "",
) -> None:
    """Take devices at all the sites or at none.

    Examples: ibshell lease request --tenant oncology --gpus 32 --sites 16 --for 1h
              ibshell lease request -t oncology -g 4 --site shanghai --site zurich --for 30m
              ibshell lease request -t oncology -g 64..256 --gpu-type h100 --wait 2h
              ibshell lease request -t oncology -g 8 --at 2026-12-24T22:00+01:00 --for 4h
    """
    fewest, most = _count(gpus or (str(len(device)) if device else "1"))
    wait_s = parse_duration(wait) if wait else 0.0
    wanted = LeaseWanted(
        tenant=tenant,
        gpus=fewest,
        gpus_max=most,
        duration_s=parse_duration(for_),
        sites=sites,
        site_names=site or [],
        gpu_type=gpu_type,
        memory_min_bytes=parse_size(memory) if memory else 0,
        milli=fraction,
        devices=device or [],
        same_leaf=same_leaf,
        spread=spread,
        avoid=avoid or [],
        per_site_min=per_site_min,
        priority=priority,
        starts_in_s=_starts_in(at),
        max_wait_s=wait_s if wait else (60.0 if at else 0.0),
        id=hashlib.sha256(f"{tenant}/{idempotency_key}".encode()).hexdigest()[:8]
        if idempotency_key
        else secrets.token_hex(4),
    )
    with options.hub() as connection:
        if dry_run:
            _foresee(connection.call("lease.foresee", wanted, LeaseView), output, explain)
            return
        with _interruptible(wanted.id) as fate:
            view = act(connection, "lease.request", wanted, LeaseView, key=idempotency_key, sites=tuple(site or ()))
            if wait:
                fate.waits = True
                view = _follow(connection, view, wait_s)
            _show(view, output)
    _judge(view, at, wait)
    if output is None:
        short = view.lease.id[:4]
        diagnostics.say(f"next: ibshell lease renew {short} --for 1h, ibshell lease release {short}")


def _judge(view: LeaseView, at: str, wait: str) -> None:
    """The exit status of a request: 0 active or reserved, 5 refused, 8 still waiting."""
    if view.lease.state in ("requested", "queued", "held") and not at:
        raise Pending(f"lease {view.lease.id} still waits: {view.waits_for}", f"ibshell lease show {view.lease.id}")
    if view.lease.state not in ("active", "queued"):
        waited = f" after waiting {wait}" if wait else ""
        raise Refused(f"lease {view.lease.id} is {view.lease.state}{waited}: {view.lease.reason}")


def _foresee(view: LeaseView, output: str | None, explain: bool) -> None:
    """What a request would meet; exit status 5 where it would be refused now."""
    now = view.starts_in_s == 0
    found: dict[str, Any] = {"would_start": now, "starts_in_s": view.starts_in_s}
    if explain or not now:
        found["waits_for"] = view.waits_for
    if explain or view.forbidden:
        found["forbidden"] = [f"{site}: {why}" for site, why in view.forbidden.items()]
    render.write(render.record(found, output))
    if not now:
        raise typer.Exit(REFUSED)


@app.command("list")
def list_(
    everything: Annotated[bool, typer.Option("--all", "-a", help="Also those that are over.")] = False,
    watch: options.Watch = False,
    output: options.Output = None,
    strict: options.Strict = False,
) -> None:
    """List the leases that are not over.

    Examples: ibshell lease list | ibshell lease list --all -o json | ibshell lease list --watch -o ndjson
    """

    def ask() -> dict[str, Any]:
        answer = options.ask_listing("lease.list")
        if not everything:
            over = ("released", "expired", "revoked", "failed", "aborted")
            answer["items"] = [item for item in answer["items"] if item["state"] not in over]
        return answer

    options.show_listing(ask, COLUMNS, "id", output, strict, watch)


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
        view = act(connection, "lease.renew", LeaseRenewal(lease, parse_duration(for_)), LeaseView, key=idempotency_key)
    if output is None:
        render.write(f"lease {view.lease.id} ends in {format_duration(view.expires_in_s or 0)}\n")
    else:
        _show(view, output)


@app.command()
def adopt(lease: LeaseArgument, output: options.Output = None) -> None:
    """Take in an orphan: a lease that sites hold and the hub, whose database was lost, does not know.

    Afterwards it is a lease as any other. `ibshell lease release` ends an orphan without more ado.

    Example: ibshell lease adopt 7f3a
    """
    with options.hub() as connection:
        _say(act(connection, "lease.adopt", ById(lease), LeaseView), output)


@app.command()
def revoke(
    lease: LeaseArgument,
    reason: Annotated[str, typer.Option("--reason", help="Why; its holder sees it.")],
    grace: Annotated[str, typer.Option("--grace", help="Tell its jobs and wait so long: 5m.")] = "",
    output: options.Output = None,
) -> None:
    """End somebody's lease, with a reason.

    Example: ibshell lease revoke 7f3a --reason "rack 3 is too hot" --grace 5m
    """
    with options.hub() as connection:
        wanted = LeaseEnding(lease, reason, parse_duration(grace) if grace else 0.0)
        _say(act(connection, "lease.revoke", wanted, LeaseView), output)


@app.command()
def resize(
    lease: LeaseArgument,
    gpus: Annotated[int, typer.Option("--gpus", "-g", min=1, help="Devices over all sites.")],
    output: options.Output = None,
) -> None:
    """Let a lease grow, or an elastic one shrink, at the sites it is at.

    What it gives back its jobs may use for another minute; they are told. What is not free yet it takes when it is.

    Example: ibshell lease resize 7f3a --gpus 128
    """
    with options.hub() as connection:
        view = act(connection, "lease.resize", LeaseSize(lease, gpus), LeaseView)
    if output is None:
        render.write(f"lease {view.lease.id} has {view.lease.gpus} devices\n")
    else:
        _show(view, output)


@app.command()
def offer(
    lease: LeaseArgument,
    to: Annotated[str, typer.Option("--to", help="The tenant; empty takes the offer back.")],
    output: options.Output = None,
) -> None:
    """Offer a lease to another tenant, who then accepts it.

    Example: ibshell lease offer 7f3a --to radiology
    """
    with options.hub() as connection:
        _say(act(connection, "lease.offer", LeaseOffer(lease, to), LeaseView), output)


@app.command()
def accept(
    lease: LeaseArgument,
    tenant: Annotated[str, typer.Option("--tenant", "-t", help="Who takes it.")],
    output: options.Output = None,
) -> None:
    """Take a lease that was offered: the old holder's processes end, its devices get new tokens.

    Example: ibshell lease accept 7f3a --tenant radiology
    """
    with options.hub() as connection:
        _say(act(connection, "lease.accept", LeaseOffer(lease, tenant), LeaseView), output)


def _say(view: LeaseView, output: str | None) -> None:
    if output is None:
        lease = view.lease
        more = lease.notice or (f"offered to {lease.offered_to}" if lease.offered_to else lease.reason)
        more = more.removeprefix(f"{lease.state}: ")
        render.write(f"lease {lease.id} of {lease.tenant} is {lease.state}{f': {more}' if more else ''}\n")
    else:
        _show(view, output)


@app.command()
def release(lease: LeaseArgument, output: options.Output = None) -> None:
    """Give a lease back: its processes end at every site, then its devices are free.

    Example: ibshell lease release 7f3a
    """
    with options.hub() as connection:
        view = act(connection, "lease.release", ById(lease), LeaseView)
    if output is None:
        render.write(f"lease {view.lease.id} is {view.lease.state}\n")
    else:
        _show(view, output)
