"""What becomes of an aggregate: the global parameters of the next round. A strategy sees the weighted mean, never an update.

Each works value by value, so a model of any size goes through it a range at a time; what it remembers from round to round is a
number of vectors (`slots`) as long as the model, kept beside it. Running statistics are not moved by any of them: they are
averaged (`parameters.is_buffer`).

Others may add their own: a class of this shape under the entry point group `ibshell.strategies`.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, ClassVar, Protocol

import numpy as np

from fedpool.errors import UsageError
from fedpool.secagg.ring import Floats

ENTRY_POINTS = "ibshell.strategies"

# What others offer and why it cannot be had here, by the name people know it under.
_NEEDS_UPDATES = (
    "krum", "multikrum", "multi-krum", "bulyan", "median", "fedmedian", "trimmedmean", "trimmed-mean", "fedtrimmedavg",
    "geomed", "geometric-median", "qfedavg",
)  # fmt: skip


class Strategy(Protocol):
    """Turns a round's mean update into the next global parameters."""

    slots: ClassVar[int]

    def apply(self, parameters: Floats, mean: Floats, slots: Sequence[Floats], step: int) -> Floats:
        """The next values of a range.

        Args:
            parameters: float32[n], the global values.
            mean: float32[n], the weighted mean of trained minus global.
            slots: float32[n] each, what was remembered for this range; zeros before the first round; written in place.
            step: 1, 2, …: how many aggregates the run has had with this one.

        Returns:
            float32[n].
        """
        ...


def _known(condition: bool, key: str, value: float, limit: str) -> None:
    if not condition:
        raise UsageError(f"strategy option {key} = {value}: {limit}")


class FedAvg:
    """Add the mean update (McMahan et al., AISTATS 2017, algorithm 1: the weighted mean of the trained models)."""

    slots: ClassVar[int] = 0

    def apply(self, parameters: Floats, mean: Floats, slots: Sequence[Floats], step: int) -> Floats:
        """See `Strategy.apply`."""
        return parameters + mean


class FedProx(FedAvg):
    """FedAvg whose sites train with a proximal term mu / 2 * |w - global|^2 (Li et al., MLSys 2020, algorithm 2).

    The term belongs to the program's loss: it finds mu as `round.proximal_mu`.

    Args:
        proximal_mu: its weight, >= 0.
    """

    def __init__(self, proximal_mu: float = 0.01) -> None:
        _known(proximal_mu >= 0, "proximal_mu", proximal_mu, "it may not be negative")
        self.proximal_mu = proximal_mu


class FedAvgM:
    """FedAvg with momentum at the hub (Hsu, Qi and Brown, arXiv 1909.06335, section 4.3).

    Args:
        server_learning_rate: step, > 0.
        server_momentum: 0 to 1, without 1.
    """

    slots: ClassVar[int] = 1

    def __init__(self, server_learning_rate: float = 1.0, server_momentum: float = 0.9) -> None:
        _known(server_learning_rate > 0, "server_learning_rate", server_learning_rate, "it must be positive")
        _known(0 <= server_momentum < 1, "server_momentum", server_momentum, "it may be 0 to 1, without 1")
        self._rate, self._momentum = np.float32(server_learning_rate), np.float32(server_momentum)

    def apply(self, parameters: Floats, mean: Floats, slots: Sequence[Floats], step: int) -> Floats:
        """See `Strategy.apply`."""
        (momentum,) = slots
        momentum *= self._momentum
        momentum += mean
        return parameters + self._rate * momentum


class _Adaptive(ABC):
    """What FedAdam and FedYogi share (Reddi et al., Adaptive Federated Optimization, ICLR 2021, algorithm 2).

    Args:
        eta: step at the hub, > 0.
        beta_1: decay of the first moment, 0 to 1 without 1.
        beta_2: decay of the second.
        tau: what keeps the step finite where an update is nearly zero, > 0.
    """

    slots: ClassVar[int] = 2

    def __init__(self, eta: float = 0.1, beta_1: float = 0.9, beta_2: float = 0.99, tau: float = 1e-3) -> None:
        _known(eta > 0, "eta", eta, "it must be positive")
        _known(0 <= beta_1 < 1, "beta_1", beta_1, "it may be 0 to 1, without 1")
        _known(0 <= beta_2 < 1, "beta_2", beta_2, "it may be 0 to 1, without 1")
        _known(tau > 0, "tau", tau, "it must be positive")
        self._eta, self._beta_1, self._beta_2, self._tau = eta, beta_1, beta_2, tau

    def apply(self, parameters: Floats, mean: Floats, slots: Sequence[Floats], step: int) -> Floats:
        """See `Strategy.apply`."""
        first, second = slots
        first *= np.float32(self._beta_1)
        first += np.float32(1 - self._beta_1) * mean
        self._second(second, np.square(mean))
        moved = first * np.float32(self._step(step))
        moved /= np.sqrt(second) + np.float32(self._tau)
        moved += parameters
        return moved

    def _step(self, step: int) -> float:
        return self._eta

    @abstractmethod
    def _second(self, second: Floats, square: Floats) -> None:
        """Move the second moment, in place."""


class FedAdam(_Adaptive):
    """Adam at the hub, with the bias correction of Kingma and Ba (arXiv 1412.6980, section 2), counted as Flower counts it."""

    def _step(self, step: int) -> float:
        return self._eta * math.sqrt(1 - self._beta_2 ** (step + 1)) / (1 - self._beta_1 ** (step + 1))

    def _second(self, second: Floats, square: Floats) -> None:
        second *= np.float32(self._beta_2)
        second += np.float32(1 - self._beta_2) * square


class FedYogi(_Adaptive):
    """Yogi at the hub: the second moment changes by what was seen, however large it is (Zaheer et al., NeurIPS 2018)."""

    def _second(self, second: Floats, square: Floats) -> None:
        second -= np.float32(1 - self._beta_2) * square * np.sign(second - square)


STRATEGIES: dict[str, type[Strategy]] = {
    "fedavg": FedAvg,
    "fedavgm": FedAvgM,
    "fedadam": FedAdam,
    "fedyogi": FedYogi,
    "fedprox": FedProx,
}


def named(name: str, options: Mapping[str, Any]) -> Strategy:
    """The strategy a plan names, with its options.

    Raises:
        UsageError: there is none of that name, it needs what nobody has here, or an option is wrong.
    """
    kind: Any = STRATEGIES.get(name)
    if kind is None:
        if name.lower().replace("_", "-") in _NEEDS_UPDATES:
            raise UsageError(
                f"strategy {name!r} compares the sites' updates, and under secure aggregation nobody has them",
                "what masks allow: norm_clip and [ranges] bound each update at its site, before it is masked",
            )
        found = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
        if name not in found:
            raise UsageError(f"strategy {name!r}: known are {', '.join([*STRATEGIES, *sorted(found)])}")
        kind = found[name].load()
    known = list(inspect.signature(kind).parameters)
    for key in options:
        if key not in known:
            raise UsageError(
                f"strategy {name} has no option {key!r}", f"known: {', '.join(known)}" if known else "it has none"
            )
    strategy: Strategy = kind(**options)
    return strategy
