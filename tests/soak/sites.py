"""A thousand simulated sites against one hub, for as long as wanted: memory, heartbeat load, latency; what grows is said.

python tests/soak/sites.py --sites 1000 --minutes 5
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from fedpool.client.acting import act
from fedpool.sim.scenario import SimulatedSite
from fedpool.wire.messages import ById, LeaseView, LeaseWanted
from ibshell.pool import LocalPool

SITES_A_PROCESS = 125
GROWTH_MAX = 1.08
REMEMBERED_PARTS = 25_000  # more than any bound of what a hub remembers
TICK = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


def memory_mb(pid):
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE / 1e6


def cpu_s(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def latencies_ms(pool, sites, count):
    """Sorted times of leases over so many sites, each given back at once."""
    times = []
    with pool.connect() as hub:
        for _ in range(count):
            began = time.perf_counter()
            lease = act(hub, "lease.request", LeaseWanted("soak", sites, 600.0, sites=sites), LeaseView).lease
            times.append(1000 * (time.perf_counter() - began))
            act(hub, "lease.release", ById(lease.id), LeaseView, 90.0)
    return sorted(times)


def measure(pool, hub, idle_s):
    """One line: memory, the CPU share of an idle hub, and how long leases take."""
    before, began = cpu_s(hub), time.monotonic()
    time.sleep(idle_s)
    load = 100 * (cpu_s(hub) - before) / (time.monotonic() - began)
    one, hundred = latencies_ms(pool, 1, 60), latencies_ms(pool, min(100, len(pool.site_names())), 10)
    memory = memory_mb(hub)
    print(
        f"  hub {memory:7.1f} MB   idle {load:5.1f} % of a core   1 site p50 {one[30]:6.1f} p99 {one[-1]:7.1f} ms"
        f"   {min(100, len(pool.site_names()))} sites p50 {hundred[5]:7.1f} ms",
        flush=True,
    )
    return memory


def fill(pool, hub, sites):
    """Let the hub remember of leases that are over as much as it ever does: from then on it must not grow."""
    began = time.monotonic()
    with pool.connect() as connection:
        for _ in range(REMEMBERED_PARTS // sites):
            lease = act(connection, "lease.request", LeaseWanted("soak", sites, 600.0, sites=sites), LeaseView).lease
            act(connection, "lease.release", ById(lease.id), LeaseView, 90.0)
    print(
        f"  {REMEMBERED_PARTS:,} parts of leases in {time.monotonic() - began:.0f} s: {memory_mb(hub):.1f} MB",
        flush=True,
    )


def run(sites, minutes):
    with tempfile.TemporaryDirectory(prefix="ibs-", ignore_cleanup_errors=True) as directory:
        os.environ["IBSHELL_RUNTIME_DIR"] = f"{directory}/run"
        pool = LocalPool("soak", Path(directory) / "pool", tied=True)
        pool.create(SimulatedSite("s", sites, 1, 8).named(), reverse=lambda position: position % 2 == 1)
        began = time.monotonic()
        try:
            pool.start_all(sites_a_process=SITES_A_PROCESS)
            hub = pool.processes()["hub"]
            print(f"{sites} sites: all up after {time.monotonic() - began:.1f} s", flush=True)
            seen = [measure(pool, hub, 10.0)]
            if minutes:
                fill(pool, hub, min(100, sites))
            until = time.monotonic() + 60 * minutes
            while time.monotonic() < until:
                seen.append(measure(pool, hub, 20.0))
        finally:
            pool.stop_all()
    if len(seen) > 3 and seen[-1] > GROWTH_MAX * seen[1]:
        print(f"the hub has grown from {seen[1]:.1f} to {seen[-1]:.1f} MB")
        return 1
    return 0


def main():
    parser = argparse.ArgumentParser(description="many simulated sites against one hub")
    parser.add_argument("--sites", type=int, nargs="+", default=[250, 500, 1000])
    parser.add_argument(
        "--minutes", type=float, default=5.0, help="for the last of the sizes; the others are measured once"
    )
    arguments = parser.parse_args()
    status = 0
    for number, sites in enumerate(arguments.sites, 1):
        status |= run(sites, arguments.minutes if number == len(arguments.sites) else 0.0)
    return status


if __name__ == "__main__":
    sys.exit(main())
