"""Promises named after what users of other schedulers report; each names the reports it answers.

The hub's and the sites' real machines, in one thread. The same on real processes and wires: `tests/integration`, and with every
fault at once: `tests/simulation`.
"""

import itertools

import pytest
from unit.pool_world import HOUR, World

from fedpool.errors import Recovering
from fedpool.leasing.gang import EndAsked
from fedpool.leasing.grants import SiteGrants
from fedpool.leasing.pool import ForLease, PlanWanted, Pool, TenantSet
from fedpool.leasing.requests import Hold, ProcessesGone
from fedpool.records import Quota, Shape, Tenant
from fedpool.sim.scenario import SimulatedSite


def grants(world, lease_id):
    return {name: site.leases[lease_id].grants for name, site in world.sites.items() if lease_id in site.leases}


@pytest.mark.parametrize("silent_s", [4.0, 60.0, 900.0, 0.9 * HOUR])
def test_link_loss_never_kills_a_healthy_lease(silent_s):
    """skypilot#10157 (a status fetch failed for 60 s, the job was cancelled and begun again), kueue#10428, dstack#2346, #2531."""
    world = World(sites=2)
    lease = world.ask(8, sites=2)
    before = grants(world, lease)
    world.hub.site_lost("s0")
    waits = world.ask(4, "b", site_names=("s0",))
    world.pass_time(silent_s)
    assert world.state(lease) == "active" and grants(world, lease) == before, "it runs on, with its devices and tokens"
    assert world.state(waits) == "queued" and world.hub.tenants.holds("a", "*", "*") == 8, "and nobody else gets them"
    world.describe("s0")
    world.settle()
    assert world.state(lease) == "active" and grants(world, lease) == before


def test_reconnecting_is_idempotent():
    """dstack#2998 (an instance that came back was of no use any more), kueue PR 12999 (a reconnected watch evicted workloads)."""
    world = World(sites=2)
    lease = world.ask(6, sites=2)
    before, entries = grants(world, lease), len(world.entries)
    for name in ("s0", "s1", "s0", "s0", "s1"):
        world.hub.site_lost(name)
        world.describe(name)
        world.settle()
    assert grants(world, lease) == before and len(world.entries) == entries, "nothing is decided, nothing is written"
    assert world.state(world.ask(2)) == "active", "and what is free can be had"


def test_an_unschedulable_request_says_why_and_is_looked_at_again_only_on_a_relevant_change():
    """KAI#1217 (a gang unschedulable on an idle rack until the scheduler restarts), volcano#5551 (retried in every session)."""
    world = World(sites=1)
    world.sites["cold"] = SiteGrants("cold", SimulatedSite("cold", gpus_per_node=4, gpu_type="a100").inventory())
    world.sites["cold"].recovering = False
    world.describe("cold")
    world.settle()
    holder, other = world.ask(3, shape=Shape(kinds=("h100",))), world.ask(2, shape=Shape(kinds=("a100",)))
    gang = world.ask(4, shape=Shape(kinds=("h100",)))
    assert world.hub.why(world.lease(gang), world.now, who=True) == (
        f"4 h100 asked for; 1 of 4 are free; held by lease {holder} of a: 3"
    )
    assert not world.hub.queue.is_dirty and not world.asks, "nothing changes, nothing is tried"
    world.put(ForLease(other, EndAsked("released")))
    while world.asks:
        world.deliver()
    plan = world.hub.queue.plan(world.now)
    assert plan.evaluated == 0 and gang in plan.unplaced, "an a100 came free: that is nothing to it"
    world.end(holder)
    assert world.state(gang) == "active", "an h100 came free"


def test_quota_and_placement_are_one_transaction():
    """kueue#4329 (quota admits a sum that no node can hold), KAI#848 (bound to a full node, tried again for ever)."""
    world = World(sites=2, gpus=4)
    world.put(TenantSet(Tenant("a", quotas=(Quota("h100", "*", 0, 5),))))
    world.put(TenantSet(Tenant("b")))
    world.ask(3, "b", site_names=("s0",))
    world.ask(3, "b", site_names=("s1",))
    leaf = world.ask(2, shape=Shape(same_leaf=True))
    assert world.state(leaf) == "queued" and world.hub.tenants.holds("a", "*", "*") == 0, "two free, but not together"
    assert world.held() == 6, "and no quota or device is taken for what cannot run"
    first, second = world.ask(1, settle=False), world.ask(1, settle=False)
    world.settle()
    assert {world.state(first), world.state(second)} == {"active"}
    assert world.hub.tenants.holds("a", "*", "*") == 2


def test_nothing_is_scheduled_before_state_is_read_back():
    """volcano#5819 (scheduling before the caches are there), k8s-device-plugin#135 (one card to two after a restart)."""
    world = World(sites=1)
    lease = world.ask(3)
    site, hub = world.sites["s0"], world.hub
    again = SiteGrants("s0", site.inventory)
    with pytest.raises(Recovering):
        again.step(Hold("ffffffff", "b", 1, 10, 1), world.now)
    again.apply(site.state())
    assert len(again.free()) == 1, "what was given is still given"
    restarted = Pool(world.sites)
    for entry in world.entries:
        restarted.apply(entry)
    assert not restarted.step(PlanWanted(), world.now).effects and not restarted.capacity.sites["s0"].up
    assert restarted.gangs[lease].lease == hub.gangs[lease].lease
    assert int(restarted.capacity.free.sum()) == 0, "nothing is free at a site that has not said what it has"


def test_release_is_exact():
    """ray#19131 (minus one CPU, a leaked group), kueue#8602 (quota held for ever): after any order of ends all is as before."""
    for order in itertools.permutations(range(3)):
        world = World(sites=2)
        leases = [world.ask(2, sites=2), world.ask(1, shape=Shape(milli=300)), world.ask(3, "b")]
        for number in order:
            world.put(ForLease(leases[number], EndAsked("released")))
            world.put(ForLease(leases[number], EndAsked("released")))
            world.settle()
            for name, site in world.sites.items():
                for lease in list(site.leases.values()):
                    world.at_site(name, ProcessesGone(lease.id))
        assert world.held() == 0 and not any(world.hub.tenants.held.values())
        assert all(not any(site.used.values()) for site in world.sites.values())
        assert int(world.hub.capacity.free.sum()) == 8
