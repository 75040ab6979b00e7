"""Arithmetic over ranges of a long vector on several threads. Kernels, hashes and ciphers release the interpreter's lock."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

T = TypeVar("T")

# A worker holds a few buffers of one chunk: eight keep a site's memory within its bound on any machine.
THREADS_MAX = 8


class Range(NamedTuple):
    """Places start to stop of a vector."""

    start: int
    stop: int


def ranges(count: int, step: int) -> list[Range]:
    """Cut 0 to count into pieces of `step`, the last one shorter."""
    return [Range(start, min(start + step, count)) for start in range(0, count, step)]


def threads() -> int:
    """How many threads arithmetic may take here: the processors this process may run on, eight at most."""
    return min(THREADS_MAX, len(os.sched_getaffinity(0)))


def over(pieces: Sequence[Range], work: Callable[[Range], T], workers: int) -> list[T]:
    """Do the work for every piece; the results in the pieces' order, the first error as it was raised.

    Args:
        pieces: what to work on.
        work: called once a piece, on any thread.
        workers: threads, >= 1.
    """
    if workers <= 1 or len(pieces) <= 1:
        return [work(piece) for piece in pieces]
    pool = ThreadPoolExecutor(min(workers, len(pieces)), thread_name_prefix="vector")
    try:
        return list(pool.map(work, pieces))
    finally:
        pool.shutdown(cancel_futures=True)
