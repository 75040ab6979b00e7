"""kill -9 of hub and sites at any moment of leasing: no device twice, none lost, and the listing tells the truth."""

import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from safetensors.numpy import load_file

from agent.launchers.local import scan
from fedpool.client.acting import act
from fedpool.wire.messages import ById, LeaseView, LeaseWanted, RunView

pytestmark = pytest.mark.integration


def truth(pool):
    """{UUID: leases that occupy it}, as the sites themselves say."""
    held = {}
    for gpu in pool.rows("gpu"):
        held.setdefault(gpu["uuid"], []).append(gpu["lease"])
    return held


@pytest.mark.parametrize("seed", range(3))
def test_kill_9_at_any_moment(make_pool, seed):
    pool = make_pool(3)
    rng = random.Random(seed)
    uuids = set(truth(pool))
    for _ in range(3):
        asking = subprocess.Popen(
            [sys.executable, "-m", "ibshell", "lease", "request", "-t", "a", "-g", "6", "--sites", "3", "-o", "name"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=pool.environment,
        )
        time.sleep(rng.uniform(0.1, 0.4))
        victim = rng.choice(["hub", "site-01", "site-02", "site-03"])
        pool.stop(victim, signal.SIGKILL)
        time.sleep(rng.uniform(0, 0.3))
        pool.start(victim)
        out, err = asking.communicate(timeout=90)
        assert "Traceback" not in err, err
        pool.until(pool.all_up)
        pool.until(lambda: settled(pool), 40)
        # What the command was told is true: an id means an active lease with six devices.
        listed = {lease["id"]: lease for lease in pool.rows("lease")}
        if asking.returncode == 0:
            assert listed[out.strip()]["state"] in ("active", "released")
        held = truth(pool)
        assert set(held) == uuids, "no device is lost"
        assert all(len(leases) == 1 for leases in held.values()), "no device is listed twice"
        for lease in listed.values():
            count = sum(leases == [lease["id"]] for leases in held.values())
            assert count == (6 if lease["state"] == "active" else 0), "all or nothing"
        for lease in listed.values():
            if lease["state"] == "active":
                with pool.connect() as hub:
                    act(hub, "lease.release", ById(lease["id"]), LeaseView)
        assert all(leases == [""] for leases in truth(pool).values()), pool.rows("lease")


def settled(pool):
    """Whether no lease is on its way any more: holds have lapsed, endings are confirmed."""
    leases = pool.rows("lease")
    states = {gpu["state"] for gpu in pool.rows("gpu")}
    return all(
        lease["state"] in ("active", "released", "expired", "failed", "aborted") for lease in leases
    ) and states <= {
        "free",
        "active",
    }


def test_ctrl_c_at_any_moment_leaves_nothing_behind(pool):
    """Case 080: after SIGINT there is no lease, or one that is on its way to its end; lease list and sites agree."""
    for step in range(12):
        asking = pool.background("lease", "request", "-t", "a", "-g", "8", "-o", "name")
        time.sleep(0.12 + 0.015 * step)
        asking.send_signal(signal.SIGINT)
        out, err = asking.communicate(timeout=60)
        if out or asking.returncode == 0:  # it was done, and its id said, before it was interrupted
            pool.cli("lease", "release", out.strip())
        pool.until(lambda: settled(pool))
        left = [row for row in pool.rows("lease") if row["state"] == "active"]
        assert not left, f"step {step} ended with {asking.returncode}, {out!r}, {err!r}: {left}"
        assert all(leases == [""] for leases in truth(pool).values()), pool.rows("lease")


def test_two_gangs_for_everything_get_it_one_at_a_time(make_pool):
    """Both ask for all devices at once: exactly one gets them, the other gets nothing and holds nothing."""
    pool = make_pool(3)
    words = [sys.executable, "-m", "ibshell", "lease", "request", "-t", "a", "-g", "6", "--sites", "3"]
    asking = [
        subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=pool.environment)
        for _ in range(2)
    ]
    codes = sorted(process.wait(timeout=60) for process in asking)
    assert codes in ([0, 5], [5, 5])
    pool.until(lambda: settled(pool))
    assert sum(lease["state"] == "active" for lease in pool.rows("lease")) == codes.count(0)
    with pool.connect() as hub:
        for lease in pool.rows("lease"):
            if lease["state"] == "active":
                act(hub, "lease.release", ById(lease["id"]), LeaseView)
        assert act(hub, "lease.request", LeaseWanted("b", 6, 60), LeaseView).lease.state == "active"


@pytest.mark.parametrize("seed", range(4))
def test_a_run_survives_kill_9_of_anybody_at_any_moment(make_pool, seed):
    """Three kills at random moments; whoever died is started again, the run is resumed until it is finished, and it is right."""
    pool = make_pool(4)
    rng = random.Random(seed)
    plan = pool.plan({"sleep": 0.05}, rounds=8, deadline="10s")
    run = pool.cli("fed", "run", str(plan), "--detach", "-o", "name").stdout.strip()
    for _ in range(3):
        time.sleep(rng.uniform(0, 0.8))
        victim = rng.choice(["hub", "site-01", "site-02", "site-03", "site-04"])
        pool.stop(victim, signal.SIGKILL)
        time.sleep(rng.uniform(0, 0.5))
        pool.start(victim)
        pool.until(pool.all_up)
    for _ in range(6):
        state = pool.until(lambda: view(pool, run).state not in ("running",) and view(pool, run).state)
        if state == "finished":
            break
        pool.cli("fed", "resume", run, "--detach")
    final = view(pool, run)
    assert (final.state, len(final.history)) == ("finished", 8), final.reason
    pool.cli("fed", "show", run, "--out", "result")
    assert np.allclose(load_file(pool.work / "result" / "model.safetensors")["w"], 0.25 * 8, atol=1e-4)
    pool.until(lambda: settled(pool))
    assert all(leases == [""] for leases in truth(pool).values()), pool.rows("lease")


def view(pool, run):
    return pool.ask("fed.show", ById(run), RunView)


@pytest.mark.waits
def test_a_lease_ends_in_time_while_the_agent_is_stopped(make_pool):
    """SIGSTOP of the agent: its watchdog ends the programs; the devices are free once the agent has seen that."""
    pool = make_pool(3)
    plan = pool.plan({"sleep": 600}, sites=3, minimum_cohort=3, deadline="10m", lease="8s")
    watching = pool.background("fed", "run", str(plan))
    try:
        pool.until(lambda: len(scan()) == 3)
        agent = pool.processes()["site-01"]
        os.kill(agent, signal.SIGSTOP)
        try:
            pool.until(lambda: not any(mark.startswith("site-01.") for mark in scan()), 60)
        finally:
            os.kill(agent, signal.SIGCONT)
        pool.until(lambda: pool.json("status")["gpus_free"] == 6, 60)
    finally:
        watching.kill()
        watching.communicate()
