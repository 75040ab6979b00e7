"""The hub's arithmetic of a round: add the survivors' vectors, remove the masks, make the next global parameters."""

import hashlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from agent import files
from fedpool.errors import IntegrityError, RoundFailed
from fedpool.federation import parameters
from fedpool.federation.strategies import STRATEGIES
from fedpool.secagg import masks
from fedpool.secagg.manifest import Manifest


class Aggregate(NamedTuple):
    """What a round came to.

    Attributes:
        weight: sum of the survivors' sample counts.
        metrics: weighted means.
        model: SHA-256 of the new global parameters.
    """

    weight: int
    metrics: dict[str, float]
    model: str


def aggregate(
    manifest: Manifest,
    vectors: Sequence[Path],
    removal: list[masks.Stream],
    strategy: str,
    model: Path,
    new_model: Path,
) -> Aggregate:
    """Add, unmask, decode and apply the strategy.

    Args:
        manifest: the round.
        vectors: the survivors' masked vectors.
        removal: masks to take off the sum.
        strategy: its name.
        model: the round's global parameters.
        new_model: where the next ones go; complete or not there.

    Raises:
        RoundFailed, IntegrityError: the sum cannot be right; nothing is written.
    """
    total = np.zeros(manifest.words, np.uint32)
    for path in vectors:
        with files.mapped(path) as raw:
            masks.add(total, raw.view("<u4"))
    masks.apply(total, removal, 0)
    count = manifest.parameters
    weight = int(total[count])
    if not 0 < weight <= manifest.max_weight * len(vectors):
        raise IntegrityError(f"round {manifest.round}: the summed weight is {weight}: a vector was not what it claims")
    with files.mapped(model) as old:
        layout = parameters.layout(old, "the model")
        base = parameters.gather(layout, old, "the model")
        mean = np.empty(count, np.float32)
        masks.decode(total[:count], None, manifest.parameter_encoding().unit() / weight, mean)
        values = STRATEGIES[strategy]().apply(base, mean)
        if not np.isfinite(values).all():
            where = parameters.name_of(layout, int(np.argmin(np.isfinite(values))))
            raise RoundFailed(
                f"round {manifest.round}: the new global parameters are not finite at {where}", "the old ones stay"
            )
        arriving = new_model.with_suffix(".part")
        shutil.copyfile(model, arriving)
        with files.mapped(arriving, writable=True) as new:
            parameters.scatter(layout, values, new)
            digest = hashlib.sha256(new.data).hexdigest()
    with arriving.open("rb") as file:
        os.fsync(file.fileno())
    arriving.rename(new_model)
    files.sync_directory(new_model.parent)
    means = np.zeros(len(manifest.metrics), np.float32)
    masks.decode(total[count + 1 :].copy(), None, manifest.metric_encoding().unit() / weight, means)
    return Aggregate(weight, {name: float(v) for name, v in zip(manifest.metrics, means, strict=True)}, digest)
