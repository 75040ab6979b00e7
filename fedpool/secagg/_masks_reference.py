"""The mask kernels in plain numpy: the oracle of the property tests, and what serves where nothing was compiled."""

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]
Floats = NDArray[np.float32]


def encode(
    values: Floats, base: Floats | None, rounding: NDArray[np.uint16], clip: float, factor: float, out: Words
) -> tuple[int, int]:
    """Write floor(clip(values - base) * factor + rounding / 2^16) as ring words; return (saturated, first_bad)."""
    finite = np.isfinite(values)
    if not finite.all():
        return 0, int(np.argmin(finite))
    difference = values.astype(np.float64)
    if base is not None:
        difference -= base
    saturated = int(np.count_nonzero(np.abs(difference) > clip))
    scaled = np.clip(difference, -clip, clip) * factor + rounding * (1.0 / 65536.0)
    out[:] = (np.floor(scaled + 2.0**30).astype(np.int64) - (1 << 30)).astype(np.uint32)
    return saturated, -1


def add(words: Words, stream: Words) -> None:
    """Add a keystream to the words, modulo 2^32."""
    np.add(words, stream, out=words)


def subtract(words: Words, stream: Words) -> None:
    """Subtract a keystream from the words, modulo 2^32."""
    np.subtract(words, stream, out=words)


def decode(words: Words, base: Floats | None, factor: float, out: Floats) -> None:
    """Write base + centred(words) * factor, computed in double and rounded once to float32."""
    values = words.view(np.int32).astype(np.float64) * factor
    out[:] = values if base is None else base + values
