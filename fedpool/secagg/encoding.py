"""Fixed-point encoding of real vectors into the ring of integers modulo 2^32, with its head-room proved.

A value x is clipped to [-clip, clip], scaled by 2^fraction_bits * weight / max_weight and rounded stochastically. With
n sites, |q| <= ceil(clip * 2^fraction_bits) and n * ceil(clip * 2^fraction_bits) <= 2^31 - 1, so the sum of all q lies in
(-2^31, 2^31) and its centred lift from the ring is the sum of the integers: no wrap-around is possible. The weight itself
is one more word, an integer; n * max_weight <= 2^31 - 1. What cannot be proved is refused before the round.

Error: stochastic rounding moves a value by less than one step, so the decoded mean differs from the plain weighted mean of
the clipped values by less than n * max_weight / (2^fraction_bits * sum of weights).
"""

import math

import msgspec

from fedpool.errors import UsageError

RING_BITS = 32
_SUM_LIMIT = (1 << (RING_BITS - 1)) - 1
# The kernel rounds with a shift of 2^30 (see _masks.pyx); two sites or more keep |q| under it by the rule above.
_VALUE_LIMIT = 1 << 30


class FixedPoint(msgspec.Struct, frozen=True):
    """How real values become ring words.

    Attributes:
        clip: largest magnitude kept, > 0.
        fraction_bits: bits after the binary point; may be negative for huge ranges.
        max_weight: largest sample count a site may have.
        cohort: number of sites the head-room was proved for.
    """

    clip: float
    fraction_bits: int
    max_weight: int
    cohort: int

    def factor(self, weight: float) -> float:
        """The multiplier of a site with this weight."""
        return math.ldexp(weight / self.max_weight, self.fraction_bits)

    def unit(self) -> float:
        """What one step of the sum is worth once multiplied by max_weight and divided by the summed weights."""
        return math.ldexp(float(self.max_weight), -self.fraction_bits)

    def mean_error_bound(self, total_weight: float) -> float:
        """Upper bound on |decoded mean - weighted mean of the clipped values|."""
        return self.cohort * self.unit() / total_weight


def fit(clip: float, max_weight: int, cohort: int) -> FixedPoint:
    """Choose the finest fixed point whose sum over `cohort` sites cannot wrap.

    Args:
        clip: largest magnitude kept.
        max_weight: largest sample count a site may have, >= 1.
        cohort: number of sites, >= 2.

    Raises:
        UsageError: no such encoding exists; the message names the value and the limit.
    """
    if not (math.isfinite(clip) and clip > 0):
        raise UsageError(f"clip {clip} is not a positive number")
    if cohort < 2:
        raise UsageError(f"a cohort of {cohort} hides nothing", "secure aggregation needs two sites or more")
    if max_weight < 1 or cohort * max_weight > _SUM_LIMIT:
        raise UsageError(
            f"max_weight {max_weight} with {cohort} sites needs {(cohort * max_weight).bit_length() + 1} bits; "
            f"the ring has {RING_BITS}",
            f"max_weight may be 1 to {_SUM_LIMIT // cohort}",
        )
    limit = min(_SUM_LIMIT // cohort, _VALUE_LIMIT - 1)
    fraction_bits = math.frexp(limit / clip)[1] - 1
    while math.ceil(math.ldexp(clip, fraction_bits)) > limit:
        fraction_bits -= 1
    return FixedPoint(clip=clip, fraction_bits=fraction_bits, max_weight=max_weight, cohort=cohort)
