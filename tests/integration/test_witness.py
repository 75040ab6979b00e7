"""Sites as witnesses of each other's ledgers: two histories are found out, whoever tells them and whoever carries them."""

import asyncio
import shutil
import sqlite3
import time
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent import clock
from agent.ledger.site_ledger import SiteLedger
from agent.ledger.unwitnessed import Unwitnessed
from agent.ledger.witness import SNAPSHOT_EVERY, Witness
from agent.store import open_store
from fedpool.errors import IntegrityError, NotAuthorised
from fedpool.leasing.recorded import Replay
from fedpool.ledger import notes
from fedpool.ledger.records import Cordoned, decode
from fedpool.ledger.verification import Verification, read_checkpoint
from fedpool.ledger.witnesses import WITNESSES_MAX, majority, size_by_majority, witnesses_of
from fedpool.transport.identity import Identity
from fedpool.wire.messages import LedgerAsked, LedgerHead, ProofWanted, RecordsWanted, SeenCheckpoints, WitnessWanted

pytestmark = pytest.mark.integration
SITES = ("north", "south", "west")


class Party:
    """A site's ledger and the witness beside it, on a store of their own."""

    def __init__(self, name, identities, store):
        self.name = name
        self.store = store
        peers = {other: identity.public for other, identity in identities.items() if other != name}
        self.ledger = SiteLedger(name, identities[name], store, clock, peers, lambda size: None)
        self.witness = Witness(peers, identities[name], self.ledger, store, clock)

    async def recover(self):
        await self.witness.recover()
        if not await self.ledger.recover():
            await self.store.append("leases", (), records=self.ledger.at([self.ledger.opening()]))

    async def write(self, count, reason="fan"):
        records = [Cordoned(what=f"gpu{number:02}", reason=reason, term=1) for number in range(count)]
        await self.store.append("leases", (), records=self.ledger.at(records))

    async def ask(self, other, old):
        """What another is asked when this ledger is to be witnessed."""
        note = (await self.ledger.head()).note
        size = read_checkpoint(note, self.ledger.key).size
        proof = (await self.ledger.proof(ProofWanted(self.name, size, old=old))).hashes if 0 < old < size else []
        return await other.witness.cosign(WitnessWanted(self.name, note, old, proof))

    async def records(self):
        return (await self.ledger.page(RecordsWanted(self.name, 0, 5000))).records


@pytest.fixture
def parties(tmp_path):
    """Opens sites by name; the same name twice goes on where it was."""
    identities = {name: Identity.create(tmp_path / name / "identity") for name in SITES}

    @asynccontextmanager
    async def opening(name, directory=None):
        store = await open_store("", tmp_path / (directory or name) / "site.db", name)
        try:
            party = Party(name, identities, store)
            await party.recover()
            yield party
        finally:
            await store.close()

    return opening


def test_a_ledger_that_goes_on_is_cosigned(parties):
    async def run():
        async with parties("north") as north, parties("south") as south:
            await north.write(10)
            first = await north.ask(south, 0)
            await north.write(300)
            assert (await north.ask(south, 0)) == type(first)("", 11), "it says from where"
            second = await north.ask(south, 11)
            assert second.size == 311
            note = notes.decode((await north.ledger.head()).note).signed(notes.parse_signature(second.line))
            await north.ledger.witnessed(note.encode())
            head = await north.ledger.head()
            key = notes.key_of("south", south.ledger.key.public)
            witness = notes.Key(key.name, key.public, notes.COSIGNATURE)
            [time_s] = notes.signers(notes.decode(head.witnessed), [witness]).values()
            assert abs(time_s - time.time()) < 60
        async with parties("north") as north, parties("south") as south:
            assert (await north.ledger.head()).witnessed == head.witnessed
            again = await north.ask(south, 311)
            assert again.size == 311 and again.line, "the same checkpoint may be cosigned again"
            assert list(south.witness.seen().notes) == ["north"]

    asyncio.run(run())


def test_a_rewritten_history_is_refused_and_recorded(parties, tmp_path):
    async def run():
        async with parties("north") as north, parties("south") as south:
            await north.write(20)
            await north.ask(south, 0)
        async with parties("north", "other") as north, parties("south") as south:
            await north.write(40, "rewritten")
            with pytest.raises(IntegrityError, match="not shown to continue"):
                await north.ask(south, 21)
            refusal = decode((await south.records())[-1])
            assert (refusal.site, refusal.size, refusal.known) == ("north", 41, 21)
            assert read_checkpoint(south.witness.seen().notes["north"], north.ledger.key).size == 21

    asyncio.run(run())


