"""A whole round over SSH: four sites and a hub as processes of their own on this machine, a model of 400 MB.

Everything shares this machine's cores: masking, both ends of every transfer and the programs. The bare channel beside it is what
the same SSH settings move between two processes that do nothing else. Memory is what a process has privately (RssAnon) at its
highest, over what it had before the run; mapped files are not in it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from fedpool.client import Connection
from fedpool.client.acting import act
from fedpool.errors import Failed
from fedpool.sim.scenario import SimulatedSite
from fedpool.wire.messages import Events, EventsWanted, RunView
from ibshell.cli.fed import run_wanted, send
from ibshell.measure.figure import Figure
from ibshell.pool import LocalPool

SITES = 4
PARAMETERS = 100_000_000
ROUNDS = 2  # the first one includes the programs' start
SAMPLE_S = 0.02
SITE_BOUND_MIB, HUB_BOUND_MIB = 64, 64 + SITES
PLAN = """
name = "bench"
tenant = "bench"
program = ["{python}", "-m", "ibshell.measure.trainer"]
initial = "initial"
max_weight = 1
"""


def measure() -> list[Figure]:
    """Seconds of a round, megabytes a second through the hub, memory of site and hub."""
    bare = _bare_channel()
    with tempfile.TemporaryDirectory(prefix="ibshell-bench-", ignore_cleanup_errors=True) as directory:
        pool = LocalPool(Path(directory).name, Path(directory) / "pool", tied=True)
        try:
            pool.create(SimulatedSite("site", SITES, 1, 1).named(), reverse=lambda position: position % 2 == 1)
            pool.start_all()
            initial = Path(directory) / "initial.safetensors"
            _zeros(initial, PARAMETERS)
            with pool.connect() as hub, _watched(pool.processes()) as above:
                run, spent = _run(hub, initial)
        finally:
            pool.stop_all()
    last = run.history[-1]
    moved = (last["bytes_up"] + last["bytes_down"]) / 1e6
    case = f"{SITES} sites {4 * PARAMETERS // 1_000_000} MB"
    site = max(mib for party, mib in above.items() if party != "hub")
    return [
        Figure("rounds", f"round {case}", round(last["seconds"], 2), "s"),
        *(Figure("rounds", f"round {case}: {phase}", round(took, 2), "s") for phase, took in spent.items()),
        Figure(
            "rounds", f"in and out of the hub, {case}", round(moved / last["seconds"], 1), "MB/s",
            limit="bare channel of the same settings", limit_value=round(bare, 1),
        ),
        Figure("rounds", f"memory of a site, {case}", round(site, 1), "MiB", limit="bound", limit_value=SITE_BOUND_MIB),
        Figure("rounds", f"memory of the hub, {case}", round(above["hub"], 1), "MiB", limit="bound", limit_value=HUB_BOUND_MIB),
    ]  # fmt: skip


def _run(hub: Connection, initial: Path) -> tuple[RunView, dict[str, float]]:
    """Run the plan to its end; the run, and how long each phase of its last round took."""
    text = PLAN + f"rounds = {ROUNDS}\nsites = {SITES}\n"
    upload = send(hub, initial)
    started = act(hub, "fed.run", run_wanted(text, upload), RunView)
    after = 0
    marks: list[tuple[str, float]] = []
    while True:
        events = hub.call("fed.events", EventsWanted(started.id, after, 10.0), Events)
        now, after = time.monotonic(), events.next
        marks += [
            (event.get("phase", "aggregated"), now)
            for event in events.items
            if event["round"] == ROUNDS and event["kind"] in ("phase", "aggregated")
        ]
        if not events.items and events.state != "running":
            break
    run = hub.call("fed.show", {"id": started.id}, RunView)
    if run.state != "finished":
        raise Failed(f"the measured run {run.state}: {run.reason}")
    return run, {phase: end - begin for (phase, begin), (_, end) in itertools.pairwise(marks)}


def _zeros(path: Path, count: int) -> None:
    """A model of so many float32, whose zeros take no room on disk."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [count], "data_offsets": [0, 4 * count]}}).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 4 * count)


@contextlib.contextmanager
def _watched(processes: dict[str, int]) -> Iterator[dict[str, float]]:
    """The largest private memory of each process above what it has now, MiB."""
    idle = {party: _private_mib(pid) for party, pid in processes.items()}
    above, done = dict.fromkeys(processes, 0.0), threading.Event()

    def sample() -> None:
        while not done.wait(SAMPLE_S):
            for party, pid in processes.items():
                above[party] = max(above[party], _private_mib(pid) - idle[party])

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield above
    finally:
        done.set()
        thread.join()


def _private_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon"))) / 1024


def _bare_channel() -> float:
    """MB/s from one process to another."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "ibshell.measure.channel"], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    if done.returncode:
        raise Failed(f"the bare channel failed: {done.stderr.strip().splitlines()[-1]}")
    return float(done.stdout)
