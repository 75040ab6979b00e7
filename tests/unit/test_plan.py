"""Plans: every error names the file's line, the key, the value and the remedy."""

import pytest

from fedpool.errors import PlanError
from fedpool.federation import plan

GOOD = """\
name = "breast-cancer"
tenant = "oncology"
program = ["{python}", "train.py"]
initial = "initial.safetensors"
rounds = 20
sites = 16
"""


def changed(key, value):
    lines = [line for line in GOOD.splitlines() if not line.startswith(f"{key} =")]
    return "\n".join([*lines, f"{key} = {value}"])


def test_a_plan_is_read_with_its_defaults():
    read = plan.parse(GOOD)
    assert (read.cohort, read.threshold_for(16), read.deadline_s, read.lease_s) == (16, 11, 600, 3600)


def test_sites_may_be_named():
    assert plan.parse(changed("sites", '["a", "b", "c"]')).cohort == 3


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (changed("rouns", "3"), "line 7: unknown key 'rouns'"),
        (changed("rounds", '"many"'), "line 6: rounds: expected `int`, got `str`"),
        (changed("rounds", "0"), "line 6: rounds = 0"),
        (GOOD.replace('tenant = "oncology"\n', ""), "the key 'tenant' is missing"),
        (changed("sites", "1"), "sites = 1"),
        (changed("sites", '["a", "a"]'), "names a site twice"),
        (changed("minimum_cohort", "17"), "line 7: minimum_cohort = 17: it may be 2 to 16"),
        (changed("threshold", "8"), "threshold = 8: with 16 sites it may be 9 to 16"),
        (changed("clip", "-1.0"), "clip = -1.0"),
        (changed("clip", "nan"), "clip = nan"),
        (changed("max_weight", "1000000000000000000"), "must be counted in 63 bits"),
        (GOOD + "levels = 8192\nmax_weight = 60000\n", "need 33 bits; the ring has 32"),
        (changed("ring_bits", "20"), "ring_bits = 20: it may be 16, 24, 32 or 64"),
        (changed("strategy", '"fedsgd"'), "known are fedavg, fedavgm, fedadam"),
        (changed("strategy", '"krum"'), "strategy 'krum' compares the sites' updates"),
        (changed("deadline", '"soon"'), "'soon' is not a duration"),
        (changed("name", '"../../etc"'), "is no name"),
        (changed("program", "[]"), "program is empty"),
        ("name = [", "is not TOML"),
    ],
)
def test_what_is_wrong_is_named(text, says):
    with pytest.raises(PlanError) as refused:
        plan.parse(text, "plan.toml")
    assert says in refused.value.message and refused.value.message.startswith("plan.toml")


def test_a_mistyped_key_gets_a_suggestion():
    with pytest.raises(PlanError) as refused:
        plan.parse(changed("rouns", "3"))
    assert refused.value.hint == "did you mean 'rounds'?"


def test_the_digest_changes_with_the_text():
    assert plan.digest(GOOD) != plan.digest(GOOD + "\n")
