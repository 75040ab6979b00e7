"""What a site obeys: each way in which a hub may depart from what was signed is refused, and a repetition comes to nothing."""

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedpool.errors import NotAuthorised, Refused
from fedpool.federation import plan as plans
from fedpool.identity import certificates, requests
from fedpool.identity.keys import fingerprint, key_blob
from fedpool.identity.trust import Denied, Trust
from fedpool.leasing.gate import Gate, digest, unsigned
from fedpool.leasing.grants import GUARD_S, SiteGrants
from fedpool.leasing.requests import (
    Commit,
    Cordon,
    Hold,
    Notify,
    ProcessesGone,
    Release,
    Renew,
    Resize,
    Tick,
    Transfer,
    Uncordon,
)
from fedpool.records import Mandate, Shape
from fedpool.sim.scenario import SimulatedSite
from fedpool.wire.messages import (
    ById,
    CordonWanted,
    LeaseEnding,
    LeaseOffer,
    LeaseRenewal,
    LeaseSize,
    LeaseWanted,
    RunAgain,
    RunWanted,
)

UNIX, BOOT = 1_800_000_000.0, 1000.0
POOL = "p@0123456789ab"
AUTHORITY, KEY = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
EVERYBODY = ("operator", "tenant/a", "tenant/b")
CERTIFICATE = certificates.issue(
    AUTHORITY,
    certificates.USER,
    KEY.public_key().public_bytes_raw(),
    EVERYBODY,
    "x",
    1,
    (int(UNIX) - 60, int(UNIX) + 86400),
)
SITE = SimulatedSite("north", 1, 1, 4, "h100")
DEVICES = SITE.inventory().devices()
WANTED = LeaseWanted(tenant="a", gpus=2, duration_s=600.0, id="0123abcd", gpu_type="h100")


def sign(method, body, principal="tenant/a", sites=(), at=UNIX, pool=POOL, nonce="00"):
    payload = requests.compose(pool, method, body, principal, sites, int(at * 1000), nonce)
    return requests.sign(KEY, CERTIFICATE, payload)


class Site:
    """A site's machine behind its gate, at a time."""

    def __init__(self):
        trust = Trust(POOL, (key_blob(AUTHORITY.public_key().public_bytes_raw()),))
        self.gate = Gate("north", trust, DEVICES)
        self.machine = SiteGrants("north", SITE.inventory())
        self.machine.recovering = False
        self.passed = 0.0

    def do(self, event):
        unix, now = UNIX + self.passed, BOOT + self.passed
        lease = self.machine.leases.get(getattr(event, "lease", ""))
        event, self.shown = self.gate.admit(event, lease, self.machine.asked_ms, unix, now)
        decision = self.machine.step(event, now)
        for entry in decision.entries:
            self.machine.apply(entry)
        self.machine.check()
        return self.machine.leases.get(getattr(event, "lease", ""))

    def hold(self, wanted=WANTED, **changes):
        method = changes.pop("method", "lease.request")
        request = changes.pop("request", sign(method, wanted))
        event = Hold("0123abcd", "a", 2, 15.0, 1, Shape(kinds=("h100",)), 600.0, 1, request)
        return self.do(msgspec.structs.replace(event, **changes))

    def active(self, wanted=WANTED, **changes):
        self.hold(wanted, **changes)
        return self.do(Commit("0123abcd", 600.0, 1, 1))


@pytest.fixture
def site():
    return Site()


