"""The hub's side of leasing, against the sites' real machines in one thread: gangs, quotas, order, backfill, preemption."""

import itertools
import random

import pytest
from unit.pool_world import HOUR, World

from fedpool.errors import Forbidden, IbshellError, NotFound, Refused, StaleToken, Unreachable, UsageError
from fedpool.leasing.gang import EndAsked, PartFailed, Renewed, Reported, ResizeAsked, surely_over
from fedpool.leasing.grants import SiteLimits
from fedpool.leasing.kept import RequestKept
from fedpool.leasing.pool import ForLease, PlanWanted, Pool, PoolRestarted, TenantSet
from fedpool.leasing.requests import Cordon, Hold, Renew, Tick, Uncordon
from fedpool.placement.spread import resized
from fedpool.records import Quota, Shape, Signed, Tenant


def test_a_gang_is_active_at_all_its_sites_or_at_none():
    world = World()
    lease = world.ask(10)
    assert world.state(lease) == "active" and world.held() == 10
    world.end(lease)
    assert world.state(lease) == "released" and world.held() == 0


def test_two_gangs_for_everything_get_it_one_after_the_other():
    """Case 082: exactly one of two runs with 100 of 100, the other holds nothing."""
    world = World(sites=4, gpus=25)
    first, second = world.ask(100, settle=False), world.ask(100, settle=False)
    world.settle()
    assert sorted([world.state(first), world.state(second)]) == ["active", "queued"]
    assert world.held() == 100
    waiting = first if world.state(first) == "queued" else second
    holder = second if waiting == first else first
    why = f"100 GPU asked for; 0 of 100 are free; held by lease {holder} of a: 100"
    assert world.hub.why(world.lease(waiting), world.now, who=True) == why
    world.end(holder)
    assert world.state(waiting) == "active"


def test_master_and_worker_are_admitted_together_or_not_at_all():
    """Case 082: 8 + 8 with 8 free is not admitted, nothing is held."""
    world = World(sites=2, gpus=4)
    with pytest.raises(IbshellError, match="16 GPU asked for; the pool has 8"):
        world.ask(16)
    assert world.held() == 0


@pytest.mark.parametrize("block", range(10))
def test_no_interleaving_leaves_two_partial_holders(block):
    """Case 082: random deliveries with lost messages over three sites; what is held never exceeds what there is."""
    for seed in range(block * 100, block * 100 + 100):
        rng = random.Random(seed)
        world = World(sites=3, gpus=2, rng=rng)
        world.lost = rng.choice([0.0, 0.1, 0.3])
        leases = [world.ask(6, settle=False) for _ in range(2)]
        for _ in range(60):
            if world.asks:
                world.deliver()
            elif world.hub.queue.is_dirty:
                world.put(PlanWanted())
            assert world.held() <= 6
        world.lost = 0.0
        world.pass_time(120)
        states = [world.state(lease) for lease in leases]
        assert states.count("active") <= 1, (seed, states)
        assert world.held() in (0, 6), f"seed {seed}: {world.held()} devices stay behind, {states}"


def test_a_restart_folds_to_the_same_state():
    world = World()
    world.put(TenantSet(Tenant("a", quotas=(Quota("*", "*", 4, 12),))))
    kept, ended = world.ask(5), world.ask(2)
    world.end(ended)
    world.ask(12)
    again = Pool(world.sites)
    for entry in world.entries:
        again.apply(entry)
    assert {key: gang.lease for key, gang in again.gangs.items()} == {k: g.lease for k, g in world.hub.gangs.items()}
    assert again.tenants.held == world.hub.tenants.held and again.tenants.uses() == world.hub.tenants.uses()
    assert again.running.keys() == {kept} and again.queue.waiting.keys() == world.hub.queue.waiting.keys()


def test_quota_and_placement_are_one_decision():
    """Two requests of one batch never count the same quota."""
    world = World()
    world.put(TenantSet(Tenant("a", quotas=(Quota("h100", "*", 4, 5),))))
    leases = [world.ask(3, settle=False) for _ in range(2)]
    world.settle()
    assert sorted(world.state(lease) for lease in leases) == ["active", "queued"]
    waiting = next(lease for lease in leases if world.state(lease) == "queued")
    assert "holds 3 of at most 5 h100 at all sites; 3 asked for" in world.hub.why(world.lease(waiting), world.now)


