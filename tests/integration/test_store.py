"""The store: durable, refused when damaged or newer, and a full disk changes nothing."""

import asyncio
import os
import shutil
import sqlite3
import subprocess
import sys

import msgspec
import pytest

from agent.store.sqlite import SCHEMA_VERSION, SqliteStore
from fedpool.errors import IntegrityError, StorageFailed
from fedpool.leasing.gang import LeaseRecorded
from fedpool.leasing.grants import GrantEntry, LeaseChanged
from fedpool.records import Grant, SiteLease

pytestmark = pytest.mark.integration

ENTRY = LeaseChanged(SiteLease("a", "onc", "held", (Grant("GPU-1", 1),), 10.0), 1, 1)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "site.db"


def append(path, entries):
    store = SqliteStore(path)
    asyncio.run(store.append("leases", entries))
    store.close()


def test_entries_come_back_in_order_by_stream(path):
    append(path, [ENTRY])
    other = LeaseChanged(SiteLease("b", "onc", "held", (), 10.0), 2, 1)
    append(path, [other])
    store = SqliteStore(path)
    assert store.read("leases", GrantEntry) == [ENTRY, other]
    assert store.read("rounds", GrantEntry) == [] and store.streams("lea") == ["leases"]
    assert store.last_written()[1] is not None
    store.close()


def test_it_is_written_through(path):
    """WAL with synchronous=FULL: what `append` returned for stands on disk without a close."""
    store = SqliteStore(path)
    asyncio.run(store.append("leases", [ENTRY]))
    reader = sqlite3.connect(path)
    assert reader.execute("SELECT count(*) FROM entries").fetchone() == (1,)
    assert reader.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    reader.close()
    assert store._thread.submit(lambda: store._db.execute("PRAGMA synchronous").fetchone()).result() == (2,)
    store.close()


def test_what_waits_is_written_in_one_transaction_and_in_order(path):
    store = SqliteStore(path)
    commits = []
    store._thread.submit(
        lambda: store._db.set_trace_callback(lambda sql: sql == "COMMIT" and commits.append(sql))
    ).result()

    async def many():
        await asyncio.gather(*(store.append("leases", [msgspec.structs.replace(ENTRY, epoch=n)]) for n in range(200)))

    asyncio.run(many())
    assert [entry.epoch for entry in store.read("leases", GrantEntry)] == list(range(200))
    assert len(commits) < 100, "two hundred writers at once share transactions"
    store.close()


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
    for body in (site, hub):
        db.execute("INSERT INTO entries (stream, at, boot, wall, body) VALUES ('leases', 1.0, 'b', 'w', ?)", (body,))
    db.execute("PRAGMA user_version=1")
    db.commit()
    db.close()
    store = SqliteStore(path)
    changed, recorded = store.read("leases", LeaseChanged | LeaseRecorded)
    assert changed.lease.grants == (Grant("GPU-1", 7),) and changed.epoch == 7
    assert recorded.lease.gpus == 1 and recorded.lease.parts[0].grants == (Grant("GPU-1", 7),)
    store.close()
    again = SqliteStore(path)
    assert again.read("leases", LeaseChanged | LeaseRecorded) == [changed, recorded], "once is enough"
    again.close()


def test_a_damaged_database_is_refused_and_kept(path):
    append(path, [ENTRY] * 200)
    data = bytearray(path.read_bytes())
    data[4096:8192] = os.urandom(4096)
    path.write_bytes(data)
    with pytest.raises(IntegrityError, match="restore it from a backup"):
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
    store = SqliteStore(path)
    written = 0
    with pytest.raises(StorageFailed, match="make room"):
        for _ in range(10_000):
            asyncio.run(store.append("leases", [ENTRY] * 10))
            written += 10
    assert len(store.read("leases", GrantEntry)) == written
    store.close()


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