def test_what_was_signed_is_granted_and_shown(site):
    request = sign("lease.request", WANTED)
    lease = site.hold(request=request)
    assert lease.state == "held" and lease.mandate.request == digest(request)
    assert site.shown == (request,)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"request": None}, "without a signed request"),
        ({"lease": "99999999"}, "a hold with lease 99999999"),
        ({"tenant": "b"}, "a hold with tenant b"),
        ({"gpus": 3}, "a hold with gpus 3"),
        ({"duration_s": 601.0}, "a hold with duration_s 601"),
        ({"duration_s": 0.0}, "a hold with duration_s 0"),
        ({"shape": Shape(kinds=("a100",))}, "a hold with kinds"),
        ({"shape": Shape()}, "a hold with kinds"),
        ({"shape": Shape(kinds=("h100",), milli=500)}, "a hold with shape"),
        ({"shape": Shape(kinds=("h100",), same_leaf=True)}, "a hold with shape"),
        ({"shape": Shape(devices=(DEVICES[0].uuid,))}, "a hold with"),
        ({"request": sign("lease.request", WANTED, principal="tenant/b")}, "a hold with principal tenant/b"),
        ({"request": sign("lease.request", WANTED, principal="operator")}, "a hold with principal operator"),
        ({"request": sign("lease.request", WANTED, sites=("south",))}, "a request for south, shown to north"),
        ({"request": sign("lease.request", WANTED, pool="q@0123456789ab")}, "for the pool 'q@0123456789ab'"),
        ({"request": sign("lease.renew", LeaseRenewal("0123abcd", 600.0))}, "covers no lease.request"),
        ({"request": sign("lease.request", WANTED, at=UNIX - 500)}, "signed 500 s ago"),
        ({"request": sign("lease.request", WANTED, at=UNIX + 500)}, "in the future"),
        (
            {"request": sign("lease.request", msgspec.structs.replace(WANTED, site_names=["south"]))},
            "a hold with site north",
        ),
    ],
)
def test_a_hold_that_nobody_signed_is_refused(site, changes, reason):
    with pytest.raises(NotAuthorised, match=reason):
        site.hold(**changes)
    assert not site.machine.leases and not site.machine.used


def test_a_hold_may_have_less_than_was_signed(site):
    assert len(site.hold(gpus=1, duration_s=10.0).grants) == 1


@pytest.mark.parametrize("name", [DEVICES[1].uuid, f"north:{DEVICES[1].node}/{DEVICES[1].label}"])
def test_devices_by_name(site, name):
    wanted = msgspec.structs.replace(WANTED, gpu_type=None, gpus=1, devices=[name])
    with pytest.raises(NotAuthorised, match="a hold with devices"):
        site.hold(wanted, gpus=1, shape=Shape(devices=(DEVICES[0].uuid,)))
    with pytest.raises(NotAuthorised, match="a hold with devices"):
        site.hold(wanted, gpus=1, shape=Shape(kinds=("h100",)))
    lease = site.hold(wanted, gpus=1, shape=Shape(devices=(DEVICES[1].uuid,)))
    assert [grant.uuid for grant in lease.grants] == [DEVICES[1].uuid]


def test_a_slice_is_not_given_to_who_asked_for_any_card(site):
    wanted = msgspec.structs.replace(WANTED, gpu_type=None)
    with pytest.raises(NotAuthorised, match="a hold with kinds"):
        site.hold(wanted, shape=Shape(kinds=("h100/1g.10gb",)))


def test_what_may_wait_is_placed_later(site):
    wanted = msgspec.structs.replace(WANTED, max_wait_s=3600.0)
    request = sign("lease.request", wanted)
    site.passed = 3500.0
    assert site.hold(wanted, request=request).state == "held"
    late = Site()
    late.passed = 3600.0 + 500.0
    with pytest.raises(NotAuthorised, match="signed 4100 s ago"):
        late.hold(wanted, request=request)


def test_a_lease_that_is_over_is_not_granted_again_by_the_same_request(site):
    wanted = msgspec.structs.replace(WANTED, max_wait_s=7200.0)
    request = sign("lease.request", wanted)
    site.active(wanted, request=request)
    site.do(Release("0123abcd", 1))
    site.do(ProcessesGone("0123abcd"))
    site.passed = 7000.0  # long after a lease that is over is forgotten otherwise, and the request still holds
    site.do(Tick())
    with pytest.raises(Refused, match="cannot be placed again"):
        site.hold(wanted, request=request, attempt=2)
    site.passed = 7200.0 + 1000.0
    site.do(Tick())
    assert not site.machine.leases
    with pytest.raises(NotAuthorised, match="s ago"):
        site.hold(wanted, request=request, attempt=3)


