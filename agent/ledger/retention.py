"""Forgets a site's records when their time is over: writes seams, and leaves of what lies before an old one the hashes alone.

A seam is written every quarter of the time that records are kept, so they stay between that time and a quarter more. Nothing is
forgotten before the seam itself is what a majority of the witnesses vouches for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from agent.ledger.site_ledger import PAGE, SiteLedger
from agent.ports import Clock, Store
from fedpool.errors import IbshellError
from fedpool.leasing.seams import InForce
from fedpool.ledger import tiles
from fedpool.ledger.records import Record, encode_at, kind_of, time_of
from fedpool.ledger.retention import forgotten, is_forgotten

log = logging.getLogger(__name__)

STREAM = "seams"
LOOK_S = 3600.0
PART = 4  # of the time, between seams


class SeamWritten(msgspec.Struct, frozen=True, tag="seam.written"):
    """A seam that may be relied on: what it repeats has been read back.

    Attributes:
        first: number of its record.
        after: of the first record after it.
        time_ms: when.
    """

    first: int
    after: int
    time_ms: int


class Retention:
    """One site's.

    Args:
        ledger: the site's.
        store: has the records.
        clock: the machine's.
        record: writes records, after everything that was handed to be written before.
        keep_s: how long records are kept.
    """

    def __init__(
        self,
        ledger: SiteLedger,
        store: Store,
        clock: Clock,
        record: Callable[[Sequence[Record]], Awaitable[None]],
        keep_s: float,
    ) -> None:
        self._ledger = ledger
        self._store = store
        self._clock = clock
        self._record = record
        self._keep_s = keep_s
        self._seams: list[SeamWritten] = []

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            try:
                await self.once()
            except IbshellError as error:
                log.error("nothing is forgotten now: %s", error)
            await asyncio.sleep(min(LOOK_S, self._keep_s / PART))

    async def once(self) -> None:
        """Write a seam if it is time, and forget what an old one makes dispensable."""
        self._seams = await self._store.read(STREAM, SeamWritten)
        now_ms = self._clock.unix() * 1000
        first = await self._first_present()
        records = await self._store.records(first, 1)
        began = self._seams[-1].time_ms if self._seams else time_of(records[0]) if records else now_ms
        after = self._seams[-1].after if self._seams else 0
        if now_ms - began >= 1000 * self._keep_s / PART and self._ledger.size - after >= tiles.WIDTH:
            await self._write_seam()  # less would not be forgotten anyway
        old = [seam for seam in self._seams if now_ms - seam.time_ms >= 1000 * self._keep_s]
        if old and self._ledger.witnessed_by_majority >= old[-1].after:
            last = old[-1].first // tiles.WIDTH * tiles.WIDTH
            if await self._comes_first(old[-1], last):
                await self._forget(first, last)

    async def _comes_first(self, seam: SeamWritten, number: int) -> bool:
        """Whether a seam is the first that is left from a number on: whoever verifies begins with that one."""
        left = await self._store.records(number, seam.first - number)
        return not any(kind_of(record) == "seam" for record in left)

    async def _first_present(self) -> int:
        """The first record that is not forgotten: what is forgotten comes before everything else."""
        low, high = 0, await self._store.recorded()
        while low < high:
            middle = (low + high) // 2
            [record] = await self._store.records(middle, 1)
            low, high = (middle + 1, high) if is_forgotten(record) else (low, middle)
        return low

    async def _write_seam(self) -> None:
        relied_on = [seam.first for seam in self._seams]
        in_force, number = InForce(relied_on), relied_on[-1] if relied_on else 0
        while number < self._ledger.size:
            for data in await self._store.records(number, min(PAGE, self._ledger.size - number)):
                in_force.take(number, data)
                number += 1
        # From here on nothing is awaited until the seam is handed over: what is on the way comes right before it.
        for data in self._ledger.on_the_way[:]:
            in_force.take(number, data)
            number += 1
        seam = list(in_force.seam())
        await self._record(seam)
        await self._ledger.advance()
        found = await self._store.records(number, len(seam))
        if found != encode_at(seam, time_of(found[0]) if found else 0):
            log.warning("a seam came elsewhere than was foreseen; another is written later")
            return
        written = SeamWritten(number, number + len(seam), time_of(found[0]))
        await self._store.append(STREAM, [written])
        self._seams.append(written)
        log.info("a seam of %d records was written at %d", len(seam), number)

    async def _forget(self, first: int, last: int) -> None:
        for begins in range(first, last, PAGE):
            page = await self._store.records(begins, min(PAGE, last - begins))
            await self._store.replace_records(begins, [forgotten(record) for record in page])
        if last > first:
            log.info("records %d to %d are forgotten; their hashes stay", first, last - 1)
