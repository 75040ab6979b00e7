"""The round protocol: the hub's sum is the plain sum to the bit, whoever drops out when; and nothing else comes out."""

import importlib.util
import os
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpool.errors import IntegrityError, LocalProtocolError, Refused, UsageError
from fedpool.secagg import client, masks
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
        world.sites[1].step(client.DealShares(keys))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"threshold": 2}, "two disjoint groups"),
        ({"minimum_cohort": 9}, "minimum cohort 9 with 4 sites"),
        ({"version": 2}, "is not spoken here"),
        ({"ring_bits": 16}, "16 bits"),
        ({"max_weight": 1 << 30}, "needs"),
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
        event = kind(bytes(32)) if kind is client.VectorSent else kind([])
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
    kept = [
        stream
        for stream in result.removal
        if stream.sign != result.removal[-1].sign or stream is not result.removal[-1]
    ]
    masks.apply(total, kept, 0)
    assert chi_square(total) < 373


@pytest.mark.parametrize(("n", "threshold"), [(2, 2), (3, 3), (9, 7), (16, 11), (200, 134)])
def test_the_usual_threshold_is_more_than_two_thirds(n, threshold):
    assert default_threshold(n) == threshold


@given(st.integers(3, 10), st.integers(0, 2**31))
def test_the_decoded_mean_is_within_its_bound(n, seed):
    rng = np.random.default_rng(seed)
    world = World(n, n // 2 + 1, words=33)
    fixed = world.manifest.parameter_encoding()
    updates = {i: rng.uniform(-1.5, 1.5, 32).astype(np.float32) for i in world.encoded}
    weights = {i: int(rng.integers(1, 101)) for i in world.encoded}
    for i in world.encoded:
        words = np.zeros(33, np.uint32)
        masks.encode(updates[i], None, fixed.clip, fixed.factor(weights[i]), os.urandom(32), 0, words[:32])
        words[32] = weights[i]
        world.encoded[i] = words
    total = world.total(world.run())
    weight = int(total[32])
    assert weight == sum(weights.values())
    mean = np.empty(32, np.float32)
    masks.decode(total[:32], None, fixed.unit() / weight, mean)
    plain = sum(np.clip(updates[i].astype(np.float64), -1, 1) * weights[i] for i in updates) / weight
    assert np.max(np.abs(mean - plain)) <= fixed.mean_error_bound(weight) + 1e-7
