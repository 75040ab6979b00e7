"""The hub's arithmetic of a round: the masks taken off the sum, the mean decoded, the next global parameters made.

A chunk at a time on several threads, from mapped files into mapped files: memory does not grow with the model.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np

from agent import files
from agent.accumulator import Accumulator
from agent.masking import encodings, within
from fedpool import parallel
from fedpool.errors import IntegrityError, RoundFailed
from fedpool.federation import parameters
from fedpool.federation.parameters import Layout, Values
from fedpool.federation.strategies import Strategy
from fedpool.parallel import Range
from fedpool.secagg import masks, ring, vector
from fedpool.secagg.manifest import Manifest
from fedpool.secagg.ring import Floats

FLOAT_BYTES = 4


class Aggregate(NamedTuple):
    """What a round came to.

    Attributes:
        weight: sum of the survivors' sample counts.
        saturated: how many values of all updates were clipped.
        error_bound: how far a mean may be from the plain mean of the clipped values, at the widest range.
        metrics: weighted means.
        model: SHA-256 of the new global parameters.
        negative: running variances that came out negative, by name.
    """

    weight: int
    saturated: int
    error_bound: float
    metrics: dict[str, float]
    model: str
    negative: list[str]


class Optimiser(NamedTuple):
    """What makes the next parameters of the mean.

    Attributes:
        strategy: the plan's.
        step: 1, 2, …: aggregates of the run up to this one.
        memory: file of what the strategy remembers, or where there is none yet.
        new_memory: where it goes after this round.
        buffers: patterns of tensors that are only averaged, beside the usual ones.
    """

    strategy: Strategy
    step: int
    memory: Path
    new_memory: Path
    buffers: tuple[str, ...] = ()


def aggregate(
    manifest: Manifest,
    total: Accumulator,
    removal: masks.Masks,
    optimiser: Optimiser,
    model: Path,
    new_model: Path,
    workers: int,
) -> Aggregate:
    """Unmask, decode and apply the strategy.

    Args:
        manifest: the round.
        total: sum of the survivors' masked vectors.
        removal: masks to take off it.
        optimiser: what makes the next parameters.
        model: the round's global parameters.
        new_model: where the next ones go; complete or not there.
        workers: threads.

    Raises:
        RoundFailed, IntegrityError: the sum cannot be right; nothing is written.
    """
    said = _tail(manifest, total, removal)
    arriving = new_model.with_suffix(".part")
    shutil.copyfile(model, arriving)
    if optimiser.strategy.slots:
        _remember(optimiser, manifest.parameters * FLOAT_BYTES * optimiser.strategy.slots)
    digest, negative = _apply(manifest, total, removal.body, optimiser, said.weight, model, arriving, workers)
    with arriving.open("rb") as file:
        os.fsync(file.fileno())
    arriving.rename(new_model)
    files.sync_directory(new_model.parent)
    bound = max((e.fixed.mean_error_bound(said.weight) for e in encodings(manifest)), default=0.0)
    return Aggregate(said.weight, said.saturated, bound, said.metrics, digest, negative)


def measure(manifest: Manifest, total: Accumulator, removal: masks.Masks, model: str) -> Aggregate:
    """What the sites measured of a model that stays as it is.

    Args:
        manifest: a round whose vector has no values.
        total: sum of the survivors' masked vectors.
        removal: masks to take off it.
        model: SHA-256 of the model.

    Raises:
        IntegrityError: the sum cannot be right.
    """
    said = _tail(manifest, total, removal)
    return Aggregate(said.weight, said.saturated, 0.0, said.metrics, model, [])


class _Tail(NamedTuple):
    """What the sum says beside its values: see `Aggregate`."""

    weight: int
    saturated: int
    metrics: dict[str, float]


def _tail(manifest: Manifest, total: Accumulator, removal: masks.Masks) -> _Tail:
    with files.mapped(total.path) as mapped:
        tail = total.tail(mapped)
    masks.apply(tail, removal.tail, 0)
    weight, saturated = int(tail[vector.WEIGHT]), int(tail[vector.SATURATED])
    if not 0 < weight <= manifest.max_weight * len(total.added):
        raise IntegrityError(f"round {manifest.round}: the summed weight is {weight}: a vector was not what it claims")
    means = np.zeros(len(manifest.metrics), np.float32)
    metric_ring, unit = ring.of(vector.TAIL_BITS), manifest.metric_encoding().unit()
    masks.decode(metric_ring, tail[vector.METRICS :], None, unit / weight, means)
    metrics = {name: float(value) for name, value in zip(manifest.metrics, means, strict=True)}
    return _Tail(weight, saturated, metrics)


def _remember(optimiser: Optimiser, size: int) -> None:
    """The strategy's memory as it was, in the file that this round writes to."""
    if optimiser.memory.exists():
        shutil.copyfile(optimiser.memory, optimiser.new_memory)
    else:
        files.reserve(optimiser.new_memory, size)