def test_two_histories_shown_to_two_witnesses_are_found_out(parties, tmp_path):
    async def run():
        async with parties("north") as north:
            await north.write(5)
        shutil.copytree(tmp_path / "north", tmp_path / "other")
        async with parties("south") as south, parties("west") as west:
            async with parties("north", "other") as north:
                await north.write(5, "what west is shown")
                await north.ask(west, 0)
            async with parties("north") as north:
                await north.write(7, "what south is shown")
                await north.ask(south, 0)
                head = await north.ledger.head()
                check = Verification("north", north.ledger.key, Replay().take)
                for other in (south, west):
                    seen = read_checkpoint(other.witness.seen().notes["north"], north.ledger.key)
                    check.expect(seen.size, seen.root, f"signed and shown to {other.name}")
                for record in await north.records():
                    check.take(record)
                check.finish(head.note)
            assert [finding.problem for finding in check.findings] == [
                "the first 11 records are not signed and shown to west: there are two histories"
            ]

    asyncio.run(run())


def test_strangers_and_forgers_get_nothing(parties, tmp_path):
    async def run():
        async with parties("north") as north, parties("south") as south, parties("west") as west:
            await north.write(3)
            note = (await north.ledger.head()).note
            with pytest.raises(NotAuthorised, match="no witness of 'east'"):
                await south.witness.cosign(WitnessWanted("east", note, 0, []))
            with pytest.raises(IntegrityError):
                await south.witness.cosign(WitnessWanted("west", note, 0, []))
            with pytest.raises(IntegrityError):
                await south.witness.cosign(WitnessWanted("north", note.replace(b"\n4\n", b"\n5\n"), 0, []))
            assert not south.witness.seen().notes
            # A cosignature in another's name, and one of somebody who is no witness.
            text = notes.decode(note).text
            forged = notes.cosign(text, west.ledger.origin, Identity.create(tmp_path / "x").signing, 5)
            line = notes.decode(note).signed(forged)
            await north.ledger.witnessed(line.encode())
            assert (await north.ledger.head()).witnessed == b"", "a key that is not known counts for nothing"
            true = notes.parse_signature((await north.ask(south, 0)).line)
            bent = notes.Signature(true.name, true.key_id, true.value[:-1] + bytes([true.value[-1] ^ 1]))
            with pytest.raises(IntegrityError, match="not of its key"):
                await north.ledger.witnessed(notes.decode(note).signed(bent).encode())

    asyncio.run(run())


def test_what_a_witness_keeps_does_not_grow(parties, tmp_path):
    async def run():
        async with parties("north") as north, parties("south") as south:
            old = 0
            for _ in range(SNAPSHOT_EVERY + 20):
                await north.write(1)
                old = (await north.ask(south, old)).size
        async with parties("south") as south:
            assert (
                read_checkpoint(
                    south.witness.seen().notes["north"], notes.key_of("north", north.ledger.key.public)
                ).size
                == old
            )
        with sqlite3.connect(tmp_path / "south" / "site.db") as db:
            [(first,)] = db.execute("SELECT seq FROM snapshots WHERE stream = 'witness'")
            [(entries,)] = db.execute("SELECT count(*) FROM entries WHERE stream = 'witness' AND seq >= ?", (first,))
        db.close()
        assert entries < 30

    asyncio.run(run())


