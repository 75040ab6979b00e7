"""What every store promises, whatever it is made of."""

import asyncio
import os
import time
from contextlib import asynccontextmanager

import msgspec
import pytest

from agent.store import open_store
from fedpool.leasing.entries import GrantEntry, LeaseChanged, SiteState
from fedpool.records import Grant, SiteLease
from fedpool.step import Instant

pytestmark = pytest.mark.integration

ENTRY = LeaseChanged(SiteLease("a", "onc", "held", (Grant("GPU-1", 1),), 10.0), 1, 1)


def numbered(*epochs):
    return [msgspec.structs.replace(ENTRY, epoch=epoch) for epoch in epochs]


@pytest.fixture(params=["sqlite", "etcd"])
def opened(request, tmp_path):
    """Opens the same store as often as it is called."""
    url = request.getfixturevalue("make_etcd")(1).url if request.param == "etcd" else ""

    @asynccontextmanager
    async def opening():
        store = await open_store(url, tmp_path / "site.db", "site/north")
        try:
            yield store
        finally:
            await store.close()

    return opening


def epochs(entries):
    return [entry.epoch for entry in entries]


def test_entries_come_back_in_order_by_stream(opened):
    async def twice():
        async with opened() as store:
            assert await store.last_written() == Instant()
            await store.append("leases", numbered(1))
        async with opened() as store:
            await store.append("leases", numbered(2, 3))
            await store.append("run/b", numbered(4))
            await store.append("run/a", numbered(5))
        async with opened() as store:
            assert epochs(await store.read("leases", GrantEntry)) == [1, 2, 3]
            assert await store.read("rounds", GrantEntry) == []
            assert await store.streams("run/") == ["run/b", "run/a"] and await store.streams("lea") == ["leases"]
            last = await store.last_written()
            assert last.at > 0 and last.boot and abs(last.unix - time.time()) < 60

    asyncio.run(twice())


def test_appends_keep_the_order_of_their_calls(opened):
    async def many():
        async with opened() as store:
            await asyncio.gather(*(store.append("leases", [entry]) for entry in numbered(*range(100))))
            assert epochs(await store.read("leases", GrantEntry)) == list(range(100))

    asyncio.run(many())


def test_an_empty_append_waits_for_those_before(opened):
    async def wait():
        async with opened() as store:
            first = asyncio.ensure_future(store.append("leases", numbered(1)))
            await asyncio.sleep(0)
            await store.append("leases", ())
            assert first.done()

    asyncio.run(wait())


def test_reading_begins_with_the_latest_snapshot(opened):
    async def snapshots():
        state = SiteState((ENTRY.lease,), {}, 9, 1)
        async with opened() as store:
            await store.append("leases", numbered(1, 2))
            await store.append("other", numbered(7))
            await store.append("leases", [SiteState((), {}, 2, 1)], snapshot=True)
            await store.append("leases", numbered(3))
            await store.append("leases", [state, *numbered(10)], snapshot=True)
            await store.append("leases", numbered(11))
        async with opened() as store:
            found = await store.read("leases", GrantEntry)
            assert found[0] == state and epochs(found) == [9, 10, 11]
            assert epochs(await store.read("other", GrantEntry)) == [7]

    asyncio.run(snapshots())


def test_large_snapshots_are_whole(opened):
    """More than etcd takes in one transaction."""
    leases = tuple(SiteLease(f"{n:08x}", "onc", "held", (Grant(os.urandom(40).hex(), n),), n) for n in range(20_000))

    async def snapshot():
        async with opened() as store:
            await store.append("leases", numbered(1))
            await store.append("leases", [SiteState(leases, {}, 1, 1)], snapshot=True)
            await store.append("leases", numbered(2))
        async with opened() as store:
            state, after = await store.read("leases", GrantEntry)
            assert state.leases == leases and after.epoch == 2

    asyncio.run(snapshot())


def test_records_are_one_sequence_over_all_streams(opened):
    """They come with their entries, in the order of the calls, and stay where a snapshot takes the entries' place."""
    said = [f"record {number}".encode() for number in range(700)]

    async def records():
        async with opened() as store:
            assert await store.recorded() == 0 and await store.records(0, 10) == []
            streams = ("leases", "run/a", "refusals")
            await asyncio.gather(
                *(
                    store.append(streams[n % 3], numbered(n) if n % 3 < 2 else (), records=said[n : n + 1])
                    for n in range(600)
                )
            )
            await store.append("leases", [SiteState((), {}, 9, 1)], snapshot=True, records=said[600:603])
        async with opened() as store:
            await store.append("leases", (), records=said[603:])
            assert await store.recorded() == 700
            assert await store.records(0, 1000) == said
            assert await store.records(595, 10) == said[595:605] and await store.records(700, 5) == []
            assert epochs(await store.read("run/a", GrantEntry)) == list(range(1, 600, 3))
            assert epochs(await store.read("leases", GrantEntry)) == [9]

    asyncio.run(records())
