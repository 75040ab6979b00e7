"""kill -9 at every single durable step of a lease's life, one after the other: strace kills the agent at its nth fdatasync."""

import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from fedpool.client.acting import act
from fedpool.errors import IbshellError
from fedpool.wire.messages import ById, LeaseOffer, LeaseRenewal, LeaseSize, LeaseView, LeaseWanted

pytestmark = pytest.mark.integration

WRITES = {"hub": range(1, 12), "site-01": range(1, 8)}
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
    """A lease from its request to its end, as a client sees it: asked for, renewed, shrunk, handed over, given back."""

    def __init__(self, pool):
        super().__init__()
        self.pool = pool
        self.seen = None

    def run(self):
        try:
            with self.pool.connect() as hub:
                lease = os.urandom(4).hex()
                for method, body in (
                    ("request", LeaseWanted("a", 2, 60.0, gpus_max=3, sites=2, id=lease)),
                    ("renew", LeaseRenewal(lease, 900.0)),
                    ("resize", LeaseSize(lease, 2)),
                    ("offer", LeaseOffer(lease, "b")),
                    ("accept", LeaseOffer(lease, "b")),
                    ("release", ById(lease)),
                ):
                    self.seen = act(hub, f"lease.{method}", body, LeaseView, 90.0)
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
    pool.until(pool.all_up)
    listed = {row["id"]: row for row in pool.rows("lease")}
    if life.seen is not None:
        told, found = life.seen.lease, listed[life.seen.lease.id]  # what was answered is not forgotten
        assert told.state != "released" or found["state"] == "released"
        assert told.tenant in (found["tenant"], "a"), "who has taken it over has it"
        if told.duration_s == 900.0 and found["state"] == "active":
            assert found["expires_in_s"] > 600.0, "what was renewed is renewed"
    with pool.connect() as hub:
        for lease_id, row in listed.items():
            if row["state"] in ("requested", "held", "active", "ending"):
                act(hub, "lease.release", ById(lease_id), LeaseView, 90.0)
        pool.until(lambda: free(pool) == 4, 40)
        everything = act(hub, "lease.request", LeaseWanted("b", 4, 60.0), LeaseView).lease
        act(hub, "lease.release", ById(everything.id), LeaseView)
    assert len({grant.uuid for part in everything.parts for grant in part.grants}) == 4, "no device is lost"
    for part in everything.parts:
        token = min(grant.token for grant in part.grants)
        assert token > HIGHEST.get(part.site, 0), "tokens only grow"
        HIGHEST[part.site] = token


def free(pool):
    return sum(row["state"] == "free" for row in pool.rows("gpu"))
