"""The round protocol: the hub's sum is the plain sum to the bit, whoever drops out when; and nothing else comes out."""

import importlib.util
import itertools
import os
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpool.errors import IntegrityError, LocalProtocolError, Refused, UsageError
from fedpool.secagg import client, graph, masks
from fedpool.secagg.client import STATES, TRANSITIONS, AgreeSurvivors, ReleaseShares
from fedpool.secagg.manifest import default_threshold
from fedpool.secagg.server import Answered, Ask, Fail, HubEvent, HubRound, Lost, PhaseEnded, Unmask

_spec = importlib.util.spec_from_file_location("rounds", Path(__file__).with_name("rounds.py"))
rounds = importlib.util.module_from_spec(_spec)
sys.modules["rounds"] = rounds
_spec.loader.exec_module(rounds)
World = rounds.World

PHASES = ("keys", "shares", "confirm", "input", "survivors", "release")


@st.composite
def cohorts(draw):
    """Cohort, threshold, who drops out in which phase, order of messages."""
    n = draw(st.integers(3, 12))
    threshold = draw(st.integers(n // 2 + 1, n))
    gone = draw(st.dictionaries(st.integers(1, n), st.sampled_from(PHASES), max_size=n))
    return n, threshold, {(phase, i): "lost" for i, phase in gone.items()}, draw(st.integers(0, 1 << 30))


@given(cohorts())
def test_the_sum_is_exact_or_the_round_fails(case):
    n, threshold, faults, order = case
    world = World(n, threshold, seed=order)
    result = world.run(faults, order)
    if isinstance(result, Unmask):
        before = {i for phase, i in faults if phase in PHASES[:4]}
        assert set(result.survivors) == set(range(1, n + 1)) - before
        assert np.array_equal(world.total(result), world.plain(result.survivors))
    else:
        assert n - len(faults) < threshold, "a quorum that stays in always gets its sum"
        if result.phase in PHASES[:5]:
            assert not world.revealed, "a round that failed before its release revealed nothing"


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("n", [3, 6])
def test_a_drop_out_at_every_point(n, phase):
    world = World(n, n // 2 + 1)
    result = world.run({(phase, 2): "lost"})
    assert np.array_equal(world.total(result), world.plain(result.survivors))
    assert (2 in result.survivors) == (phase in ("survivors", "release"))


def test_under_the_threshold_the_round_fails_and_reveals_nothing():
    world = World(5, 4)
    result = world.run({("input", 1): "lost", ("input", 4): "lost"})
    assert isinstance(result, Fail) and "3 of 5 sites left, 4 needed" in result.reason and "s1: gone" in result.reason
    assert not world.revealed


def test_under_the_minimum_cohort_too():
    world = World(5, 3, minimum=5)
    assert isinstance(world.run({("confirm", 1): "lost"}), Fail)
    assert not world.revealed


@given(cohorts(), st.data())
def test_a_hub_restarted_from_its_journal_goes_on_in_the_same_state(case, data):
    n, threshold, faults, order = case
    world = World(n, threshold, seed=order)
    world.run(faults, order)
    cut = data.draw(st.integers(0, len(world.journal)))
    one, other = HubRound(world.manifest), HubRound(world.manifest)
    for event in world.journal[:cut]:
        one.step(event)
        encoded = msgspec.msgpack.encode(event)
        other.step(msgspec.msgpack.decode(encoded, type=HubEvent))
    assert (one.phase, one.members, one.outstanding()) == (other.phase, other.members, other.outstanding())


def test_a_site_asked_again_gives_the_first_answer_and_refuses_another_question():
    world = World(4, 3)
    world.run()
    site = world.sites[1]
    question = AgreeSurvivors([world.hub._vectors[i] for i in (1, 2, 3, 4)])
    assert site.step(question).replies == site.step(question).replies
    with pytest.raises(Refused, match="already answered for another list"):
        site.step(AgreeSurvivors([world.hub._vectors[i] for i in (1, 2, 3)]))


def test_no_second_release_for_another_list():
    world = World(4, 3)
    world.run()
    signatures = [world.hub._signatures[i] for i in (1, 2, 3)]
    with pytest.raises(Refused, match="already answered"):
        world.sites[1].step(ReleaseShares(signatures))
    assert len(world.revealed) == 3 and {entry.round for entry in world.revealed} == {1}


def test_after_a_release_the_same_round_is_never_joined_again():
    world = World(4, 3)
    again = msgspec.structs.replace(world.manifest, attempt=2)
    with pytest.raises(Refused, match="already released its shares for round 1"):
        world.open(1, again, last_released=1)


def alter_signature(message):
    return msgspec.structs.replace(message, signature=bytes(64))


@pytest.mark.parametrize("phase", ["keys", "shares", "confirm", "input", "survivors"])
def test_an_altered_message_drops_its_sender_and_names_it(phase):
    world = World(5, 3)
    result = world.run({(phase, 3): alter_signature})
    assert isinstance(result, Unmask)
    assert "does not carry s3's signature" in world.hub.lost[3][1]


def test_a_wrong_share_is_found_by_its_commitment():
    def lie(message):
        bad = msgspec.structs.replace(message.own[0], share=bytes(66))
        return msgspec.structs.replace(message, own=[bad, *message.own[1:]])

    world = World(5, 3)
    result = world.run({("release", 2): lie})
    assert "s2 revealed a wrong share of s1" in world.hub.lost[2][1]
    assert np.array_equal(world.total(result), world.plain(result.survivors))


def test_a_hub_that_shows_another_model_is_refused():
    world = World(4, 3)
    with pytest.raises(Refused, match="names model"):
        world.open(1, model=b"x" * 32)


def test_two_manifests_give_keys_that_do_not_verify():
    world = World(4, 3)
    keys = [world.open(i) for i in (1, 2, 3)]
    other = msgspec.structs.replace(world.manifest, model=b"x" * 32)
    keys.append(world.open(4, other, model=b"x" * 32))
    with pytest.raises(IntegrityError, match="s4"):
        world.sites[1].step(client.DealShares(keys, []))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"threshold": 2}, "two disjoint groups"),
        ({"minimum_cohort": 9}, "minimum cohort 9 with 4 sites"),
        ({"version": 1}, "is not spoken here"),
        ({"ring_bits": 48}, "48 bits"),
        ({"parameters": 8}, "do not cover the 8 values"),
        ({"degree": 2}, "degree 2 with 4 sites"),
        ({"share_threshold": 2}, "in a complete graph"),
        ({"max_weight": 1 << 62}, "63 bits"),
    ],
)
def test_a_manifest_no_honest_hub_would_make_is_refused(change, says):
    world = World(4, 3)
    with pytest.raises(UsageError, match=says):
        world.open(1, msgspec.structs.replace(world.manifest, **change))


