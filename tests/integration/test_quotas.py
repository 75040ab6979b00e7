"""Quotas about which nobody has to believe the hub: an operator signs them, sites hold them where they see, verifiers see all."""

import json
import secrets
import time

import pytest

from fedpool.errors import Forbidden, NotAuthorised
from fedpool.identity import certificates, requests
from fedpool.leasing.requests import Commit, Hold
from fedpool.records import Quota, Shape, SiteLease, Tenant
from fedpool.transport.identity import Identity
from fedpool.wire.membership import TenantsGiven
from fedpool.wire.messages import LeaseWanted, Nothing
from ibshell import contexts

pytestmark = pytest.mark.integration
SHAPE = Shape(kinds=("h100",))


class Hostile:
    """Somebody who has a certificate as tenant and as operator, and the place of the hub at two sites."""

    def __init__(self, pool):
        self.pool = pool
        self.identity = contexts.load(pool.client).pool
        self.key = Identity.create(pool.work / "somebody" / "identity")
        self.authority = Identity.load(pool.authority / "identity")

    def sign(self, method, body, role, age_s=0):
        now = int(time.time())
        valid = (now - 3600, now + 3600)
        own = certificates.issue(
            self.authority.signing, certificates.USER, self.key.public, (role,), "somebody", 7, valid
        )
        time_ms = time.time_ns() // 1_000_000 - 1000 * age_s
        payload = requests.compose(self.identity, method, body, role, (), time_ms, secrets.token_hex(8))
        return requests.sign(self.key.signing, own, payload)

    def limit(self, gpus, role="operator", age_s=0):
        quotas = (Quota("*", "*", 0, gpus),)
        return self.sign("tenant.set", Tenant("oncology", quotas=quotas), role, age_s)

    def lease(self, lease, *sites):
        wanted = LeaseWanted("oncology", len(sites), 600.0, id=lease)
        signed = self.sign("lease.request", wanted, "tenant/oncology")
        for version, site in enumerate(sites, 1):
            with self.pool.bridge(site) as hub:
                hub.call("lease.hold", Hold(lease, "oncology", 1, 10.0, 1, SHAPE, 600.0, version, signed), SiteLease)
                hub.call("lease.commit", Commit(lease, 600.0, 1), SiteLease)


@pytest.fixture
def hostile(make_pool):
    pool = make_pool(2, start=False)
    for site in pool.site_names():
        pool.start(site)
    yield Hostile(pool)


def adopt(hostile, site, *signed):
    with hostile.pool.bridge(site) as hub:
        hub.call("tenants.adopt", TenantsGiven(list(signed)), Nothing)


def test_a_site_gives_a_tenant_no_more_than_it_may_have_at_all(hostile):
    adopt(hostile, "site-01", hostile.limit(1))
    with pytest.raises(NotAuthorised, match=r"tenant/oncology has signed tenant\.set; an operator may"):
        adopt(hostile, "site-01", hostile.limit(8, "tenant/oncology"))
    adopt(hostile, "site-01", hostile.limit(8, age_s=60))  # shown again: an older one comes to nothing
    hostile.lease("00000001", "site-01")
    with pytest.raises(Forbidden, match="holds 1 of at most 1 GPUs at all sites, as an operator has signed; 1 more"):
        hostile.lease("00000002", "site-01")
    hostile.pool.stop("site-01")
    hostile.pool.start("site-01")  # it forgets nothing
    with pytest.raises(Forbidden):
        hostile.lease("00000003", "site-01")
    adopt(hostile, "site-01", hostile.limit(2))
    hostile.lease("00000004", "site-01")
    pool = hostile.pool
    pool.start("hub")
    pool.until(pool.all_up)
    refusals = [row["said"] for row in pool.json("ledger", "log", "--kind", "refusal")["items"]]
    assert [said["asked"] for said in refusals] == ["tenants.adopt", "hold", "hold"]
    assert {row["result"] for row in pool.json("ledger", "verify")["items"]} == {"whole"}


def test_a_hold_that_names_no_type_is_no_way_round_a_policy(make_pool):
    pool = make_pool(1, start=False)
    (pool.site_directory("site") / "policy.toml").write_text('types = ["a100"]')
    path = pool.site_directory("site") / "site.toml"
    path.write_text('policy_file = "policy.toml"\n' + path.read_text())
    pool.start("site")
    hostile = Hostile(pool)
    for shape in (SHAPE, Shape()):
        wanted = LeaseWanted("oncology", 1, 600.0, id="00000001")
        signed = hostile.sign("lease.request", wanted, "tenant/oncology")
        asked = Hold("00000001", "oncology", 1, 10.0, 1, shape, 600.0, 1, signed)
        with pool.bridge("site") as hub, pytest.raises(Forbidden, match="h100 is not leased here; allowed are: a100"):
            hub.call("lease.hold", asked, SiteLease)


def test_what_a_hub_gives_over_a_quota_at_several_sites_is_found(hostile):
    for site in ("site-01", "site-02"):
        adopt(hostile, site, hostile.limit(1, age_s=1000))
    hostile.lease("00000001", "site-01", "site-02")
    pool = hostile.pool
    pool.start("hub")
    pool.until(pool.all_up)
    for _ in range(2):  # it is not forgotten the next time
        done = pool.cli("ledger", "verify", "-o", "json", status=9)
        [finding] = json.loads(done.stdout)["findings"]
        assert finding["site"] == "site-02"
        assert "tenant oncology holds 2 of at most 1 GPUs at all sites" in finding["problem"]
    assert "oncology holds 2 of at most 1" in pool.cli("ledger", "verify", status=9).stdout


def test_sites_learn_of_quotas_whenever_they_come(make_pool):
    pool = make_pool(2)

    def told():
        rows = pool.json("ledger", "log", "--kind", "request", "-n", "0")["items"]
        return sorted((row["site"], row["what"]) for row in rows)

    pool.stop("site-02")
    pool.cli("tenant", "add", "oncology")
    pool.cli("tenant", "quota", "oncology", "-g", "1", "--limit", "2")
    pool.until(lambda: len(told()) == 2)
    pool.start("site-02")
    pool.until(lambda: len(told()) == 3)
    said = "tenant.set signed by operator"
    assert told() == [("site-01", said), ("site-01", said), ("site-02", said)], "the latest is enough"
    pool.stop("hub")
    pool.start("hub")
    pool.until(pool.all_up)
    process = None
    try:
        pool.joined("zurich-7")
        process = pool.agent("site", "--config", str(pool.work / "zurich-7" / "site.toml"))
        pool.until(lambda: ("zurich-7", said) in told())
        pool.cli("tenant", "remove", "oncology")
        removed = "tenant.remove signed by operator"
        pool.until(lambda: {("zurich-7", removed), ("site-01", removed), ("site-02", removed)} <= set(told()))
        assert len(told()) == 7
        assert {row["result"] for row in pool.json("ledger", "verify")["items"]} == {"whole"}
    finally:
        if process is not None:
            process.terminate()
            process.communicate(timeout=20)