def test_what_the_hub_says_of_a_mandate_is_ignored(site):
    lying = Mandate("f" * 32, 0, 1e12)
    assert site.hold(mandate=lying).mandate.until < 1e6
    assert unsigned(Hold("0123abcd", "a", 1, 15.0, 1, mandate=lying)).mandate is None


def test_a_hold_is_committed_for_no_longer_than_was_signed(site):
    site.hold(duration_s=10.0)
    with pytest.raises(NotAuthorised, match="for 601 s; signed is 600 s"):
        site.do(Commit("0123abcd", 601.0, 1, 1))
    assert site.do(Commit("0123abcd", 600.0, 1, 1)).state == "active"


def test_a_request_that_no_record_could_hold_is_refused(site):
    wanted = msgspec.structs.replace(WANTED, avoid=[f"tenant-{number}" for number in range(3000)])
    with pytest.raises(NotAuthorised, match="bytes; the limit is 24576"):
        site.hold(wanted)


# --- renewals


def test_a_renewal_counts_from_when_it_was_signed(site):
    site.active()
    request = sign("lease.renew", LeaseRenewal("0123abcd", 900.0))
    first = site.do(Renew("0123abcd", 900.0, 1, request)).deadline
    assert first == pytest.approx(BOOT + 900 * 1.01 + GUARD_S)
    site.passed = 290.0
    again = site.do(Renew("0123abcd", 900.0, 1, request)).deadline
    assert again - first <= requests.SKEW_S, "shown again and again it keeps a lease for five minutes more at most"
    site.passed = 310.0
    with pytest.raises(NotAuthorised, match="s ago"):
        site.do(Renew("0123abcd", 900.0, 1, request))


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (None, "without a signed request for lease.renew"),
        (sign("lease.renew", LeaseRenewal("0123abcd", 600.0), principal="tenant/b"), "belongs to a; tenant/b"),
        (sign("lease.renew", LeaseRenewal("0123abcd", 600.0), principal="operator"), "belongs to a; operator"),
        (sign("lease.renew", LeaseRenewal("ffffffff", 600.0)), "of 'ffffffff'"),
        (sign("lease.renew", LeaseRenewal("0123abcd", 500.0)), "signed is 500 s"),
        (sign("lease.request", WANTED), "may go on no longer by what was signed"),
    ],
)
def test_a_renewal_that_nobody_signed(site, request_, reason):
    site.active(request=sign("lease.request", WANTED))
    with pytest.raises(NotAuthorised, match=reason):
        site.do(Renew("0123abcd", 600.0, 1, request_))


def test_an_older_request_about_a_lease_is_obeyed_no_more(site):
    site.active()
    site.do(Renew("0123abcd", 60.0, 1, sign("lease.renew", LeaseRenewal("0123abcd", 60.0), at=UNIX + 2)))
    with pytest.raises(Refused, match="a later request"):
        site.do(Renew("0123abcd", 600.0, 1, sign("lease.renew", LeaseRenewal("0123abcd", 600.0), at=UNIX + 1)))


# --- sizes


def test_an_elastic_lease_grows_to_what_was_signed_and_no_further(site):
    wanted = msgspec.structs.replace(WANTED, gpus_max=3)
    request = sign("lease.request", wanted)
    lease = site.active(wanted, request=request)
    lease = site.do(Resize("0123abcd", 3, 0.0, 1, lease.version, request))
    assert len(lease.grants) == 3
    with pytest.raises(NotAuthorised, match="signed is 3 in all"):
        site.do(Resize("0123abcd", 4, 0.0, 1, lease.version, request))
    with pytest.raises(NotAuthorised, match="without a signed request"):
        site.do(Resize("0123abcd", 4, 0.0, 1, lease.version))
    larger = sign("lease.resize", LeaseSize("0123abcd", 4))
    lease = site.do(Resize("0123abcd", 4, 0.0, 1, lease.version, larger))
    assert len(lease.grants) == 4 and site.shown == (larger,) and lease.mandate.request == digest(larger)


def test_devices_may_be_taken_back_without_a_signature(site):
    lease = site.active()
    assert len(site.do(Resize("0123abcd", 1, 5.0, 1, lease.version)).leaving) == 1


