"""The hub's planning alone: ten thousand requests that wait over a thousand sites, and again after one change."""

import time

from fedpool.leasing.pool import PlanWanted, Pool, Submitted
from fedpool.records import Demand, Lease, Shape
from fedpool.sim.scenario import SimulatedSite
from ibshell.measure.figure import Figure

SITES = 1000
WAITING = 10_000
GPUS = (1, 2, 4, 8, 16, 64)
TYPES = ("h100", "a100", "l40s")
REACH_S = 1.0


def _pool() -> Pool:
    described = [SimulatedSite(f"s{n:04}", 1, 2, 8, TYPES[n % len(TYPES)]) for n in range(SITES)]
    pool = Pool(site.name for site in described)
    pool.term = 1
    for site in described:
        pool.site_described(site.name, site.inventory(), [], {})
    for number in range(WAITING):
        demand = Demand(GPUS[number % len(GPUS)], shape=Shape(kinds=(TYPES[number % len(TYPES)],)), max_wait_s=None)
        lease = Lease(f"{number:08x}", f"t{number % 50}", "requested", demand, 3600.0, "", submitted=float(number))
        for entry in pool.step(Submitted(lease), 20_000.0).entries:
            pool.apply(entry)
    return pool


def measure() -> list[Figure]:
    """Both plans, against the second that is to be reached."""
    pool = _pool()
    began = time.perf_counter()
    decision = pool.step(PlanWanted(), 20_000.0)
    whole = time.perf_counter() - began
    for entry in decision.entries:
        pool.apply(entry)
    pool.queue.mark(TYPES[0])
    began = time.perf_counter()
    pool.step(PlanWanted(), 20_001.0)
    again = time.perf_counter() - began
    case = f"plan {WAITING} waiting over {SITES} sites"
    return [
        Figure("planner", case, round(whole, 3), "s", limit="to be reached", limit_value=REACH_S),
        Figure(
            "planner", f"{case}, one change later", round(again, 3), "s", limit="to be reached", limit_value=REACH_S
        ),
    ]
