"""What a plan's next round does, with which configuration and at which sites, and when a run has had enough of them.

A round that evaluates is a round like any other whose vector has no values: its metrics are masked and summed the same way, over a
model that stays as it is. What is decided here follows from the plan and from the summaries of the rounds so far, so a hub that
was restarted decides the same again.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from fedpool.units import parse_duration

TRAIN = "train"
EVALUATE = "evaluate"

Summary = Mapping[str, Any]


class Evaluation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When the sites evaluate the global parameters.

    Attributes:
        metrics: names of the values that every site reports.
        every: after so many rounds of training, and after the last one.
        initial: also before the first.
    """

    metrics: list[str]
    every: int = 1
    initial: bool = False


class Best(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which model is the best one, and when nothing better is waited for.

    Attributes:
        metric: of the evaluations, or of the rounds of training where no evaluation has it.
        mode: `min` or `max`.
        patience: measurements without an improvement after which the run ends; 0: it never ends early.
        min_delta: what counts as an improvement.
    """

    metric: str
    mode: str = "min"
    patience: int = 0
    min_delta: float = 0.0


class Change(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"first": "from"}):
    """Values of the configuration from one round of training on.

    Attributes:
        first: 1, 2, …: the round of training, `from` in the plan.
        config: what is other than before.
    """

    first: int
    config: dict[str, Any]


class Stragglers(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When a round goes on without the slow ones.

    Attributes:
        enough: updates, as a number of sites (8) or a share of the round's (0.75).
        grace: how long the others have from then on.
    """

    enough: int | float
    grace: str = "30s"

    @property
    def grace_s(self) -> float:
        """How long the others have, seconds."""
        return parse_duration(self.grace)


class Measured(NamedTuple):
    """The metric of one model: the round whose model it is, and the value."""

    model: int
    value: float


class Standing(NamedTuple):
    """Where a run stands with what its plan calls the best.

    Attributes:
        best: the best measurement, or None where there is none yet.
        since: measurements after it.
    """

    best: Measured | None
    since: int


def is_training(summary: Summary) -> bool:
    """Whether a finished round made a new model."""
    return bool(summary.get("does", TRAIN) == TRAIN)


def trained(history: Sequence[Summary]) -> int:
    """Rounds of training that are done."""
    return sum(map(is_training, history))


def total(rounds: int, evaluation: Evaluation | None) -> int:
    """Rounds of both kinds that a plan has when nothing ends it early."""
    if evaluation is None:
        return rounds
    return rounds + math.ceil(rounds / evaluation.every) + evaluation.initial


def next_kind(rounds: int, evaluation: Evaluation | None, best: Best | None, history: Sequence[Summary]) -> str | None:
    """What the next round does; None where the plan is done.

    Args:
        rounds: of training in the plan.
        evaluation: when it evaluates.
        best: when it ends early.
        history: summaries of the finished rounds, in order.
    """
    done = trained(history)
    over = done >= rounds or bool(ended_early(best, evaluation, history))
    if evaluation is not None:
        due = is_training(history[-1]) if history else evaluation.initial
        if due and (over or done % evaluation.every == 0):
            return EVALUATE
    return None if over else TRAIN


def measured(best: Best, evaluation: Evaluation | None, history: Sequence[Summary]) -> list[Measured]:
    """The metric that decides, model by model: of the evaluations if they have it, of the rounds of training otherwise."""
    of_evaluation = evaluation is not None and best.metric in evaluation.metrics
    return [
        Measured(summary.get("model_round", summary["round"]), summary["metrics"][best.metric])
        for summary in history
        if is_training(summary) != of_evaluation and best.metric in summary["metrics"]
    ]


def standing(best: Best, evaluation: Evaluation | None, history: Sequence[Summary]) -> Standing:
    """The best model so far; of two that are equal the earlier one."""
    sign = 1.0 if best.mode == "min" else -1.0
    found, since = None, 0
    for one in measured(best, evaluation, history):
        if found is None or sign * one.value < sign * found.value - best.min_delta:
            found, since = one, 0
        else:
            since += 1
    return Standing(found, since)


def ended_early(best: Best | None, evaluation: Evaluation | None, history: Sequence[Summary]) -> str:
    """Why a run is over before its last round, or ""."""
    if best is None or not best.patience:
        return ""
    found, since = standing(best, evaluation, history)
    if found is None or since < best.patience:
        return ""
    return (
        f"stopped early: {best.metric} has not improved on {found.value:.6g} of round {found.model} "
        f"in the {since} measurements since"
    )


def config(base: Mapping[str, Any], changes: Sequence[Change], step: int) -> dict[str, Any]:
    """The program's configuration in a round.

    Args:
        base: from the first round on.
        changes: of the plan, ascending.
        step: 1, 2, …: the round of training.
    """
    merged = dict(base)
    for change in changes:
        if change.first <= step:
            merged |= change.config
    return merged


def count(share: float, of: int) -> int:
    """How many sites a share means: a whole number is that many, a fraction that part of them, rounded up."""
    return min(of, share if isinstance(share, int) else math.ceil(share * of))


def drawn(run: str, number: int, ready: Sequence[str], share: float, fewest: int) -> list[str]:
    """The sites that are asked in a round, in order: the same for whoever draws, and other ones in every round.

    Args:
        run: id.
        number: of the round.
        ready: sites whose program runs.
        share: how many of them, as `count` takes it.
        fewest: at least so many, if there are.
    """
    wanted = max(count(share, len(ready)), fewest)
    by_lot = sorted(ready, key=lambda site: hashlib.sha256(f"{run}/{number}/{site}".encode()).digest())
    return sorted(by_lot[:wanted])
