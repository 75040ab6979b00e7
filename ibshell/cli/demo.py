"""`ibshell demo`: the whole story on this machine, and its report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from fedpool.units import format_duration, format_size
from ibshell import diagnostics, render
from ibshell.cli import options
from ibshell.cli.pool import sites_progress

app = typer.Typer()


def _report(found: dict[str, Any]) -> str:
    """The report as people read it."""
    lines = ["", f"{'':24}{'accuracy':>10}{'AUC':>10}"]
    for key, name in (
        ("pooled", "all data pooled"),
        ("federated", "the federation"),
        ("single_mean", "one hospital, mean"),
        ("single_worst", "one hospital, worst"),
        ("single_best", "one hospital, best"),
    ):
        lines.append(f"{name:24}{found['accuracy'][key]:>10.4f}{found['auc'][key]:>10.4f}")
    drop, sample = found["dropout"], found["hub_view_sample"]
    back = f"; back in round {drop['back_in_round']}" if drop["back_in_round"] else ""
    lines += [
        "",
        f"{found['rounds']} rounds over {found['sites']} sites, {found['gpus']} GPUs, in {found['seconds_total']:.1f} s; "
        f"{format_duration(found['seconds_per_round'])} a round on average",
        f"each site sent {format_size(found['bytes_up_per_site'])} and received {format_size(found['bytes_down_per_site'])}",
        f"round {drop['round']}: {drop['site']} was killed; the round finished with {drop['survivors']} sites{back}",
        f"leases open: {found['leases_open_at_end']}; devices free: {found['devices_free_at_end']} of {found['gpus']}",
        "",
        f"what the hub held of {sample['site']} in round {sample['round']}, and what only {sample['site']} knows:",
        f"{'hub: masked word':>20}  {'true update':>12}",
    ]
    for word, value in zip(sample["hub_sees_words"], sample["true_update"], strict=True):
        lines.append(f"{word:>20}  {value:>12.6f}")
    return "\n".join(lines) + "\n"


@app.command()
def demo(
    report: Annotated[Path, typer.Option("--report", help="Where the report goes, as JSON.")] = Path(
        "demo-report.json"
    ),
    output: options.Output = None,
) -> None:
    """Sixteen hospitals train a cancer classifier together; none shows its data or its update.

    A hub and 16 site agents run as real processes over SSH on loopback, with 32 simulated GPUs and real patients' data.
    One hospital is killed in the middle of a round and comes back later. It takes well under a minute and cleans up.

    Examples: ibshell demo | ibshell demo -o json
    """
    from ibshell.demo import story

    found = story.tell(diagnostics.say, sites_progress)
    report.write_text(json.dumps(found, indent=2) + "\n")
    if output is None:
        render.write(_report(found))
        diagnostics.say(f"the same in {report}")
    else:
        render.write(render.record(found, output, "rounds"))
