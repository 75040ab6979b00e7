import numpy as np
from numpy.typing import NDArray

def encode(
    values: NDArray[np.float32],
    base: NDArray[np.float32] | None,
    rounding: NDArray[np.uint16],
    clip: float,
    factor: float,
    out: NDArray[np.uint32],
) -> tuple[int, int]: ...
def add(words: NDArray[np.uint32], stream: NDArray[np.uint32]) -> None: ...
def subtract(words: NDArray[np.uint32], stream: NDArray[np.uint32]) -> None: ...
def decode(
    words: NDArray[np.uint32], base: NDArray[np.float32] | None, factor: float, out: NDArray[np.float32]
) -> None: ...
