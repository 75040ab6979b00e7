"""What a site's ledger says: one encoding, small records, and a replay that notices every broken rule."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpool.errors import IntegrityError
from fedpool.leasing.entries import LeaseChanged
from fedpool.leasing.grants import SiteGrants
from fedpool.leasing.recorded import CARRIED, Replay, ReplayState, lease_records, records_of
from fedpool.leasing.requests import Commit, Cordon, Hold, Notify, Obey, ProcessesGone, Release, Renew, Resize, Transfer
from fedpool.ledger import canonical
from fedpool.ledger.records import (
    Cordoned,
    Granted,
    HubObeyed,
    LeaseDevices,
    LeaseSaid,
    LedgerOpened,
    SiteStarted,
    Uncordoned,
    decode,
    encode,
    encode_at,
)
from fedpool.ledger.tiles import ENTRY_BYTES_MAX
from fedpool.records import Grant, SiteLease
from fedpool.sim.scenario import SimulatedSite

texts = st.text(st.characters(codec="utf-8"), max_size=20)
granted = st.builds(
    Granted, st.lists(texts, max_size=3).map(tuple), st.integers(0, canonical.INTEGER_MAX), st.integers(1, 1000)
)
leases = st.builds(
    LeaseSaid,
    time=st.integers(0, canonical.INTEGER_MAX),
    lease=texts,
    tenant=texts,
    event=texts,
    state=texts,
    for_ms=st.none() | st.integers(0, 1 << 40),
    grants=st.none() | st.lists(granted, max_size=2).map(tuple),
    leaving=st.none() | st.lists(texts, max_size=2).map(tuple),
    reason=texts,
)


@given(leases)
def test_the_encoding_is_the_canonical_one(record):
    data = encode(record)
    value = canonical.decode(data)
    assert canonical.encode(value) == data and value["kind"] == "lease"
    assert decode(data) == record


@pytest.mark.parametrize(
    "data", [b'{"kind":"lease","time":1}', b'{"kind":"lease"', b"[]", b'{"kind":"cordoned","time":1.5}', b"\xff"]
)
def test_what_is_no_record_is_said(data):
    with pytest.raises(IntegrityError):
        decode(data)


def test_a_kind_of_a_newer_release_is_no_fault():
    assert decode(b'{"kind":"comet.seen","time":5}') is None


# --- from entries


class Site:
    """A site's machine whose records are kept."""

    def __init__(self, gpus=4):
        self.machine = SiteGrants("s", SimulatedSite("s", gpus_per_node=gpus).inventory())
        self.machine.recovering = False
        self.now = 100.0
        self.records = []

    def put(self, event):
        decision = self.machine.step(event, self.now)
        for entry in decision.entries:
            self.records += records_of(self.machine.leases, entry, self.now, "1.0")
            self.machine.apply(entry)
        return decision

    def lease(self, name="aaaaaaaa", gpus=2):
        self.put(Hold(name, "onc", gpus, 15.0, 1, duration_s=3600.0, attempt=1))
        self.put(Commit(name, 3600.0, 1, 1))
        return name


def replayed(records):
    replay = Replay()
    return [problem for record in records for problem in replay.take(record)], replay


def test_the_life_of_a_lease_is_told_in_full():
    site = Site()
    site.put(Obey(1))
    lease = site.lease()
    site.put(Renew(lease, 7200.0, 1))
    version = site.machine.leases[lease].version
    site.put(Resize(lease, 3, 0.0, 1, version))
    site.put(Transfer(lease, "physics", 1))
    site.put(ProcessesGone(lease))
    site.put(Notify(lease, 60.0, "maintenance", 1))
    site.put(Release(lease, 1, "revoked: now"))
    site.put(ProcessesGone(lease))
    said = [record for record in site.records if isinstance(record, LeaseSaid)]
    assert [one.event for one in said] == [
        "hold",
        "commit",
        "renew",
        "resize",
        "transfer",
        "transfer",
        "notify",
        "end",
        "revoke",
    ]
    hold, commit, renew = said[:3]
    assert len(hold.grants[0].devices) == 2 and hold.for_ms == 15_000 and commit.grants is None
    assert 3600_000 < commit.for_ms < 3700_000 < renew.for_ms
    assert sum(len(group.devices) for group in said[3].grants) == 3
    assert [one.tenant for one in said[4:6]] == ["onc", "physics"] and said[4].next_tenant == "physics"
    assert said[6].reason == "maintenance" and said[-1].state == "revoked"
    problems, replay = replayed(site.records)
    assert not problems and replay.leases == 1
    assert sum(len(encode(record)) for record in said) < 2200


