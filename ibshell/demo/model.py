"""The demo's classifier: one hidden layer, logistic loss, plain numpy. The same code trains pooled, alone and together."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Params = dict[str, Floats]

FEATURES = 30
HIDDEN = 16


def initial(seed: int) -> Params:
    """Random parameters: what every training begins with."""
    rng = np.random.default_rng(seed)
    return {
        "hidden.weight": (rng.standard_normal((FEATURES, HIDDEN)) / np.sqrt(FEATURES)).astype(np.float32),
        "hidden.bias": np.zeros(HIDDEN, np.float32),
        "out.weight": (rng.standard_normal(HIDDEN) / np.sqrt(HIDDEN)).astype(np.float32),
        "out.bias": np.zeros(1, np.float32),
    }


def scores(params: Params, x: Floats) -> Floats:
    """float32[n] in (0, 1): how likely each sample is benign."""
    hidden = np.tanh(x @ params["hidden.weight"] + params["hidden.bias"])
    z = hidden @ params["out.weight"] + params["out.bias"][0]
    return np.asarray(1 / (1 + np.exp(-np.clip(z, -30, 30))), np.float32)


def train(params: Params, x: Floats, y: Floats, epochs: int, rate: float, decay: float = 1e-3) -> Params:
    """Full-batch gradient descent on the logistic loss."""
    p = {name: np.array(value, np.float32) for name, value in params.items()}
    for _ in range(epochs):
        hidden = np.tanh(x @ p["hidden.weight"] + p["hidden.bias"])
        z = hidden @ p["out.weight"] + p["out.bias"][0]
        error = (1 / (1 + np.exp(-np.clip(z, -30, 30))) - y) / len(y)
        back = np.outer(error, p["out.weight"]) * (1 - hidden**2)
        gradient = {
            "hidden.weight": x.T @ back,
            "hidden.bias": back.sum(0),
            "out.weight": hidden.T @ error,
            "out.bias": error.sum(keepdims=True),
        }
        for name, g in gradient.items():
            p[name] -= np.float32(rate) * (g + decay * p[name] * name.endswith("weight")).astype(np.float32)
    return p


def loss(params: Params, x: Floats, y: Floats) -> float:
    """Mean logistic loss."""
    s = np.clip(scores(params, x), 1e-7, 1 - 1e-7)
    return float(-np.mean(y * np.log(s) + (1 - y) * np.log(1 - s)))


def accuracy(params: Params, x: Floats, y: Floats) -> float:
    """Share of samples on the right side of one half."""
    return float(np.mean((scores(params, x) > 0.5) == (y > 0.5)))


def auc(params: Params, x: Floats, y: Floats) -> float:
    """Area under the ROC curve, as the rank statistic (Hanley and McNeil, Radiology 143, 1982); ties count half."""
    s = scores(params, x)
    positive, negative = s[y > 0.5], s[y <= 0.5]
    if not len(positive) or not len(negative):
        return float("nan")
    above = (positive[:, None] > negative[None, :]).mean()
    level = (positive[:, None] == negative[None, :]).mean()
    return float(above + level / 2)