# --- changes of hands


def offer(**changes):
    return sign("lease.offer", LeaseOffer("0123abcd", "b"), **changes)


def accept(**changes):
    return sign("lease.accept", LeaseOffer("0123abcd", "b"), principal=changes.pop("principal", "tenant/b"), **changes)


def test_a_lease_changes_hands_when_both_have_signed(site):
    site.active()
    lease = site.do(Transfer("0123abcd", "b", 1, offer(), accept()))
    assert lease.next_tenant == "b" and len(site.shown) == 2
    assert site.do(ProcessesGone("0123abcd")).tenant == "b"
    with pytest.raises(NotAuthorised, match="belongs to b; tenant/a"):  # its old holder has no say any more
        site.do(Renew("0123abcd", 60.0, 1, sign("lease.renew", LeaseRenewal("0123abcd", 60.0), at=UNIX + 1)))


@pytest.mark.parametrize(
    ("offered", "accepted", "reason"),
    [
        (None, accept(), "without a signed request for lease.offer"),
        (offer(), None, "without a signed request for lease.accept"),
        (offer(principal="tenant/b"), accept(), "belongs to a; tenant/b"),
        (offer(), accept(principal="tenant/a"), "belongs to a; tenant/a has signed lease.accept"),
        (sign("lease.offer", LeaseOffer("0123abcd", "c")), accept(), "signed is c"),
        (sign("lease.offer", LeaseOffer("ffffffff", "b")), accept(), "of 'ffffffff'"),
    ],
)
def test_a_change_of_hands_that_not_both_signed(site, offered, accepted, reason):
    site.active()
    with pytest.raises(NotAuthorised, match=reason):
        site.do(Transfer("0123abcd", "b", 1, offered, accepted))


# --- ends and cordons


def test_the_hub_may_end_a_lease_and_the_requester_s_own_word_is_shown(site):
    site.active()
    request = sign("lease.release", ById("0123abcd"))
    assert site.do(Release("0123abcd", 1, "released", request)).state == "ending" and site.shown == (request,)
    other = Site()
    other.active()
    assert other.do(Release("0123abcd", 1, "failed: south is gone")).state == "ending" and other.shown == ()


@pytest.mark.parametrize(
    "request_",
    [
        sign("lease.release", ById("0123abcd"), principal="tenant/b"),
        sign("lease.release", ById("ffffffff")),
        sign("lease.revoke", LeaseEnding("0123abcd", "mine")),
        sign("lease.request", WANTED),
    ],
)
def test_an_end_is_not_said_to_be_somebody_s_who_did_not_sign_it(site, request_):
    site.active()
    for event in (Release("0123abcd", 1, "released", request_), Notify("0123abcd", 1.0, "r", 1, request_)):
        with pytest.raises(NotAuthorised):
            site.do(event)
    assert site.machine.leases["0123abcd"].state == "active"


def test_an_operator_revokes(site):
    site.active()
    request = sign("lease.revoke", LeaseEnding("0123abcd", "hot", 5.0), principal="operator")
    assert site.do(Notify("0123abcd", 5.0, "hot", 1, request)).notice == "hot" and site.shown == (request,)


def cordon(method="site.cordon", where="north", what="", principal="operator", at=UNIX):
    return sign(method, CordonWanted(where, what, "power"), principal, at=at)


def test_a_cordon_is_an_operator_s(site):
    site.do(Cordon("", "power", 1, cordon()))
    assert site.machine.cordons == {"": "power"}
    site.passed = 2.0
    site.do(Uncordon("", 1, cordon("site.uncordon", at=UNIX + 2)))
    assert not site.machine.cordons
    with pytest.raises(Refused, match="a later change"):  # the cordon shown again after its end
        site.do(Cordon("", "power", 1, cordon()))


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (None, "without a signed request"),
        (cordon(principal="tenant/a"), "tenant/a may not change"),
        (cordon(where="south"), "at south"),
        (cordon(what="north-01"), "signed is 'north-01'"),
        (cordon("site.uncordon"), "covers no site.cordon"),
    ],
)
def test_a_cordon_that_no_operator_signed(site, request_, reason):
    with pytest.raises(NotAuthorised, match=reason):
        site.do(Cordon("", "power", 1, request_))


