"""Commands against a real pool: what they print, how they exit, what they say when something is wrong."""

import json
import signal
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.integration


def test_listings_in_every_form(pool):
    assert {row["name"] for row in pool.json("site", "list")["items"]} == {f"site-0{i}" for i in range(1, 5)}
    gpus = pool.json("gpu", "list")
    assert len(gpus["items"]) == 8 and len({gpu["uuid"] for gpu in gpus["items"]}) == 8
    assert set(gpus["as_of"]) == {f"site-0{i}" for i in range(1, 5)} and gpus["errors"] == []
    assert len(pool.cli("node", "list", "-o", "name").stdout.splitlines()) == 4
    assert len(pool.cli("gpus", "list", "-o", "ndjson").stdout.splitlines()) == 8, "plurals are accepted"
    assert pool.cli("gpu", "list").stdout.startswith("GPU\tTYPE\t"), "tab-separated in a pipe"
    assert pool.json("gpu", "show", "site-01:gpu01/1")["memory_bytes"] == 80 << 30
    assert pool.json("gpu", "show", gpus["items"][0]["uuid"][:20])["gpu"] == gpus["items"][0]["gpu"]
    assert len(pool.json("node", "show", "site-02:gpu01")["devices"]) == 2
    assert pool.json("site", "show", "site-03")["mode"] == "dial"
    assert pool.json("status")["gpus_free"] == 8
    assert "4/4 sites up" in pool.cli("status").stdout
    assert pool.json("lease", "list")["items"] == [] and pool.json("fed", "list")["items"] == []
    rows = {row["check"]: row for row in pool.json("doctor")["items"]}
    assert rows["pool"]["result"] == "ok"
    assert (
        rows["links"]["found"] == f"{len(pool.site_names())} with keys by mlkem768x25519-sha256, aes128-gcm@openssh.com"
    )


def test_a_lease_from_request_to_release(pool):
    lease = pool.json("lease", "request", "--tenant", "oncology", "--gpus", "6", "--sites", "3", "--for", "1h")
    assert lease["state"] == "active" and lease["gpus"] == 6 and len(lease["parts"]) == 3
    assert {len(part["grants"]) for part in lease["parts"]} == {2}
    held = [gpu for gpu in pool.json("gpu", "list")["items"] if gpu["lease"] == lease["id"]]
    assert len(held) == 6 and {gpu["tenant"] for gpu in held} == {"oncology"} and all(gpu["token"] for gpu in held)
    assert pool.json("lease", "show", lease["id"][:4])["id"] == lease["id"]
    assert "ends in 2h" in pool.cli("lease", "renew", lease["id"], "--for", "2h").stdout
    assert pool.json("lease", "list")["items"][0]["expires_in_s"] > 7000
    assert "is released" in pool.cli("lease", "release", lease["id"]).stdout
    assert pool.json("status")["gpus_free"] == 8
    assert pool.json("lease", "list")["items"] == [] and len(pool.json("lease", "list", "--all")["items"]) == 1


def test_all_or_nothing(pool):
    pool.json("lease", "request", "-t", "a", "-g", "2", "--site", "site-01")
    refused = pool.cli("lease", "request", "-t", "b", "-g", "8", status=5)
    assert "8 GPU asked for; 6 of 8 are free" in refused.stderr
    refused = pool.cli("lease", "request", "-t", "b", "-g", "4", "--site", "site-01", "--site", "site-02", status=5)
    assert "4 GPU asked for; 2 of 4 are free" in refused.stderr
    assert pool.json("status")["gpus_free"] == 6, "nothing stays behind"


def test_a_request_waits_and_says_what_for(pool):
    holder = pool.json("lease", "request", "-t", "a", "-g", "8", "--for", "1h")
    foreseen = pool.cli("lease", "request", "-t", "b", "-g", "4", "--dry-run", "--explain", "-o", "json", status=5)
    assert (
        json.loads(foreseen.stdout)["waits_for"]
        == f"4 GPU asked for; 0 of 8 are free; held by lease {holder['id']} of a: 8"
    )
    assert 3600 < json.loads(foreseen.stdout)["starts_in_s"] < 3700
    over = pool.cli("lease", "request", "-t", "b", "-g", "4", "--wait", "1s", status=5)
    assert "is aborted after waiting 1s: 4 GPU asked for; 0 of 8 are free" in over.stderr
    waiting = pool.background("lease", "request", "-t", "b", "-g", "4", "--wait", "1m", "-o", "json")
    row = pool.until(lambda: next((row for row in pool.rows("lease") if row["state"] == "queued"), None))
    assert row["reason"] == "4 GPU asked for; 0 of 8 are free"
    pool.cli("lease", "release", holder["id"])
    out, err = waiting.communicate(timeout=60)
    assert waiting.returncode == 0 and json.loads(out)["state"] == "active", err
    assert "0 before it: 4 GPU asked for; 0 of 8 are free" in err


