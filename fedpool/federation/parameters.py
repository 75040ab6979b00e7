"""A model's file as one vector of float32, and back. Pure: it works on buffers, whoever mapped them.

The file is safetensors: a u64 length, a JSON header, then the tensors' bytes. Tensors of floating point make up the vector, in
the order of the global file; everything else (counters, masks) keeps its global value. fp8 means nothing without its scales and
is refused.
"""

import itertools
import json
import math
import struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedpool.errors import UsageError

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

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
    """The tensors of a file in file order, the length of the vector, and the length of the file."""

    tensors: tuple[Tensor, ...]
    parameters: int
    size: int

    @property
    def is_flat(self) -> bool:
        """Whether the vector lies in the file as it is: float32 only, without gaps."""
        floats = [t for t in self.tensors if t.offset >= 0 and t.values]
        joined = all(a.stop == b.start for a, b in itertools.pairwise(floats))
        return joined and all(t.dtype == "F32" for t in floats)


def layout(file: Bytes, what: str) -> Layout:
    """Read the header of a safetensors file.

    Args:
        file: uint8[size], the whole file, usually mapped.
        what: what to call it in messages.

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
        if dtype not in _WIDTHS:
            raise UsageError(
                f"{what}: tensor {name!r} has type {dtype}, which cannot be averaged",
                "dequantise it to bf16 or leave it out",
            )
        values = math.prod(shape)
        if not 0 <= start <= stop <= size - base or stop - start != values * _WIDTHS[dtype]:
            raise UsageError(f"{what}: tensor {name!r} of shape {list(shape)} does not fit bytes {start} to {stop}")
        is_float = dtype in _FLOATS
        found.append(Tensor(name, dtype, shape, base + start, base + stop, offset if is_float else -1))
        offset += values if is_float else 0
    return Layout(tuple(found), offset, size)


def _read(file: Bytes, tensor: Tensor) -> Floats:
    raw = file[tensor.start : tensor.stop].view(_FLOATS[tensor.dtype])
    if tensor.dtype == "BF16":
        return (raw.astype(np.uint32) << 16).view(np.float32)
    return raw.astype(np.float32, copy=False)


def gather(reference: Layout, file: Bytes, what: str) -> Floats:
    """The vector of a file, in the reference's order; a view where the file's bytes are the vector.

    Args:
        reference: layout of the global parameters.
        file: uint8[size].
        what: what to call the file in messages.

    Returns:
        float32[reference.parameters].

    Raises:
        UsageError: tensors are missing, unknown or of another shape or type; each is named.
    """
    own = layout(file, what)
    expected = {t.name: t for t in reference.tensors}
    given = {t.name: t for t in own.tensors}
    problems = [f"{name!r} is missing" for name in expected if name not in given]
    problems += [f"{name!r} is not in the global parameters" for name in given if name not in expected]
    for name in expected.keys() & given.keys():
        if given[name].shape != expected[name].shape:
            problems.append(f"{name!r} has shape {list(given[name].shape)}, {list(expected[name].shape)} expected")
        elif given[name].dtype != expected[name].dtype:
            problems.append(f"{name!r} has type {given[name].dtype}, {expected[name].dtype} expected")
    if problems:
        raise UsageError(f"{what} does not match the global parameters: {'; '.join(sorted(problems)[:5])}")
    if own.is_flat and [t.name for t in own.tensors] == [t.name for t in reference.tensors]:
        floats = [t for t in own.tensors if t.offset >= 0 and t.values]
        if not floats:
            return np.zeros(0, np.float32)
        if floats[0].start % 4 == 0:
            return file[floats[0].start : floats[-1].stop].view("<f4")
    vector = np.empty(reference.parameters, np.float32)
    for tensor in reference.tensors:
        if tensor.offset >= 0:
            vector[tensor.offset : tensor.offset + tensor.values] = _read(file, given[tensor.name])
    return vector


def name_of(reference: Layout, index: int) -> str:
    """How people name the value at this place of the vector: `w[3]`, `conv.bias[0, 2]`."""
    for tensor in reference.tensors:
        if tensor.offset >= 0 and tensor.offset <= index < tensor.offset + tensor.values:
            place = np.unravel_index(index - tensor.offset, tensor.shape)
            return f"{tensor.name}[{', '.join(str(int(i)) for i in place)}]" if tensor.shape else tensor.name
    return f"value {index}"


def scatter(reference: Layout, vector: Floats, file: Bytes) -> None:
    """Write the vector into a copy of the global file, rounding once to each tensor's type (nearest, ties to even)."""
    for tensor in reference.tensors:
        if tensor.offset < 0 or not tensor.values:
            continue
        values = vector[tensor.offset : tensor.offset + tensor.values]
        if tensor.dtype == "BF16":
            bits = np.ascontiguousarray(values).view(np.uint32).astype(np.uint64)
            out = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
        else:
            out = values.astype(_FLOATS[tensor.dtype])
        file[tensor.start : tensor.stop] = out.view(np.uint8)
