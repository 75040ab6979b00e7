"""The store on SQLite: written through, refused when damaged or newer, and a full disk changes nothing."""

import asyncio
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from contextlib import asynccontextmanager

import msgspec
import pytest

from agent.store.sqlite import SCHEMA_VERSION, SqliteStore
from fedpool.errors import IntegrityError, StorageFailed
from fedpool.leasing.entries import GrantEntry, LeaseChanged
from fedpool.leasing.gang import LeaseRecorded
from fedpool.records import Grant, SiteLease

pytestmark = pytest.mark.integration

ENTRY = LeaseChanged(SiteLease("a", "onc", "held", (Grant("GPU-1", 1),), 10.0), 1, 1)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "site.db"


@asynccontextmanager
async def opened(path):
    store = SqliteStore(path)
    try:
        yield store
    finally:
        await store.close()


def append(path, entries):
    async def all_of_it():
        async with opened(path) as store:
            await store.append("leases", entries)

    asyncio.run(all_of_it())


def read(path, kinds=GrantEntry):
    async def all_of_it():
        async with opened(path) as store:
            return await store.read("leases", kinds)

    return asyncio.run(all_of_it())


def test_it_is_written_through(path):
    """WAL with synchronous=FULL: what `append` returned for stands on disk without a close."""

    async def write():
        async with opened(path) as store:
            await store.append("leases", [ENTRY])
            reader = sqlite3.connect(path)
            assert reader.execute("SELECT count(*) FROM entries").fetchone() == (1,)
            assert reader.execute("PRAGMA journal_mode").fetchone() == ("wal",)
            reader.close()
            assert await store._ask(lambda: store._db.execute("PRAGMA synchronous").fetchone()) == (2,)

    asyncio.run(write())


def test_what_waits_is_written_in_one_transaction(path):
    commits = []

    async def many():
        async with opened(path) as store:
            await store._ask(lambda: store._db.set_trace_callback(lambda sql: sql == "COMMIT" and commits.append(sql)))
            entries = [msgspec.structs.replace(ENTRY, epoch=n) for n in range(200)]
            await asyncio.gather(*(store.append("leases", [entry]) for entry in entries))

    asyncio.run(many())
    assert [entry.epoch for entry in read(path)] == list(range(200))
    assert len(commits) < 100, "two hundred writers at once share transactions"


def test_a_newer_schema_is_refused(path):
    append(path, [ENTRY])
    db = sqlite3.connect(path)
    db.execute(f"PRAGMA user_version={SCHEMA_VERSION + 1}")
    db.close()
    with pytest.raises(IntegrityError, match="newer release"):
        SqliteStore(path)


def test_an_older_schema_is_brought_forward(path):
    """A file of schema 1, as release 0.1.0 wrote it at a site and at a hub."""
    append(path, [ENTRY])
    db = sqlite3.connect(path)
    site = """{"type":"lease.changed","lease":{"id":"a","tenant":"onc","state":"active","grants":[{"uuid":"GPU-1","token":7}],
      "deadline":10.0,"reason":""},"epoch":7,"term":2}"""
    hub = """{"type":"lease.recorded","lease":{"id":"a","tenant":"onc","state":"active","parts":[{"site":"zurich","gpus":1,
      "state":"active","grants":[{"uuid":"GPU-1","token":7}],"reason":""}],"duration_s":60.0,"requested_at":"now","deadline":9.0}}"""
    db.execute("DELETE FROM entries")
    db.execute("DROP TABLE snapshots")
    db.execute("DROP TABLE records")
    for body in (site, hub):
        db.execute("INSERT INTO entries (stream, at, boot, wall, body) VALUES ('leases', 1.0, 'b', 'w', ?)", (body,))
    db.execute("PRAGMA user_version=1")
    db.commit()
    db.close()
    changed, recorded = read(path, LeaseChanged | LeaseRecorded)
    assert changed.lease.grants == (Grant("GPU-1", 7),) and changed.epoch == 7
    assert recorded.lease.gpus == 1 and recorded.lease.parts[0].grants == (Grant("GPU-1", 7),)
    assert read(path, LeaseChanged | LeaseRecorded) == [changed, recorded], "once is enough"


def test_a_file_without_a_ledger_gets_one(path):
    """A file of schema 4."""
    append(path, [ENTRY])
    db = sqlite3.connect(path)
    db.execute("DROP TABLE records")
    db.execute("PRAGMA user_version=4")
    db.close()
    assert read(path, LeaseChanged) == [ENTRY]

    async def records():
        store = SqliteStore(path)
        await store.append("leases", (), records=[b"{}"])
        found = await store.records(0, 10)
        await store.close()
        return found

    assert asyncio.run(records()) == [b"{}"]


def test_a_damaged_database_is_refused_and_kept(path):
    append(path, [ENTRY] * 200)
    data = bytearray(path.read_bytes())
    data[4096:8192] = os.urandom(4096)
    path.write_bytes(data)
    with pytest.raises(IntegrityError, match="is damaged"):
        SqliteStore(path)
    assert path.read_bytes() == data