# --- runs

PLAN = 'name = "r"\ntenant = "a"\nprogram = ["true"]\ninitial = "i"\nrounds = 2\nsites = 3\ndeadline = "1m"\nlease = "10m"\n'


def run_wanted(run="00aa00aa", text=PLAN):
    plan = plans.parse(text)
    return RunWanted(text, "00", run, plan.lease_wanted("0123abcd"), plan.longest_s)


def run(site, request):
    return site.active(request=request, gpus=1)


def test_a_run_s_request_covers_its_lease_its_renewals_and_its_plan(site):
    request = sign("fed.run", run_wanted())
    lease = run(site, request)
    assert site.gate.plan(request, lease, "00aa00aa") == PLAN
    site.passed = 500.0
    site.do(Renew("0123abcd", 600.0, 1, request))
    site.passed = 700.0  # two rounds of a minute, and a lease of ten, after it was signed: 720 s
    assert site.do(Renew("0123abcd", 600.0, 1, request)).deadline < BOOT + 720 + 10
    site.passed = 721.0
    with pytest.raises(NotAuthorised, match="no longer by what was signed"):
        site.do(Renew("0123abcd", 600.0, 1, request))


@pytest.mark.parametrize(
    ("shown", "name"),
    [
        (lambda: None, "00aa00aa"),
        (lambda: sign("fed.run", run_wanted(), nonce="01"), "00aa00aa"),
        (lambda: sign("fed.run", run_wanted(text=PLAN.replace("true", "false"))), "00aa00aa"),
        (lambda: sign("fed.run", run_wanted()), "11111111"),
    ],
)
def test_a_program_that_was_not_signed_is_not_started(site, shown, name):
    lease = run(site, sign("fed.run", run_wanted()))
    with pytest.raises(NotAuthorised):
        site.gate.plan(shown(), lease, name)


def test_a_run_of_somebody_who_was_revoked_is_renewed_no_more(site):
    request = sign("fed.run", run_wanted())
    lease = run(site, request)
    site.gate.trust.denied = Denied(keys=frozenset({fingerprint(CERTIFICATE.public)}))
    for ask in (
        lambda: site.do(Renew("0123abcd", 600.0, 1, request)),
        lambda: site.gate.plan(request, lease, "00aa00aa"),
    ):
        with pytest.raises(NotAuthorised, match="has been revoked"):
            ask()


def test_no_program_is_run_under_a_lease_that_was_asked_for_otherwise(site):
    request = sign("lease.request", WANTED)
    lease = site.active(request=request)
    with pytest.raises(NotAuthorised, match="was not asked for to run a program"):
        site.gate.plan(request, lease, "00aa00aa")


def test_a_run_goes_on_when_its_lease_was_resized_and_not_when_it_has_changed_hands(site):
    request = sign("fed.run", run_wanted())
    lease = run(site, request)
    larger = sign("lease.resize", LeaseSize("0123abcd", 2), at=UNIX + 1)
    lease = site.do(Resize("0123abcd", 2, 0.0, 1, lease.version, larger))
    assert len(lease.grants) == 2 and site.gate.plan(request, lease, "00aa00aa") == PLAN
    site.do(Renew("0123abcd", 600.0, 1, request))
    site.do(Transfer("0123abcd", "b", 1, offer(at=UNIX + 2), accept(at=UNIX + 2)))
    lease = site.do(ProcessesGone("0123abcd"))
    with pytest.raises(NotAuthorised):
        site.gate.plan(request, lease, "00aa00aa")
    with pytest.raises(NotAuthorised):
        site.do(Renew("0123abcd", 600.0, 1, request))


def test_a_run_that_goes_on_has_a_request_of_its_own(site):
    plan = plans.parse(PLAN)
    again = RunAgain("00aa00aa", PLAN, plan.lease_wanted("0123abcd"), plan.longest_s)
    request = sign("fed.resume", again)
    lease = run(site, request)
    assert site.gate.plan(request, lease, "00aa00aa") == PLAN
