"""Seams in the ledgers that simulated worlds leave: whoever verifies from one knows what who verifies from the beginning knows."""

import itertools
import random

import msgspec
import pytest

from fedpool.leasing.rules import LedgerRules
from fedpool.leasing.seams import InForce
from fedpool.ledger.records import (
    Cordoned,
    DevicesSaid,
    Granted,
    LeaseDevices,
    LeaseSaid,
    OfKind,
    SiteStarted,
    Uncordoned,
    decode,
    encode,
    encode_at,
    time_of,
)
from fedpool.ledger.retention import forgotten, is_forgotten, kept, leaf_of, text_of, told
from simulation.disk import RECORDS
from simulation.world import World, signatures


@pytest.fixture(scope="module", params=[1, 6, 25, 54, 112])
def ledger(request):
    """The records of a site of a world, and whom its verifier believes."""
    world = World(request.param)
    assert world.run() is None
    site = max(world.sites.values(), key=lambda site: len(site.disk.rows))
    trust = signatures().trust() if world.signatures is not None else None
    return [row.body for row in site.disk.rows if row.stream == RECORDS], trust


def with_seam(records, cut):
    in_force = InForce()
    for number, data in enumerate(records[:cut]):
        in_force.take(number, data)
    return [*records[:cut], *encode_at(in_force.seam(), time_of(records[cut - 1])), *records[cut:]]


def followed(records, trust):
    rules, problems = LedgerRules(trust), []
    for number, data in enumerate(records):
        rules.hashed(number, leaf_of(data), is_forgotten(data))
        if not is_forgotten(data):
            problems += rules.take(number, decode(data))
    return rules, [*problems, *rules.finish()]


def knows(rules):
    state = rules.state()
    replayed = msgspec.structs.replace(state.replayed, leases=0)
    covered = {lease: (one.tenant, one.devices, sorted(one.by)) for lease, one in state.covered.leases.items()}
    held = {lease: one.granted for lease, one in state.held.leases.items()}
    return replayed, covered, held, state.held.kinds, state.covered.on, state.covered.policy


def cuts(records, count=12):
    return sorted(random.Random(len(records)).sample(range(2, len(records) + 1), min(count, len(records) - 2)))


def test_from_a_seam_on_one_knows_what_one_knows_from_the_beginning(ledger):
    records, trust = ledger
    assert len(records) > 40
    for cut in cuts(records):
        seamed = with_seam(records, cut)
        whole, problems = followed(seamed, trust)
        assert problems == []
        for gone in {cut, cut // 2}:
            rules, problems = followed([*map(forgotten, seamed[:gone]), *seamed[gone:]], trust)
            assert problems == []
            assert knows(rules) == knows(whole)


def test_seams_follow_seams(ledger):
    records, trust = ledger
    third = len(records) // 3
    seamed = with_seam(with_seam(records, third), 2 * third)
    whole, problems = followed(seamed, trust)
    assert problems == []
    second = max(number for number, data in enumerate(seamed) if b'"kind":"seam"' in data)
    rules, problems = followed([*map(forgotten, seamed[:second]), *seamed[second:]], trust)
    assert problems == [] and knows(rules) == knows(whole)


def test_what_is_told_is_every_record_still_in_force_once(ledger):
    records, _ = ledger
    cut = len(records) // 2
    seamed = with_seam(records, cut)
    block = len(seamed) - len(records)
    left = list(told(enumerate([*map(forgotten, seamed[:cut]), *seamed[cut:]])))
    repeated = [text_of(decode(data)) for data in seamed[cut + 1 : cut + block]]
    assert [data for _, data in left] == [*repeated, *records[cut:]]
    assert all(records[number] == data for number, data in left[: len(repeated)])


def living(records):
    """A cut at which a lease lives, and it."""
    for cut in range(len(records), 2, -1):
        in_force = InForce()
        for number, data in enumerate(records[:cut]):
            in_force.take(number, data)
        for said in itertools.islice(in_force.seam(), 1, None):
            record = decode(text_of(said))
            if isinstance(record, LeaseSaid):
                return cut, record.lease
    raise AssertionError("no lease ever lives")


def test_a_seam_that_leaves_out_or_changes_something_is_found(ledger):
    records, trust = ledger
    cut, lease = living(records)
    seamed = with_seam(records, cut)
    block = range(cut + 1, cut + len(seamed) - len(records))
    about = [n for n in block if getattr(decode(text_of(decode(seamed[n]))), "lease", "") == lease]
    seam = decode(seamed[cut])
    shorter = [data for number, data in enumerate(seamed) if number not in about]
    shorter[cut] = encode(msgspec.structs.replace(seam, kept=seam.kept - len(about)))
    assert f"the seam leaves out lease {lease}, which lives" in followed(shorter, trust)[1]
    behind = [*seamed[:cut], encode(msgspec.structs.replace(seam, token=seam.token + 1)), *seamed[cut + 1 :]]
    assert any("the seam says token" in problem for problem in followed(behind, trust)[1])
    cut_short = [*seamed[: about[-1]], *seamed[about[-1] + 1 :]]
    assert any("are missing before it" in p or "outside a seam" in p for p in followed(cut_short, trust)[1])
    # Who begins with the seam has the hashes of what it repeats.
    said = decode(seamed[about[0]])
    bent = msgspec.structs.replace(decode(text_of(said)), time=0)
    other = msgspec.structs.replace(kept(said.number, encode(bent)), time=said.time)
    changed = [*map(forgotten, seamed[:cut]), *seamed[cut:]]
    changed[about[0]] = encode(other)
    assert f"record {said.number} is repeated otherwise than it was written" in followed(changed, trust)[1]


def test_records_are_not_forgotten_without_a_seam(ledger):
    records, trust = ledger
    gone = [*map(forgotten, records[:10]), *records[10:]]
    assert "no seam follows" in followed(gone, trust)[1][-1]


def test_cordons_and_leases_of_several_records_are_in_force_too():
    """The worlds have neither."""
    grants = [Granted((f"g{n}",), n + 1) for n in range(4)]
    lease = {"lease": "one", "tenant": "a", "state": "active", "version": 1}
    records = encode_at(
        [
            SiteStarted(epoch=0, software="x"),
            DevicesSaid(kinds=(OfKind("h100", ("g0", "g1")),)),
            DevicesSaid(kinds=(OfKind("a100", ("g2", "g3", "g4", "g5")),), continued=True),
            Cordoned(what="g4"),
            Cordoned(what="g5"),
            Uncordoned(what="g5"),
            LeaseSaid(**lease, event="hold", grants=(grants[0],), more=1),
            LeaseDevices(lease="one", grants=tuple(grants[1:])),
        ],
        1000,
    )
    seamed = with_seam(records, len(records))
    later = [
        LeaseSaid(**{**lease, "lease": "two"}, event="hold", grants=(Granted(("g4",), 9),)),
        LeaseSaid(**{**lease, "lease": "three"}, event="hold", grants=(Granted(("g5",), 10),)),
        LeaseSaid(**{**lease, "lease": "four"}, event="hold", grants=(Granted(("g3",), 11),)),
    ]
    seamed += encode_at(later, 2000)
    gone = [*map(forgotten, seamed[: len(records)]), *seamed[len(records) :]]
    expected = ["lease two gets g4, which is cordoned", "lease four gets g3: 2000 thousandths of it are taken then"]
    for found in (seamed, gone):
        rules, problems = followed(found, None)
        assert problems == expected
        assert rules.state().held.leases["one"].granted == {"h100": 2, "a100": 2}
