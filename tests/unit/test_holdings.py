"""Who held how many devices when, from records; compared with a count of every moment, and with the limits that were signed."""

import json
from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpool.leasing.holdings import CHANGE_S, CLOCKS_S, Holdings, HoldingsState, over_limits
from fedpool.ledger.records import DevicesSaid, Granted, LeaseDevices, LeaseSaid, OfKind, Requested

MINUTE = 60_000
LONG = round(4000 * CLOCKS_S)
START = round(2000 * CHANGE_S)


def limited(limit, time=0, name="a", kind="*", site="*", method="tenant.set"):
    body = {"name": name, "quotas": [{"kind": kind, "site": site, "gpus": 0, "limit": limit}]}
    payload = {
        "format": 1,
        "pool": "p",
        "method": method,
        "principal": "operator",
        "sites": [],
        "time_ms": time,
        "nonce": "00",
        "body": body if method == "tenant.set" else {"name": name},
    }
    return Requested(time=time, payload=json.dumps(payload, sort_keys=True, separators=(",", ":")), signature="")


class Site:
    """Records of one site, with what it has."""

    def __init__(self, devices=("g0", "g1", "g2", "g3"), kind="h100", state=None):
        self.holdings = Holdings(state)
        self.number = -1
        self.take(DevicesSaid(kinds=(OfKind(kind, tuple(devices)),)))

    def take(self, record):
        self.number += 1
        self.holdings.take(self.number, record)

    def lease(self, time, name, devices, state="active", tenant="a", **more):
        grants = None if devices is None else (Granted(tuple(devices), 1),)
        self.take(LeaseSaid(time=time, lease=name, tenant=tenant, event="x", state=state, grants=grants, **more))


def found(**sites):
    return [(one.site, one.record) for one in over_limits({name: site.holdings for name, site in sites.items()})]


def test_a_site_alone_is_compared_exactly():
    north = Site()
    north.take(limited(2))
    north.lease(START, "one", ["g0"], "held")
    north.lease(START + 1, "one", None)
    north.lease(START + 2, "two", ["g1"])
    assert found(north=north) == []
    north.lease(START + 3, "three", ["g2"], "held")
    north.lease(START + 4, "three", None, "aborted")
    assert found(north=north) == [("north", 5)]
    [finding] = over_limits({"north": north.holdings})
    assert finding.problem == "tenant a holds 3 of at most 2 GPUs at all sites: a quota that an operator has signed"


def test_what_was_given_back_counts_no_longer_even_in_the_same_millisecond():
    north = Site()
    north.take(limited(2))
    north.lease(START, "one", ["g0", "g1"])
    north.lease(START + 9, "one", None, "ending")
    north.lease(START + 9, "two", ["g2", "g3"])
    north.lease(START + 9, "one", None, "released")
    assert found(north=north) == []


def test_what_is_to_be_given_back_counts_no_longer():
    north = Site()
    north.take(limited(2))
    north.lease(START, "one", ["g0", "g1"])
    north.lease(START + 5, "one", None, leaving=("g1",))
    north.lease(START + 6, "two", ["g2"])
    assert found(north=north) == []
    north.lease(START + 7, "one", ["g0"], leaving=())
    assert found(north=north) == []
    north.lease(START + 8, "two", ["g2", "g3"])
    assert found(north=north) == [("north", 6)]


def test_several_sites_are_compared_as_far_as_clocks_agree():
    def pool(gap):
        north, south = Site(), Site()
        for site in (north, south):
            site.take(limited(2))
        north.lease(START, "one", ["g0", "g1"])
        north.lease(START + LONG, "one", None, "released")
        south.lease(START + LONG - gap, "two", ["g0"])
        return found(north=north, south=south)

    assert pool(0) == []
    assert pool(round(1000 * CLOCKS_S)) == [], "the one site's clock may be ahead"
    assert pool(round(2000 * CLOCKS_S) + 1) == [("south", 2)]


def test_a_gang_over_its_limit_is_found_while_it_lives():
    north, south = Site(), Site()
    for site in (north, south):
        site.take(limited(3))
    north.lease(START, "gang", ["g0", "g1"])
    south.lease(START + 5, "gang", ["g0", "g1"])
    assert found(north=north, south=south) == [("south", 2)]


