"""Fixed-point encoding of real vectors into a ring of integers modulo 2^b, with its head-room proved.

A value x is clipped to [-clip, clip], scaled by 2^fraction_bits * weight / max_weight and rounded stochastically. With
n sites, |q| <= ceil(clip * 2^fraction_bits) and n * ceil(clip * 2^fraction_bits) <= 2^(b-1) - 1, so the sum of all q lies in
(-2^(b-1), 2^(b-1)) and its centred lift from the ring is the sum of the integers: no wrap-around is possible. What cannot be
proved is refused before the round. The weight itself is an integer of the tail, in a ring of 64 bits.

Error: stochastic rounding moves a value by less than one step, so the decoded mean differs from the plain weighted mean of
the clipped values by less than n * max_weight / (2^fraction_bits * sum of weights).
"""

import math

import msgspec

from fedpool.errors import UsageError
from fedpool.secagg import ring

# The kernel rounds words of up to 32 bits with a shift of 2^30 (ext/fedpool/secagg/_ring.h); two sites or more keep |q| under
# it by the rule above. Words of 64 bits are rounded in double, which holds integers up to 2^53: one bit is left to the sum.
_VALUE_LIMIT = {16: 1 << 15, 24: 1 << 23, 32: 1 << 30, 64: 1 << 52}
# Under this many steps on either side of zero a sum tells little more than signs: a plan that gets there is a mistake.
STEPS_MIN = 8


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


def bits_needed(levels: int, max_weight: int, cohort: int) -> int:
    """Width of the ring in which `levels` steps over a value's range survive at every weight: the smallest weight is 1.

    Args:
        levels: steps over [-clip, clip], >= 2.
        max_weight: largest sample count of a site.
        cohort: number of sites.
    """
    return ((levels - 1) * max_weight * cohort).bit_length()


def fit(clip: float, max_weight: int, cohort: int, ring_bits: int = 32, levels: int = 0) -> FixedPoint:
    """Choose the finest fixed point whose sum over `cohort` sites cannot wrap.

    Args:
        clip: largest magnitude kept.
        max_weight: largest sample count a site may have, >= 1.
        cohort: number of sites, >= 2.
        ring_bits: 16, 24, 32 or 64.
        levels: steps over [-clip, clip] that must survive whatever a site's weight; 0 demands none.

    Raises:
        UsageError: no such encoding exists; the message names the value and the limit.
    """
    largest = ring.of(ring_bits).largest
    if not (math.isfinite(clip) and clip > 0):
        raise UsageError(f"clip {clip} is not a positive number")
    if cohort < 2:
        raise UsageError(f"a cohort of {cohort} hides nothing", "secure aggregation needs two sites or more")
    tail = ring.of(64).largest
    if max_weight < 1 or cohort * max_weight > tail:
        raise UsageError(
            f"max_weight {max_weight} with {cohort} sites: their summed weights must be counted in 63 bits",
            f"max_weight may be 1 to {tail // cohort}",
        )
    needed = bits_needed(levels, max_weight, cohort) if levels else 0
    if needed > ring_bits:
        wider = next((width for width in ring.WIDTHS if width >= needed), None)
        raise UsageError(
            f"{levels} levels at weights up to max_weight {max_weight} over {cohort} sites need {needed} bits; "
            f"the ring has {ring_bits}",
            f"set ring_bits = {wider}, or ask for fewer levels" if wider else "ask for fewer levels",
        )
    limit = min(largest // cohort, _VALUE_LIMIT[ring_bits] - 1)
    if limit < STEPS_MIN:
        raise UsageError(
            f"{cohort} sites leave {limit} steps to a value in a ring of {ring_bits} bits; {STEPS_MIN} are the least",
            f"set ring_bits = {next(w for w in ring.WIDTHS if ring.of(w).largest // cohort >= STEPS_MIN)}",
        )
    fraction_bits = math.frexp(limit / clip)[1] - 1
    while math.ceil(math.ldexp(clip, fraction_bits)) > limit:
        fraction_bits -= 1
    return FixedPoint(clip=clip, fraction_bits=fraction_bits, max_weight=max_weight, cohort=cohort)
