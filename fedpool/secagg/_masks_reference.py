"""The mask kernels in plain numpy: the oracle of the property tests, and what serves where nothing was compiled."""

import numpy as np
from numpy.typing import NDArray

from fedpool.secagg.ring import Floats, Words


def has_keystream() -> bool:
    """There is no keystream of its own here: it comes from the `cryptography` package."""
    return False


def encode(
    values: Floats, base: Floats | None, rounding: NDArray[np.uint16], clip: float, factor: float, out: Words
) -> tuple[int, int]:
    """Add floor(clip(values - base) * factor + rounding / 2^16) to the words; return (saturated, first_bad)."""
    finite = np.isfinite(values)
    if not finite.all():
        return 0, int(np.argmin(finite))
    difference = values.astype(np.float64)
    if base is not None:
        difference -= base
    saturated = int(np.count_nonzero(np.abs(difference) > clip))
    scaled = np.clip(difference, -clip, clip) * factor + rounding * (1.0 / 65536.0)
    # As the kernel rounds words of up to 32 bits: truncation after a shift that makes every value positive.
    shift = 1 << 30 if out.itemsize < 8 else 0
    integers = np.floor(scaled + shift).astype(np.int64) - shift
    out += integers.astype(out.dtype)
    return saturated, -1


def add(words: Words, other: Words) -> None:
    """words += other in the ring."""
    np.add(words, other, out=words)


def subtract(words: Words, other: Words) -> None:
    """words -= other in the ring."""
    np.subtract(words, other, out=words)


def decode(words: Words, base: Floats | None, lift: int, factor: float, out: Floats) -> None:
    """out = base + centred(words) * factor, in double, rounded once to float32; `lift` upper bits of a word mean nothing."""
    signed = np.left_shift(words, lift).view(f"<i{words.itemsize}") >> lift
    values = signed.astype(np.float64) * factor
    out[:] = values if base is None else base + values
