"""Signatures of many records, checked on every core: what takes longest when a ledger is verified."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from types import TracebackType

from fedpool.errors import NotAuthorised
from fedpool.identity import sshsig
from fedpool.identity.sshsig import Signature

BATCH = 2000
# So few are checked where they are found: starting processes would take longer.
AT_ONCE = 4000

_Check = tuple[int, Signature, bytes, str, bytes]


def _wrong(batch: list[_Check]) -> list[tuple[int, str]]:
    """The numbers of the records whose signature is wrong, and why."""
    found = []
    for number, signature, public, namespace, message in batch:
        try:
            sshsig.check(signature, public, namespace, message)
        except NotAuthorised as error:
            found.append((number, error.message))
    return found


class SignatureChecks:
    """Takes checks as they come and does them when there are many, or at the end.

    Args:
        number: of the record that is looked at now.
    """

    def __init__(self, number: Callable[[], int]) -> None:
        self._number = number
        self._batch: list[_Check] = []
        self._under_way: list[Future[list[tuple[int, str]]]] = []
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> SignatureChecks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def __call__(self, signature: Signature, public: bytes, namespace: str, message: bytes) -> None:
        """Put one check off; see `fedpool.identity.sshsig.check`."""
        self._batch.append((self._number(), signature, public, namespace, message))
        if len(self._batch) >= (BATCH if self._pool is not None else AT_ONCE) and (os.cpu_count() or 1) > 1:
            self._pool = self._pool or ProcessPoolExecutor(mp_context=get_context("spawn"))
            self._under_way.append(self._pool.submit(_wrong, self._batch))
            self._batch = []

    def finish(self) -> list[tuple[int, str]]:
        """Do what is left; returns the numbers of the records whose signature is wrong, and why."""
        found = _wrong(self._batch)
        self._batch = []
        for future in self._under_way:
            found += future.result()
        return sorted(found)