def test_tenants_have_quotas_and_unknown_ones_are_refused(pool):
    pool.cli("tenant", "add", "oncology", "--weight", "2")
    assert "did you mean oncology?" in pool.cli("lease", "request", "-t", "oncologie", "-g", "1", status=3).stderr
    pool.cli("tenant", "quota", "oncology", "--gpus", "2", "--limit", "3")
    pool.cli("tenant", "quota", "oncology", "--gpus", "9", "--gpu-type", "h10", status=3)
    pool.json("lease", "request", "-t", "oncology", "-g", "2")
    refused = pool.cli("lease", "request", "-t", "oncology", "-g", "2", status=5)
    assert "tenant oncology holds 2 of at most 3 GPUs at all sites; 2 asked for" in refused.stderr
    assert pool.json("tenant", "list")["items"][0]["gpus_held"] == 2
    assert "has 1 leases" in pool.cli("tenant", "remove", "oncology", status=5).stderr
    pool.cli("tenant", "add", "oncology", status=5)
    pool.cli("lease", "request", "-t", "oncology", "-g", "1", "--priority", "urgent", status=5)


def test_what_is_drained_or_cordoned_is_not_granted(pool):
    pool.cli("site", "drain", "site-01", "--reason", "power work")
    assert pool.json("site", "show", "site-01")["state"] == "drained"
    assert "6 of 8 are free" in pool.cli("lease", "request", "-t", "a", "-g", "8", status=5).stderr
    pool.cli("site", "resume", "site-01")
    pool.cli("node", "cordon", "site-02:gpu01", "--reason", "fan 3")
    assert "6 of 8 are free" in pool.cli("lease", "request", "-t", "a", "-g", "8", status=5).stderr
    assert pool.json("node", "show", "site-02:gpu01")["cordon"] == "fan 3"
    assert {gpu["state"] for gpu in pool.json("node", "show", "site-02:gpu01")["devices"]} == {"cordoned"}
    assert pool.json("site", "show", "site-02")["gpus_free"] == 0 and pool.json("status")["gpus_free"] == 6
    pool.cli("node", "cordon", "site-02:gpu99", status=3)
    pool.cli("node", "cordon", "site-02", status=2)
    pool.cli("node", "uncordon", "site-02:gpu01")
    pool.json("lease", "request", "-t", "a", "-g", "8")


def test_a_lease_is_revoked_resized_and_handed_over(pool):
    lease = pool.json("lease", "request", "-t", "a", "-g", "2..4", "--site", "site-01", "--site", "site-02")
    pool.until(lambda: pool.json("lease", "show", lease["id"])["gpus"] == 4)
    tokens = {part["site"]: max(grant["token"] for grant in part["grants"]) for part in lease["parts"]}
    pool.cli("lease", "accept", lease["id"], "-t", "b", status=5)
    pool.cli("lease", "offer", lease["id"], "--to", "b")
    pool.cli("lease", "accept", lease["id"], "-t", "b")
    handed = pool.json("lease", "show", lease["id"])
    assert handed["tenant"] == "b" and handed["state"] == "active"
    for part in handed["parts"]:
        assert min(grant["token"] for grant in part["grants"]) > tokens[part["site"]], "new tokens at every site"
    pool.cli("lease", "renew", lease["id"], "--for", "2h")
    assert "has 2 devices" in pool.cli("lease", "resize", lease["id"], "-g", "2").stdout
    pool.until(lambda: pool.json("status")["gpus_free"] == 6, 10)  # nothing uses them: they need no grace
    assert {part["gpus"] for part in pool.json("lease", "show", lease["id"])["parts"]} == {1}
    refused = pool.cli("lease", "resize", lease["id"], "-g", "1", status=5)
    assert f"lease {lease['id']} has at least 2 devices; 1 asked for" in refused.stderr
    refused = pool.cli("lease", "resize", lease["id"], "-g", "9", status=5)
    assert "of 9 devices: no more are free where it is" in refused.stderr
    assert "revoked: too hot" in pool.cli("lease", "revoke", lease["id"], "--reason", "too hot").stdout
    pool.until(lambda: pool.json("status")["gpus_free"] == 8)


