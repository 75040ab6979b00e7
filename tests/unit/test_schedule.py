"""What the next round does, with which configuration, at which sites; and when a run has had enough."""

import pytest

from fedpool.errors import PlanError
from fedpool.federation import plan, schedule
from fedpool.federation.schedule import Best, Change, Evaluation

GOOD = """\
name = "test"
tenant = "oncology"
program = ["train"]
initial = "initial.safetensors"
rounds = 5
sites = 8
metrics = ["loss"]
"""


def played(rounds, evaluation=None, best=None, values=()):
    """The kinds of rounds of a whole run whose deciding metric takes these values, and why it ended."""
    history, kinds, values = [], [], iter(values)
    while (kind := schedule.next_kind(rounds, evaluation, best, history)) is not None:
        number = len(history) + 1
        model = number if kind == "train" else max((e["round"] for e in history if e["does"] == "train"), default=0)
        decides = best is not None and (kind == "evaluate") == (
            evaluation is not None and best.metric in evaluation.metrics
        )
        metrics = {best.metric: next(values)} if decides else {}
        history.append({"round": number, "does": kind, "model_round": model, "metrics": metrics})
        kinds.append(kind[0])
    return "".join(kinds), history


@pytest.mark.parametrize(
    ("rounds", "evaluation", "kinds"),
    [
        (3, None, "ttt"),
        (3, Evaluation(["a"]), "tetete"),
        (5, Evaluation(["a"], every=2), "ttettete"),
        (4, Evaluation(["a"], every=2, initial=True), "ettette"),
        (2, Evaluation(["a"], every=7), "tte"),
    ],
)
def test_evaluations_come_after_so_many_rounds_and_after_the_last(rounds, evaluation, kinds):
    found, _ = played(rounds, evaluation)
    assert found == kinds
    assert schedule.total(rounds, evaluation) == len(kinds)


def test_the_best_model_is_the_first_of_equals_and_a_small_gain_is_none():
    best = Best("accuracy", "max", min_delta=0.01)
    evaluation = Evaluation(["accuracy"])
    _, history = played(5, evaluation, best, [0.5, 0.8, 0.8, 0.805, 0.7])
    assert schedule.standing(best, evaluation, history) == (schedule.Measured(3, 0.8), 3)


def test_a_run_ends_early_after_an_evaluation_of_its_last_model():
    best = Best("loss", patience=2)
    kinds, history = played(9, Evaluation(["a"], every=4), best, [3.0, 2.0, 2.5, 2.2, 1.0])
    assert kinds == "tttte", "two without an improvement on round 2, then the last model is evaluated"
    assert schedule.ended_early(best, None, history) == (
        "stopped early: loss has not improved on 2 of round 2 in the 2 measurements since"
    )


def test_a_metric_of_both_counts_where_it_is_evaluated():
    best, evaluation = Best("loss"), Evaluation(["loss"])
    history = [
        {"round": 1, "does": "train", "model_round": 1, "metrics": {"loss": 0.1}},
        {"round": 2, "does": "evaluate", "model_round": 1, "metrics": {"loss": 0.7}},
    ]
    assert schedule.measured(best, evaluation, history) == [(1, 0.7)]
    assert schedule.measured(best, None, history) == [(1, 0.1)]


def test_the_configuration_changes_from_a_round_on():
    changes = [Change(3, {"rate": 0.1}), Change(5, {"rate": 0.01, "epochs": 2})]
    found = [schedule.config({"rate": 1.0, "seed": 7}, changes, step)["rate"] for step in range(1, 7)]
    assert found == [1.0, 1.0, 0.1, 0.1, 0.01, 0.01]
    assert schedule.config({"seed": 7}, changes, 6) == {"seed": 7, "rate": 0.01, "epochs": 2}


def test_sites_are_drawn_evenly_and_the_same_by_whoever_draws():
    ready = [f"site-{i:02}" for i in range(10)]
    draws = [schedule.drawn("run", number, ready, 0.25, 2) for number in range(1, 2001)]
    assert all(len(draw) == 3 and draw == sorted(draw) for draw in draws)
    assert draws[0] == schedule.drawn("run", 1, list(reversed(ready)), 0.25, 2)
    taken = [sum(site in draw for draw in draws) for site in ready]
    assert min(taken) > 500 and max(taken) < 700, "600 of 2000 are expected of each"
    assert len(schedule.drawn("run", 1, ready, 1, 4)) == 4, "never fewer than may be summed"
    assert schedule.drawn("run", 1, ready[:2], 8, 4) == ready[:2]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[evaluation]\nmetrics = []", "line 9: evaluation: metrics is empty"),
        ('[evaluation]\nmetrics = ["a"]\nevery = 0', "line 10: evaluation: every = 0"),
        ('evaluation = {metrics = ["a"], every = 0}', "line 8: evaluation: every = 0"),
        ('[best]\nmetric = "auc"', "line 9: best: metric = 'auc' is none of the plan's: loss"),
        ('[best]\nmetric = "loss"\nmode = "least"', "line 10: best: mode = 'least'"),
        ('[best]\nmetric = "loss"\npatience = -1', "line 10: best: patience = -1"),
        ('[best]\nmetric = "loss"\nmin_delta = nan', "line 10: best: min_delta = nan"),
        ("[[schedule]]\nfrom = 2\nconfig = {}\n[[schedule]]\nfrom = 2\nconfig = {}", "line 12: schedule: from = 2: it may be 3 to"),
        ("[[schedule]]\nform = 2\nconfig = {}", "unknown key 'form'"),
        ("sample = 1.5", "line 8: sample = 1.5"),
        ("sample = 0", "line 8: sample = 0"),
        ("[stragglers]\nenough = 0.0", "line 9: stragglers: enough = 0.0"),
        ('[stragglers]\nenough = 6\ngrace = "soon"', "line 10: stragglers: grace = 'soon' is not a duration"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(text, says):
    with pytest.raises(PlanError) as refused:
        plan.parse(GOOD + text, "plan.toml")
    assert says in refused.value.message
