"""A site that has written a million entries starts again: how long that takes, beside reading its file once.

python tests/soak/entries.py --entries 1000000
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path

from agent import clock
from agent.house_rules import HouseRules
from agent.leases import SiteLeases
from agent.ledger.site_ledger import SiteLedger
from agent.store.sqlite import SqliteStore
from fedpool.leasing.requests import Commit, Hold, Release
from fedpool.sim.scenario import SimulatedSite
from fedpool.transport.identity import Identity

REACH_S = 2.0
AT_ONCE = 500


class NoPrograms:
    """The launcher of a site on which nothing runs."""

    async def marks(self, site):
        return []

    async def warn(self, mark, devices=()):
        return None

    async def uses(self, mark, devices):
        return False

    async def end(self, mark, devices=()):
        return None

    def guard(self, mark, deadline):
        return None


def opened(path):
    """The leases of a site, their store and their ledger."""
    inventory = SimulatedSite("zurich", nodes=100, gpus_per_node=8).inventory()
    key = path.with_name("identity")
    identity = Identity.load(key) if key.exists() else Identity.create(key)
    store = SqliteStore(path)
    ledger = SiteLedger("zurich", identity, store, clock, {}, lambda size: None)
    rules = HouseRules("zurich", None, lambda *_: None, None, None)
    leases = SiteLeases("zurich", inventory, None, store, lambda *_: None, clock, NoPrograms(), ledger, None, rules)
    return leases, store, ledger


async def grow(path, entries):
    """Leases begin and end, four entries each; some stay."""
    site, store, ledger = opened(path)
    await site.recover()
    running = asyncio.create_task(site.run())

    async def live(number):
        lease = f"{number:08x}"
        await site.step(Hold(lease, "oncology", 1, 15.0, 1))
        await site.step(Commit(lease, 3600.0, 1))
        if number % 1000:
            await site.step(Release(lease, 1))

    for first in range(0, entries // 4, AT_ONCE):
        await asyncio.gather(*(live(number) for number in range(first, first + AT_ONCE)))
        if first % 20_000 == 0:
            print(f"  {first * 4:,} entries written", file=sys.stderr, flush=True)
    while any(lease.state == "ending" for lease in site.machine.leases.values()):  # noqa: ASYNC110 (nobody tells)
        await asyncio.sleep(0.05)
    running.cancel()
    await asyncio.wait([running])
    await ledger.advance()
    await store.close()
    return site.machine.state()


async def start_again(path):
    began = time.perf_counter()
    site, store, ledger = opened(path)
    await site.recover()
    took = time.perf_counter() - began
    await ledger.advance()
    records = await store.recorded()
    await store.close()
    return took, site.machine.state(), records


def read_once(path):
    """Bare reading of the file, from the disk: what no opening that looks at all of it can beat."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        began = time.perf_counter()
        while os.read(descriptor, 1 << 20):
            pass
        return time.perf_counter() - began
    finally:
        os.close(descriptor)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entries", type=int, default=1_000_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ibshell-entries-") as directory:
        path = Path(directory) / "site.db"
        before = asyncio.run(grow(path, arguments.entries))
        bare = read_once(path)
        took, after, records = asyncio.run(start_again(path))
        same = (after.leases, after.cordons, after.term) == (before.leases, before.cordons, before.term)
        print(
            f"{arguments.entries:,} entries and {records:,} records of the ledger, "
            f"{path.stat().st_size / 1e6:.0f} MB: open in {took:.2f} s "
            f"(to be reached {REACH_S:g} s; the file read once {bare:.2f} s); {len(after.leases):,} leases, "
            f"{'the same as before' if same else 'NOT the same as before'}"
        )
    return 0 if same and took < REACH_S else 1


if __name__ == "__main__":
    sys.exit(main())