@pytest.mark.parametrize(
    ("line", "faults"),
    [
        ({"kind": "h100"}, 1),
        ({"kind": "a100"}, 0),
        ({"site": "north"}, 1),
        ({"site": "south"}, 0),
        ({"name": "b"}, 0),
        ({"limit": None}, 0),
    ],
)
def test_only_what_a_line_speaks_of_counts(line, faults):
    north = Site()
    north.take(limited(**{"limit": 1, **line}))
    north.lease(START, "one", ["g0", "g1"])
    assert len(found(north=north)) == faults


def test_a_limit_counts_from_when_it_was_signed_and_a_change_needs_time_to_arrive():
    after = round(1000 * CHANGE_S)

    def faults(lowered, granted):
        north = Site()
        north.take(limited(2, 0))
        north.take(limited(1, lowered))
        north.lease(granted, "one", ["g0", "g1"])
        return len(found(north=north))

    assert faults(START, START - MINUTE) == 0
    assert faults(START, START + after - 1) == 0
    assert faults(START, START + after + 1) == 1
    north = Site()
    north.lease(START, "one", ["g0", "g1"])
    north.take(limited(1, START + 2 * after))
    assert found(north=north) == [], "it had none before"
    north.take(limited(0, START + 4 * after, method="tenant.remove"))
    north.lease(START + 8 * after, "two", ["g2"])
    assert found(north=north) == [], "nor any more"


def test_a_lease_that_changes_hands_counts_for_who_has_it():
    north = Site()
    north.take(limited(1))
    north.lease(START, "one", ["g0", "g1"], tenant="b")
    north.lease(START + 1, "one", None, tenant="b", next_tenant="a")
    assert found(north=north) == []
    north.lease(START + 2, "one", None, tenant="a")
    assert found(north=north) == [("north", 4)]


def test_devices_of_several_records_count_together():
    north = Site([f"g{n}" for n in range(6)])
    north.take(limited(5))
    north.lease(START, "one", ["g0", "g1", "g2"], more=1)
    assert found(north=north) == []
    north.take(LeaseDevices(time=START, lease="one", grants=(Granted(("g3", "g4", "g5"), 1),)))
    assert found(north=north) == [("north", 2)]


def test_what_was_compared_is_not_compared_again():
    north = Site()
    north.take(limited(1))
    north.lease(START, "one", ["g0"])
    north.lease(START + 1, "two", ["g1"])
    kept = msgspec.json.decode(msgspec.json.encode(north.holdings.state()), type=HoldingsState)
    again = Site(state=kept)
    assert found(north=again) == []
    again.lease(START + 2, "three", ["g2"])
    assert found(north=again) == [("north", 1)], "with what came before"


steps = st.lists(
    st.tuples(st.sampled_from("xyz"), st.sampled_from(["a", "b"]), st.integers(0, 4), st.booleans()), max_size=20
)


@given(steps, st.integers(0, 6), st.integers(0, 20))
def test_faults_are_those_of_a_count_of_every_moment(steps, limit, cut):
    """One site: the plain reference counts anew after each record."""
    state, faults, expected = None, [], []
    holds, tenants = {}, {}
    site = Site([f"g{n}" for n in range(12)])
    site.take(limited(limit))
    for number, (lease, tenant, count, over) in enumerate(steps):
        if number == cut:  # what was compared is kept, and it goes on
            faults += found(north=site)
            state = msgspec.json.decode(msgspec.json.encode(site.holdings.state()), type=HoldingsState)
            site.holdings = Holdings(state)
        tenant = tenants.get(lease, tenant)
        before = Counter(tenants[name] for name in holds for _ in range(holds[name]))["a"]
        if over:
            holds.pop(lease, None)
            tenants.pop(lease, None)
            site.lease(START + number, lease, None, "released", tenant)
            continue
        holds[lease], tenants[lease] = count, tenant
        site.lease(START + number, lease, [f"g{n}" for n in range(count)], "active", tenant)
        after = Counter(tenants[name] for name in holds for _ in range(holds[name]))["a"]
        if after > limit and after > before:
            expected.append(("north", site.number))
    assert sorted([*faults, *found(north=site)]) == sorted(expected)
