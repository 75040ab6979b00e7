"""A site's ledger on its store: proofs, checkpoints, restarts; every change of its past is found. And through a whole pool."""

import asyncio
import copy
import json
import shutil
import signal
import sqlite3
import time

import ledger_verifier
import msgspec
import pytest

from agent import clock
from agent.ledger.site_ledger import PAGE, SiteLedger
from agent.store import open_store
from fedpool.client.acting import act
from fedpool.errors import IbshellError, IntegrityError, UsageError
from fedpool.identity.authorities import parse_authority
from fedpool.identity.keys import public_line
from fedpool.leasing.recorded import Replay
from fedpool.ledger import merkle, notes
from fedpool.ledger.records import Cordoned
from fedpool.ledger.verification import Verification, read_checkpoint
from fedpool.transport.identity import Identity
from fedpool.wire.messages import ById, LeaseView, LeaseWanted, ProofWanted, RecordsWanted
from ibshell.ledger import proofs
from ibshell.ledger.exported import Exported
from ibshell.ledger.verifying import LedgerCheck
from ibshell.progress import Bar

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def identity(tmp_path_factory):
    return Identity.create(tmp_path_factory.mktemp("key") / "identity")


def with_ledger(work, identity, path, url=""):
    """Run something on a ledger whose store is opened for it alone; it is brought up to date first."""

    async def run():
        store = await open_store(url, path, "site/north")
        try:
            ledger = SiteLedger("north", identity, store, clock, {}, lambda size: None)
            if not await ledger.recover():
                await store.append("leases", (), records=ledger.at([ledger.opening()]))
            await ledger.advance()
            return await work(ledger, store)
        finally:
            await store.close()

    return asyncio.run(run())


def said(count):
    return [Cordoned(what=f"gpu{number:02}", reason="fan", term=1) for number in range(count)]


@pytest.mark.parametrize("kind", ["sqlite", "etcd"])
def test_a_ledger_grows_and_proves(kind, identity, tmp_path, request):
    url = request.getfixturevalue("make_etcd")(1).url if kind == "etcd" else ""
    path = tmp_path / "site.db"
    roots = []

    async def grow(ledger, store):
        records = ledger.at(said(300))
        for first in range(0, 300, 50):
            await store.append("leases", (), records=records[first : first + 50])
        roots.append(await ledger.advance())
        return ledger.key

    key = with_ledger(grow, identity, path, url)
    with_ledger(grow, identity, path, url)

    async def prove(ledger, store):
        head = read_checkpoint((await ledger.head()).note, key)
        assert [signed.size for signed in roots] == [301, 601] and head.size == 601 and head.root == roots[1].root
        records = (await ledger.page(RecordsWanted("north", 0, 1000))).records
        assert len(records) == 601 and b"ledger.opened" in records[0]
        for index in (0, 1, 255, 256, 300, 511, 512, 600):
            proof = (await ledger.proof(ProofWanted("north", 601, index))).hashes
            merkle.require_inclusion(merkle.leaf_hash(records[index]), index, 601, proof, head.root)
        for old in (1, 255, 256, 257, 301, 512, 513, 600, 601):
            tree = merkle.Frontier()
            for record in records[:old]:
                tree.append(merkle.leaf_hash(record))
            proof = (await ledger.proof(ProofWanted("north", 601, old=old))).hashes
            merkle.require_consistency(old, 601, tree.root(), head.root, proof)
        with pytest.raises(IntegrityError, match="has 601 records, not 602"):
            await ledger.proof(ProofWanted("north", 602, 0))
        with pytest.raises(UsageError):
            await ledger.page(RecordsWanted("north", -1, 5))

    with_ledger(prove, identity, path, url)