def test_a_site_demands_its_own_minimum_and_knows_its_peers():
    world = World(4, 3)
    policy = world.policy(1, minimum=4)
    with pytest.raises(Refused, match="under the 4 that s1 demands"):
        policy.admit(world.manifest, 0)
    stranger = msgspec.structs.replace(
        policy, peers={k: v for k, v in policy.peers.items() if k != "s3"}, minimum_cohort=2
    )
    with pytest.raises(Refused, match="does not know s3"):
        stranger.admit(world.manifest, 0)
    impostor = msgspec.structs.replace(policy, peers={**policy.peers, "s3": bytes(32)}, minimum_cohort=2)
    with pytest.raises(Refused, match="another identity key for s3"):
        impostor.admit(world.manifest, 0)


@pytest.mark.parametrize("state", STATES)
def test_every_event_that_does_not_follow_is_illegal_and_changes_nothing(state):
    world = World(4, 3)
    world.open(1)
    site = world.sites[1]
    site.state = state
    for kind in {kind for _, kind in TRANSITIONS}:
        if (state, kind) in TRANSITIONS:
            continue
        empty = [[] for _ in kind.__struct_fields__]
        event = kind(bytes(32)) if kind is client.VectorSent else kind(*empty)
        with pytest.raises(LocalProtocolError, match=f"does not follow state {state}"):
            site.step(event)
        assert site.state == state


def test_the_hub_ignores_what_comes_late_and_refuses_what_cannot_be():
    world = World(3, 2)
    key = world.open(1)
    world.step(Answered.of("keys", key))
    assert not world.hub.step(Answered.of("keys", key)).entries
    assert not world.hub.step(Lost(1, "keys", "x")).entries
    assert not world.hub.step(PhaseEnded("input")).entries
    with pytest.raises(LocalProtocolError):
        world.hub.step(Answered("tea", 1, b""))
    effects = world.step(PhaseEnded("keys"))
    assert isinstance(effects[0], Fail) and "1 of 3" in effects[0].reason


def test_a_site_cannot_answer_for_another():
    world = World(3, 2)
    stolen = msgspec.structs.replace(world.open(2), index=1)
    world.open(1)
    world.step(Answered("keys", 1, msgspec.msgpack.encode(stolen)))
    assert "does not carry s1's signature" in world.hub.lost[1][1]


def test_questions_carry_nobody_elses_shares():
    """The hub relays to a site only what was dealt to that site."""
    world = World(4, 3)
    asked = []
    original = world.answer
    world.answer = lambda ask: (asked.append(ask), original(ask))[1]
    world.run()
    for ask in asked:
        if isinstance(ask, Ask) and ask.phase == "confirm":
            assert {d.dealing.holder for d in ask.question.shares} == {ask.index}


