"""Masking: encode, own mask, pairwise masks, on one core; beside the bare keystream of the same bytes and Flower's own step."""

import os
import statistics
import time
from collections.abc import Callable

import numpy as np

from fedpool.secagg import masks
from ibshell.measure.figure import Figure, peer

PARAMETERS = 10_000_000
NEIGHBOURS = (8, 15)
REPEAT = 5


def _median_s(work: Callable[[], object]) -> float:
    work()
    times = []
    for _ in range(REPEAT):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure() -> list[Figure]:
    """Figures for 10 million float32 parameters against 8 and 15 neighbours."""
    values = np.random.default_rng(0).standard_normal(PARAMETERS, dtype=np.float32)
    words = np.empty(PARAMETERS, np.uint32)
    buffer = bytearray(masks.BLOCK_WORDS * masks.WORD_BYTES + masks.AES_BLOCK_BYTES)
    figures = []
    for neighbours in NEIGHBOURS:
        streams = [masks.Stream(os.urandom(32), 1 if i % 2 else -1) for i in range(neighbours + 1)]
        rounding = os.urandom(32)

        def mask(streams: list[masks.Stream] = streams, rounding: bytes = rounding) -> None:
            masks.encode(values, None, 8.0, 2.0**20, rounding, 0, words)
            masks.apply(words, streams, 0)

        def bare(streams: list[masks.Stream] = streams) -> None:
            size = masks.BLOCK_WORDS * masks.WORD_BYTES
            for stream in streams:
                keystream = masks.Keystream(stream.key, 0)
                for _ in range(PARAMETERS * masks.WORD_BYTES // size):
                    keystream.fill(buffer, size)

        ours, limit = _median_s(mask), _median_s(bare)
        flower = peer(
            "flower_secagg.py",
            "flower",
            "make peers",
            ["--parameters", str(PARAMETERS), "--neighbours", str(neighbours), "--repeat", "3"],
        )
        theirs = flower["seconds"] if flower else None
        kind = "" if masks.is_compiled() else " (pure reference)"
        figures.append(
            Figure(
                bench="secagg",
                case=f"mask {PARAMETERS}x{neighbours} threads=1{kind}",
                value=round(ours, 4),
                unit="s",
                peer="flower SecAgg+",
                peer_value=theirs,
                ratio=round(theirs / ours, 2) if theirs else None,
                limit="bare AES-256-CTR keystream",
                limit_value=round(limit, 4),
            )
        )
    return figures
