"""How long a command takes from its start to its end: the version, and a listing against a pool of its own, beside bare Python."""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from fedpool.sim.scenario import SimulatedSite
from ibshell.measure.figure import Figure
from ibshell.pool import LocalPool

REPEAT = 11
SITES = 4


def _median_ms(command: Sequence[str], environment: dict[str, str]) -> float:
    times = []
    for _ in range(REPEAT):
        start = time.perf_counter()
        subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
        times.append(time.perf_counter() - start)
    return round(1000 * statistics.median(times), 1)


def measure() -> list[Figure]:
    """Whole-process times of `ibshell --version` and `ibshell gpu list`."""
    ibshell = [sys.executable, "-m", "ibshell"]
    with tempfile.TemporaryDirectory(prefix="ibshell-bench-", ignore_cleanup_errors=True) as directory:
        pool = LocalPool(Path(directory).name, Path(directory) / "pool", tied=True)
        environment = {**os.environ, "IBSHELL_POOL": f"unix://{pool.socket}"}
        try:
            pool.create(SimulatedSite("site", SITES, 1, 8).named(), reverse=lambda position: position % 2 == 1)
            pool.start_all()
            bare = _median_ms([sys.executable, "-c", "pass"], environment)
            version = _median_ms([*ibshell, "--version"], environment)
            listing = _median_ms([*ibshell, "gpu", "list"], environment)
        finally:
            pool.stop_all()
    return [
        Figure("start", case, value, "ms", limit="bare python", limit_value=bare)
        for case, value in (("ibshell --version", version), (f"ibshell gpu list, {SITES * 8} gpus", listing))
    ]
