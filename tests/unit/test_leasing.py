"""Leases: the table whole, the site's machine, cases of restarts. Nothing is given twice, nothing is left half-done."""

import itertools

import msgspec
import pytest

from fedpool.errors import Insufficient, NotFound, Recovering, Refused, StaleToken, UsageError
from fedpool.leasing import lease as life
from fedpool.leasing.grants import REMEMBER_S, EndProcesses, SiteGrants, SiteLimits, WarnProcesses
from fedpool.leasing.requests import (
    Abort,
    Commit,
    Cordon,
    Hold,
    Notify,
    Obey,
    ProcessesGone,
    Release,
    Renew,
    Resize,
    Tick,
    Transfer,
    Uncordon,
)
from fedpool.records import EPOCH_JUMP, Gpu, Inventory, Node, Shape
from fedpool.sim.scenario import SimulatedSite
from fedpool.step import Instant

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
    again.apply(again.restarted(Instant(4, "boot"), Instant(3, "boot")))
    assert again.epoch == machine.epoch + EPOCH_JUMP and again.leases == machine.leases


def test_after_a_reboot_what_was_left_of_a_lease_is_left():
    machine = site()
    put(machine, Hold("a", "onc", 1, 10, 1), 1000)
    put(machine, Commit("a", 100, 1), 1000)
    left = machine.leases["a"].deadline - 1010
    machine.apply(machine.restarted(Instant(5, "new boot"), Instant(1010, "old boot")))
    assert machine.leases["a"].deadline - 5 == pytest.approx(left)


def test_a_reboot_that_renumbers_cards_changes_nothing():
    """Case 085: identity is the UUID; nothing is granted until the state is read back."""
    one, two = (Gpu(f"GPU-..0{n}", n - 1, "h100", 80 << 30, 0) for n in (1, 2))
    before = SiteGrants("zurich", Inventory((Node("n", "leaf", (one, two)),), "simulated"))
    before.recovering = False
    entries = [*put(before, Hold("L1", "onc", 1, 10, 1)).entries, *put(before, Commit("L1", 60, 1)).entries]
    assert before.leases["L1"].grants[0].uuid == "GPU-..01"
    turned = tuple(msgspec.structs.replace(gpu, index=1 - gpu.index) for gpu in (two, one))
    after = SiteGrants("zurich", Inventory((Node("n", "leaf", turned),), "simulated"))
    for entry in entries:
        after.apply(entry)
    with pytest.raises(Recovering):
        after.step(Hold("L2", "onc", 1, 10, 1), 1)
    after.recovering = False
    assert put(after, Hold("L2", "onc", 1, 10, 1)).replies[0].grants[0].uuid == "GPU-..02"
    assert put(after, Hold("L1", "onc", 1, 10, 1)).replies[0].grants[0].uuid == "GPU-..01"
    with pytest.raises(Insufficient):
        after.step(Hold("L3", "onc", 1, 10, 1), 1)


def test_a_snapshot_folds_to_the_same_state():
    machine = site()
    put(machine, Hold("a", "onc", 3, 10, 1))
    put(machine, Commit("a", 60, 1), 1)
    put(machine, Cordon("gpu01", "fan", 2), 2)
    again = site()
    again.apply(machine.state())
    assert again.state() == machine.state() and again.used == machine.used
    assert put(again, Tick(), 70).effects == put(machine, Tick(), 70).effects != []


def test_what_is_cordoned_is_not_granted_and_what_runs_there_goes_on():
    machine = site()
    put(machine, Hold("a", "onc", 2, 10, 1))
    put(machine, Commit("a", 60, 1))
    put(machine, Cordon("gpu01", "fan 3", 1))
    with pytest.raises(Insufficient, match=r"needs 3 GPUs of one type at zurich; 2 of 4 are free"):
        machine.step(Hold("b", "onc", 3, 10, 1), 0)
    put(machine, Renew("a", 60, 1), 1)
    put(machine, Cordon("", "power work", 1))
    with pytest.raises(Refused, match="zurich grants nothing now: power work"):
        machine.step(Hold("b", "onc", 1, 10, 1), 0)
    put(machine, Uncordon("", 1))
    put(machine, Uncordon("gpu01", 1))
    put(machine, Hold("b", "onc", 2, 10, 1))
    with pytest.raises(NotFound, match="no node or device 'gpu99'"):
        machine.step(Cordon("gpu99", "x", 1), 0)


def test_a_lease_with_notice_ends_after_its_grace_and_cannot_be_renewed():
    machine = site()
    put(machine, Hold("a", "onc", 2, 10, 1))
    put(machine, Commit("a", 600, 1))
    [warning] = put(machine, Notify("a", 30, "lease b needs it", 1), 10).effects
    assert warning == WarnProcesses("a", "lease b needs it", 30)
    with pytest.raises(Refused, match="about to end: lease b needs it"):
        machine.step(Renew("a", 600, 1), 20)
    assert put(machine, Tick(), 40).effects == [EndProcesses("a")]
    assert put(machine, ProcessesGone("a"), 41).replies[0].state == "revoked"