def _apply(
    manifest: Manifest,
    total: Accumulator,
    removal: tuple[masks.Stream, ...],
    optimiser: Optimiser,
    weight: int,
    model: Path,
    new_model: Path,
    workers: int,
) -> tuple[str, list[str]]:
    """Write the next parameters; returns their SHA-256 and the running variances that are negative."""
    layout_of = manifest.vector
    slots_path = optimiser.new_memory if optimiser.strategy.slots else new_model
    with (
        files.mapped(total.path) as summed,
        files.mapped(model) as old_bytes,
        files.mapped(new_model, writable=True) as new_bytes,
        files.mapped(slots_path, writable=True) as memory_bytes,
    ):
        layout = parameters.layout(old_bytes, "the model", manifest.exclude)
        old, new = Values(layout, old_bytes, "the model"), Values(layout, new_bytes, "the new model")
        averaged = parameters.buffers(layout, optimiser.buffers)
        found = encodings(manifest)
        memory = (
            memory_bytes.view("<f4").reshape(optimiser.strategy.slots, -1)
            if optimiser.strategy.slots
            else np.zeros((0, layout.parameters), np.float32)
        )

        def work(piece: Range) -> int:
            words = total.words(summed, piece)
            masks.apply(words, removal, piece.start)
            mean = np.empty(piece.stop - piece.start, np.float32)
            for part, fixed in within(found, piece):
                place = slice(part.start - piece.start, part.stop - piece.start)
                masks.decode(layout_of.ring, words[place], None, fixed.unit() / weight, mean[place])
            base = old.read(piece)
            slots = list(memory[:, piece.start : piece.stop])
            values = optimiser.strategy.apply(base, mean, slots, optimiser.step)
            _average(values, base, mean, averaged, piece)
            finite = np.isfinite(values)
            if not finite.all():
                return piece.start + int(np.argmin(finite))
            new.write(piece.start, values)
            return -1

        bad = min((place for place in parallel.over(layout_of.chunks(), work, workers) if place >= 0), default=-1)
        if bad >= 0:
            raise RoundFailed(
                f"round {manifest.round}: the new global parameters are not finite at {parameters.name_of(layout, bad)}",
                "the old ones stay",
            )
        return hashlib.sha256(new_bytes.data).hexdigest(), _negative(layout, new)


def _average(values: Floats, base: Floats, mean: Floats, averaged: list[Range], piece: Range) -> None:
    """Running statistics take the mean, whatever the strategy made of them."""
    for part in averaged:
        first, last = max(part.start, piece.start) - piece.start, min(part.stop, piece.stop) - piece.start
        if first < last:
            values[first:last] = base[first:last] + mean[first:last]


def _negative(layout: Layout, values: Values) -> list[str]:
    """Running variances under zero: the model would give NaN at its next use."""
    found = []
    for tensor in layout.tensors:
        if tensor.offset >= 0 and tensor.values and tensor.name.endswith("running_var"):
            read = values.read(Range(tensor.offset, tensor.offset + tensor.values))
            if read.min() < 0:
                found.append(tensor.name)
    return found