def test_a_card_that_is_cut_is_leased_by_slice(make_pool):
    pool = make_pool(1, mig=("3g.40gb", "1g.10gb"), mig_gpus=1)
    rows = pool.json("gpu", "list")["items"]
    assert [(row["gpu"], row["type"]) for row in rows] == [
        ("site:gpu01/0", "h100"),
        ("site:gpu01/1.0", "h100/3g.40gb"),
        ("site:gpu01/1.1", "h100/1g.10gb"),
    ]
    lease = pool.json("lease", "request", "-t", "a", "--gpu-type", "h100/1g.10gb")
    assert lease["parts"][0]["grants"][0]["uuid"] == rows[2]["uuid"] and rows[2]["uuid"].startswith("MIG-")
    assert pool.json("gpu", "show", "site:gpu01/1.1")["lease"] == lease["id"]
    assert pool.json("site", "show", "site")["gpus_free"] == 1, "the card that is cut is no longer wholly free"
    assert "0 of 1 are free" in pool.cli("lease", "request", "-t", "b", "--gpu-type", "h100/1g.10gb", status=5).stderr
    pool.json("lease", "request", "-t", "b", "--device", "site:gpu01/1.0")


def test_what_a_hub_has_forgotten_is_an_orphan_to_adopt_or_to_end(make_pool):
    """Case 079: a hub that has lost its database shows what its sites hold; nothing disappears before it is confirmed gone."""
    pool = make_pool(2)
    kept, ended = (pool.json("lease", "request", "-t", "a", "-g", "2", "--sites", "2", "--for", "2h") for _ in range(2))
    pool.stop("hub", signal.SIGKILL)
    for file in (pool.directory / "hub").glob("*.db*"):
        file.unlink()
    pool.start("hub")
    pool.until(pool.all_up)
    assert [row["state"] for row in pool.rows("lease")] == ["orphan (active)"] * 4, "one row a lease and site"
    assert pool.json("status")["gpus_free"] == 0, "and its devices are taken"
    pool.cli("lease", "adopt", "ffff", status=3)
    assert "is active" in pool.cli("lease", "adopt", kept["id"]).stdout
    adopted = pool.json("lease", "show", kept["id"])
    assert adopted["gpus"] == 2 and adopted["tenant"] == "a" and 7000 < adopted["expires_in_s"] < 7300
    assert [part["grants"] for part in adopted["parts"]] == [part["grants"] for part in kept["parts"]], (
        "the same tokens"
    )
    assert "is released" in pool.cli("lease", "release", ended["id"]).stdout
    assert pool.json("status")["gpus_free"] == 2
    pool.cli("lease", "release", kept["id"])
    assert pool.json("status")["gpus_free"] == 4


def test_exact_devices_fractions_and_times(pool):
    first = pool.json("lease", "request", "-t", "a", "--device", "site-01:gpu01/1", "--milli", "250")
    again = pool.json("lease", "request", "-t", "b", "--device", "site-01:gpu01/1", "--milli", "750")
    uuids = {lease["parts"][0]["grants"][0]["uuid"] for lease in (first, again)}
    assert len(uuids) == 1, "two fractions of one card"
    shared = pool.json("gpu", "show", "site-01:gpu01/1")
    assert (shared["used_milli"], shared["state"], shared["tenant"]) == (1000, "active", "a,b")
    assert [(share["lease"], share["milli"]) for share in shared["shares"]] == [(first["id"], 250), (again["id"], 750)]
    pool.cli("lease", "request", "-t", "c", "--device", "site-01:gpu01/1", "--milli", "1", status=5)
    pool.cli("lease", "request", "-t", "c", "--device", "site-09:gpu01/1", status=3)
    assert "is over" in pool.cli("lease", "request", "-t", "c", "-g", "1", "--at", "2020-01-01T00:00Z", status=2).stderr
    pool.cli("lease", "request", "-t", "c", "-g", "1", "--at", "tomorrow", status=2)
    pool.cli("lease", "request", "-t", "c", "-g", "2", "--same-leaf", "--spread", "leaf", status=2)
    pool.cli("lease", "request", "-t", "c", "-g", "1", "--for", "31d", status=5)


def test_an_idempotency_key_returns_the_first_answer(pool):
    words = ("lease", "request", "-t", "a", "-g", "2", "--idempotency-key", "k1")
    assert pool.json(*words)["id"] == pool.json(*words)["id"]
    assert pool.json("status")["gpus_free"] == 6
    at_once = [
        pool.background("lease", "request", "-t", "a", "-g", "2", "--idempotency-key", "k2", "-o", "name")
        for _ in range(4)
    ]
    assert len({process.communicate(timeout=60)[0] for process in at_once}) == 1
    assert pool.json("status")["gpus_free"] == 4, "asked four times at once, done once"
    other = pool.cli("lease", "request", "-t", "a", "-g", "1", "--idempotency-key", "k1", status=5)
    assert "used for another" in other.stderr


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (("site", "show", "site-9"), 3, "did you mean site-0"),
        (("lease", "show", "zzzz"), 3, "no lease zzzz"),
        (("lease", "release", "zzzz"), 3, "no lease zzzz"),
        (("fed", "show", "zzzz"), 3, "no run zzzz"),
        (("lease", "request", "-t", "a", "-g", "1000"), 5, "the pool has 8"),
        (("lease", "request", "-t", "a", "-g", "1", "--site", "atlantis"), 3, "no site 'atlantis'"),
        (("lease", "request", "-t", "a", "-g", "1", "--gpu-type", "h10"), 3, "did you mean h100?"),
        (("lease", "request", "-t", "a", "-g", "1", "--for", "soon"), 2, "is not a duration"),
        (("lease", "request", "-t", "a/b", "-g", "1"), 2, "is no name"),
        (("lease", "request", "-t", "a", "-g", "0"), 2, "a number of at least 1"),
        (("lease", "request", "-t", "a", "-g", "2", "--sites", "3"), 2, "2 GPUs over 3 sites"),
        (("gpu", "list", "-o", "xml"), 2, "no output form 'xml'"),
        (("fed", "run", "missing.toml"), 3, "no plan at missing.toml"),
        (("frobnicate",), 2, "frobnicate"),
    ],
)
def test_what_cannot_be_is_said_with_the_right_status(shared_pool, words, status, says):
    done = shared_pool.cli(*words, status=status)
    assert says in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""