def test_a_lease_grows_at_once_and_shrinks_after_a_grace():
    machine = site()
    put(machine, Hold("a", "onc", 1, 10, 1))
    put(machine, Commit("a", 600, 1))
    first = machine.leases["a"].version
    [grown] = put(machine, Resize("a", 3, 0, 1, first), 1).replies
    assert len(grown.grants) == 3 and grown.token == 2
    with pytest.raises(StaleToken, match="as it was at version"):
        machine.step(Resize("a", 3, 0, 1, first), 1)
    [shrinking] = put(machine, Resize("a", 1, 30, 1, grown.version), 2).replies
    assert len(shrinking.leaving) == 2 and len(machine.free()) == 1, "they are taken until the grace is over"
    [effect] = put(machine, Tick(), 32).effects
    assert effect == EndProcesses("a", shrinking.leaving)
    put(machine, ProcessesGone("a", shrinking.leaving), 33)
    assert len(machine.leases["a"].grants) == 1 and len(machine.free()) == 3


def test_a_resize_that_cannot_be_is_over_all_the_same():
    """Two resizes are on their way and the first is late: once the second has had its answer, the first is no longer obeyed."""
    machine = site()
    for lease, gpus in (("a", 1), ("b", 3)):
        put(machine, Hold(lease, "onc", gpus, 10, 1))
        put(machine, Commit(lease, 600, 1))
    late = Resize("a", 2, 0, 1, machine.leases["a"].version)
    [answer] = put(machine, late, 1).replies
    assert len(answer.grants) == 1 and answer.version > late.version, "nothing is free"
    put(machine, Release("b", 1), 2)
    put(machine, ProcessesGone("b"), 3)
    with pytest.raises(StaleToken):
        machine.step(late, 4)
    assert len(machine.leases["a"].grants) == 1


def test_nothing_is_added_to_what_is_ending():
    """Case 079: a lease that is on its way to its end takes no more devices, no new time and no new holder."""
    machine = site()
    put(machine, Hold("a", "onc", 1, 10, 1))
    put(machine, Commit("a", 600, 1))
    [ending] = put(machine, Release("a", 1), 1).replies
    for event in (Resize("a", 2, 0, 1, ending.version), Renew("a", 600, 1), Transfer("a", "radiology", 1)):
        with pytest.raises(Refused, match="it cannot"):
            machine.step(event, 2)
    assert len(machine.free()) == 3, "it is not free before it is confirmed"


def test_a_hub_that_has_connected_leaves_its_predecessor_nothing():
    machine = site()
    put(machine, Obey(2))
    assert not machine.step(Obey(2), 1).entries, "once is enough"
    for event in (Hold("a", "onc", 1, 10, 1), Cordon("", "mine", 1), Obey(1)):
        with pytest.raises(StaleToken, match="an older hub"):
            machine.step(event, 1)
    again = SiteGrants(machine.site, machine.inventory)
    again.apply(machine.state())
    assert again.term == 2, "and it is not forgotten"


def test_a_lease_changes_hands_when_the_old_holders_processes_are_gone():
    machine = site()
    put(machine, Hold("a", "onc", 2, 10, 1))
    put(machine, Commit("a", 600, 1))
    old = machine.leases["a"].token
    assert put(machine, Transfer("a", "radiology", 1)).effects == (EndProcesses("a"),)
    with pytest.raises(Refused, match="on its way to radiology"):
        machine.require("a", old)
    put(machine, ProcessesGone("a"), 1)
    assert machine.leases["a"].tenant == "radiology"
    with pytest.raises(StaleToken):
        machine.require("a", old)
    machine.require("a", machine.leases["a"].token)


def test_a_later_attempt_replaces_an_earlier_one_and_an_earlier_one_is_refused():
    machine = site()
    put(machine, Hold("a", "onc", 4, 10, 1, attempt=1))
    [second] = put(machine, Hold("a", "onc", 3, 10, 1, attempt=2)).replies
    assert len(second.grants) == 3 and len(machine.free()) == 1
    for late in (Hold("a", "onc", 4, 10, 1, attempt=1), Commit("a", 60, 1, attempt=1)):
        with pytest.raises(StaleToken):
            machine.step(late, 1)
    assert put(machine, Abort("a", 1, attempt=1), 1).replies[0].state == "held", "a late abort changes nothing"


def test_a_duration_over_the_sites_policy_is_refused():
    machine = SiteGrants("zurich", SimulatedSite("zurich").inventory(), SiteLimits(3600.0))
    machine.recovering = False
    with pytest.raises(Refused, match="2h at zurich, whose policy allows 1h"):
        machine.step(Hold("a", "onc", 1, 10, 1, duration_s=7200.0), 0)


def test_what_is_long_over_is_forgotten_and_nothing_grows():
    machine = site()
    for number in range(50):
        put(machine, Hold(f"{number}", "onc", 1, 10, 1), number)
        put(machine, Abort(f"{number}", 1), number)
    for later in (0, 2):
        put(machine, Tick(), 50 + REMEMBER_S + later)
    assert not machine.leases and not machine._due


def test_no_more_than_so_many_leases_that_are_over_are_remembered(monkeypatch):
    monkeypatch.setattr("fedpool.leasing.grants.REMEMBER_MAX", 10)
    machine = site()
    put(machine, Hold("kept", "onc", 1, 10, 1))
    put(machine, Commit("kept", 600, 1))
    for number in range(50):
        put(machine, Hold(f"{number}", "onc", 1, 10, 1), 1)
        put(machine, Abort(f"{number}", 1), 1)
        put(machine, Tick(), 1)
        assert len(machine.leases) <= 13
    assert {"kept", "49", "40"} <= machine.leases.keys() and "30" not in machine.leases, "the latest are remembered"
