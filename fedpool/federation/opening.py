"""The manifest of a run's next round: what follows for it from the plan, the model and who is there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedpool.federation import plan as plans
from fedpool.federation import schedule
from fedpool.federation.parameters import Layout, ranges
from fedpool.federation.rounds import Run
from fedpool.secagg.manifest import Manifest, Participant


def cohort(run: Run, ready: Sequence[str]) -> list[str]:
    """The sites of the next round, in order: some of those that are ready where it trains, all where it evaluates."""
    if run.next_kind == schedule.EVALUATE:
        return sorted(ready)
    fewest = run.plan.minimum_cohort
    return schedule.drawn(run.id, run.next_round, ready, run.plan.sample, fewest)


def manifest(run: Run, model: Layout, keys: Mapping[str, bytes]) -> Manifest:
    """The next round's manifest.

    Args:
        run: where it stands.
        model: layout of its global parameters.
        keys: {site: identity key} of the round's sites, in order.
    """
    plan = run.plan
    evaluates = run.next_kind == schedule.EVALUATE
    found = plan.graph(len(keys))
    return Manifest(
        federation=run.id,
        round=run.next_round,
        attempt=run.attempt + 1,
        plan=plans.digest(run.plan_text),
        model=bytes.fromhex(run.model),
        participants=tuple(Participant(i, name, key) for i, (name, key) in enumerate(keys.items(), 1)),
        threshold=plan.threshold_for(len(keys)),
        share_threshold=found.share_threshold,
        degree=found.degree,
        minimum_cohort=plan.minimum_cohort,
        parameters=0 if evaluates else model.parameters,
        metrics=tuple(plan.evaluation.metrics if evaluates and plan.evaluation else plan.metrics),
        ranges=() if evaluates else ranges(model, plan.clip, plan.ranges),
        metric_range=plan.metric_range,
        max_weight=plan.max_weight,
        norm_clip=plan.norm_clip,
        exclude=("*",) if evaluates else tuple(plan.exclude),
        ring_bits=plan.ring_bits,
    )
