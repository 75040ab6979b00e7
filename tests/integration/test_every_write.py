"""kill -9 at every single durable step of a lease's life, one after the other: strace kills the agent at its nth fdatasync."""

import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from fedpool.errors import IbshellError
from fedpool.wire.messages import ById, LeaseView, LeaseWanted

pytestmark = pytest.mark.integration

WRITES = {"hub": range(1, 8), "site-01": range(1, 6)}
HIGHEST = {}
CASES = [(party, number) for party, numbers in WRITES.items() for number in numbers]


@pytest.fixture(scope="module")
def pool(request):
    from integration.conftest import pools

    with pools() as make:
        yield make(2)


def kill_at_write(pool, party, number, strace):
    """Let an agent run until its nth write from now on would be durable; it dies in the call that makes it so."""
    pid = pool.processes()[party]
    tracer = subprocess.Popen(
        [
            strace,
            "-f",
            "-qq",
            "-e",
            "trace=fdatasync",
            "-e",
            f"inject=fdatasync:signal=KILL:when={number}",
            "-p",
            str(pid),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 10
    while "TracerPid:\t0" in Path(f"/proc/{pid}/status").read_text():
        assert time.monotonic() < deadline, "strace does not attach"
        time.sleep(0.01)
    return tracer


class Life(threading.Thread):
    """A lease from its request to its end, as a client sees it."""

    def __init__(self, pool):
        super().__init__()
        self.pool = pool
        self.seen = []

    def run(self):
        try:
            with self.pool.connect() as hub:
                wanted = LeaseWanted("a", 3, 60.0, id=os.urandom(4).hex())
                lease = hub.call("lease.request", wanted, LeaseView).lease
                self.seen.append((lease.id, lease.state))
                lease = hub.call("lease.release", ById(lease.id), LeaseView, 90.0).lease
                self.seen.append((lease.id, lease.state))
        except IbshellError:
            pass  # the hub died; what was answered before counts


@pytest.mark.parametrize(("party", "number"), CASES)
def test_nothing_is_lost_or_doubled(pool, need, party, number):
    tracer = kill_at_write(pool, party, number, need("strace", "strace"))
    life = Life(pool)
    life.start()
    while life.is_alive() and party in pool.processes():
        time.sleep(0.01)
    if party in pool.processes():  # its life has fewer writes
        os.kill(pool.processes()[party], signal.SIGKILL)
    tracer.wait(timeout=10)
    pool.start(party)
    life.join()
    pool.until(lambda: everybody(pool))
    listed = {row["id"]: row["state"] for row in pool.rows("lease")}
    for lease_id, state in life.seen:
        assert lease_id in listed, "what was answered is not forgotten"
        assert state != "released" or listed[lease_id] == "released"
    with pool.connect() as hub:
        for lease_id, state in listed.items():
            if state in ("requested", "held", "active", "ending"):
                hub.call("lease.release", ById(lease_id), LeaseView, 90.0)
        pool.until(lambda: free(pool) == 4, 40)
        everything = hub.call("lease.request", LeaseWanted("b", 4, 60.0), LeaseView).lease
        hub.call("lease.release", ById(everything.id), LeaseView)
    assert len({grant.uuid for part in everything.parts for grant in part.grants}) == 4, "no device is lost"
    for part in everything.parts:
        token = min(grant.token for grant in part.grants)
        assert token > HIGHEST.get(part.site, 0), "tokens only grow"
        HIGHEST[part.site] = token


def free(pool):
    return sum(row["state"] == "free" for row in pool.rows("gpu"))


def everybody(pool):
    try:
        return len(pool.sites_up()) == 2
    except IbshellError:
        return False
