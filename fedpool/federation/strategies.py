"""What becomes of an aggregate: the global parameters of the next round. A strategy sees the weighted mean, never an update."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


class Strategy(Protocol):
    """Turns a round's mean update into the next global parameters."""

    def apply(self, parameters: Floats, mean_update: Floats) -> Floats:
        """Args: float32[n] each; returns float32[n]."""
        ...


class FedAvg:
    """Add the mean update (McMahan et al., AISTATS 2017, algorithm 1: the weighted mean of the trained models)."""

    def apply(self, parameters: Floats, mean_update: Floats) -> Floats:
        """See `Strategy.apply`."""
        return parameters + mean_update


STRATEGIES: dict[str, type[Strategy]] = {"fedavg": FedAvg}
