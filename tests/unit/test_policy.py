"""A site's policy: what it forbids is said with the limit, what is wrong with it with the line."""

import math
from datetime import UTC, datetime

import pytest

from fedpool.errors import Forbidden, UsageError
from fedpool.leasing.policy import parse, require

TEXT = """
max_duration = "7d"
types = ["h100", "a100"]
programs = ["{python} train.py*", "/opt/*"]
data_tags = ["mammography"]

[tenants.oncology]
gpus = 8
types = ["h100"]
max_duration = "1d"

[tenants.night]
hours = ["mon-fri 18:00-08:00", "sat-sun 00:00-24:00"]

[tenants."*"]
gpus = 1
"""
POLICY = parse(TEXT, "policy.toml")
WEDNESDAY = datetime(2026, 12, 2, 12, 0, tzinfo=UTC).timestamp()
HOUR = 3600.0


def lease(tenant="oncology", gpus=4, kinds=("h100",), duration_s=HOUR, unix=WEDNESDAY, policy=POLICY):
    return list(policy.lease_problems(tenant, gpus, kinds, duration_s, unix))


def test_what_is_allowed():
    assert lease() == []
    assert lease("physics", 1, ("a100",)) == []
    assert lease(policy=parse("", "p"), tenant="anybody", gpus=1000) == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"gpus": 9}, "would have 9 devices here; 8 are allowed"),
        ({"kinds": ("a100",)}, "a100 is not leased to tenant oncology; allowed are: h100"),
        ({"kinds": ("b200",)}, "b200 is not leased here; allowed are: h100, a100"),
        ({"duration_s": 25 * HOUR}, "1d 1h for tenant oncology; 1d are allowed"),
        ({"tenant": "physics", "gpus": 2}, "tenant physics would have 2 devices here; 1 are allowed"),
        ({"tenant": "physics", "gpus": 1, "duration_s": 8 * 24 * HOUR}, "8d for tenant physics; 7d are allowed"),
        ({"tenant": "night"}, "it is wed 12:00 (UTC); tenant night may begin: mon-fri 18:00-08:00; sat-sun"),
    ],
)
def test_what_is_forbidden(changes, says):
    assert any(says in problem for problem in lease(**changes)), lease(**changes)


@pytest.mark.parametrize(
    ("day", "hour", "minute", "ok"),
    [
        (2, 17, 59, False),
        (2, 18, 0, True),
        (3, 7, 59, True),
        (3, 8, 0, False),
        (5, 12, 0, True),  # Saturday
        (7, 7, 0, False),  # Monday morning: Sunday's hours end at midnight
        (8, 7, 0, True),
    ],
)
def test_hours_go_on_after_midnight(day, hour, minute, ok):
    unix = datetime(2026, 12, day, hour, minute, tzinfo=UTC).timestamp()
    assert (lease("night", unix=unix) == []) == ok


def test_hours_are_those_of_the_time_zone():
    policy = parse('timezone = "Asia/Tokyo"\n[tenants.a]\nhours = ["09:00-17:00"]\n', "p")
    noon = datetime(2026, 12, 2, 3, 0, tzinfo=UTC).timestamp()
    assert lease("a", unix=noon, policy=policy) == []
    assert "it is thu 00:00 (Asia/Tokyo)" in lease("a", unix=noon + 12 * HOUR, policy=policy)[0]


def test_only_those_who_are_named():
    policy = parse("[tenants.a]\n", "p")
    assert lease("b", policy=policy) == ["tenant b may have nothing here; allowed are: a"]
    with pytest.raises(Forbidden, match="the policy of north: tenant b may have nothing here"):
        require("north", policy.lease_problems("b", 1, (), 1.0, WEDNESDAY))


def test_programs_and_data():
    assert list(POLICY.program_problems(["{python}", "train.py", "--x"], ["mammography"])) == []
    [program, data] = POLICY.program_problems(["/bin/sh", "-c", "x"], ["genomes"])
    assert "may not run here" in program and "'genomes' joins no federation here" in data
    assert "does not say what data" in next(POLICY.program_problems(["/opt/x"], []))
    assert list(parse("", "p").program_problems(["x"], [])) == []


def test_a_pool_of_four_waits_ten_minutes_for_its_witnesses():
    assert [parse("", "p").unwitnessed_s(sites) for sites in (1, 3, 4, 1000)] == [math.inf, math.inf, 600.0, 600.0]
    assert parse('witnessed_within = "2m"', "p").unwitnessed_s(3) == 120.0
    assert parse('witnessed_within = "never"', "p").unwitnessed_s(100) == math.inf


def test_isolation_that_is_not_there_is_not_pretended():
    assert "no control of the fabric" in lease(policy=parse("fabric_isolation = true", "p"))[0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max_duratoin = 3", "line 1: unknown key 'max_duratoin'"),
        ('max_duration = "soon"', "line 1: max_duration ="),
        ('timezone = "Mars/Olympus"', "line 1: no time zone 'Mars/Olympus'"),
        ('[tenants.a]\nhours = ["mon 25:00-26:00"]', "line 2: hours 'mon 25:00-26:00' for a"),
        ('[tenants.a]\nhours = ["moon 05:00-06:00"]', "hours 'moon 05:00-06:00' for a"),
        ("[tenants.a]\ngpus = -1", "line 2: gpus = -1 for a"),
        ('[tenants."a b"]', "'a b' is no name"),
        ("= 3", "is not TOML"),
        ("#" * 40000, "the limit is 24576"),
        ("minimum_cohort = -3", "minimum_cohort = -3"),
        ('witnessed_within = "soon"', "line 1: witnessed_within ="),
    ],
)
def test_what_is_wrong_with_a_policy_is_said_with_its_line(text, says):
    with pytest.raises(UsageError) as found:
        parse(text, "policy.toml")
    assert says in found.value.message
