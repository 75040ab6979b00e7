"""What a plan may ask for beside training round after round: evaluation, the best model, an early end, draws, stragglers."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

pytestmark = pytest.mark.integration


def history(pool, directory="result"):
    return json.loads((pool.work / directory / "history.json").read_text())["rounds"]


def test_the_best_model_is_kept_and_the_run_ends_early(pool):
    """Values go 0.25, 0.5, 0.75, 1: the distance to 0.6 is smallest after the second round of training."""
    plan = pool.plan(
        rounds=9,
        evaluation={"metrics": ["distance"], "initial": True},
        best={"metric": "distance", "patience": 2},
    )
    done = pool.cli("fed", "run", str(plan), "--out", "result")
    rounds = history(pool)
    assert [entry["does"][0] for entry in rounds] == list("etetetete")
    assert [entry["metrics"].get("distance") for entry in rounds[::2]] == pytest.approx(
        [0.6, 0.35, 0.1, 0.15, 0.4], abs=1e-4
    )
    assert all(entry["model"] == before["model"] for before, entry in zip(rounds[1::2], rounds[2::2], strict=True))
    assert rounds[2]["weight"] == 14 and rounds[2]["bytes_up"] < 20_000, "nothing but metrics goes up"
    assert np.allclose(load_file(pool.work / "result" / "best.safetensors")["w"], 0.5, atol=1e-5)
    assert np.allclose(load_file(pool.work / "result" / "model.safetensors")["w"], 1.0, atol=1e-5)
    assert "round 1/19 evaluated: 4 sites, distance=0.6" in done.stderr
    assert "stopped early: distance has not improved on 0.1 of round 4 in the 2 measurements since" in done.stderr
    assert "best: distance=0.1 in round 4, best.safetensors" in done.stdout
    assert pool.json("fed", "show", "test")["best"]["model"] == 4


def test_a_plan_changes_the_configuration_and_draws_sites(pool):
    plan = pool.plan({"step": 0.5}, rounds=6, sample=3, schedule=[{"from": 4, "config": {"step": 0.25}}])
    pool.cli("fed", "run", str(plan), "--out", "result")
    assert np.allclose(load_file(pool.work / "result" / "model.safetensors")["w"], 2.25, atol=1e-4)
    drawn = [tuple(entry["survivors"]) for entry in history(pool)]
    assert all(len(sites) == 3 for sites in drawn) and len(set(drawn)) > 1
    assert all(entry["lost"] == {} for entry in history(pool)), "who was not asked is not missing"


def test_a_slow_site_is_left_behind_and_comes_along_later(pool):
    config = {"victim": "site-02", "does": "slow", "sleep": 0.3}
    plan = pool.plan(config, rounds=6, deadline="60s", stragglers={"enough": 0.75, "grace": "0.5s"})
    pool.cli("fed", "run", str(plan), "--out", "result")
    first, *later = history(pool)
    assert "site-02" not in first["survivors"] and first["lost"]["site-02"].startswith("input: ")
    assert first["seconds"] < 20, "far under its deadline"
    assert any("site-02" in entry["survivors"] for entry in later), "a program whose update came too late goes on"