def test_who_has_used_least_for_its_weight_comes_first():
    world = World(sites=1, gpus=4)
    for tenant in "ab":
        world.put(TenantSet(Tenant(tenant)))
    held = world.ask(4, "a")
    world.pass_time(1800)
    mine, theirs = world.ask(4, "a"), world.ask(4, "b")
    world.end(held)
    assert (world.state(theirs), world.state(mine)) == ("active", "queued"), "a has had its turn"


def test_backfill_does_not_delay_the_first():
    world = World(sites=1, gpus=4)
    world.ask(2, hours=2)
    first = world.ask(4)
    promised = world.hub.expected_start(world.lease(first), world.now)
    assert 2 * HOUR < promised < 2.1 * HOUR
    too_long, fits = world.ask(2, hours=3), world.ask(2, hours=1)
    assert (world.state(first), world.state(too_long), world.state(fits)) == ("queued", "queued", "active")
    assert world.hub.expected_start(world.lease(first), world.now) == pytest.approx(promised)
    world.pass_time(2.2 * HOUR)
    assert world.state(first) == "active"


def test_what_is_drained_is_named_and_promised_to_nobody():
    """A lease that ends at a drained site frees nothing, so nobody is told that it will start then, and backfill is not held up."""
    world = World(sites=2)
    runs = world.ask(3, shape=Shape(kinds=("h100",)), site_names=("s0",))
    world.at_site("s0", Cordon("", "new cooling", 1))
    world.describe("s0")
    waits = world.ask(6)
    why = f"6 GPU asked for; 4 of 8 are free; 4 drained or cordoned (s0: 4); held by lease {runs} of a: 3"
    assert world.hub.why(world.lease(waits), world.now, who=True) == why
    assert world.hub.expected_start(world.lease(waits), world.now) is None
    assert world.state(world.ask(4, hours=9)) == "active", "nothing is kept for what cannot start"
    world.at_site("s0", Uncordon("", 1))
    world.describe("s0")
    assert HOUR < world.hub.expected_start(world.lease(waits), world.now) < 10 * HOUR


def test_an_advance_reservation_has_its_devices_at_its_time():
    world = World(sites=1, gpus=4)
    booked = world.ask(4, not_before=world.now + 4 * HOUR)
    assert world.state(booked) == "queued"
    long, short = world.ask(1, hours=5), world.ask(4, hours=2)
    assert (world.state(long), world.state(short)) == ("queued", "active")
    assert world.hub.queue.timeline.blocks(world.lease(short), world.now + 6 * HOUR) == booked
    world.pass_time(4.1 * HOUR)
    assert world.state(booked) == "active"


def test_the_owner_takes_back_what_others_borrow_and_the_borrower_is_told():
    world = World(sites=1, gpus=4)
    world.put(TenantSet(Tenant("owner", quotas=(Quota("h100", "*", 4),))))
    world.put(TenantSet(Tenant("guest")))
    borrowed = world.ask(4, "guest")
    mine = world.ask(3, "owner")
    assert "takes back the h100 that belong to it" in world.lease(borrowed).notice
    assert world.state(borrowed) == "active", "it has a grace"
    world.pass_time(120)
    assert (world.state(borrowed), world.state(mine)) == ("revoked", "active")


def test_a_guest_takes_nothing_back():
    world = World(sites=1, gpus=4)
    world.put(TenantSet(Tenant("owner", quotas=(Quota("h100", "*", 4),))))
    world.put(TenantSet(Tenant("guest")))
    mine = world.ask(4, "owner")
    world.ask(1, "guest")
    assert not world.lease(mine).notice