def test_two_levels_of_tiles(identity, tmp_path):
    """More than 65,536 records: the hashes of 256 lots of 256 are one of the next level."""

    async def grow(ledger, store):
        records = ledger.at(said(70_000))
        await store.append("leases", (), records=records)
        await ledger.advance()

    with_ledger(grow, identity, tmp_path / "site.db")

    async def prove(ledger, store):
        head = read_checkpoint((await ledger.head()).note, ledger.key)
        assert head.size == 70_001
        for index in (0, 65_535, 65_536, 70_000):
            [record] = (await ledger.page(RecordsWanted("north", index, 1))).records
            proof = (await ledger.proof(ProofWanted("north", head.size, index))).hashes
            merkle.require_inclusion(merkle.leaf_hash(record), index, head.size, proof, head.root)

    started = time.monotonic()
    with_ledger(prove, identity, tmp_path / "site.db")
    assert time.monotonic() - started < 30, "the records are not all read again"


def test_a_page_is_bounded(identity, tmp_path):
    async def ask(ledger, store):
        await store.append("leases", (), records=ledger.at(said(PAGE + 10)))
        assert len((await ledger.page(RecordsWanted("north", 0, 10**9))).records) == PAGE
        assert (await ledger.page(RecordsWanted("north", 10**9, 5))).records == []

    with_ledger(ask, identity, tmp_path / "site.db")


# --- a past that is changed


def change(db, number):
    db.execute("UPDATE records SET body = CAST(replace(body, 'north', 'south') AS BLOB) WHERE number = ?", (number,))
    db.execute("UPDATE records SET body = CAST(replace(body, 'fan', 'fun') AS BLOB) WHERE number = ?", (number,))


def date_back(db, number):
    [(body,)] = db.execute("SELECT body FROM records WHERE number = ?", (number,))
    digit = body.rindex(b'"time":') + 8
    db.execute("UPDATE records SET body = ? WHERE number = ?", (body[:digit] + b"0" + body[digit + 1 :], number))


def remove(db, number):
    db.execute("DELETE FROM records WHERE number = ?", (number,))
    db.execute("UPDATE records SET number = -number + 1 WHERE number > ?", (number,))
    db.execute("UPDATE records SET number = -number WHERE number < 0")


def swap(db, number):
    for old, new in ((number, 0), (number + 1, number), (0, number + 1)):
        db.execute("UPDATE records SET number = ? WHERE number = ?", (new, old))


def double(db, number):
    [(body,)] = db.execute("SELECT body FROM records WHERE number = ?", (number,))
    db.execute("UPDATE records SET number = -number - 1 WHERE number > ?", (number,))
    db.execute("UPDATE records SET number = -number WHERE number < 0")
    db.execute("INSERT INTO records VALUES (?, ?)", (number + 1, body))


COUNT = 12


@pytest.fixture(scope="module")
def small(identity, tmp_path_factory):
    """A small ledger: its database, its key, its checkpoint and its records."""
    path = tmp_path_factory.mktemp("small") / "site.db"

    async def grow(ledger, store):
        await store.append("leases", (), records=ledger.at(said(COUNT - 1)))
        return ledger.key, (await ledger.head()).note, (await ledger.page(RecordsWanted("north", 0, 100))).records

    return path, *with_ledger(grow, identity, path)


@pytest.mark.parametrize(
    ("tamper", "number"),
    [
        (tamper, number)
        for tamper in (change, date_back, remove, swap, double)
        for number in range(1, COUNT + (tamper is not swap))
    ],
)
def test_a_changed_past_is_found_by_the_site_and_by_whoever_verifies(tamper, number, small, identity, tmp_path):
    path, key, note, _ = small
    copy = tmp_path / "site.db"
    shutil.copy(path, copy)
    with sqlite3.connect(copy) as db:
        tamper(db, number)
        records = [body for (body,) in db.execute("SELECT body FROM records ORDER BY number")]
    db.close()

    async def never(ledger, store):
        raise AssertionError("the site goes on with a past that was changed")

    if not (tamper is double and number == COUNT):  # that is appended: the site cannot know that it did not write it
        with pytest.raises(IntegrityError, match="the ledger of north is not what it was"):
            with_ledger(never, identity, copy)
    check = Verification("north", key, Replay().take)
    for record in records:
        check.take(record)
    check.finish(note)
    assert any("one was changed, removed, added or moved" in finding.problem for finding in check.findings)


