"""The demo's course: sixteen hospitals as real processes, one lease, a federation, one hospital that dies and comes back."""

from __future__ import annotations

import json
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save

from fedpool.client import Connection
from fedpool.client.acting import act
from fedpool.errors import Failed
from fedpool.sim.scenario import SimulatedSite
from fedpool.wire.messages import HubView, Listing, Nothing, RunView
from ibshell.cli.fed import fetch_model, run_wanted, send, watch
from ibshell.demo import data, model
from ibshell.pool import LocalPool

SITES = 16
GPUS_PER_SITE = 2
ROUNDS = 24
EPOCHS = 8
RATE = 0.6
SEED = 20
DIES_IN_ROUND = 8
RETURNS_AFTER_ROUND = 11

PLAN = f"""\
name = "breast-cancer"
tenant = "oncology"
sites = {SITES}
gpus_per_site = {GPUS_PER_SITE}
program = ["{{python}}", "-m", "ibshell.demo.hospital", "--data", "{{data}}"]
initial = "initial.safetensors"
rounds = {ROUNDS}
minimum_cohort = 10
clip = 2.0
max_weight = 200
metrics = ["loss"]
deadline = "60s"
lease = "1h"

[config]
epochs = {EPOCHS}
rate = {RATE}
"""


class Victim:
    """One hospital whose program hangs, whose machine then dies in the middle of the round, and which comes back later."""

    def __init__(self, pool: LocalPool, site: str) -> None:
        self.site = site
        self.back_in_round = 0
        self._pool = pool
        self._state = "well"

    def seen(self, event: dict[str, Any], say: Callable[[str], None]) -> None:
        """React to an event of the run."""
        number = event["round"]
        match event["kind"], self._state:
            case ("aggregated", "well") if number == DIES_IN_ROUND - 1:
                # Its training hangs, so that the round is certain to be in the middle when the machine dies.
                for child in self._programs():
                    _signal(child, signal.SIGSTOP)
                self._state = "hanging"
            case ("phase", "hanging") if number == DIES_IN_ROUND and event["phase"] == "input":
                self._pool.stop(self.site, signal.SIGKILL)
                say(f"round {number}: SIGKILL to {self.site}, after it agreed on its masks")
                self._state = "dead"
            case ("aggregated", "dead") if number >= RETURNS_AFTER_ROUND:
                self._pool.start(self.site)
                say(f"round {number}: {self.site} starts again")
                self._state = "starting"
            case ("aggregated", "starting") if self.site in event["survivors"]:
                self.back_in_round = number
                self._state = "back"

    def _programs(self) -> list[int]:
        """The agent's children that run under a lease; its watchdog does not."""
        pid = self._pool.processes()[self.site]
        children = [
            child for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()
        ]
        return [int(child) for child in children if b"IBSHELL_LEASE=" in Path(f"/proc/{child}/environ").read_bytes()]


def _signal(pid: int, number: int) -> None:
    import os

    os.kill(pid, number)


@contextmanager
def demo_pool() -> Iterator[LocalPool]:
    """A pool in a temporary directory that leaves nothing behind, whatever happens."""
    with tempfile.TemporaryDirectory(prefix="ibshell-demo-", ignore_cleanup_errors=True) as directory:
        pool = LocalPool(Path(directory).name, Path(directory) / "pool", tied=True)
        try:
            yield pool
        finally:
            pool.stop_all()


def tell(say: Callable[[str], None], sites_up: Callable[[int, int], None]) -> dict[str, Any]:
    """Run the whole story; returns the report, every number of it measured in this run."""
    began = time.monotonic()
    split = data.load(SITES, SEED)
    say(
        f"{sum(len(h.y) for h in split.hospitals)} patients at {SITES} hospitals, {len(split.test.y)} in the common test set"
    )
    for number, hospital in enumerate(split.hospitals, 1):
        benign = int(hospital.y.sum())
        say(
            f"  hospital-{number:02}: {len(hospital.y):3} patients, {len(hospital.y) - benign:3} malignant, {benign:3} benign"
        )
    with demo_pool() as pool:
        pool.create(
            SimulatedSite("hospital", SITES, 1, GPUS_PER_SITE, "h100").named(),
            reverse=lambda position: position % 2 == 1,
        )
        for site, hospital in zip(pool.site_names(), split.hospitals, strict=True):
            np.savez(pool.site_directory(site) / "data" / "patients.npz", x=hospital.x, y=hospital.y)
        pool.start_all(sites_up)
        with pool.connect() as hub:
            return _federate(pool, hub, split, say, began)