def test_no_database_at_all(tmp_path):
    path = tmp_path / "site.db"
    path.write_bytes(b"this is no database, but it is long enough to be looked at by anybody who wants one" * 20)
    with pytest.raises(IntegrityError):
        SqliteStore(path)


@pytest.fixture
def small_disk(tmp_path):
    """A disk of one mebibyte: a real file system, which only root may mount."""
    if os.getuid() != 0:
        pytest.skip("mounting a small disk needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(disk)], check=True)
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_full_disk_is_said_and_nothing_is_half_done(small_disk):
    path = small_disk / "site.db"

    async def fill():
        written = 0
        async with opened(path) as store:
            with pytest.raises(StorageFailed, match="make room"):
                for _ in range(10_000):
                    await store.append("leases", [ENTRY] * 10)
                    written += 10
            with pytest.raises(StorageFailed, match="what came before in leases was not written"):
                await store.append("leases", [ENTRY])
            assert len(await store.read("leases", GrantEntry)) == written

    asyncio.run(fill())


def test_a_site_with_a_full_disk_grants_nothing_and_recovers(make_pool, small_disk):
    pool = make_pool(2, start=False)
    site = pool.site_directory("site-01")
    for name in ("identity", "identity.pub"):
        shutil.move(site / name, small_disk / name)
    text = (site / "site.toml").read_text()
    (site / "site.toml").write_text(f'state = "{small_disk}"\n' + text)
    pool.start_all()
    filler = small_disk / "filler"
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        while file.write(bytes(4096)):
            continue
    # SQLite has some pages of its log already; use them up, then the site must refuse.
    for _ in range(200):
        done = subprocess.run(
            [*_ibshell(), "lease", "request", "-t", "a", "-g", "4", "--for", "1h"],
            capture_output=True,
            text=True,
            env=pool.environment,
        )
        if done.returncode:
            break
        _release_all(pool)
    assert done.returncode == 1 and "site.db cannot be written" in done.stderr and "make room" in done.stderr
    filler.unlink()
    pool.until(lambda: pool.json("status")["gpus_free"] == 4)
    lease = pool.json("lease", "request", "-t", "a", "-g", "4")
    assert lease["state"] == "active"


def _ibshell():
    return [sys.executable, "-m", "ibshell"]


def _release_all(pool):
    for lease in pool.rows("lease"):
        if lease["state"] == "active":
            subprocess.run(
                [*_ibshell(), "lease", "release", lease["id"]], capture_output=True, env=pool.environment, timeout=90
            )


def agent(*words, status=0):
    done = subprocess.run([sys.executable, "-m", "agent.main", *map(str, words)], capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    return done.stdout + done.stderr


def test_a_copy_taken_while_a_site_runs_is_put_back(make_pool, tmp_path):
    """Leases of the copy come back, what was given since is not given again under the same tokens."""
    pool = make_pool(1)
    database, copy = pool.site_directory("site") / "site.db", tmp_path / "copy.db"
    kept = pool.json("lease", "request", "-t", "a", "-g", "1")
    assert "entries in" in agent("backup", database, copy)
    assert "exists already" in agent("backup", database, copy, status=5)
    later = pool.json("lease", "request", "-t", "b", "-g", "1")
    token = later["parts"][0]["grants"][0]["token"]
    assert "has" in agent("restore", copy, database, status=5), "the agent runs"
    pool.stop("site", signal.SIGKILL)
    database.write_bytes(os.urandom(100_000))
    assert "the old file is" in agent("restore", copy, database)
    pool.start("site")
    pool.until(lambda: pool.sites_up() == {"site"})
    states = pool.until(lambda: ended(pool, later["id"]))
    assert states[kept["id"]] == "active" and states[later["id"]] == "failed", (
        "the site no longer knows it, and says so"
    )
    again = pool.json("lease", "request", "-t", "c", "-g", "1")
    assert again["parts"][0]["grants"][0]["token"] > token


def ended(pool, lease):
    states = {row["id"]: row["state"] for row in pool.rows("lease")}
    return states if states[lease] not in ("active", "ending") else None


def test_a_damaged_copy_is_not_put_back(path, tmp_path):
    append(path, [ENTRY] * 200)
    before = path.read_bytes()
    bad = tmp_path / "bad.db"
    bad.write_bytes(os.urandom(50_000))
    assert "is damaged" in agent("restore", bad, path, status=1)
    assert "no database" in agent("restore", tmp_path / "none.db", path, status=3)
    assert path.read_bytes() == before


def test_a_read_only_disk_is_said(small_disk):
    path = small_disk / "site.db"
    append(path, [ENTRY])
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    try:
        with pytest.raises(StorageFailed, match="read-only"):
            SqliteStore(path)
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