def test_an_unchanged_past_is_whole(small):
    _, key, note, records = small
    check = Verification("north", key, Replay().take)
    for record in records:
        check.take(record)
    assert check.finish(note).size == COUNT and not check.findings


@pytest.mark.parametrize("other", ["name", "key", "note"])
def test_a_checkpoint_of_somebody_else_is_refused(other, small, tmp_path):
    _, key, note, _ = small
    stranger = Identity.create(tmp_path / "identity")
    match other:
        case "name":
            key = notes.Key("ibshell/south/00", key.public)
        case "key":
            key = notes.Key(key.name, stranger.public)
        case "note":
            note = note.replace(b"\n12\n", b"\n11\n")
    with pytest.raises(IntegrityError):
        read_checkpoint(note, key)


# --- a whole pool


def test_what_was_done_is_listed(pool):
    lease = pool.json("lease", "request", "-t", "oncology", "-g", "4", "--sites", "2", "--for", "1h")
    other = pool.json("lease", "request", "-t", "physics", "-g", "1", "--for", "2h")
    pool.cli("lease", "release", lease["id"])
    pool.cli("node", "cordon", "site-04:gpu01", "--reason", "fan \x1b[31m3")
    kinds = [item["kind"] for item in pool.json("ledger", "log", "--lease", lease["id"][:6])["items"]]
    assert sorted(kinds) == sorted(
        2 * ["request", "lease.hold", "lease.commit", "request", "lease.end", "lease.release"]
    )
    signed = {item["what"] for item in pool.json("ledger", "log", "--kind", "request")["items"]}
    assert signed == {
        "lease.request signed by tenant/oncology",
        "lease.request signed by tenant/physics",
        "lease.release signed by tenant/oncology",
        "site.cordon signed by operator",
    }
    rows = pool.json("ledger", "log", "-n", "0")["items"]
    assert rows == sorted(rows, key=lambda row: (row["time"], row["site"], row["record"]))
    assert {row["tenant"] for row in pool.json("ledger", "log", "-t", "physics")["items"]} == {"physics"}
    [cordoned] = pool.json("ledger", "log", "--kind", "cordoned")["items"]
    assert cordoned["site"] == "site-04" and cordoned["said"]["reason"] == "fan \x1b[31m3"
    assert "\x1b" not in pool.cli("ledger", "log").stdout
    latest = pool.json("ledger", "log", "-n", "3")["items"]
    assert latest == rows[-3:]
    assert pool.json("ledger", "log", "--since", "1h", "-n", "0")["items"] == rows
    assert pool.json("ledger", "log", "--since", "2099-01-01T00:00+00:00")["items"] == []
    assert {row["site"] for row in pool.json("ledger", "log", "--site", "site-02")["items"]} == {"site-02"}
    assert "write 2h" in pool.cli("ledger", "log", "--since", "yesterday", status=2).stderr
    assert "no site 'mars'" in pool.cli("ledger", "verify", "--site", "mars", status=3).stderr
    told = json.loads(pool.cli("ledger", "report", "--tenant", "oncology", "-o", "json").stdout)
    assert {(use["lease"], use["site"], use["ended"]) for use in told["uses"]} == {
        (lease["id"], row["site"], "released") for row in rows if row["lease"] == lease["id"]
    }
    assert all(use["gpus"] == 2 and use["gpu_hours"] > 0 for use in told["uses"]) and len(told["ledgers"]) == 4
    assert "| physics | " in pool.cli("ledger", "report", "--since", "1h").stdout
    assert "<h2>Leases</h2>" in pool.cli("ledger", "report", "-o", "html").stdout
    assert "known: markdown" in pool.cli("ledger", "report", "-o", "pdf", status=2).stderr
    checked = pool.json("ledger", "verify")
    assert {row["result"] for row in checked["items"]} == {"whole"} and checked["findings"] == []
    assert sum(row["leases"] for row in checked["items"]) == 3
    pool.cli("lease", "release", other["id"])
    again = pool.json("ledger", "verify")["items"]
    assert sum(row["new"] for row in again) == 3 < sum(row["records"] for row in again)
    assert [row["root"] for row in pool.json("ledger", "verify", "--full")["items"]] == [row["root"] for row in again]


