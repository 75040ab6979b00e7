"""Leases: the table whole, the site's machine, the gang machine. Nothing is given twice, nothing is left half-done."""

import itertools

import pytest

from fedpool.errors import Insufficient, NotFound, Recovering, Refused, StaleToken, UsageError
from fedpool.leasing import lease as life
from fedpool.leasing.grants import EPOCH_JUMP, EndProcesses, SiteGrants
from fedpool.leasing.requests import Abort, Commit, Hold, ProcessesGone, Release, Renew, Tick
from fedpool.records import Shape
from fedpool.sim.scenario import SimulatedSite

EVENTS = sorted({event for _, event in life.TRANSITIONS})


@pytest.mark.parametrize(("state", "event"), list(itertools.product((*life.LIVE, *life.FINAL), EVENTS)))
def test_the_table_is_whole(state, event):
    after = life.after(state, event)
    if state in life.FINAL:
        assert after is None, "what is over stays over"
    elif after is not None:
        assert after in (*life.LIVE, *life.FINAL)
        assert after == state or life.progress(after) > life.progress(state), "a lease never goes back"


def site(gpus=4, recovering=False):
    machine = SiteGrants("zurich", SimulatedSite("zurich", nodes=2, gpus_per_node=gpus // 2).inventory())
    machine.recovering = recovering
    return machine


def put(machine, event, now=0.0):
    decision = machine.step(event, now)
    for entry in decision.entries:
        machine.apply(entry)
    machine.check()
    return decision


def test_a_hold_then_a_commit_then_a_release():
    machine = site()
    [held] = put(machine, Hold("a", "onc", 3, 10, 1)).replies
    assert (held.state, len(held.grants), {g.token for g in held.grants}) == ("held", 3, {1})
    assert put(machine, Commit("a", 60, 1), 1).replies[0].state == "active"
    decision = put(machine, Release("a", 1), 2)
    assert decision.effects == (EndProcesses("a"),) and decision.replies[0].state == "ending"
    assert len(machine.free()) == 1, "an ending lease still has its devices"
    assert put(machine, ProcessesGone("a"), 3).replies[0].state == "released"
    assert len(machine.free()) == 4


def test_too_many_devices_are_refused_with_the_numbers():
    machine = site()
    put(machine, Hold("a", "onc", 3, 10, 1))
    with pytest.raises(Insufficient, match="needs 2 h100 at zurich; 1 of 4 are free"):
        machine.step(Hold("b", "onc", 2, 10, 1, Shape(kinds=("h100",))), 0)
    with pytest.raises(Insufficient):
        machine.step(Hold("b", "onc", 1, 10, 1, Shape(kinds=("a100",))), 0)


def test_the_same_request_again_gets_the_first_answer():
    machine = site()
    first = put(machine, Hold("a", "onc", 2, 10, 1)).replies
    again = put(machine, Hold("a", "onc", 2, 10, 1))
    assert again.replies == first and not again.entries
    put(machine, Commit("a", 60, 1))
    assert not put(machine, Commit("a", 60, 1)).entries


def test_a_hold_lapses_and_cannot_be_committed():
    machine = site()
    put(machine, Hold("a", "onc", 4, 10, 1))
    with pytest.raises(Refused, match="has lapsed"):
        machine.step(Commit("a", 60, 1), 10)
    put(machine, Tick(), 10)
    assert machine.leases["a"].state == "aborted" and len(machine.free()) == 4
    with pytest.raises(Refused, match=r"aborted \(hold lapsed\)"):
        machine.step(Commit("a", 60, 1), 11)


def test_an_active_lease_expires_after_its_guard_and_frees_only_when_its_processes_are_gone():
    machine = site()
    put(machine, Hold("a", "onc", 4, 10, 1))
    put(machine, Commit("a", 100, 1), 0)
    assert put(machine, Tick(), 105.9).wake_at == pytest.approx(106)
    decision = put(machine, Tick(), 106)
    assert decision.effects == [EndProcesses("a")] and not machine.free()
    put(machine, ProcessesGone("a"), 107)
    assert machine.leases["a"].state == "expired" and len(machine.free()) == 4


def test_renewal_counts_from_now():
    machine = site()
    put(machine, Hold("a", "onc", 1, 10, 1))
    put(machine, Commit("a", 10, 1), 0)
    put(machine, Renew("a", 100, 1), 5)
    assert machine.leases["a"].deadline == pytest.approx(5 + 101 + 5)
    with pytest.raises(UsageError):
        machine.step(Renew("a", -1, 1), 6)


def test_an_older_hub_is_fenced():
    machine = site()
    put(machine, Hold("a", "onc", 1, 10, 7))
    with pytest.raises(StaleToken, match="term 6 at zurich, which has already obeyed term 7"):
        machine.step(Hold("b", "onc", 1, 10, 6), 0)


def test_a_stale_token_is_refused():
    machine = site()
    put(machine, Hold("a", "onc", 1, 10, 1))
    put(machine, Commit("a", 10, 1))
    token = machine.leases["a"].grants[0].token
    machine.require("a", token)
    with pytest.raises(StaleToken):
        machine.require("a", token - 1)
    with pytest.raises(NotFound):
        machine.require("b", token)


def test_nothing_is_granted_while_recovering():
    with pytest.raises(Recovering):
        site(recovering=True).step(Hold("a", "onc", 1, 10, 1), 0)


def test_a_restart_replays_to_the_same_state_and_jumps_the_epoch():
    machine, entries = site(), []
    for event, now in (
        (Hold("a", "onc", 2, 10, 1), 0),
        (Commit("a", 50, 1), 1),
        (Hold("b", "x", 1, 10, 1), 2),
        (Abort("b", 1), 3),
    ):
        entries += put(machine, event, now).entries
    again = site()
    for entry in entries:
        again.apply(entry)
    assert again.leases == machine.leases and again.epoch == machine.epoch
    again.apply(again.restarted(4, 3, "boot", "boot"))
    assert again.epoch == machine.epoch + EPOCH_JUMP and again.leases == machine.leases


def test_after_a_reboot_what_was_left_of_a_lease_is_left():
    machine = site()
    put(machine, Hold("a", "onc", 1, 10, 1), 1000)
    put(machine, Commit("a", 100, 1), 1000)
    left = machine.leases["a"].deadline - 1010
    machine.apply(machine.restarted(5, 1010, "new boot", "old boot"))
    assert machine.leases["a"].deadline - 5 == pytest.approx(left)