def test_a_large_lease_takes_several_records():
    """An entry of a log has at most 65,535 bytes."""
    grants = tuple(Grant(f"GPU-{n:036}", 7 + n % 2, 1000) for n in range(5000))
    before = SiteLease("aaaaaaaa", "onc", "held", (), 50.0, version=1)
    lease = msgspec.structs.replace(before, grants=grants, version=2)
    records = lease_records(None, lease, 1, 0.0)
    assert [type(record) for record in records] == [LeaseSaid, *[LeaseDevices] * 4] and records[0].more == 4
    assert all(len(data) <= ENTRY_BYTES_MAX for data in encode_at(records, 1))
    problems, replay = replayed(records)
    assert not problems and len(replay.held()) == 5000
    # It grows: what it had keeps its tokens, whichever record says so.
    grown = msgspec.structs.replace(lease, state="active", version=3)
    more = msgspec.structs.replace(grown, grants=(*grants, Grant("GPU-new", 9)), version=4)
    records += [*lease_records(lease, grown, 1, 0.0), *lease_records(grown, more, 1, 0.0)]
    problems, replay = replayed(records)
    assert not problems and len(replay.held()) == 5001
    assert "are missing" in replayed(records[:3] + records[4:])[0][0]


def test_leases_older_than_the_ledger_are_carried_over():
    lease = SiteLease("aaaaaaaa", "onc", "active", (Grant("GPU-1", 90),), 50.0, version=7)
    records = [LedgerOpened(format=1, site="s", key=""), *lease_records(None, lease, 3, 10.0, CARRIED)]
    ended = msgspec.structs.replace(lease, state="ending", reason="expired", version=8)
    records += [*lease_records(lease, ended, 3, 50.0), SiteStarted(epoch=1090, software="1")]
    assert replayed(records)[0] == []


# --- broken rules

HOLD = LeaseSaid(lease="a", tenant="t", event="hold", state="held", version=1, term=2, grants=(Granted(("G1",), 5),))
COMMIT = LeaseSaid(lease="a", tenant="t", event="commit", state="active", version=2, term=2, for_ms=1000)
OTHER = LeaseSaid(lease="b", tenant="t", event="hold", state="held", version=1, term=2, grants=(Granted(("G1",), 6),))


@pytest.mark.parametrize(
    ("records", "says"),
    [
        ([HOLD, COMMIT, OTHER], "lease b gets G1: 2000 thousandths"),
        ([HOLD, msgspec.structs.replace(OTHER, grants=(Granted(("G2",), 5),))], "G2 with token 5; 5 was given before"),
        ([SiteStarted(epoch=9, software=""), HOLD], "token 5; 9 was given before"),
        ([HOLD, SiteStarted(epoch=4, software="")], "starts with token 4; it has given 5"),
        ([COMMIT], "does not live, and yet there is commit"),
        ([HOLD, msgspec.structs.replace(COMMIT, event="expire", state="expired")], "is held; expire does not make it"),
        ([HOLD, COMMIT, COMMIT], "is active; commit does not make it active"),
        ([HOLD, msgspec.structs.replace(COMMIT, version=1)], "has version 1 after 1"),
        (
            [HOLD, COMMIT, msgspec.structs.replace(HOLD, grants=(Granted(("G1",), 7),))],
            "granted again while it is active",
        ),
        ([HOLD, HubObeyed(term=3), COMMIT], "a hub of term 2 is obeyed after one of term 3"),
        ([Cordoned(what="G1", term=1), HOLD], "gets G1, which is cordoned"),
        ([Cordoned(term=1), HOLD], "gets G1, which is cordoned"),
        ([LeaseDevices(lease="a", grants=())], "devices of lease a that no record announced"),
    ],
)
def test_a_broken_rule_is_found(records, says):
    problems, _ = replayed(records)
    assert problems and any(says in problem for problem in problems), problems


def test_what_keeps_the_rules_is_no_fault():
    half = (Granted(("G1",), 5, 500),)
    first, second = (
        msgspec.structs.replace(HOLD, grants=half),
        msgspec.structs.replace(OTHER, grants=(Granted(("G1",), 6, 500),)),
    )
    assert replayed([Cordoned(what="G1"), Uncordoned(what="G1"), first, second, COMMIT])[0] == []


def test_forgotten_and_snapshot_entries_say_nothing():
    site = Site()
    assert records_of({}, site.machine.state(), 0.0, "1") == []
    assert records_of({}, LeaseChanged(SiteLease("a", "t", "held", (), 1.0), 1, 1), 0.0, "1")[0].event == "hold"


def test_a_cordon_is_told_with_its_reason():
    site = Site()
    site.put(Cordon("gpu01", "fan " * 1000, 1))
    assert site.records[0].what == "gpu01" and len(site.records[0].reason) == 500


@given(st.integers(0, 30))
def test_a_replay_goes_on_where_an_earlier_one_ended(place):
    site = Site(8)
    for name in ("aaaaaaaa", "bbbbbbbb"):
        site.lease(name, 3)
    site.put(Release("aaaaaaaa", 1))
    site.put(ProcessesGone("aaaaaaaa"))
    site.put(Cordon("gpu01", "fan", 1))
    site.put(Renew("bbbbbbbb", 7200.0, 1))
    first, second = Replay(), Replay()
    for record in site.records[:place]:
        assert not first.take(record) and not second.take(record)
    state = msgspec.json.decode(msgspec.json.encode(second.state()), type=ReplayState)
    second = Replay(state)
    for record in site.records[place:]:
        assert first.take(record) == second.take(record) == []
    assert (first.state(), first.held()) == (second.state(), second.held())