def test_a_log_is_followed(pool):
    following = pool.background("ledger", "log", "--kind", "lease.commit", "--follow", "-o", "ndjson")
    time.sleep(1.5)
    lease = pool.json("lease", "request", "-t", "oncology", "-g", "1")
    assert lease["id"] in following.stdout.readline()
    following.send_signal(signal.SIGINT)
    following.communicate(timeout=10)
    assert following.returncode == 130


@pytest.mark.waits
def test_a_lease_is_proved_to_somebody_without_a_hub(pool, tmp_path):
    lease = pool.json("lease", "request", "-t", "oncology", "-g", "4", "--sites", "2")
    pool.cli("lease", "release", lease["id"])
    file = tmp_path / "lease.json"
    assert "12 records of 2 sites" in pool.cli("ledger", "prove", lease["id"][:5], "--file", str(file)).stdout
    assert "exists already" in pool.cli("ledger", "prove", lease["id"], "--file", str(file), status=5).stderr
    assert "no site has recorded" in pool.cli("ledger", "prove", "ffffffffff", status=3).stderr
    authority = (pool.authority / "identity.pub").read_text().strip()
    pool.stop_all()
    checked = pool.json("ledger", "verify", str(file), "--authority", authority)["items"]
    assert [(row["result"], row["about"]) for row in checked] == 2 * [("whole", f"lease {lease['id']}")]
    other = public_line(bytes(range(32)))
    assert "no roster in it" in pool.cli("ledger", "verify", str(file), "--authority", other, status=1).stderr
    rows = pool.json("ledger", "verify", str(file))["items"]
    assert [(row["result"], row["records"], row["witnesses"]) for row in rows] == 2 * [("whole", 6, 3)]
    proof = json.loads(file.read_text())
    for change, says in (
        (lambda site: site["records"].__setitem__(0, {**site["records"][0], "number": 1}), "does not show entry 1"),
        (lambda site: site["records"][1].update(record=site["records"][0]["record"]), "does not show entry"),
        (lambda site: site["records"][0]["proof"].pop(), "does not show entry"),
        (lambda site: site.update(checkpoint=site["checkpoint"].replace("site-0", "site-1", 1)), "a checkpoint of"),
        (lambda site: site.update(witnesses=site["witnesses"] + site["witnesses"][:1]), "has not cosigned"),
        (lambda site: site.update(site="site-09"), "not those of site-09"),
    ):
        altered = copy.deepcopy(proof)
        change(altered["ledgers"][0])
        read = msgspec.convert(altered, proofs.Proof)
        _, _, findings = proofs.check(read.ledgers[0], read, None)
        assert findings and says in findings[0].problem
    # With the authority it is known whose keys they are, who has to have witnessed it, and who had asked.
    trust = proofs.trust_of(msgspec.convert(proof, proofs.Proof).rosters, parse_authority(authority, "it"))
    for change, says in (
        (lambda site: site["records"].pop(0), "had signed no request for it"),
        (lambda site: site.update(witnesses=[]), "0 sites have witnessed it; 2 are needed"),
        (lambda site: site.update(key=proof["ledgers"][1]["key"]), "a checkpoint of"),
    ):
        altered = copy.deepcopy(proof)
        change(altered["ledgers"][0])
        read = msgspec.convert(altered, proofs.Proof)
        _, _, findings = proofs.check(read.ledgers[0], read, trust)
        assert any(says in finding.problem for finding in findings), findings
    (tmp_path / "altered.json").write_text(json.dumps({**proof, "lease": "ffffffff"}))
    assert "not about lease ffffffff" in pool.cli("ledger", "verify", str(tmp_path / "altered.json"), status=9).stdout
    (tmp_path / "altered.json").write_text("{}")
    assert "is no proof" in pool.cli("ledger", "verify", str(tmp_path / "altered.json"), status=1).stderr


