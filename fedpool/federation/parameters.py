"""A model's file as one vector of float32, and back. Pure: it works on buffers, whoever mapped them.

The file is safetensors: a u64 length, a JSON header, then the tensors' bytes. Tensors of floating point make up the vector, in
the order of the global file; everything else (counters, masks) keeps its global value. fp8 means nothing without its scales and
is refused. Nothing here needs memory for a whole model: values are read and written a range at a time.

One rule for what a training keeps beside its weights: integers and booleans (`num_batches_tracked`) keep the global value, because
under masks only an exact sum could be computed and a sum of counters means nothing; running statistics of floating point are
averaged like weights, but no server optimiser moves them (`is_buffer`).
"""

import bisect
import fnmatch
import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fedpool.errors import UsageError
from fedpool.parallel import Range
from fedpool.secagg.manifest import ValueRange
from fedpool.secagg.ring import Bytes, Floats

# What torch and its kin call their running statistics.
BUFFERS = ("*running_mean", "*running_var")

HEADER_BYTES_MAX = 100_000_000  # the format's own limit
_FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_OTHERS = {"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1}
_WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, **_OTHERS}


class Tensor(NamedTuple):
    """One tensor of a file: bytes start to stop, and where its values stand in the vector (-1: not part of it)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    offset: int

    @property
    def values(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class Layout(NamedTuple):
    """The tensors of a file in file order, the length of the vector, the length of the file, and what was excluded."""

    tensors: tuple[Tensor, ...]
    parameters: int
    size: int
    exclude: tuple[str, ...] = ()

    def may_be_missing(self, tensor: Tensor) -> bool:
        """Whether an update need not hold it: it is excluded, or of a type that programs cannot write (an empty one, then)."""
        return matches(tensor.name, self.exclude) or not is_known(tensor.dtype)


def layout(file: Bytes, what: str, exclude: Sequence[str] = ()) -> Layout:
    """Read the header of a safetensors file.

    Args:
        file: uint8[size], the whole file, usually mapped.
        what: what to call it in messages.
        exclude: patterns of tensors that are no part of the vector whatever their type, `head.*`; they and empty ones may
            have types that cannot be averaged.

    Raises:
        UsageError: damaged, or a tensor's type cannot be aggregated; tensor and type are named.
    """
    size = len(file)
    try:
        if size < 8:
            raise ValueError("it is shorter than a header")
        (length,) = struct.unpack("<Q", file[:8].tobytes())
        if length > min(HEADER_BYTES_MAX, size - 8):
            raise ValueError(f"its header claims {length} bytes of {size}")
        header = json.loads(file[8 : 8 + length].tobytes())
        header.pop("__metadata__", None)
        tensors = sorted(
            ((name, t["dtype"], tuple(t["shape"]), *t["data_offsets"]) for name, t in header.items()),
            key=lambda t: (t[3], t[4]),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(f"{what} is no safetensors file: {error}") from None
    found, offset, base = [], 0, 8 + length
    for name, dtype, shape, start, stop in tensors:
        values = math.prod(shape)
        if not is_known(dtype) and values and not matches(name, exclude):
            raise UsageError(
                f"{what}: tensor {name!r} has type {dtype}, which cannot be averaged: its codes mean nothing without their scales",
                f'dequantise it to bf16, or write exclude = ["{name}"] so that it keeps its global value',
            )
        if not 0 <= start <= stop <= size - base or stop - start != _bytes(dtype, values, stop - start):
            raise UsageError(f"{what}: tensor {name!r} of shape {list(shape)} does not fit bytes {start} to {stop}")
        is_float = dtype in _FLOATS and not matches(name, exclude)
        found.append(Tensor(name, dtype, shape, base + start, base + stop, offset if is_float else -1))
        offset += values if is_float else 0
    return Layout(tuple(found), offset, size, tuple(exclude))


def _bytes(dtype: str, values: int, claimed: int) -> int:
    """What so many values take; a type that is not known takes what its file says, and nothing where there are none."""
    if is_known(dtype):
        return values * _WIDTHS[dtype]
    return claimed if values else 0


def is_known(dtype: str) -> bool:
    """Whether it is a type whose values can be read here."""
    return dtype in _WIDTHS


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a tensor's name fits one of the patterns."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def ranges(reference: Layout, clip: float, special: Mapping[str, float]) -> tuple[ValueRange, ...]:
    """The clipping ranges of a vector's values.

    Args:
        reference: layout of the global parameters.
        clip: range of what no pattern fits.
        special: {pattern of names: range}; the first that fits counts.
    """
    found: list[ValueRange] = []
    for tensor in reference.tensors:
        if tensor.offset < 0 or not tensor.values:
            continue
        own = next((value for pattern, value in special.items() if fnmatch.fnmatchcase(tensor.name, pattern)), clip)
        if found and found[-1].clip == own:
            found[-1] = ValueRange(found[-1].values + tensor.values, own)
        else:
            found.append(ValueRange(tensor.values, own))
    return tuple(found)


def buffers(reference: Layout, patterns: Sequence[str]) -> list[Range]:
    """Where running statistics stand in the vector, ascending.

    Args:
        reference: layout of the global parameters.
        patterns: of names, beside the usual ones.
    """
    return [
        Range(t.offset, t.offset + t.values)
        for t in reference.tensors
        if t.offset >= 0 and t.values and matches(t.name, (*BUFFERS, *patterns))
    ]


class _Piece(NamedTuple):
    """Values of one type that lie one after the other, in the file as in the vector."""

    offset: int
    values: int
    dtype: str
    start: int


class Values:
    """The vector of a file, read and written a range at a time.

    Args:
        reference: layout of the global parameters, which gives the order.
        file: uint8[size], usually mapped.
        what: what to call the file in messages.

    Raises:
        UsageError: tensors are missing, unknown or of another shape or type; each is named.
    """

    def __init__(self, reference: Layout, file: Bytes, what: str) -> None:
        given = _matched(reference, file, what)
        self._file = file
        self._pieces: list[_Piece] = []
        for tensor in reference.tensors:
            if tensor.offset < 0 or not tensor.values:
                continue
            own = given[tensor.name]
            last = self._pieces[-1] if self._pieces else None
            if last and last.dtype == own.dtype and last.start + last.values * _WIDTHS[own.dtype] == own.start:
                self._pieces[-1] = last._replace(values=last.values + own.values)
            else:
                self._pieces.append(_Piece(tensor.offset, own.values, own.dtype, own.start))
        self._starts = [piece.offset for piece in self._pieces]

    def _parts(self, wanted: Range) -> Iterator[tuple[_Piece, int, int]]:
        """The pieces of a range, with the first and the last value in each."""
        at = max(0, bisect.bisect_right(self._starts, wanted.start) - 1)
        while at < len(self._pieces) and self._starts[at] < wanted.stop:
            piece = self._pieces[at]
            yield piece, max(wanted.start - piece.offset, 0), min(wanted.stop - piece.offset, piece.values)
            at += 1

    def read(self, wanted: Range) -> Floats:
        """The values of a range: a view where the file's bytes are these values, otherwise converted.

        Returns:
            float32[wanted.stop - wanted.start]; not to be written to.
        """
        parts = [self._read(piece, first, last) for piece, first, last in self._parts(wanted)]
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.zeros(0, np.float32)

    def _read(self, piece: _Piece, first: int, last: int) -> Floats:
        width = _WIDTHS[piece.dtype]
        start = piece.start + first * width
        octets = self._file[start : start + (last - first) * width]
        if start % width:  # a file whose header has an odd length
            octets = octets.copy()
        raw = octets.view(_FLOATS[piece.dtype])
        if piece.dtype == "BF16":
            return (raw.astype(np.uint32) << 16).view(np.float32)
        return raw.astype(np.float32, copy=False)

    def write(self, first: int, values: Floats) -> None:
        """Write values from a place onwards, rounding once to each tensor's type (nearest, ties to even).

        Args:
            first: place of the first value in the vector.
            values: float32[n].
        """
        for piece, start, stop in self._parts(Range(first, first + len(values))):
            part = values[piece.offset + start - first : piece.offset + stop - first]
            if piece.dtype == "BF16":
                bits = np.ascontiguousarray(part).view(np.uint32).astype(np.uint64)
                out = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
            else:
                out = part.astype(_FLOATS[piece.dtype])
            place = piece.start + start * _WIDTHS[piece.dtype]
            self._file[place : place + out.nbytes] = out.view(np.uint8)


def _matched(reference: Layout, file: Bytes, what: str) -> dict[str, Tensor]:
    """The file's tensors by name, once they are found to be the reference's."""
    own = layout(file, what, reference.exclude)
    expected = {t.name: t for t in reference.tensors}
    given = {t.name: t for t in own.tensors}
    problems = [f"{n!r} is missing" for n, t in expected.items() if n not in given and not reference.may_be_missing(t)]
    problems += [f"{name!r} is not in the global parameters" for name in given if name not in expected]
    for name in expected.keys() & given.keys():
        if given[name].shape != expected[name].shape:
            problems.append(f"{name!r} has shape {list(given[name].shape)}, {list(expected[name].shape)} expected")
        elif given[name].dtype != expected[name].dtype:
            problems.append(f"{name!r} has type {given[name].dtype}, {expected[name].dtype} expected")
    if problems:
        raise UsageError(f"{what} does not match the global parameters: {'; '.join(sorted(problems)[:5])}")
    return given


def gather(reference: Layout, file: Bytes, what: str) -> Floats:
    """The whole vector of a file; see `Values`."""
    return Values(reference, file, what).read(Range(0, reference.parameters))


def name_of(reference: Layout, index: int) -> str:
    """How people name the value at this place of the vector: `w[3]`, `conv.bias[0, 2]`."""
    for tensor in reference.tensors:
        if tensor.offset >= 0 and tensor.offset <= index < tensor.offset + tensor.values:
            place = np.unravel_index(index - tensor.offset, tensor.shape)
            return f"{tensor.name}[{', '.join(str(int(i)) for i in place)}]" if tensor.shape else tensor.name
    return f"value {index}"
