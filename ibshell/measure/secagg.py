"""Masking: encode, own mask, pairwise masks in one pass; beside the bare keystream of the same bytes, Flower's step and TenSEAL's.

The bare keystream is what the `cryptography` package's AES-256-CTR takes to fill one buffer again and again: nothing is encoded,
nothing is added, no memory is passed over. The peers run at sizes they finish in seconds; their steps are loops over the
parameters, so their times are scaled to ours.
"""

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from fedpool import parallel
from fedpool.parallel import Range
from fedpool.secagg import encoding, masks, vector
from fedpool.secagg.ring import Floats, Words
from ibshell.measure.figure import Figure, peer

SIZES = (10_000_000, 100_000_000)
NEIGHBOURS = (8, 15)
NARROW_BITS = 16
FLOWER_SIZE = 10_000_000
TENSEAL_SIZE = 1_000_000
KEYSTREAM_BUFFER_BYTES = 128 * 1024
REPEAT = 5
CLIP, MAX_WEIGHT = 8.0, 1000


def measure() -> list[Figure]:
    """Figures for 10 and 100 million float32 parameters against 8 and 15 neighbours, on one core and on all."""
    flower = {near: _flower(near) for near in NEIGHBOURS}
    tenseal = peer("tenseal_ckks.py", "tenseal", "make peers", ["--parameters", str(TENSEAL_SIZE)])
    figures = []
    for size in SIZES:
        values = np.random.default_rng(0).standard_normal(size, dtype=np.float32)
        for near in NEIGHBOURS:
            figures += _masking(values, near, flower[near])
        figures.append(_beside_ckks(values, tenseal))
        figures.append(_unmasking(values, NEIGHBOURS[0]))
    figures.append(_narrow(values, NEIGHBOURS[0]))
    return figures + _uploads(flower[NEIGHBOURS[0]], tenseal)


def _masking(values: Floats, near: int, flower: dict[str, Any] | None) -> list[Figure]:
    """One core, then all of them, beside Flower's one core: its step is single-threaded."""
    limit = _median_s(lambda: _bare(near + 1, 4 * len(values)))
    theirs = flower["seconds"] * len(values) / FLOWER_SIZE if flower else None
    figures = []
    for threads in sorted({1, parallel.threads()}):
        ours = _median_s(_mask(values, 32, near, threads))
        figures.append(
            Figure(
                bench="secagg",
                case=_case("mask", values, near, threads),
                value=round(ours, 4),
                unit="s",
                peer="flower SecAgg+",
                peer_value=round(theirs, 3) if theirs else None,
                ratio=round(theirs / ours, 2) if theirs else None,
                limit="bare AES-256-CTR keystream, one core",
                limit_value=round(limit, 4),
            )
        )
    return figures


def _beside_ckks(values: Floats, tenseal: dict[str, Any] | None) -> Figure:
    """Encryption under CKKS does for a site what masking does."""
    ours = _median_s(_mask(values, 32, NEIGHBOURS[0], 1))
    theirs = tenseal["encrypt_s"] * len(values) / TENSEAL_SIZE if tenseal else None
    return Figure(
        bench="secagg",
        case=_case("mask", values, NEIGHBOURS[0], 1) + " beside encryption",
        value=round(ours, 4),
        unit="s",
        peer="TenSEAL CKKS",
        peer_value=round(theirs, 3) if theirs else None,
        ratio=round(theirs / ours, 1) if theirs else None,
    )


