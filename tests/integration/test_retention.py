"""Records whose time is over leave their hashes, and every proof holds: at a real site that keeps them for seconds."""

import asyncio
import json

import ledger_verifier
import pytest

from agent.store import open_store
from fedpool.client.acting import act
from fedpool.ledger.retention import forgotten, is_forgotten
from fedpool.wire.messages import ById, LeaseView, LeaseWanted

pytestmark = pytest.mark.integration


def row(pool, *words, status=0):
    return {one["site"]: one for one in pool.json("ledger", "verify", *words, status=status)["items"]}["site-01"]


def leased(pool, count):
    with pool.connect() as hub:
        for number in range(count):
            wanted = LeaseWanted("a", 1, 60.0, site_names=("site-01",), id=f"{number + 1:08x}")
            view = act(hub, "lease.request", wanted, LeaseView)
            act(hub, "lease.release", ById(view.lease.id), LeaseView)


@pytest.fixture
def forgetful(make_pool):
    pool = make_pool(2, start=False)
    path = pool.site_directory("site-01") / "site.toml"
    path.write_text('keep_records = "8s"\n' + path.read_text())
    pool.start_all()
    return pool


@pytest.mark.waits
def test_what_is_forgotten_leaves_its_hash_and_every_proof(forgetful, tmp_path):
    pool = forgetful
    pool.cli("tenant", "add", "a")
    pool.cli("tenant", "quota", "a", "-g", "1", "--limit", "2")
    lives = pool.cli(
        "lease", "request", "-t", "a", "-g", "1", "--site", "site-01", "--for", "1h", "-o", "name"
    ).stdout.strip()
    before = tmp_path / "before.json"
    pool.cli("ledger", "prove", lives, "--file", str(before))
    assert row(pool)["result"] == "whole"
    leased(pool, 60)
    archive = tmp_path / "archive"
    pool.cli("ledger", "export", str(archive))
    gone = pool.until(lambda: row(pool, "--full")["forgotten"], 60)
    assert gone % 256 == 0
    # Whoever verified before goes on from there; whoever begins now begins with the seam.
    for words in ((), ("--full",)):
        found = row(pool, *words)
        assert found["result"] == "whole" and found["records"] > gone
    # What was proved and exported before is as good as ever, and the lease that lives is proved still.
    authority = (pool.authority / "identity.pub").read_text().strip()
    pool.cli("ledger", "verify", str(before), "--authority", authority)
    assert {
        one["result"] for one in pool.json("ledger", "verify", str(archive), "--authority", authority)["items"]
    } == {"whole"}
    after = tmp_path / "after.json"
    pool.cli("ledger", "prove", lives, "--file", str(after))
    pool.cli("ledger", "verify", str(after), "--authority", authority)
    numbers = {record["number"] for part in json.loads(after.read_text())["ledgers"] for record in part["records"]}
    assert min(numbers) < gone
    shown = pool.cli("ledger", "report", "-o", "json").stdout
    assert lives in shown
    assert any(item["lease"] == lives for item in pool.json("ledger", "log", "-n", "0")["items"]) is False
    # What is left, as files, for anybody's verifier.
    left = tmp_path / "left"
    pool.cli("ledger", "export", str(left))
    for words in ((), ("--authority", authority)):
        found = pool.json("ledger", "verify", str(left), *words)["items"]
        assert {one["result"] for one in found} == {"whole"}
    assert ledger_verifier.verify(left / "site-01") >= found[0]["records"]
    assert not (left / "site-01" / "tile" / "entries" / "000").exists()
    pool.stop("site-01")
    pool.start("site-01")
    pool.until(pool.all_up)
    assert row(pool)["result"] == "whole"
    pool.cli("lease", "release", lives)
    pool.until(lambda: row(pool, "--full")["result"] == "whole")


@pytest.mark.parametrize("kind", ["sqlite", "etcd"])
def test_a_store_replaces_records_and_nothing_else(kind, make_etcd, tmp_path):
    url = f"{make_etcd().url}/test" if kind == "etcd" else ""
    records = [b'{"kind":"x","number":%d}' % number for number in range(600)]

    async def run():
        store = await open_store(url, tmp_path / "site.db", "site")
        for at in range(0, 600, 70):
            await store.append("ledger", (), records=records[at : at + 70])
        await store.replace_records(256, [forgotten(record) for record in records[256:512]])
        await store.close()
        store = await open_store(url, tmp_path / "site.db", "site")
        try:
            assert await store.recorded() == 600
            found = await store.records(0, 600)
        finally:
            await store.close()
        assert found[:256] == records[:256] and found[512:] == records[512:]
        assert all(map(is_forgotten, found[256:512]))

    asyncio.run(run())
