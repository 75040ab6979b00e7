"""The strategies: the same values as Flower's own after the same rounds, whatever the range they work on at a time."""

import json
from pathlib import Path

import numpy as np
import pytest

from fedpool.errors import UsageError
from fedpool.federation import strategies

# Made by tests/bench/peers/flower_strategies.py with flwr 1.42.0.
FLOWER = json.loads(Path(__file__).with_name("flower_strategies.json").read_text())


def run(name, options, pieces=1):
    """The values after every round."""
    strategy = strategies.named(name, options)
    values = np.array(FLOWER["initial"], np.float32)
    slots = np.zeros((strategy.slots, len(values)), np.float32)
    after = []
    for step, update in enumerate(FLOWER["updates"], 1):
        mean = np.array(update, np.float32)
        parts = np.array_split(np.arange(len(values)), pieces)
        new = [
            strategy.apply(values[p[0] : p[-1] + 1], mean[p], [s[p[0] : p[-1] + 1] for s in slots], step) for p in parts
        ]
        values = np.concatenate(new)
        after.append(values)
    return np.array(after)


@pytest.mark.parametrize("name", list(FLOWER["strategies"]))
def test_the_same_as_flowers(name):
    theirs = FLOWER["strategies"][name]
    assert np.allclose(run(name, theirs["options"]), theirs["after"], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", list(strategies.STRATEGIES))
def test_a_range_at_a_time_gives_the_same(name):
    assert np.array_equal(run(name, {}), run(name, {}, pieces=5))


def test_what_they_compute_stays_float32():
    assert {run(name, {}).dtype for name in strategies.STRATEGIES} == {np.dtype(np.float32)}


@pytest.mark.parametrize("name", ["krum", "MultiKrum", "fed_median", "bulyan", "trimmed_mean"])
def test_what_needs_single_updates_is_refused_with_the_reason(name):
    if name == "fed_median":
        name = "fedmedian"
    with pytest.raises(UsageError, match="under secure aggregation nobody has them") as error:
        strategies.named(name, {})
    assert "norm_clip" in error.value.hint


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("fedsgd", {}, "known are fedavg, fedavgm"),
        ("fedadam", {"lr": 1}, "has no option 'lr'"),
        ("fedavg", {"eta": 1}, "has no option 'eta'"),
        ("fedadam", {"eta": 0}, "eta = 0: it must be positive"),
        ("fedavgm", {"server_momentum": 1.0}, "without 1"),
        ("fedprox", {"proximal_mu": -1}, "may not be negative"),
    ],
)
def test_wrong_options_are_named(name, options, says):
    with pytest.raises(UsageError, match=says):
        strategies.named(name, options)


class Doubling:
    """A third party's."""

    slots = 0

    def apply(self, parameters, mean, slots, step):
        return parameters + 2 * mean


def test_a_third_partys_strategy_comes_by_its_entry_point(monkeypatch):
    class Point:
        name = "doubling"

        def load(self):
            return Doubling

    monkeypatch.setattr(strategies, "entry_points", lambda group: [Point()] if group == strategies.ENTRY_POINTS else [])
    strategy = strategies.named("doubling", {})
    assert strategy.apply(np.ones(1, np.float32), np.ones(1, np.float32), [], 1).tolist() == [3.0]
    with pytest.raises(UsageError, match="doubling"):
        strategies.named("tripling", {})