def test_what_no_majority_has_cosigned_is_known_and_for_how_long(parties, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(clock, "now", lambda: now[0])

    async def cosigned(north, *others):
        note = notes.decode((await north.ledger.head()).note)
        lines = [(await north.ask(other, old)).line for other, old in others]
        await north.ledger.witnessed(note.signed(*map(notes.parse_signature, lines)).encode())

    def waited(party):
        return round(party.ledger.unwitnessed_s())

    async def run():
        async with parties("south") as south, parties("west") as west:
            async with parties("north") as north:
                await north.write(3)
                now[0] += 5000
                assert waited(north) == 0, "no hub was there to carry checkpoints"
                north.ledger.unwitnessed.hub_came()
                now[0] += 40
                assert waited(north) == 40
                await cosigned(north, (south, 0))
                assert waited(north) == 40, "one of two is no majority"
                await cosigned(north, (west, 0))
                assert waited(north) == 0
                now[0] += 1000
                assert waited(north) == 0, "nothing was written since"
                await north.write(2)
                now[0] += 20
                await cosigned(north, (south, 4))
                now[0] += 50
                await north.write(2)
                assert waited(north) == 70
                await cosigned(north, (south, 6), (west, 4))
                assert waited(north) == 0
                await north.write(1)
                now[0] += 30
                await north.ledger.advance()
                await north.write(1)
                now[0] += 10
                note = notes.decode((await north.ledger.head()).note)
                assert waited(north) == 40
            async with parties("north") as north:
                now[0] += 7
                assert waited(north) == 0, "after a restart it begins anew"
                north.ledger.unwitnessed.hub_came()
                now[0] += 7
                assert waited(north) == 7
            return note

    asyncio.run(run())


class Watch:
    now_s = 100.0

    def now(self):
        return self.now_s


def test_only_time_with_a_hub_counts_and_a_checkpoint_covers_what_came_before_it():
    watch = Watch()
    waiting = Unwitnessed(watch)

    def passes(seconds):
        watch.now_s += seconds
        return round(waiting.seconds)

    waiting.hub_came()
    assert passes(10) == 0
    waiting.wrote()
    assert passes(10) == 10
    waiting.hub_left()
    assert passes(1000) == 10
    waiting.hub_came()
    waiting.hub_came()  # a second one, which takes over
    waiting.hub_left()
    assert passes(5) == 15
    waiting.signed(4)
    assert passes(20) == 35
    waiting.signed(6)
    waiting.witnessed(3, 7)
    assert passes(0) == 35, "nothing that was signed is covered"
    waiting.witnessed(5, 7)
    assert passes(0) == 20, "what is left was written after the first checkpoint"
    waiting.witnessed(6, 7)
    assert passes(3) == 3
    waiting.witnessed(7, 7)
    assert passes(50) == 0
    waiting.wrote()
    assert passes(4) == 4


@given(
    st.dictionaries(st.sampled_from("abcdefg"), st.integers(0, 9)),
    st.sets(st.sampled_from("abcdefg"), min_size=1),
)
def test_a_majority_vouches_for_what_each_of_it_has_cosigned(cosigned, witnesses):
    needed = len(witnesses) // 2 + 1
    size = size_by_majority(cosigned, witnesses, needed)
    assert sum(cosigned.get(name, 0) >= size for name in witnesses) >= needed
    assert sum(cosigned.get(name, 0) > size for name in witnesses) < needed


def test_witnesses_are_chosen_by_names_alone():
    assert [majority(sites) for sites in (1, 2, 3, 4, 5, 9, 1000)] == [0, 1, 2, 2, 3, 5, 5]
    names = [f"site-{number:03}" for number in range(200)]
    assert witnesses_of("site-001", names[:4]) == ["site-000", "site-002", "site-003"]
    chosen = {name: witnesses_of(name, names) for name in names}
    assert all(len(found) == WITNESSES_MAX and name not in found for name, found in chosen.items())
    assert chosen["site-007"] == witnesses_of("site-007", names[::-1])
    burden = [sum(name in found for found in chosen.values()) for name in names]
    assert max(burden) < 3 * WITNESSES_MAX


@pytest.mark.waits
@pytest.mark.waits
def test_a_pool_s_sites_witness_each_other(make_pool):
    """And one that rewrites its past is refused by them, and found out by somebody who never verified before."""
    pool = make_pool(3)
    for _ in range(2):
        lease = pool.json("lease", "request", "-t", "oncology", "-g", "6")
        pool.cli("lease", "release", lease["id"])

    def is_carried():
        head = pool.ask("ledger.head", LedgerAsked("site-01"), LedgerHead)
        seen = pool.ask("ledger.seen", LedgerAsked("site-02"), SeenCheckpoints).notes
        return "site-01" in seen and notes.decode(seen["site-01"]).text == notes.decode(head.note).text

    pool.until(is_carried)
    rows = pool.json("ledger", "verify")["items"]
    assert {row["result"] for row in rows} == {"whole"} and "2 of 2" in {row["witnesses"] for row in rows}
    pool.stop("site-01")
    with sqlite3.connect(pool.site_directory("site-01") / "site.db") as db:
        db.execute("UPDATE records SET body = CAST(replace(body, 'oncology', 'chemists') AS BLOB)")
        db.execute("DELETE FROM entries WHERE stream IN ('ledger', 'checkpoint', 'witnessed')")
    db.close()
    shutil.rmtree(pool.directory / "ledgers")
    pool.start("site-01")
    pool.until(pool.all_up)
    found = pool.json("ledger", "verify", status=9)["findings"]
    assert {one["site"] for one in found} == {"site-01"}
    assert any("shown to site-02: there are two histories" in one["problem"] for one in found)

    def refused():
        rows = pool.json("ledger", "log", "--kind", "witness.refused")["items"]
        return {row["site"] for row in rows} == {"site-02", "site-03"}

    pool.until(refused)