def _narrow(values: Floats, near: int) -> Figure:
    """Half the bytes up need half the keystream."""
    return Figure(
        bench="secagg",
        case=_case("mask", values, near, 1) + f" ring={NARROW_BITS}",
        value=round(_median_s(_mask(values, NARROW_BITS, near, 1)), 4),
        unit="s",
        limit="bare AES-256-CTR keystream, one core",
        limit_value=round(_median_s(lambda: _bare(near + 1, NARROW_BITS // 8 * len(values))), 4),
    )


def _unmasking(values: Floats, near: int) -> Figure:
    """What the hub does where one site of the graph dropped out: its pairwise masks go, every own mask goes, the mean comes out."""
    fixed = encoding.fit(CLIP, MAX_WEIGHT, near + 1)
    layout = vector.layout(32, len(values), 0)
    words, streams, out = layout.ring.zeros(len(values)), _streams(2 * near), np.empty_like(values)

    def unmask(piece: Range) -> None:
        part = words[piece.start : piece.stop]
        masks.apply(part, streams, piece.start)
        masks.decode(layout.ring, part, values[piece.start : piece.stop], fixed.unit(), out[piece.start : piece.stop])

    return Figure(
        bench="secagg",
        case=_case("unmask", values, near, 1),
        value=round(_median_s(lambda: parallel.over(layout.chunks(), unmask, 1)), 4),
        unit="s",
        limit="bare AES-256-CTR keystream, one core",
        limit_value=round(_median_s(lambda: _bare(2 * near, 4 * len(values))), 4),
    )


def _uploads(flower: dict[str, Any] | None, tenseal: dict[str, Any] | None) -> list[Figure]:
    """Bytes up for each parameter, as they lie in the file that is sent."""
    found = []
    for bits in (32, NARROW_BITS):
        ours = vector.layout(bits, SIZES[0], 0).size / SIZES[0]
        for name, said in (("flower SecAgg+", flower), ("TenSEAL CKKS", tenseal)):
            theirs = said["bytes_per_parameter"] if said else None
            found.append(
                Figure(
                    "secagg",
                    f"upload of a parameter ring={bits} beside {name.split()[0]}",
                    round(ours, 3),
                    "B",
                    name,
                    theirs,
                    round(theirs / ours, 2) if theirs else None,
                )
            )
    return found


def _mask(values: Floats, bits: int, near: int, threads: int) -> Callable[[], object]:
    """A site's whole step, as it is done in a round: chunks over threads, each encoded and masked block by block."""
    fixed = encoding.fit(CLIP, MAX_WEIGHT, near + 1, bits)
    layout = vector.layout(bits, len(values), 0)
    words: Words = layout.ring.zeros(len(values))
    rounding, streams, factor = os.urandom(32), _streams(near + 1), fixed.factor(MAX_WEIGHT)

    def work(piece: Range) -> None:
        part, out = values[piece.start : piece.stop], words[piece.start : piece.stop]
        masks.mask(part, None, CLIP, factor, rounding, streams, piece.start, out)

    return lambda: parallel.over(layout.chunks(), work, threads)


def _streams(count: int) -> list[masks.Stream]:
    return [masks.Stream(os.urandom(32), 1 if i % 2 else -1) for i in range(count)]


def _bare(count: int, size: int) -> None:
    """The library's keystream for so many masks of so many bytes, into one buffer."""
    buffer, zeros = bytearray(KEYSTREAM_BUFFER_BYTES + 15), memoryview(bytes(KEYSTREAM_BUFFER_BYTES))
    for _ in range(count):
        cipher = Cipher(algorithms.AES(os.urandom(32)), modes.CTR(bytes(16))).encryptor()
        for at in range(0, size, KEYSTREAM_BUFFER_BYTES):
            cipher.update_into(zeros[: min(KEYSTREAM_BUFFER_BYTES, size - at)], buffer)


def _flower(near: int) -> dict[str, Any] | None:
    arguments = ["--parameters", str(FLOWER_SIZE), "--neighbours", str(near), "--repeat", "3"]
    return peer("flower_secagg.py", "flower", "make peers", arguments)


def _case(what: str, values: Floats, near: int, threads: int) -> str:
    kind = "" if masks.is_compiled() else " (pure reference)"
    return f"{what} {len(values)}x{near} threads={threads}{kind}"


def _median_s(work: Callable[[], object]) -> float:
    work()
    times = []
    for _ in range(REPEAT):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