def _federate(
    pool: LocalPool, hub: Connection, split: data.Split, say: Callable[[str], None], began: float
) -> dict[str, Any]:
    first = model.initial(SEED)
    initial = pool.directory / "initial.safetensors"
    initial.write_bytes(save(first))
    victim = Victim(pool, "hospital-06")
    started = act(hub, "fed.run", run_wanted(PLAN, send(hub, initial)), RunView)
    run = watch(hub, started, victim.seen)
    if run.state != "finished":
        raise Failed(f"the demo's run {run.state}: {run.reason}")
    final = pool.directory / "model.safetensors"
    fetch_model(hub, run.id, final)
    federated = load_file(final)
    say("training once on all data pooled, and at each hospital alone, for comparison")
    scores = _scores(split, first, federated)
    sample = _sample(pool, hub, run)
    leases = hub.call("lease.list", Nothing(), Listing).items
    devices = hub.call("gpu.list", Nothing(), Listing).items
    hurt = next(entry for entry in run.history if victim.site in entry["lost"])
    return {
        **scores,
        "sites": SITES,
        "gpus": len(devices),
        "rounds": run.round,
        "seconds_total": round(time.monotonic() - began, 2),
        "seconds_per_round": round(float(np.mean([entry["seconds"] for entry in run.history])), 4),
        "bytes_up_per_site": sum(entry["bytes_up"] for entry in run.history) // SITES,
        "bytes_down_per_site": sum(entry["bytes_down"] for entry in run.history) // SITES,
        "dropout": {
            "site": victim.site,
            "round": hurt["round"],
            "survivors": len(hurt["survivors"]),
            "reason": hurt["lost"][victim.site],
            "back_in_round": victim.back_in_round or None,
        },
        "leases_open_at_end": sum(lease["state"] not in ("released", "expired") for lease in leases),
        "devices_free_at_end": sum(device["state"] == "free" for device in devices),
        "ledger_verified": None,
        "hub_view_sample": sample,
    }


def _scores(split: data.Split, first: model.Params, federated: model.Params) -> dict[str, Any]:
    """Accuracy and AUC on the common test set: pooled, federated, each hospital alone."""
    epochs = ROUNDS * EPOCHS
    pooled = model.train(first, *split.pooled(), epochs, RATE)
    alone = [model.train(first, hospital.x, hospital.y, epochs, RATE) for hospital in split.hospitals]
    found: dict[str, Any] = {}
    for name, measure in (("accuracy", model.accuracy), ("auc", model.auc)):
        single = [measure(params, *split.test) for params in alone]
        found[name] = {
            "pooled": round(measure(pooled, *split.test), 4),
            "federated": round(measure(federated, *split.test), 4),
            "single_mean": round(float(np.mean(single)), 4),
            "single_worst": round(min(single), 4),
            "single_best": round(max(single), 4),
        }
    return found


def _sample(pool: LocalPool, hub: Connection, run: RunView) -> dict[str, Any]:
    """What the hub holds of one hospital's last update, beside the update itself, which only the hospital has."""
    site = run.sites[0]
    view = hub.call("fed.hub_view", {"id": run.id, "site": site}, HubView)
    true = json.loads((pool.site_directory(site) / "tasks" / run.id / "true-update.json").read_text())
    assert true["round"] == view.round
    # The vector begins with the tensor that comes first in the model's file, hidden.bias, in both.
    return {
        "site": site,
        "round": view.round,
        "hub_sees_words": view.words[:8],
        "true_update": [round(value, 6) for value in true["update"]],
    }
