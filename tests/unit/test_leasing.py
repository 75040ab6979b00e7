"""Leases: the table whole, the site's machine, the gang machine. Nothing is given twice, nothing is left half-done."""

import itertools

import msgspec
import pytest

from fedpool.errors import Insufficient, NotFound, Recovering, Refused, StaleToken, UsageError
from fedpool.leasing import lease as life
from fedpool.leasing.gang import (
    Ask,
    EndAsked,
    Gang,
    Interrupted,
    PartCommitted,
    PartEnded,
    PartHeld,
    PartRefused,
    site_says,
)
from fedpool.leasing.grants import (
    EPOCH_JUMP,
    Abort,
    Commit,
    EndProcesses,
    Hold,
    ProcessesGone,
    Release,
    Renew,
    SiteGrants,
    Tick,
)
from fedpool.records import Grant, Lease, Part
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
        machine.step(Hold("b", "onc", 2, 10, 1, "h100"), 0)
    with pytest.raises(Insufficient):
        machine.step(Hold("b", "onc", 1, 10, 1, "a100"), 0)


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


def gang(sites=("a", "b", "c")):
    return Gang(Lease("7f3a", "onc", "requested", tuple(Part(s, 2) for s in sites), 60, "now"))


def go(machine, event, now=0.0):
    decision = machine.step(event, now)
    for entry in decision.entries:
        machine.apply(entry)
    return decision


GRANTS = (Grant("GPU-1", 1), Grant("GPU-2", 1))


def test_a_gang_is_active_only_when_every_site_has_committed():
    machine = gang()
    assert [ask.verb for ask in machine.start().effects] == ["hold"] * 3
    for name in "ab":
        assert not go(machine, PartHeld(name, GRANTS)).effects
    assert [ask.verb for ask in go(machine, PartHeld("c", GRANTS)).effects] == ["commit"] * 3
    for name in "ab":
        assert not go(machine, PartCommitted(name)).replies
        assert machine.lease.state == "held"
    [said] = go(machine, PartCommitted("c")).replies
    assert said.state == "active"


def test_one_refusal_aborts_all_and_a_late_hold_is_given_up():
    machine = gang()
    go(machine, PartHeld("a", GRANTS))
    decision = go(machine, PartRefused("b", "9 of 16 are free"))
    assert machine.lease.state == "aborted" and machine.lease.reason == "9 of 16 are free"
    assert {(ask.site, ask.verb) for ask in decision.effects} == {("a", "abort"), ("c", "abort")}
    assert go(machine, PartHeld("c", GRANTS)).effects == (Ask("c", "abort"),)


def test_a_hold_that_lapsed_before_its_commit_releases_the_others():
    machine = gang()
    for name in "abc":
        go(machine, PartHeld(name, GRANTS))
    go(machine, PartCommitted("a"))
    decision = go(machine, PartRefused("b", "hold lapsed"))
    assert machine.lease.state == "ending"
    assert {(ask.site, ask.verb) for ask in decision.effects} == {("a", "release"), ("c", "release")}
    go(machine, PartEnded("a", "x"))
    assert go(machine, PartCommitted("c")).effects == (Ask("c", "release"),)
    go(machine, PartEnded("c", "x"))
    assert machine.lease.state == "failed"


def test_what_was_not_decided_is_aborted_after_a_restart_and_what_was_is_carried_on():
    undecided = gang()
    assert {ask.verb for ask in go(undecided, Interrupted()).effects} == {"abort"}
    assert undecided.lease.state == "aborted"
    decided = gang()
    for name in "abc":
        go(decided, PartHeld(name, GRANTS))
    assert {ask.verb for ask in Gang(decided.lease).step(Interrupted(), 0).effects} == {"commit"}


def test_release_waits_for_every_site():
    machine = gang()
    for name in "abc":
        go(machine, PartHeld(name, GRANTS))
    for name in "abc":
        go(machine, PartCommitted(name))
    go(machine, EndAsked("released"))
    for name in "ab":
        go(machine, PartEnded(name, "released"))
        assert machine.lease.state == "ending"
    go(machine, PartEnded("c", "released"))
    assert machine.lease.state == "released"
    with pytest.raises(Refused):
        machine.step(EndAsked("released"), 0)


def test_a_site_that_expired_ends_the_gang():
    machine = gang()
    for name in "abc":
        go(machine, PartHeld(name, GRANTS))
    for name in "abc":
        go(machine, PartCommitted(name))
    assert {ask.site for ask in go(machine, PartEnded("b", "expired")).effects} == {"a", "c"}


def test_what_a_site_says_after_a_reconnection_is_settled():
    machine = gang()
    for name in "abc":
        go(machine, PartHeld(name, GRANTS))
    held = machine.lease
    from fedpool.records import SiteLease

    at_site = SiteLease("7f3a", "onc", "held", GRANTS, 10)
    assert site_says(held, "a", at_site) == Ask("a", "commit")
    assert site_says(held, "a", msgspec.structs.replace(at_site, state="active")) == PartCommitted("a")
    assert isinstance(site_says(held, "a", None), PartEnded)
    assert isinstance(
        site_says(held, "a", msgspec.structs.replace(at_site, state="aborted", reason="hold lapsed")), PartEnded
    )
    over = msgspec.structs.replace(held, state="aborted")
    assert site_says(over, "a", at_site) == Ask("a", "abort")
    assert site_says(over, "a", msgspec.structs.replace(at_site, state="active")) == Ask("a", "release")
    assert site_says(over, "a", None) is None
