"""The demo's patients: the Wisconsin diagnostic breast-cancer data that scikit-learn ships, split unevenly among hospitals.

569 real patients, 30 measured features each (Street, Wolberg, Mangasarian 1993). A tenth is a public reference set from which
every hospital takes the scale of the features, three tenths are the common test set, the rest is split: sizes and class balance
differ from hospital to hospital, as they would.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedpool.errors import NotFound

Floats = NDArray[np.float32]
SMALLEST = 8
OF_EACH_CLASS = 2


class Samples(NamedTuple):
    """x: float32[n, 30], scaled; y: float32[n], 1 benign, 0 malignant."""

    x: Floats
    y: Floats


class Split(NamedTuple):
    """The common test set and each hospital's patients."""

    test: Samples
    hospitals: list[Samples]

    def pooled(self) -> Samples:
        """All hospitals' patients together: what nobody may do in reality."""
        return Samples(np.concatenate([h.x for h in self.hospitals]), np.concatenate([h.y for h in self.hospitals]))


def load(hospitals: int, seed: int) -> Split:
    """Split the patients.

    Args:
        hospitals: how many.
        seed: fixes the split.

    Raises:
        NotFound: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_breast_cancer
    except ImportError:
        raise NotFound(
            "the demo's data come with scikit-learn, which is not installed", "pip install 'ibshell[demo]'"
        ) from None
    x, y = load_breast_cancer(return_X_y=True)
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(y))
    x, y = x[order], y[order].astype(np.float32)
    reference, test = len(y) // 10, len(y) * 4 // 10
    scaled = ((x - x[:reference].mean(0)) / x[:reference].std(0)).astype(np.float32)
    rest_x, rest_y = scaled[test:], y[test:]
    return Split(
        Samples(scaled[reference:test], y[reference:test]),
        [Samples(rest_x[part], rest_y[part]) for part in _parts(rest_y, hospitals, rng)],
    )


def _parts(y: Floats, hospitals: int, rng: np.random.Generator) -> list[NDArray[np.intp]]:
    """Indices for each hospital: shares of each class drawn from a Dirichlet distribution, none too small."""
    while True:
        parts: list[list[int]] = [[] for _ in range(hospitals)]
        for label in (0.0, 1.0):
            of_class = np.flatnonzero(y == label)
            shares = rng.dirichlet(np.full(hospitals, 1.5))
            extra = len(of_class) - OF_EACH_CLASS * hospitals
            counts = OF_EACH_CLASS + rng.multinomial(extra, shares)
            for part, piece in zip(parts, np.split(of_class, np.cumsum(counts)[:-1]), strict=True):
                part.extend(int(i) for i in piece)
        if min(len(part) for part in parts) >= SMALLEST:
            return [np.array(sorted(part)) for part in parts]