def test_an_elastic_gang_grows_and_shrinks_while_it_is_active():
    world = World(sites=2, gpus=4)
    elastic = world.ask(2, gpus_max=8, sites=2)
    assert world.lease(elastic).gpus == 8
    other = world.ask(3, "b")
    world.pass_time(120)
    assert world.state(other) == "active" and world.state(elastic) == "active"
    assert 2 <= world.lease(elastic).gpus <= 5
    world.end(other)
    assert world.lease(elastic).gpus == 8, "what nobody waits for comes back"


def test_what_a_lease_may_still_get_counts_until_its_site_has_said_what_became_of_it():
    """A growth is lost on its way and asked for again; the first comes late. Neither the quota nor the lease has both."""
    world = World(sites=1, gpus=4)
    world.put(TenantSet(Tenant("a", quotas=(Quota("*", "*", 0, 4),))))
    world.put(TenantSet(Tenant("b")))
    other = world.ask(2, "b")
    elastic = world.ask(2, gpus_max=3)
    world.put(ForLease(other, EndAsked("released")))
    world.deliver()
    world.put(PlanWanted())
    [late] = world.asks
    world.asks.clear()
    world.put(ForLease(elastic, PartFailed("s0", late.what, Unreachable("lost"))))
    assert world.hub.tenants.holds("a", "*", "*") == 3, "it may have it"
    world.describe("s0")
    assert world.hub.tenants.holds("a", "*", "*") == 3, "the site has not had it yet, and may have it later"
    world.put(PlanWanted())
    assert [ask.what for ask in world.asks] == [late.what], "asked for again, not for more"
    waits = world.ask(2, settle=False)
    world.put(PlanWanted())
    assert "holds 3 of at most 4" in world.hub.why(world.lease(waits), world.now)
    world.settle()
    assert world.lease(elastic).gpus == 3 and world.hub.tenants.holds("a", "*", "*") == 3
    with pytest.raises(StaleToken):
        world.at_site("s0", late.what)


def test_the_holder_stops_first_and_the_hub_gives_up_last():
    """The holder counts from when it asked, the site from when it answered and a guard more; what the hub calls over is over."""
    world = World(sites=1)
    lease = world.ask(2, hours=1.0)
    asked_at = world.now
    world.now += 20.0  # on its way
    renewed = world.at_site("s0", Renew(lease, 2 * HOUR, 1))
    world.now += 20.0  # and back
    world.put(ForLease(lease, Reported("s0", renewed)))
    world.put(ForLease(lease, Renewed(2 * HOUR, asked_at)))
    holder, site, hub = world.lease(lease).deadline, renewed.deadline, surely_over(world.lease(lease))
    assert holder == asked_at + 2 * HOUR
    assert holder + 0.01 * 2 * HOUR < site < hub
    world.hub.site_lost("s0")
    world.now = site + 1.0
    world.at_site("s0", Tick())
    assert world.sites["s0"].leases[lease].state == "expired" and world.now < hub, "over before anybody assumes so"


def test_nobody_waits_for_ever():
    """A stream of small requests that would always fit never keeps a large one from its turn."""
    world = World(sites=1, gpus=4)
    world.ask(1, hours=0.5)
    large = world.ask(4)
    for _ in range(40):
        world.ask(1, "b", hours=0.5)
        world.pass_time(600)
        if world.state(large) == "active":
            return
    raise AssertionError("the large request starves")


def test_a_wait_has_an_end():
    world = World(sites=1, gpus=2)
    world.ask(2)
    waiting = world.ask(2, wait=300.0)
    world.pass_time(400)
    assert world.state(waiting) == "aborted" and "0 of 2 are free" in world.lease(waiting).reason


def test_a_silent_site_has_nothing_free_and_keeps_what_it_had():
    """Case 079: unreachable is not free; the lease stays listed and counted until the site speaks."""
    world = World(sites=2, gpus=2)
    lease = world.ask(2, site_names=("s0",))
    world.hub.site_lost("s0")
    world.put(ForLease(lease, EndAsked("released")))
    assert world.hub.tenants.holds("a") == 2 and world.state(lease) == "ending"
    with pytest.raises(Unreachable):
        world.ask(1, site_names=("s0",), wait=0.0)
    world.describe("s0")
    world.settle()
    assert world.state(lease) == "released" and world.hub.tenants.holds("a") == 0