def test_a_federation_is_proved_and_reported(pool, tmp_path):
    """What left the sites, in what form, how much of it, under which request."""
    pool.cli("fed", "run", str(pool.plan(rounds=2)), "--out", "result")
    run = pool.rows("fed")[-1]["id"]
    file = tmp_path / "run.json"
    assert f"about run {run}" in pool.cli("ledger", "prove", run, "--file", str(file)).stdout
    authority = (pool.authority / "identity.pub").read_text().strip()
    rows = pool.json("ledger", "verify", str(file), "--authority", authority)["items"]
    assert [row["result"] for row in rows] == 4 * ["whole"]
    kinds = [item["kind"] for item in pool.json("ledger", "log", "--site", "site-01", "-n", "0")["items"]]
    for kind, count in (
        ("program.started", 1),
        ("round.sent", 2),
        ("round.released", 2),
        ("program.ended", 1),
        ("login", 1),
    ):
        assert kinds.count(kind) >= count, kind
    told = json.loads(pool.cli("ledger", "report", "--tenant", "oncology", "-o", "json").stdout)
    assert {row["site"] for row in told["federations"]} == set(pool.site_names())
    for row in told["federations"]:
        assert row["rounds"] == 2 and row["cohort_min"] == 4 and row["bytes"] == 2 * (4 * 4 + 3 * 8)
        assert row["form"] == "doubly masked, 32-bit ring" and row["tenant"] == "oncology"


def test_a_site_that_changes_its_past_is_found_out(make_pool):
    """Its operator changes the database and has every hash made anew: who has verified before, or has a checkpoint, sees it."""
    pool = make_pool(2)
    lease = pool.json("lease", "request", "-t", "oncology", "-g", "2", "--site", "site-01")
    pool.cli("lease", "release", lease["id"])
    pool.cli("ledger", "verify")
    pool.stop("site-01")
    with sqlite3.connect(pool.site_directory("site-01") / "site.db") as db:
        db.execute("UPDATE records SET body = CAST(replace(body, 'oncology', 'chemists') AS BLOB)")
        db.execute("DELETE FROM entries WHERE stream IN ('ledger', 'checkpoint')")
    db.close()
    pool.start("site-01")
    pool.until(pool.all_up)
    done = pool.cli("ledger", "verify", "--full", status=9)
    assert "site-02	whole" in done.stdout
    assert "are not verified here before: there are two histories" in done.stdout
    assert "one was changed, removed, added or moved" in pool.cli("ledger", "verify", status=9).stdout
    # A site that cannot be asked is not called whole.
    pool.stop("site-01")
    assert "site-01: " in pool.cli("ledger", "verify", status=9).stdout