def test_errors_come_as_json_when_asked(shared_pool):
    done = shared_pool.cli("lease", "show", "zzzz", "-o", "json", status=3)
    error = json.loads(done.stderr)["error"]
    assert (error["code"], bool(error["hint"])) == ("not_found", True)


def test_no_pool_is_said(make_pool):
    pool = make_pool(1, start=False)
    done = pool.cli("gpu", "list", status=7)
    assert "no pool 'p0' is running" in done.stderr and "ibshell up" in done.stderr


def test_up_and_down(make_pool):
    pool = make_pool(1, start=False)
    assert "2 sites, 4 GPUs" in pool.cli("up", "--sites", "2").stdout
    assert "is running" in pool.cli("up", status=5).stderr
    assert len(pool.json("gpu", "list")["items"]) == 4
    assert "3 processes ended" in pool.cli("down").stdout
    assert "was running" in pool.cli("down").stderr
    scenario = pool.work / "scenario.toml"
    scenario.write_text('[[site]]\nname = "bank"\nnodes = 2\ngpus_per_node = 4\ngpu_type = "a100"\n')
    assert "1 sites, 8 GPUs" in pool.cli("up", str(scenario)).stdout
    assert {gpu["type"] for gpu in pool.json("gpu", "list")["items"]} == {"a100"}
    pool.cli("down")
    scenario.write_text('[[site]]\nname = "bank"\nnodes = 0\n')
    assert "nodes = 0" in pool.cli("up", str(scenario), status=2).stderr


def test_a_reader_that_goes_is_no_error(shared_pool):
    for _ in range(5):
        done = subprocess.run(
            f"{sys.executable} -u -m ibshell gpu list | head -1",
            shell=True,
            capture_output=True,
            text=True,
            env=shared_pool.environment,
        )
        assert done.stdout.startswith("GPU") and done.stderr == ""


@pytest.mark.parametrize(
    "words", [("gpu", "list"), ("site", "show", "nowhere"), ("--help",), ("lease", "--help"), ("nonsense",)]
)
def test_no_escape_goes_into_a_pipe(shared_pool, words):
    done = subprocess.run([sys.executable, "-m", "ibshell", *words], capture_output=True, env=shared_pool.environment)
    assert b"\x1b" not in done.stdout + done.stderr


def test_a_missing_site_is_shown_not_hidden(make_pool):
    pool = make_pool(4)
    pool.stop("site-04")
    pool.until(lambda: "site-04" not in pool.sites_up())
    done = pool.cli("gpu", "list")
    assert "missing: site-04" in done.stderr and done.stdout.count("unknown") == 2
    assert [error["site"] for error in pool.json("gpu", "list")["errors"]] == ["site-04"]
    pool.cli("gpu", "list", "--strict", status=6)
    assert pool.cli("doctor", status=9).stdout.count("fault") >= 1


def test_a_listing_is_watched(pool):
    """Changes as they come, one a line; Ctrl-C ends it."""
    watching = pool.background("lease", "list", "--watch", "-o", "ndjson")
    try:
        time.sleep(1)
        lease = pool.json("lease", "request", "-t", "a", "-g", "1")
        seen = [json.loads(watching.stdout.readline())]
        while seen[-1]["state"] != "active":
            seen.append(json.loads(watching.stdout.readline()))
        pool.cli("lease", "release", lease["id"])
        while seen[-1]["state"] != "gone":
            seen.append(json.loads(watching.stdout.readline()))
        assert {row["id"] for row in seen} == {lease["id"]}
        watching.send_signal(signal.SIGINT)
        _, err = watching.communicate(timeout=20)
        assert watching.returncode == 130 and "Traceback" not in err
    finally:
        watching.kill()
        watching.communicate()
    assert "--watch with -o csv" in pool.cli("lease", "list", "--watch", "-o", "csv", status=2).stderr
