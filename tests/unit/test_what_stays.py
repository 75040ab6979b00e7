"""What a hub remembers has bounds: however many leases have come and gone, it is no larger."""

import pickle

from unit.pool_world import World

from fedpool.leasing import pool
from fedpool.placement import capacity
from fedpool.records import Grant, SiteLease


def test_a_hub_does_not_grow_with_the_leases_that_are_over(monkeypatch):
    monkeypatch.setattr(capacity, "ENDS_MAX", 50)
    monkeypatch.setattr(pool, "REMEMBER_MAX", 20)
    monkeypatch.setattr(pool, "REMEMBER_PARTS_MAX", 40)
    world, sizes = World(), []
    for number in range(600):
        world.end(world.ask(4, sites=2))
        world.now += 1
        world.entries.clear()
        if number % 100 == 99:
            sizes.append(len(pickle.dumps(world.hub)))
    assert sizes[-1] < 1.02 * sizes[1], sizes


def picture():
    """A site that has said that lease a has one device."""
    site = capacity.Capacity().add("zurich")
    site.describe(World().sites["s0"].inventory, [lease(1)], {}, epoch=1, known={})
    assert site.leases.keys() == {"a"}
    return site


def lease(version, state="active", name="a"):
    return SiteLease(name, "t", state, (Grant("GPU-1", 1),), 9.0, version=version)


def describe(site, leases, known, epoch=1):
    site.describe(site.inventory, leases, {}, epoch, known)


def test_a_lease_the_site_was_asked_about_and_does_not_describe_is_gone():
    site = picture()
    describe(site, [], {"a": 1})
    assert not site.leases


def test_what_has_come_since_the_site_was_asked_stays():
    site = picture()
    site.note(lease(2))
    site.note(lease(1, name="b"))
    describe(site, [lease(1)], {"a": 1})
    assert {key: found.version for key, found in site.leases.items()} == {"a": 2, "b": 1}


def test_what_has_ended_since_the_site_was_asked_does_not_come_back():
    site = picture()
    site.note(lease(3, "released"))
    describe(site, [lease(2)], {"a": 1})
    assert not site.leases and site.is_stale(lease(2)) and not site.is_stale(lease(4))


def test_a_site_that_has_restarted_is_believed_anew():
    site = picture()
    site.note(lease(5))
    describe(site, [lease(2)], {"a": 5}, epoch=1 + capacity.EPOCH_JUMP)
    assert site.leases["a"].version == 2
