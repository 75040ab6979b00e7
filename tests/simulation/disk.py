"""A disk that fails, and a store on it that keeps the promises of `agent.ports.Store` as far as the disk lets it."""

import asyncio
from collections import Counter
from dataclasses import dataclass, replace

import msgspec

from fedpool.errors import StorageFailed
from fedpool.step import Instant

RECORDS = "(records)"  # no stream of an agent's


@dataclass(frozen=True)
class Row:
    """One entry as it stands on the disk."""

    stream: str
    at: float
    boot: str
    unix: float
    body: bytes
    snapshot: bool


class Disk:
    """What survives its machine's processes.

    Attributes:
        rows: what is durable.
        volatile: the latest so many rows were acknowledged by a lying disk and are lost with power.
        full: whether writes fail.
        slow_s: how long a write takes at most.
    """

    def __init__(self, loop, chance):
        self.loop = loop
        self.chance = chance
        self.rows = []
        self.volatile = 0
        self.lies = False
        self.full = False
        self.slow_s = 0.005
        self.store = None

    def power_lost(self):
        """Lose what was never really written."""
        if self.volatile:
            del self.rows[-self.volatile :]
            self.volatile = 0

    def store_rows(self, rows):
        self.rows += rows
        self.volatile = self.volatile + len(rows) if self.lies else 0


@dataclass
class _Waiting:
    stream: str
    basis: int
    rows: list
    done: asyncio.Future


class Store:
    """A store on a simulated disk, for one run of one process; opening one takes the disk away from the one before it."""

    def __init__(self, disk, clock, told):
        self.disk = disk
        self.clock = clock
        self.told = told  # called with the rows that have become durable
        self.waiting = []
        self.writing = None
        self.in_flight = Counter()
        self.basis = Counter()
        self.failed = set()
        self.fenced = False
        self.gone = asyncio.Event()
        if disk.store is not None:
            disk.store.fence()
        disk.store = self

    def fence(self):
        """Its machine or its leadership is gone: what it was writing may stand or not; it writes nothing more."""
        self.fenced = True
        self.disk.loop.outside(self.disk.chance.uniform(0.0, 5.0), self.gone.set)
        if self.writing:
            rows = [row for one in self.writing for row in one.rows]
            if rows and self.disk.chance.random() < 0.5:
                self.disk.store_rows(rows)
                self.told(rows)
            self.writing = None

    async def append(self, stream, entries, *, snapshot=False, records=()):
        basis = self.basis[stream]
        if self.fenced or (stream, basis) in self.failed:
            raise StorageFailed(f"what came before in {stream} was not written")
        if not entries and not records and not self.in_flight[stream]:
            return
        at, boot, unix = self.clock.now(), self.clock.boot(), self.clock.unix()
        rows = [
            Row(stream, at, boot, unix, msgspec.json.encode(entry), snapshot and number == 0)
            for number, entry in enumerate(entries)
        ]
        rows += [Row(RECORDS, at, boot, unix, record, False) for record in records]
        done = self.disk.loop.create_future()
        self.in_flight[stream] += 1
        self.waiting.append(_Waiting(stream, basis, rows, done))
        if self.writing is None:
            self.begin()
        await done

    def begin(self):
        self.writing, self.waiting = self.waiting, []
        delay = self.disk.chance.uniform(0.0002, self.disk.slow_s)
        self.disk.loop.outside(delay, self.finish)

    def finish(self):
        if self.writing is None:
            return  # fenced meanwhile
        group = [one for one in self.writing if (one.stream, one.basis) not in self.failed]
        for one in self.writing:
            if one not in group:
                self.settle(one, StorageFailed(f"what came before in {one.stream} was not written"))
        if self.disk.full and any(one.rows for one in group):
            self.failed |= {(one.stream, one.basis) for one in group if one.rows}
            for one in group:
                self.settle(one, StorageFailed("the disk is full"))
        else:
            rows = [row for one in group for row in one.rows]
            self.disk.store_rows(rows)
            self.told(rows)
            for one in group:
                self.settle(one, None)
        self.writing = None
        if self.waiting:
            self.begin()

    def settle(self, one, error):
        self.in_flight[one.stream] -= 1
        if one.done.cancelled():
            return
        if error is None:
            one.done.set_result(None)
        else:
            one.done.set_exception(error)
            one.done.exception()  # a killed process no longer asks

    async def read(self, stream, kinds):
        self.basis[stream] += 1
        await asyncio.sleep(self.disk.chance.uniform(0.0, 0.002))
        rows = [row for row in self.disk.rows if row.stream == stream]
        latest = max((number for number, row in enumerate(rows) if row.snapshot), default=0)
        decoder = msgspec.json.Decoder(kinds)
        return [decoder.decode(row.body) for row in rows[latest:]]

    async def streams(self, prefix):
        return list(dict.fromkeys(row.stream for row in self.disk.rows if row.stream.startswith(prefix)))

    async def recorded(self):
        return sum(row.stream == RECORDS for row in self.disk.rows)

    async def records(self, first, count):
        return [row.body for row in self.disk.rows if row.stream == RECORDS][first : first + count]

    async def replace_records(self, first, records):
        if self.disk.full:
            raise StorageFailed("the disk is full")
        places = [place for place, row in enumerate(self.disk.rows) if row.stream == RECORDS]
        for place, record in zip(places[first:], records, strict=False):
            self.disk.rows[place] = replace(self.disk.rows[place], body=record)

    async def last_written(self):
        last = self.disk.rows[-1] if self.disk.rows else None
        return Instant(last.at, last.boot, last.unix) if last else Instant()

    async def lost(self):
        await self.gone.wait()
        raise StorageFailed("another has taken the disk over")

    async def close(self):
        self.fenced = True
