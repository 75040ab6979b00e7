"""Nobody starves: whatever stream of other requests keeps the pool full, every request that can be met starts in time."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from unit.pool_world import HOUR, World

from fedpool.leasing.pool import TenantSet
from fedpool.leasing.queue import AGE_S
from fedpool.records import PRIORITIES, Quota, Shape, Tenant

LONGEST_H = 2.0
STEP_S = 1200.0
# It has aged past every class, then all that runs has ended, then what was promised to others of its age has.
IN_TIME_S = len(PRIORITIES) * AGE_S + 3 * LONGEST_H * HOUR


@settings(max_examples=100, deadline=None)
@given(
    seed=some.integers(0, 2**32),
    gpus=some.integers(1, 8),
    priority=some.sampled_from(PRIORITIES),
    wishes=some.sampled_from([{}, {"sites": 2}, {"shape": Shape(same_leaf=True)}, {"gpus_max": 8}]),
    quotas=some.booleans(),
)
def test_every_request_that_can_be_met_starts_in_time(seed, gpus, priority, wishes, quotas):
    chance = random.Random(seed)
    world = World(sites=2, gpus=4)
    if quotas:  # others own everything, and take back what they lend
        for name in ("a", "b", "c"):
            world.put(
                TenantSet(Tenant(name, highest=PRIORITIES[-1], quotas=(Quota("h100", "*", 0 if name == "a" else 4),)))
            )
    shape = wishes.get("shape", Shape())
    gpus = min(gpus, 4) if shape.same_leaf else max(gpus, wishes.get("sites", 1))

    def fill():
        """Others want more than there is, always."""
        while sum(lease.demand.gpus for lease in world.hub.queue.waiting.values()) < 12:
            hours = chance.uniform(0.3, LONGEST_H)
            asked = chance.randint(1, 3)
            world.ask(asked, chance.choice("bc"), hours=hours, priority=chance.choice(PRIORITIES), settle=False)
        world.settle()

    fill()
    asked_at = world.now
    lease = world.ask(gpus, "a", hours=1.0, priority=priority, **wishes)
    while world.state(lease) == "queued":
        assert world.now - asked_at <= IN_TIME_S, f"{gpus} of {priority} starve behind seed {seed}"
        fill()
        world.pass_time(STEP_S)
    assert world.lease(lease).started, "it had its turn, whoever took it back since"


@pytest.mark.parametrize("priority", PRIORITIES[:-1])
def test_a_request_comes_before_later_ones_of_any_class_once_it_is_old_enough(priority):
    world = World(sites=1, gpus=4)
    world.ask(4, "b", hours=60.0)
    old = world.ask(4, "a", priority=priority)
    world.now += len(PRIORITIES) * AGE_S
    young = world.ask(4, "b", priority=PRIORITIES[-2])
    assert world.hub.ahead(world.lease(old), world.now) == 0 and world.hub.ahead(world.lease(young), world.now) == 1