@pytest.mark.parametrize(
    ("error", "says", "wishes"),
    [
        (UsageError, "under one leaf and on different leaves", {"shape": Shape(same_leaf=True, spread="leaf")}),
        (UsageError, "a leaf switch belongs to one site", {"shape": Shape(same_leaf=True), "sites": 2}),
        (UsageError, "4..2 GPUs", {"gpus_max": 2}),
        (UsageError, "4 GPUs over 5 sites", {"sites": 5}),
        (UsageError, "1001 thousandths", {"shape": Shape(milli=1001)}),
        (UsageError, "no priority 'hihg'", {"priority": "hihg"}),
        (UsageError, "4 GPUs and 1 devices by name", {"shape": Shape(devices=("x",))}),
        (UsageError, "a start", {"not_before": 1.0}),
        (NotFound, "no site 's9'", {"site_names": ("s9",)}),
        (NotFound, "no site has a 'h1000' GPU", {"shape": Shape(kinds=("h1000",))}),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(error, says, wishes):
    with pytest.raises(error, match=says) as refused:
        World().ask(4, **wishes)
    assert refused.value.hint


def test_a_tenant_that_holds_leases_is_not_removed():
    from fedpool.leasing.pool import TenantDropped

    world = World()
    world.put(TenantSet(Tenant("a")))
    lease = world.ask(1)
    with pytest.raises(Refused, match=lease):
        world.put(TenantDropped("a"))
    with pytest.raises(NotFound) as refused:
        world.ask(1, "aa")
    assert refused.value.hint == "did you mean a?"


def test_what_is_long_over_is_forgotten(monkeypatch):
    """Nothing grows with time: neither at the hub nor at a site."""
    from fedpool.leasing import pool

    monkeypatch.setattr(pool, "REMEMBER_MAX", 20)
    world = World(sites=1)
    for _ in range(60):
        world.end(world.ask(1))
    assert len(world.hub.gangs) <= 24 and len(world.hub.queue.waiting) == 0
    again = Pool(world.sites)
    for entry in world.entries:
        again.apply(entry)
    assert again.gangs.keys() == world.hub.gangs.keys()


def test_who_gives_up_waiting_lets_the_others_go():
    """What was promised to a request is free for those behind it as soon as that request is withdrawn."""
    world = World(sites=1, gpus=4)
    world.ask(3, hours=1.0)
    first = world.ask(4)
    behind = world.ask(1, hours=5.0)
    assert world.state(behind) == "queued", "it would delay the first"
    world.put(ForLease(first, EndAsked("released")))
    world.settle()
    assert world.state(behind) == "active"


def test_a_lease_that_was_made_smaller_stays_so_and_one_made_larger_grows_when_it_can():
    world = World(sites=2, gpus=4)
    elastic = world.ask(2, gpus_max=6, sites=2)
    assert world.lease(elastic).gpus == 6

    def resize(gpus):
        share = world.hub.share(world.lease(elastic), gpus)
        world.put(ForLease(elastic, ResizeAsked(share, 60.0, most=gpus)))
        world.settle()

    resize(3)
    world.pass_time(300)
    assert world.lease(elastic).gpus == 3 and world.held() == 3, "nobody gives it back what it did not want"
    other = world.ask(4, "b")
    resize(7)
    assert world.lease(elastic).gpus == 4
    world.end(other)
    assert world.lease(elastic).gpus == 7


@pytest.mark.parametrize(
    ("have", "gpus", "free", "least", "expected"),
    [
        ({"a": 2, "b": 1}, 3, {"a": 9, "b": 9}, 1, {"a": 2, "b": 1}),
        ({"a": 2, "b": 1}, 4, {"a": 9, "b": 0}, 1, {"a": 3, "b": 1}),
        ({"a": 2, "b": 1}, 6, {"a": 9, "b": 9}, 1, {"a": 3, "b": 3}),
        ({"a": 5, "b": 1}, 3, {}, 1, {"a": 2, "b": 1}),
        ({"a": 2, "b": 2}, 1, {}, 1, {"a": 1, "b": 1}),
        ({"a": 2, "b": 2}, 9, {"a": 1}, 1, {"a": 3, "b": 2}),
    ],
)
def test_a_gang_is_resized_with_as_little_change_as_possible(have, gpus, free, least, expected):
    assert resized(have, gpus, free, least) == expected


def test_what_a_site_will_not_have_waits_with_its_reason_and_not_for_ever():
    """Nothing is in the way but the site's own policy: that is said, it is tried ever more seldom, and given up in time."""
    world = World(sites=1)
    world.sites["s0"].limits = SiteLimits(max_duration_s=HOUR)
    patient, other = world.ask(2, hours=2.0), world.ask(2, hours=2.0, wait=90.0)
    says = "2h at s0, whose policy allows 1h"
    assert world.hub.why(world.lease(patient), world.now) == says
    waits = []
    for _ in range(20):
        world.now = min(world.hub.queue.due())
        world.hub.queue.mark()
        world.put(PlanWanted())
        while world.asks:
            ask = world.asks.pop()
            with pytest.raises(Refused) as refused:
                world.at_site("s0", ask.what)
            failed = world.hub.step(ForLease(ask.lease, PartFailed("s0", ask.what, refused.value)), world.now)
            for entry in failed.entries:
                world.hub.apply(entry)
            if ask.lease == patient:
                waits.append(failed.wake_at - world.now)
    assert waits == sorted(waits) and waits[-1] == 30.0
    assert world.state(other) == "aborted" and world.lease(other).reason == says
    assert world.state(patient) == "queued" and world.held() == 0


def test_a_gang_that_one_site_refuses_is_not_held_at_the_others_and_given_up_all_the_time():
    """Found by the simulation: what the others gave back was a change, and it was tried again with every change."""
    world = World(sites=3)
    obeys, tries = world.at_site, []

    def at_site(name, event):
        if name == "s1" and isinstance(event, Hold):
            tries.append(world.now)
            raise Forbidden("the policy of s1 says no")
        return obeys(name, event)

    world.at_site = at_site
    gang = world.ask(12)
    for _ in range(900):
        world.now += 0.1
        world.hub.queue.mark()
        world.settle()
    assert world.state(gang) == "queued" and world.held() == 0
    gaps = [later - before for before, later in itertools.pairwise(tries)]
    assert len(tries) == 9 and gaps == sorted(gaps) and gaps[0] < 1 and gaps[-1] > 20
    small = world.ask(4, "b", site_names=("s0",))
    assert world.state(small) == "active", "it is in nobody's way meanwhile"
    world.at_site = obeys
    world.end(small)
    assert world.state(gang) == "queued"
    world.describe("s1")  # its policy has changed
    world.settle()
    assert world.state(gang) == "active"


def test_a_lease_that_a_site_has_seen_end_is_not_placed_again():
    """The hub's disk has lost what became of it."""
    world = World(sites=1)
    lease = world.ask(2)
    kept = world.entries[:1]
    world.end(lease)
    forgetful = Pool(world.sites)
    forgetful.term = 2
    for entry in kept:
        forgetful.apply(entry)
    world.hub = forgetful
    world.describe("s0")
    world.settle()
    assert (
        world.state(lease) == "aborted" and "is released at s0: it cannot be placed again" in world.lease(lease).reason
    )


def test_a_reboot_of_the_hub_s_machine_shifts_times_and_nothing_else():
    """What was signed stays: sites would obey nothing more about leases that live."""
    world = World(sites=1)
    signed, quotas = Signed(b"what an operator signed", b""), (Quota("*", "*", 1, 4),)
    world.put(TenantSet(Tenant("a", quotas=quotas), signed))
    lease = world.ask(2)
    world.hub.apply(RequestKept(lease, "grant", Signed(b"what a was asked for", b"")))
    before = world.hub.state()
    world.hub.apply(PoolRestarted(-900.0))
    after = world.hub.state()
    assert (after.requests, after.signed, after.tenants) == (before.requests, {"a": signed}, before.tenants)
    assert after.leases[0].deadline == before.leases[0].deadline - 900.0
