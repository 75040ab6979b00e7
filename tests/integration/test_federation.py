"""Federated runs on real pools: exact arithmetic, drop-outs, programs that misbehave, kill -9 of every party."""

import hashlib
import json
import os
import signal
import time

import numpy as np
import pytest
from safetensors.numpy import load_file

from agent.launchers.local import scan
from fedpool.errors import IbshellError
from fedpool.wire.messages import ById, RunView

pytestmark = pytest.mark.integration


def latest_run(pool):
    return pool.until(lambda: pool.rows("fed"))[-1]["id"]


def view(pool, run):
    return pool.ask("fed.show", ById(run), RunView)


def round_reached(pool, run, number):
    return pool.until(lambda: view(pool, run).round >= number)


def test_a_run_from_plan_to_model_and_history(pool):
    done = pool.cli("fed", "run", str(pool.plan()), "--out", "result")
    assert "finished after round 3 of 3" in done.stdout and "round 3/3: 4 sites" in done.stderr
    model = load_file(pool.work / "result" / "model.safetensors")
    # Every site adds 0.25 to each value: the weighted mean is 0.25 whatever the weights, three rounds make 0.75.
    assert np.allclose(model["w"], 0.75, atol=1e-5) and model["w"].dtype == np.float32
    assert model["steps"] == 7 and model["steps"].shape == (), "an integer keeps its global value"
    history = json.loads((pool.work / "result" / "history.json").read_text())
    [first, *_] = history["rounds"]
    # Weights are 2, 3, 4, 5 and each site's loss is its weight: the mean is (4 + 9 + 16 + 25) / 14.
    assert first["weight"] == 14 and first["metrics"]["loss"] == pytest.approx(54 / 14, abs=1e-4)
    assert len(first["survivors"]) == 4 and first["lost"] == {} and first["bytes_up"] > 0
    model_hash = hashlib.sha256((pool.work / "result" / "model.safetensors").read_bytes()).hexdigest()
    assert model_hash == history["rounds"][-1]["model"]
    assert pool.json("status")["gpus_free"] == 8 and pool.json("lease", "list")["items"] == []
    shown = pool.json("fed", "show", "test")
    assert (shown["state"], shown["round"]) == ("finished", 3)
    assert "all 3 rounds are done" in pool.cli("fed", "resume", "test", status=5).stderr


@pytest.mark.parametrize(
    ("does", "reason"),
    [
        ("crash", "python3 exited with status 1: I give up"),
        ("nan", "the update holds nan at w[3]"),
        ("shape", "'w' has shape [2], [4] expected"),
        ("drop", "'w' is missing"),
        ("weight", "weight 1000000000 in round 1; the plan allows 1 to 10"),
        ("metric", "metrics loss are missing in round 1"),
    ],
)
def test_a_program_that_misbehaves_drops_its_site_with_the_reason(pool, does, reason):
    plan = pool.plan({"victim": "site-02", "does": does}, rounds=1)
    pool.cli("fed", "run", str(plan), "--out", "result")
    [entry] = json.loads((pool.work / "result" / "history.json").read_text())["rounds"]
    assert len(entry["survivors"]) == 3 and reason.removeprefix("python3 ") in entry["lost"]["site-02"]
    model = load_file(pool.work / "result" / "model.safetensors")
    assert np.allclose(model["w"], 0.25, atol=1e-5)


@pytest.mark.waits
def test_a_program_that_hangs_is_left_behind_at_the_deadline(pool):
    plan = pool.plan({"victim": "site-02", "does": "hang"}, rounds=2, deadline="3s")
    pool.cli("fed", "run", str(plan), "--out", "result")
    entries = json.loads((pool.work / "result" / "history.json").read_text())["rounds"]
    assert (
        "had not submitted round 1 within" in entries[0]["lost"]["site-02"]
        or "deadline" in entries[0]["lost"]["site-02"]
    )
    assert all(len(entry["survivors"]) == 3 for entry in entries)
    assert pool.json("status")["gpus_free"] == 8


def test_a_program_that_does_not_exist(pool):
    plan = pool.plan(program=["no-such-program"])
    done = pool.cli("fed", "run", str(plan), status=1)
    assert "the program 'no-such-program' does not exist at site-0" in done.stderr
    assert pool.json("status")["gpus_free"] == 8


