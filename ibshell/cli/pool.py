"""`ibshell up`, `down`, `status`: a pool on this machine."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fedpool.errors import IbshellError, NotFound, UsageError
from fedpool.sim.scenario import SimulatedSite, check, parse
from fedpool.units import format_duration
from fedpool.wire.messages import Nothing
from ibshell import diagnostics, render, settings
from ibshell.cli import options
from ibshell.pool import LocalPool

app = typer.Typer()

PROCESSES_MAX = 32  # beyond so many sites several share an agent


def sites_progress(up: int, total: int) -> None:
    """Say how many sites are up, on a terminal."""
    import sys

    if not diagnostics.is_plain(sys.stderr):
        print(f"\r\x1b[K{up}/{total} sites up", end="" if up < total else "\n", file=sys.stderr, flush=True)


@app.command()
def up(
    scenario: Annotated[Path | None, typer.Argument(help="Scenario file (TOML) instead of the options.")] = None,
    sites: Annotated[int, typer.Option("--sites", min=1, max=256, help="How many simulated sites.")] = 4,
    nodes_per_site: Annotated[int, typer.Option("--nodes-per-site", min=1)] = 1,
    gpus_per_node: Annotated[int, typer.Option("--gpus-per-node", min=1)] = 2,
    gpu_type: Annotated[str, typer.Option("--gpu-type")] = "h100",
) -> None:
    """Start a hub and simulated sites as real processes; every other site dials out to the hub, as behind a firewall.

    Examples: ibshell up | ibshell up --sites 16 --gpus-per-node 8 --gpu-type a100 | ibshell up scenario.toml
    """
    if "://" in settings.pool_name():
        raise UsageError(
            f"IBSHELL_POOL={settings.pool_name()} names a hub that runs elsewhere", "unset it, or name a local pool"
        )
    if scenario is None:
        wanted = SimulatedSite("site", sites, nodes_per_site, gpus_per_node, gpu_type)
        check(wanted, "the options")
        described = wanted.named()
    else:
        try:
            described = parse(scenario.read_text(), str(scenario))
        except FileNotFoundError:
            raise NotFound(f"no scenario file {scenario}") from None
    pool = LocalPool(settings.pool_name())
    pool.create(described, reverse=lambda position: position % 2 == 1)
    try:
        pool.start_all(sites_progress, sites_a_process=-(-len(described) // PROCESSES_MAX))
    except (IbshellError, KeyboardInterrupt):
        pool.stop_all()
        raise
    gpus = sum(site.nodes * site.gpus_per_node for site in described)
    render.write(f"pool {pool.name}: {len(described)} sites, {gpus} GPUs\n")
    diagnostics.say("next: ibshell gpu list, ibshell lease request --tenant oncology --gpus 2 --for 1h, ibshell down")


@app.command()
def down() -> None:
    """End the pool on this machine: programs, sites, then the hub.

    Example: ibshell down
    """
    pool = LocalPool(settings.pool_name())
    ended = pool.stop_all()
    if ended:
        render.write(f"pool {pool.name}: {len(ended)} processes ended\n")
    else:
        diagnostics.say(f"no pool {pool.name!r} was running")


@app.command()
def status(output: options.Output = None) -> None:
    """The pool in a few lines.

    Examples: ibshell status | ibshell status -o json
    """
    with options.hub() as connection:
        found: dict[str, Any] = connection.call("pool.status", Nothing(), dict[str, Any])
    if output is not None:
        render.write(render.record(found, output, "pool"))
        return
    render.write(
        f"pool {found['pool']}: {found['sites_up']}/{found['sites']} sites up, "
        f"{found['gpus_free']}/{found['gpus']} GPUs free, {found['leases']} leases, {found['runs']} runs\n"
        f"hub {found['software']}, process {found['hub_pid']}, up {format_duration(found['uptime_s'])}\n"
    )