def chi_square(words):
    """Chi-square of the bytes of some words against uniformity, 255 degrees of freedom."""
    counts = np.bincount(words.view(np.uint8), minlength=256)
    expected = words.nbytes / 256
    return float(((counts - expected) ** 2 / expected).sum())


def test_a_single_masked_vector_is_uniform_even_for_a_constant_update():
    """Every site's update is all zeros; what the hub holds passes a uniformity test (p > 10^-6: chi-square under 373)."""
    world = World(4, 3, words=50_000)
    for index in world.encoded:
        world.encoded[index] = np.zeros(50_000, np.uint32)
    assert isinstance(world.run({("input", 3): "lost"}), Unmask)
    for index, words in world.masked.items():
        assert chi_square(words) < 373, f"s{index}"
    assert chi_square(world.encoded[1]) > 1e6, "the test can fail"


def test_two_worlds_with_the_same_sum_look_the_same_to_the_hub():
    """The hub holds every message but one site's, and cannot tell which of two updates that site had.

    World A: s1 has update u and s2 has v; world B: swapped. With s1's masked vector taken away, the hub knows the sum and all
    other masked vectors; a test statistic that separates the worlds on the plain updates does not on what the hub has.
    """
    rng = np.random.default_rng(5)
    u = np.zeros(64, np.uint32)
    v = rng.integers(0, 2**32, 64, np.uint32)

    def view(first, second):
        world = World(3, 2, words=64)
        world.encoded = {1: first.copy(), 2: second.copy(), 3: np.full(64, 7, np.uint32)}
        result = world.run()
        total = world.total(result)
        assert np.array_equal(total, u + v + np.uint32(7))
        return [world.masked[2], world.masked[3], total - world.masked[2] - world.masked[3]]

    correlations = {"A": [], "B": []}
    for name, (first, second) in (("A", (u, v)), ("B", (v, u))):
        for _ in range(60):
            close = [np.mean((words ^ v) & 1) for words in view(first, second)]
            correlations[name].append(close)
    a, b = np.array(correlations["A"]), np.array(correlations["B"])
    # Share of low bits that differ from v: one half in either world, within five standard errors of 60 x 64 bits.
    bound = 5 * 0.5 / np.sqrt(60 * 64)
    assert np.all(np.abs(a.mean(0) - 0.5) < bound) and np.all(np.abs(b.mean(0) - 0.5) < bound)
    assert np.all(np.abs(a.mean(0) - b.mean(0)) < 2 * bound)


def test_without_the_pair_masks_of_one_missing_site_the_sum_is_noise():
    world = World(4, 3, words=20_000)
    for index in world.encoded:
        world.encoded[index] = np.zeros(20_000, np.uint32)
    result = world.run({("input", 2): "lost"})
    total = np.zeros(20_000, np.uint32)
    for index in result.survivors:
        masks.add(total, world.masked[index])
    kept = [stream for stream in result.removal.body if stream is not result.removal.body[-1]]
    masks.apply(total, kept, 0)
    assert chi_square(total) < 373


@pytest.mark.parametrize(("n", "threshold"), [(2, 2), (3, 3), (9, 7), (16, 11), (200, 134)])
def test_the_usual_threshold_is_more_than_two_thirds(n, threshold):
    assert default_threshold(n) == threshold


