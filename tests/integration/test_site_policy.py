"""A site's policy on a running pool: the site refuses what it forbids; a change is in force at once and stands in its ledger."""

import pytest

pytestmark = pytest.mark.integration

POLICY = """
programs = ["*python* *train.py"]
data_tags = ["mammography"]
minimum_cohort = 4

[tenants.oncology]
gpus = 1
max_duration = "1h"
"""


def ask(pool, *words, status=0):
    return pool.cli("lease", "request", "--site", "site-01", "--for", "30m", *words, status=status)


@pytest.fixture
def strict(make_pool):
    """A pool of four whose first site has a policy."""
    pool = make_pool(4, start=False)
    directory = pool.site_directory("site-01")
    (directory / "policy.toml").write_text(POLICY)
    path = directory / "site.toml"
    path.write_text('policy_file = "policy.toml"\n' + path.read_text())
    pool.start_all(sites_a_process=4)
    return pool


def test_what_a_policy_forbids_and_how_it_changes(strict):
    pool = strict
    path = pool.site_directory("site-01") / "policy.toml"
    refused = ask(pool, "-t", "oncology", "-g", "2", status=5).stderr
    assert "the policy of site-01: tenant oncology would have 2 devices here; 1 are allowed" in refused
    assert (
        "tenant physics may have nothing here; allowed are: oncology"
        in ask(pool, "-t", "physics", "-g", "1", status=5).stderr
    )
    foreseen = ask(pool, "-t", "physics", "-g", "1", "--dry-run", "--explain", status=5).stdout
    assert "site-01: tenant physics may have nothing here" in foreseen
    lease = ask(pool, "-t", "oncology", "-g", "1", "-o", "name").stdout.strip()
    assert "2h for tenant oncology; 1h are allowed" in pool.cli("lease", "renew", lease, "--for", "2h", status=5).stderr
    path.write_text(POLICY.replace("gpus = 1", "gpus = 2"))
    pool.until(lambda: "gpus = 2" in pool.cli("site", "policy", "show", "site-01").stdout)
    ask(pool, "-t", "oncology", "-g", "1")
    path.write_text("tenants = 3")  # cannot be read: the one before stays
    pool.until(lambda: "the policy stays as it was" in pool.log("site-01").read_text())
    assert "gpus = 2" in pool.cli("site", "policy", "show", "site-01").stdout
    said = [row["said"]["text"] for row in pool.json("ledger", "log", "--kind", "policy")["items"]]
    assert said == [POLICY, POLICY.replace("gpus = 1", "gpus = 2")]
    refusals = [row["said"] for row in pool.json("ledger", "log", "--kind", "refusal")["items"]]
    assert {refusal["asked"] for refusal in refusals} == {"hold", "renew"}
    assert any("tenant physics may have nothing here" in refusal["reason"] for refusal in refusals)
    pool.cli("lease", "release", lease)
    assert {row["result"] for row in pool.json("ledger", "verify")["items"]} == {"whole"}


@pytest.mark.waits
def test_nothing_new_is_granted_while_no_majority_vouches_for_the_ledger(make_pool):
    pool = make_pool(4, start=False)
    directory = pool.site_directory("site-01")
    (directory / "policy.toml").write_text('witnessed_within = "2s"')
    path = directory / "site.toml"
    path.write_text('policy_file = "policy.toml"\n' + path.read_text())
    pool.start_all()

    def tried(status):
        done = ask(pool, "-t", "oncology", "-g", "1", "-o", "name", status=None)
        if done.returncode == 0:
            pool.cli("lease", "release", done.stdout.strip())
        return done if done.returncode == status else None

    pool.until(lambda: tried(0))
    for name in ("site-02", "site-03"):  # one of three is left
        pool.stop(name)
    refused = pool.until(lambda: tried(5)).stderr
    assert "no majority of its witnesses has cosigned the ledger of site-01 for" in refused
    assert "ibshell ledger verify shows who has" in refused
    [said, *_] = [row["said"] for row in pool.json("ledger", "log", "--kind", "refusal", "-n", "0")["items"]]
    assert (said["asked"], said["reason"].partition(" for ")[0]) == (
        "hold",
        "no majority of its witnesses has cosigned the ledger of site-01",
    )
    pool.start("site-02")
    pool.until(lambda: tried(0))


def test_programs_data_and_cohorts(strict):
    import json

    pool = strict

    def lost(**plan):
        pool.cli("fed", "run", str(pool.plan(rounds=1, **plan)), "--out", "result")
        [entry] = json.loads((pool.work / "result" / "history.json").read_text())["rounds"]
        return entry["lost"].get("site-01", "")

    assert "the plan does not say what data it is for; allowed here are: mammography" in lost()
    assert "data tagged 'genomes' joins no federation here" in lost(data_tags=["genomes"])
    assert "minimum cohort 3 is under the 4 that site-01 demands" in lost(data_tags=["mammography"])
    assert lost(data_tags=["mammography"], minimum_cohort=4) == ""
    refusals = [row["said"] for row in pool.json("ledger", "log", "--kind", "refusal")["items"]]
    assert {refusal["asked"] for refusal in refusals} == {"task.start", "round.open"}


def test_a_policy_is_tried_before_it_is_in_force(pool, tmp_path):
    path = tmp_path / "policy.toml"
    path.write_text(POLICY)
    assert "can be read" in pool.cli("site", "policy", "check", str(path)).stdout
    good = "tenant=oncology gpus=1 type=h100 for=30m"
    bad = "tenant=oncology gpus=2 for=2h program='sh -c x' data=genomes"
    checked = pool.cli("site", "policy", "check", str(path), "--request", good, "--request", bad, status=5)
    assert "2h for tenant oncology; 1h are allowed" in checked.stdout and "joins no federation" in checked.stdout
    pool.cli("site", "policy", "check", str(path), "--request", good)
    assert "known are tenant=" in pool.cli("site", "policy", "check", str(path), "--request", "who=x", status=2).stderr
    path.write_text("tenants = 3")
    assert "policy.toml, line 1: tenants" in pool.cli("site", "policy", "check", str(path), status=2).stderr
    assert "no policy at" in pool.cli("site", "policy", "check", str(tmp_path / "none"), status=3).stderr