def test_too_few_sites_fail_the_round_and_reveal_nothing(pool):
    plan = pool.plan({"victim": "site-02", "does": "crash"}, rounds=1, minimum_cohort=4)
    done = pool.cli("fed", "run", str(plan), status=1)
    assert "3 of 4 sites left, 4 needed" in done.stderr and "no mask share was revealed" in done.stderr
    assert pool.json("status")["gpus_free"] == 8
    for site in pool.site_names():
        assert b"round.released" not in (pool.site_directory(site) / "site.db").read_bytes()


def test_more_gpus_than_exist(pool):
    done = pool.cli("fed", "run", str(pool.plan(gpus_per_site=5)), status=1)
    assert "20 GPU asked for; the pool has 8" in done.stderr


def test_a_malformed_plan_is_refused_before_anything_is_asked(pool):
    done = pool.cli("fed", "run", str(pool.plan(rouns=3)), status=2)
    assert "plan.toml, line " in done.stderr and "unknown key 'rouns'" in done.stderr and "'rounds'" in done.stderr
    assert pool.json("fed", "list")["items"] == []


def test_a_site_that_demands_more_stays_out(make_pool):
    pool = make_pool(4)
    path = pool.site_directory("site-03") / "site.toml"
    path.write_text(path.read_text().replace("minimum_cohort = 3", "minimum_cohort = 4"))
    pool.stop("site-03")
    pool.start("site-03")
    pool.until(lambda: len(pool.sites_up()) == 4)
    pool.cli("fed", "run", str(pool.plan(rounds=1)), "--out", "result")
    [entry] = json.loads((pool.work / "result" / "history.json").read_text())["rounds"]
    assert "under the 4 that site-03 demands" in entry["lost"]["site-03"]


def test_kill_9_of_a_site_in_a_round_and_its_return(make_pool):
    pool = make_pool(4)
    running = pool.background("fed", "run", str(pool.plan({"sleep": 0.3}, rounds=12)), "--out", "result")
    run = latest_run(pool)
    round_reached(pool, run, 2)
    pool.stop("site-02", signal.SIGKILL)
    round_reached(pool, run, 4)
    pool.start("site-02")
    out, err = running.communicate(timeout=90)
    assert running.returncode == 0, out + err
    entries = json.loads((pool.work / "result" / "history.json").read_text())["rounds"]
    assert any("site-02" not in entry["survivors"] for entry in entries)
    assert "site-02" in entries[-1]["survivors"], "it came back to the run"
    assert np.allclose(load_file(pool.work / "result" / "model.safetensors")["w"], 0.25 * 12, atol=1e-4)
    assert pool.json("status")["gpus_free"] == 8


def test_kill_9_of_the_hub_and_resume(pool):
    running = pool.background("fed", "run", str(pool.plan({"sleep": 0.4}, rounds=5)))
    run = latest_run(pool)
    round_reached(pool, run, 1)
    pool.stop("hub", signal.SIGKILL)
    _, err = running.communicate(timeout=60)
    assert (running.returncode == 7 and "closed the connection" in err) or "broke" in err
    pool.start("hub")
    pool.until(lambda: _up(pool) == 4)
    assert view(pool, run).state == "interrupted"
    assert pool.json("lease", "list")["items"][0]["state"] == "active", "the lease lives on without the hub"
    pool.cli("fed", "resume", run, "--out", "result")
    entries = json.loads((pool.work / "result" / "history.json").read_text())["rounds"]
    assert [entry["round"] for entry in entries] == [1, 2, 3, 4, 5]
    assert all(entry["attempt"] == 1 for entry in entries), "the round in progress went on, it did not begin anew"
    assert np.allclose(load_file(pool.work / "result" / "model.safetensors")["w"], 0.25 * 5, atol=1e-4)
    assert pool.json("status")["gpus_free"] == 8


def _up(pool):
    try:
        return len(pool.sites_up())
    except IbshellError:  # the hub is starting
        return 0