@given(st.integers(3, 10), st.sampled_from([16, 24, 32, 64]), st.integers(0, 2**31))
def test_the_decoded_mean_is_within_its_bound(n, bits, seed):
    rng = np.random.default_rng(seed)
    world = World(n, n // 2 + 1, words=32, bits=bits)
    ring = world.manifest.vector.ring
    fixed = world.manifest.value_encoding(1.0)
    updates = {i: rng.uniform(-1.5, 1.5, 32).astype(np.float32) for i in world.encoded}
    weights = {i: int(rng.integers(1, 101)) for i in world.encoded}
    for i in world.encoded:
        world.encoded[i] = ring.zeros(32)
        masks.mask(updates[i], None, fixed.clip, fixed.factor(weights[i]), os.urandom(32), [], 0, world.encoded[i])
    total = world.total(world.run())
    weight = sum(weights.values())
    mean = np.empty(32, np.float32)
    masks.decode(ring, total, None, fixed.unit() / weight, mean)
    plain = sum(np.clip(updates[i].astype(np.float64), -1, 1) * weights[i] for i in updates) / weight
    assert np.max(np.abs(mean - plain)) <= fixed.mean_error_bound(weight) + 1e-7


def sparse(n, **changes):
    """A cohort on the graph that is chosen for its size."""
    found = graph.choose(n, default_threshold(n))
    return World(n, default_threshold(n), degree=found.degree, share_threshold=found.share_threshold, **changes)


@pytest.mark.parametrize("phase", PHASES)
def test_a_sparse_graph_gives_the_same_sum(phase):
    """Forty sites with 36 neighbours each; a tenth drops out in one phase."""
    world = sparse(40)
    assert 0 < world.manifest.degree < 39
    result = world.run({(phase, i): "lost" for i in (3, 17, 18, 40)})
    assert isinstance(result, Unmask)
    assert len(result.survivors) == (36 if phase in PHASES[:4] else 40)
    assert np.array_equal(world.total(result), world.plain(result.survivors))
    present = 36 if phase == "keys" else 40
    assert {len(m.dealings) for m in world.hub._shares.values()} == {min(world.manifest.degree + 1, present)}


def test_more_sites_than_anyone_has_neighbours():
    world = sparse(60, words=40)
    result = world.run({("input", i): "lost" for i in range(1, 7)}, order=1)
    assert len(result.survivors) == 54
    assert np.array_equal(world.total(result), world.plain(result.survivors))


def test_where_too_few_hold_a_sites_shares_the_round_fails_before_anything_is_revealed():
    world = sparse(100)
    threshold = world.manifest.share_threshold
    honest = world.answer
    victim = 7

    def gone(ask):
        """In the shares phase the neighbours of one site go, all but too few of them."""
        if ask.phase != "shares":
            return False
        near = world.hub._near[victim]
        return ask.index in near[: len(near) - threshold + 2]

    world.answer = lambda ask: honest(ask) if not gone(ask) else (_ for _ in ()).throw(Refused("gone"))
    result = world.run()
    assert isinstance(result, Fail) and not world.revealed
    assert "of those who hold shares of s7 are left" in result.reason


def test_another_order_of_the_ring_is_refused():
    """A hub that shows a site the keys of others than its neighbours gets nothing."""
    world = sparse(40)

    def swap(ask):
        if ask.phase == "shares" and ask.index == 5:
            keys = ask.question.keys
            other = world.hub._keys[ask.question.others[0].index]
            victim = next(k for k in keys if k.index != 5)
            shown = sorted([other, *(k for k in keys if k is not victim)], key=lambda k: k.index)
            hidden = sorted(
                [victim.header(world.manifest.digest()), *ask.question.others[1:]], key=lambda header: header.index
            )
            return msgspec.structs.replace(ask, question=client.DealShares(shown, hidden))
        return ask

    honest = world.answer
    world.answer = lambda ask: honest(swap(ask))
    assert isinstance(world.run(), Unmask)
    assert "not those of this site's neighbours" in world.refusals[5].message


@pytest.mark.parametrize(("degree", "share_threshold"), [(4, 3), (10, 6), (48, 25), (60, 30), (56, 33)])
def test_a_weak_graph_is_refused(degree, share_threshold):
    """A hub that wants few neighbours, some of them its own, gets nobody's keys."""
    world = sparse(100)
    world.open(1)
    weak = msgspec.structs.replace(world.manifest, degree=degree, share_threshold=share_threshold)
    with pytest.raises(UsageError, match=r"2\^-40 is demanded"):
        world.open(2, weak)


@pytest.mark.parametrize("n", [33, 64, 100, 200, 500, 1000])
def test_the_chosen_graph_keeps_its_bounds(n):
    found = graph.choose(n, default_threshold(n))
    assert 0 < found.degree < n - 1 and found.degree % 2 == 0
    assert min(found.secrecy_bits, found.connection_bits) >= graph.SECURITY_BITS
    assert found.completeness_bits >= graph.COMPLETENESS_BITS
    thinner = graph.bounds(n, found.degree - 2, found.share_threshold)
    assert min(thinner.secrecy_bits, thinner.connection_bits) < graph.SECURITY_BITS or (
        thinner.completeness_bits < graph.COMPLETENESS_BITS
    )


def test_the_tails_are_those_of_a_count():
    """The bounds against counting every possible neighbourhood of a small cohort."""
    n, degree, threshold, corrupted = 9, 4, 3, 4
    found = graph.bounds(n, degree, threshold, corrupted / n, 0)
    others = range(n - 1)
    samples = list(itertools.combinations(others, degree))
    unlucky = sum(sum(i < corrupted for i in sample) >= threshold for sample in samples)
    assert found.secrecy_bits == pytest.approx(-np.log2(n * unlucky / len(samples)))


@given(st.integers(4, 60), st.integers(1, 10), st.binary(min_size=32, max_size=32))
def test_the_ring_is_an_undirected_regular_graph(n, half, context):
    ring = graph.order(context, range(1, n + 1))
    near = {i: graph.neighbours(ring, 2 * half, i) for i in ring}
    assert all(i in near[j] for i in near for j in near[i])
    assert {len(found) for found in near.values()} == {min(2 * half, n - 1)}
