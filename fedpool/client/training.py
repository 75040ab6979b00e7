"""The tenant's side of a federation: ten lines in a training script.

Parameters come as arrays over a mapped file (changes stay private to the program) and go back as a file that the site maps;
they are never sent through a socket. Arrays may be numpy's or torch's.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from fedpool.client.connection import Connection, connect
from fedpool.errors import LocalProtocolError, Refused, Unreachable, UsageError
from fedpool.federation import parameters, schedule
from fedpool.wire.messages import Joined, NextRound, Nothing, Submission

SOCKET_VARIABLE = "IBSHELL_TASK"
_DTYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?",
}  # fmt: skip


class Round:
    """One round to train or to evaluate.

    Attributes:
        number: 1, 2, …
        kind: `train`, to be answered with `submit`; `evaluate`, to be answered with `report`.
        step: 1, 2, …: the round of training this is, or the one after which this evaluates (0: before the first).
        params: {name: array} of the global parameters; bf16 comes as float32, types that numpy does not have (fp8) not at all.
        site: where this program runs.
        config: the plan's `[config]` with what its `[[schedule]]` makes of it in this round.
        is_submitted: whether the site has taken the answer.
    """

    def __init__(self, connection: Connection, joined: Joined, offered: NextRound) -> None:
        self.number = offered.round
        self.kind = offered.kind
        self.step = offered.step
        self.site = joined.site
        self.config = joined.config | offered.config
        self._connection = connection
        self._update = Path(offered.update)
        self._bf16: set[str] = set()
        self._carried: set[str] = set()
        self.params = self._load(Path(offered.parameters))
        self.is_submitted = False

    def _load(self, path: Path) -> dict[str, Any]:
        with path.open("rb") as file:
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        raw = np.frombuffer(memory, np.uint8)
        loaded: dict[str, Any] = {}
        # The site knows what the plan excludes and has refused what cannot be averaged: here every type may pass.
        for tensor in parameters.layout(raw, "the global parameters", ("*",)).tensors:
            piece = raw[tensor.start : tensor.stop]
            if not parameters.is_known(tensor.dtype):
                self._carried.add(tensor.name)
            elif tensor.dtype == "BF16":
                self._bf16.add(tensor.name)
                loaded[tensor.name] = (piece.view("<u2").astype(np.uint32) << 16).view(np.float32).reshape(tensor.shape)
            else:
                loaded[tensor.name] = piece.view(_DTYPES[tensor.dtype]).reshape(tensor.shape)
        return loaded

    def submit(self, params: Mapping[str, Any], weight: int, metrics: Mapping[str, float] | None = None) -> bool:
        """Hand in the trained parameters; the site encodes and masks them before anything leaves it.

        Args:
            params: {name: array or tensor}, the same names, shapes and types as `round.params`. Further names for an array
                that is among them (tied weights) are left out: it is averaged once.
            weight: number of samples, a positive integer; it stays secret within the sum.
            metrics: the values the plan names.

        Returns:
            Whether they were taken. Where the round went on without this site they were not: ask for the next round.

        Raises:
            UsageError: they cannot be used; tensor, value and limit are named, and nothing has left the site.
        """
        if self.kind != schedule.TRAIN:
            raise UsageError(f"round {self.number} evaluates", "answer it with round.report(weight, metrics)")
        given = {name: _as_numpy(name, value) for name, value in params.items() if name not in self._carried}
        known = [given[name] for name in self.params if name in given]
        arrays = {
            name: np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"), copy=False)).reshape(array.shape)
            for name, array in given.items()
            if name in self.params or not any(_is_same(array, other) for other in known)
        }
        whole = _whole(weight)
        self._update.parent.mkdir(parents=True, exist_ok=True)
        arriving = self._update.with_suffix(".part")
        if self._bf16 & arrays.keys():
            _save_with_bf16(arrays, self._bf16, arriving)
        else:
            save_file(arrays, arriving)
        arriving.replace(self._update)
        return self._hand_in(whole, metrics or {})

    def report(self, weight: int, metrics: Mapping[str, float]) -> bool:
        """Hand in what was measured of the global parameters in a round that evaluates; it is summed under masks like an update.

        Args:
            weight: number of samples, a positive integer.
            metrics: the values the plan's `[evaluation]` names.

        Returns:
            Whether they were taken; see `submit`.

        Raises:
            UsageError: a metric is missing or not finite, or the round does not evaluate.
        """
        if self.kind != schedule.EVALUATE:
            raise UsageError(f"round {self.number} trains", "answer it with round.submit(params, weight, metrics)")
        return self._hand_in(_whole(weight), metrics)

    def _hand_in(self, weight: int, metrics: Mapping[str, float]) -> bool:
        submission = Submission(self.number, weight, {name: float(value) for name, value in metrics.items()})
        try:
            self._connection.call("program.submit", submission, Nothing, timeout_s=600.0)
        except Refused:
            return False
        self.is_submitted = True
        return True


def _whole(weight: float) -> int:
    if int(weight) != weight:
        raise UsageError(f"weight {weight!r} is no whole number", "the weight is the number of samples")
    return int(weight)


def _as_numpy(name: str, value: Any) -> Any:
    if hasattr(value, "detach"):  # a torch tensor, taken as it is
        value = value.detach().cpu()
        if str(value.dtype) == "torch.bfloat16":
            value = value.float()
        value = value.numpy()
    array = np.asarray(value)
    if array.dtype.hasobject:
        raise UsageError(f"{name!r} is an array of objects", "convert it to numbers: nothing is pickled")
    return array


def _is_same(one: Any, other: Any) -> bool:
    """Whether two arrays are one in memory, under two names."""
    here, there = one.__array_interface__, other.__array_interface__
    return one.size > 0 and all(here[key] == there[key] for key in ("data", "shape", "strides", "typestr"))


def _save_with_bf16(arrays: Mapping[str, Any], bf16: set[str], path: Path) -> None:
    """Write a safetensors file in which some float32 arrays are rounded to bf16 (nearest, ties to even).

    The library's numpy face has no bf16, so the format's few bytes are written here: length, header, tensors.
    """
    kinds = {np.dtype(code).str: kind for kind, code in _DTYPES.items()}
    header: dict[str, Any] = {}
    pieces: list[bytes] = []
    position = 0
    for name, array in sorted(arrays.items()):
        if name in bf16:
            bits = np.ascontiguousarray(array, np.float32).view(np.uint32).astype(np.uint64)
            kind, piece = "BF16", ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()
        else:
            kind, piece = kinds[array.dtype.str], array.tobytes()
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [position, position + len(piece)]}
        position += len(piece)
        pieces.append(piece)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.writelines(pieces)


class Federation:
    """The rounds of a run, one after the other; the loop ends when the plan ends."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._joined = connection.call("program.join", Nothing(), Joined)
        self.site = self._joined.site
        self.run = self._joined.run
        self.config = self._joined.config

    def __enter__(self) -> Federation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()

    def __iter__(self) -> Iterator[Round]:
        while True:
            offered = self._connection.call("program.next", Nothing(), NextRound, timeout_s=None)
            if offered.round == 0:
                return
            yield Round(self._connection, self._joined, offered)


def join() -> Federation:
    """Join the federation that started this program.

    Raises:
        LocalProtocolError: no site started this program for a run.
        Unreachable: the site's agent is gone.
    """
    path = os.environ.get(SOCKET_VARIABLE)
    if not path:
        raise LocalProtocolError(
            "this program was not started by a federation",
            "name it as `program` in a plan and start that: ibshell fed run plan.toml",
        )
    try:
        return Federation(connect(Path(path), "program", "the site's agent"))
    except Unreachable as error:
        raise Unreachable(f"the site's agent is gone: {error.message}") from None