# --- files


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Ledgers of a pool in which something happened, as files."""
    from integration.conftest import pools

    with pools() as make:
        pool = make(2, sites_a_process=2)
        with pool.connect() as hub:
            for number in range(150):
                wanted = LeaseWanted("oncology", 1 + number % 3, 600.0)
                view = act(hub, "lease.request", wanted, LeaseView)
                act(hub, "lease.release", ById(view.lease.id), LeaseView)
        directory = tmp_path_factory.mktemp("exported")
        done = pool.json("ledger", "export", str(directory))
        assert [row["site"] for row in done["items"]] == ["site-01", "site-02"]
        assert "exists already" in pool.cli("ledger", "export", str(directory), status=5).stderr
        yield pool, directory, max(done["items"], key=lambda row: row["records"])


def files_of(directory):
    return sorted(path for path in directory.rglob("*") if path.is_file() and path.name != "key")


def test_another_verifier_agrees(exported):
    pool, directory, largest = exported
    assert largest["records"] > 512
    for row in pool.json("ledger", "verify", str(directory))["items"]:
        assert row["result"] == "whole"
        assert ledger_verifier.verify(directory / row["site"], row["key"]) == row["records"]


HARM = {
    "turn": lambda data, place: data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :],
    "cut": lambda data, place: data[:place],
    "remove": lambda data, place: None,
}


def harmed(original, directory, relative, harm, place):
    """A copy in which one file is changed."""
    copy = directory / original.name
    shutil.copytree(original, copy)
    data = HARM[harm]((original / relative).read_bytes(), place)
    (copy / relative).unlink()
    if data is not None:
        (copy / relative).write_bytes(data)
    return copy


def test_whatever_is_changed_in_a_file_both_find_it(exported, tmp_path):
    """Every file, at its ends and in between: a bit turned over, the file cut short, the file gone."""
    _, directory, largest = exported
    original = directory / largest["site"]
    copies = []
    for path in files_of(original):
        size = path.stat().st_size
        for place in sorted({0, size // 3, size // 2, size - 1}):
            for harm in HARM:
                copies.append(harmed(original, tmp_path / str(len(copies)), path.relative_to(original), harm, place))
    for broken in copies:
        with pytest.raises((ledger_verifier.Wrong, ValueError, OSError, KeyError)):
            ledger_verifier.verify(broken)
        with pytest.raises(IbshellError):
            ledger = Exported(broken, "")
            check = LedgerCheck(ledger, None, ledger.witnesses)
            check.run({}, Bar("verifying"))
            for finding in check.result()[1]:
                raise IntegrityError(finding.problem)


def test_an_export_is_sealed_by_its_witnesses_and_verified_by_the_authority_alone(exported, tmp_path):
    pool, directory, _ = exported
    authority = (pool.authority / "identity.pub").read_text().strip()

    def verified(where, authority, status=0):
        done = pool.cli("ledger", "verify", str(where), "--authority", authority, "-o", "json", status=status)
        return json.loads(done.stdout)

    rows = verified(directory, authority)["items"]
    assert {(row["result"], row["witnesses"]) for row in rows} == {("whole", "1 of 1")}
    assert all(row["signatures"] for row in rows), "who signed what is checked too"
    stranger = public_line(Identity.create(tmp_path / "stranger" / "identity").public)
    assert "no roster in it is signed by the authority" in str(verified(directory, stranger, 9)["findings"])
    clone = tmp_path / "clone"
    shutil.copytree(directory, clone)
    note = (clone / "site-01" / "checkpoint").read_text().splitlines(keepends=True)
    (clone / "site-01" / "checkpoint").write_text("".join(note[:-1]))
    (clone / "site-01" / "witnesses").unlink()
    assert (
        verified(clone / "site-01", authority, 9)["findings"][0]["problem"] == "0 sites have witnessed it; 1 are needed"
    )


def test_one_site_is_exported_and_sealed_while_another_is_away(make_pool, tmp_path):
    pool = make_pool(2)
    pool.until(lambda: {row["witnesses"] for row in pool.json("ledger", "verify")["items"]} == {"1 of 1"})
    pool.stop("site-02")
    pool.cli("ledger", "export", str(tmp_path / "out"), "--site", "site-01")
    authority = (pool.authority / "identity.pub").read_text().strip()
    [row] = pool.json("ledger", "verify", str(tmp_path / "out"), "--authority", authority)["items"]
    assert (row["site"], row["result"], row["witnesses"]) == ("site-01", "whole", "1 of 1")


def test_a_broken_export_is_said(exported, tmp_path):
    pool, directory, largest = exported
    original = directory / largest["site"]
    harmed(original, tmp_path / "a", "tile/entries/001", "turn", 500)
    found = pool.cli("ledger", "verify", str(tmp_path / "a"), status=9).stdout
    assert "unverified" in found and "tile/0/001 has hashes that are not of what is below it" in found
    harmed(original, tmp_path / "b", "checkpoint", "remove", 0)
    assert "no ledger in" in pool.cli("ledger", "verify", str(tmp_path / "b"), status=3).stderr
    stranger = (directory / "site-01" / "key").read_text().strip()
    wrong = pool.cli("ledger", "verify", str(directory / "site-02"), "--key", stranger, status=9).stdout
    assert "not of ibshell/site-01/" in wrong
