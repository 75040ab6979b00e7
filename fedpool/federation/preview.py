"""What a plan's rounds will be like, before anything is leased: the graph and its bounds, bytes, and what rounding costs."""

from __future__ import annotations

import math

import msgspec

from fedpool.federation.parameters import Layout, ranges
from fedpool.federation.plan import Plan
from fedpool.secagg import encoding, graph, vector


class RangePreview(msgspec.Struct, frozen=True):
    """Values with one clipping range.

    Attributes:
        values: how many.
        clip: largest magnitude kept.
        step: of a value of a site with the largest weight.
        levels: steps over [-clip, clip] that are left to a site of weight 1.
        error_bound: on the mean, where every site has the largest weight; it grows as the mean weight falls.
    """

    values: int
    clip: float
    step: float
    levels: int
    error_bound: float


class Preview(msgspec.Struct, frozen=True):
    """A plan's rounds with its full cohort.

    Attributes:
        cohort: number of sites.
        graph: `complete` or `sparse`.
        neighbours: sites with which a site shares masks and secrets.
        share_threshold: shares that rebuild a secret, held by a site and its neighbours.
        threshold: signatures needed on the survivors.
        minimum_cohort: fewest sites whose sum is revealed.
        corrupted: largest share of the sites that may collude with the hub for the bounds to hold.
        lost: share of the sites that may drop out.
        secrecy_bits, connection_bits, completeness_bits: -log2 of the probabilities that a site's secret can be rebuilt by
            colluders, that the honest sites fall apart, and that the round fails; None where it cannot happen within those shares.
        parameters: values of the vector.
        kept: names of the tensors that keep their global value.
        ring_bits: width of the ring.
        upload_bytes, download_bytes: of one site in one round.
        ranges: clipping ranges.
    """

    cohort: int
    graph: str
    neighbours: int
    share_threshold: int
    threshold: int
    minimum_cohort: int
    corrupted: float
    lost: float
    secrecy_bits: float | None
    connection_bits: float | None
    completeness_bits: float | None
    parameters: int
    kept: tuple[str, ...]
    ring_bits: int
    upload_bytes: int
    download_bytes: int
    ranges: tuple[RangePreview, ...]


def preview(plan: Plan, model: Layout) -> Preview:
    """What the rounds of a plan will be like.

    Args:
        plan: as it was read.
        model: layout of its initial parameters.
    """
    cohort = plan.cohort
    found = plan.graph(cohort)
    threshold = plan.threshold_for(cohort)
    # Fewer than rebuild a secret; and so few that two lists of survivors cannot both gather the signatures.
    colluding = min(found.share_threshold - 1, 2 * threshold - cohort - 1)
    return Preview(
        cohort=cohort,
        graph="sparse" if found.degree else "complete",
        neighbours=found.degree or cohort - 1,
        share_threshold=found.share_threshold,
        threshold=threshold,
        minimum_cohort=plan.minimum_cohort,
        corrupted=round(graph.CORRUPTED if found.degree else colluding / cohort, 3),
        lost=round(plan.lost_sites if found.degree else (cohort - threshold) / cohort, 3),
        secrecy_bits=_finite(found.secrecy_bits),
        connection_bits=_finite(found.connection_bits),
        completeness_bits=_finite(found.completeness_bits),
        parameters=model.parameters,
        kept=tuple(tensor.name for tensor in model.tensors if tensor.offset < 0),
        ring_bits=plan.ring_bits,
        upload_bytes=vector.layout(plan.ring_bits, model.parameters, len(plan.metrics)).size,
        download_bytes=model.size,
        ranges=tuple(_range(plan, part.values, part.clip) for part in ranges(model, plan.clip, plan.ranges)),
    )


def _range(plan: Plan, values: int, clip: float) -> RangePreview:
    fixed = encoding.fit(clip, plan.max_weight, plan.cohort, plan.ring_bits, plan.levels)
    return RangePreview(
        values=values,
        clip=clip,
        step=math.ldexp(1.0, -fixed.fraction_bits),
        levels=math.floor(2 * clip * fixed.factor(1)) + 1,
        error_bound=fixed.mean_error_bound(plan.cohort * plan.max_weight),
    )


def _finite(bits: float) -> float | None:
    return round(bits, 1) if math.isfinite(bits) else None