def test_kill_9_of_a_training_program(pool):
    plan = pool.plan({"victim": "site-03", "does": "hang", "in_round": 2}, rounds=4)
    running = pool.background("fed", "run", str(plan), "--out", "result")
    # Between two rounds a program may die and be started again without anything being lost: it has to be inside one.
    pool.until((pool.work / "train.py.hangs").exists)
    [(child, *_)] = [pids for mark, pids in scan().items() if mark.startswith("site-03.")]
    os.kill(child, signal.SIGKILL)
    out, err = running.communicate(timeout=90)
    assert running.returncode == 0, out + err
    entries = json.loads((pool.work / "result" / "history.json").read_text())["rounds"]
    assert "SIGKILL" in entries[1]["lost"]["site-03"]
    assert "site-03" in entries[-1]["survivors"], "its program was started again"


def test_a_run_asked_for_twice_with_one_key_runs_once(pool):
    words = ("fed", "run", str(pool.plan(rounds=1)), "--detach", "--idempotency-key", "k", "-o", "name")
    assert pool.cli(*words).stdout == pool.cli(*words).stdout
    assert len(pool.rows("fed")) == 1


def test_a_dry_run_tells_and_takes_nothing(pool):
    plan = pool.plan(rounds=1)
    found = json.loads(pool.cli("fed", "run", str(plan), "--dry-run", "-o", "json").stdout)
    assert (found["cohort"], found["graph"], found["threshold"]) == (4, "complete", 3)
    assert "share_threshold:" in pool.cli("fed", "run", str(plan), "--dry-run").stdout
    assert pool.rows("fed") == [] and pool.json("status")["gpus_free"] == 8


def test_stop_and_resume(pool):
    plan = pool.plan({"sleep": 0.3}, rounds=6)
    run = pool.cli("fed", "run", str(plan), "--detach", "-o", "name").stdout.strip()
    round_reached(pool, run, 1)
    assert f"run {run} is stopped" in pool.cli("fed", "stop", run).stdout
    assert pool.json("status")["gpus_free"] == 8
    pool.cli("fed", "resume", run, "--out", "result")
    entries = json.loads((pool.work / "result" / "history.json").read_text())["rounds"]
    assert len(entries) == 6


def test_ctrl_c_detaches_and_says_how_to_come_back(pool):
    running = pool.background("fed", "run", str(pool.plan({"sleep": 0.3}, rounds=4)))
    run = latest_run(pool)
    round_reached(pool, run, 1)
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=30)
    assert running.returncode == 130 and f"ibshell fed show {run} --watch" in err
    pool.until(lambda: view(pool, run).state == "finished")


def test_what_the_hub_keeps_of_a_round_is_masked(pool):
    run = pool.cli("fed", "run", str(pool.plan(rounds=1)), "--out", "result").stdout.split()[1]
    kept = pool.directory / "hub" / "runs" / run / "round-1-1"
    heads = [np.frombuffer(path.read_bytes(), "<u4") for path in sorted(kept.glob("head-*"))]
    assert len(heads) == 4 and not list(kept.glob("vector-*"))
    # All four sites submitted nearly the same update; what the hub has of them has nothing in common.
    assert len({word for head in heads for word in head.tolist()}) == sum(len(head) for head in heads)
    # The sum keeps its masks on disk: the model is its copy without them.
    words = np.fromfile(kept / "sum", "<u4")
    assert len(set(words[: len(words) // 2].tolist())) == len(words) // 2 and np.ptp(words.astype(np.int64)) > 2**24


def test_join_outside_a_federation(pool):
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, "-c", "import fedpool.client as fed; fed.join()"],
        capture_output=True,
        text=True,
        env=pool.environment,
    )
    assert (
        done.returncode == 1 and "was not started by a federation" in done.stderr and "ibshell fed run" in done.stderr
    )


@pytest.mark.waits
def test_time_passes(pool):
    """A lease whose holder says nothing ends by itself, at the sites, with its programs."""
    lease = pool.json("lease", "request", "-t", "a", "-g", "4", "--for", "1s")
    time.sleep(0.5)
    assert pool.json("lease", "show", lease["id"])["state"] == "active"
    pool.until(lambda: pool.json("lease", "show", lease["id"])["state"] == "expired", 15)
    assert pool.json("status")["gpus_free"] == 8
