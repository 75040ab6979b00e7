"""A ledger read against what was signed: whatever a site granted that nobody had asked for, or its policy forbids, is named."""

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedpool.identity import certificates, requests
from fedpool.identity.authorities import authority_fingerprint
from fedpool.identity.keys import key_blob
from fedpool.identity.trust import Trust
from fedpool.leasing.coverage import Coverage
from fedpool.leasing.policy import digest
from fedpool.leasing.recorded import requested
from fedpool.ledger.records import Cordoned, Granted, LeaseSaid, PolicyObeyed, SiteStarted, Uncordoned
from fedpool.wire.messages import ById, CordonWanted, LeaseOffer, LeaseRenewal, LeaseSize, LeaseWanted

AUTHORITY, KEY = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
TRUST = Trust("p@0", (key_blob(AUTHORITY.public_key().public_bytes_raw()),))
CERTIFICATE = certificates.issue(
    AUTHORITY,
    certificates.USER,
    KEY.public_key().public_bytes_raw(),
    ("operator", "tenant/a", "tenant/b"),
    "x",
    1,
    (0, 1 << 40),
)
ID = "0123abcd"


def asked(method, body, principal="tenant/a", pool="p@0", lease=ID):
    payload = requests.compose(pool, method, body, principal, (), 1000, "00")
    return requested(lease, requests.sign(KEY, CERTIFICATE, payload))


def said(event, state, devices=None, tenant="a", **more):
    grants = None if devices is None else (Granted(tuple(f"GPU-{n}" for n in range(devices)), 1),)
    return LeaseSaid(time=1000, lease=ID, tenant=tenant, event=event, state=state, grants=grants, **more)


STARTED = SiteStarted(epoch=1, software="x", pool="p@0", authorities=(authority_fingerprint(TRUST.authorities[0]),))
REQUEST = asked("lease.request", LeaseWanted("a", 2, 600.0, gpus_max=3, id=ID))
LIFE = [
    STARTED,
    REQUEST,
    said("hold", "held", 2),
    said("commit", "active"),
    asked("lease.renew", LeaseRenewal(ID, 600.0)),
    said("renew", "active"),
    said("resize", "active", 3),  # by itself, to what was asked for at most
    said("resize", "active", 1),  # given back
    asked("lease.resize", LeaseSize(ID, 5)),
    said("resize", "active", 5),
    asked("lease.offer", LeaseOffer(ID, "b")),
    asked("lease.accept", LeaseOffer(ID, "b"), "tenant/b"),
    said("transfer", "active", next_tenant="b"),
    said("transfer", "active", 5, tenant="b"),
    asked("lease.renew", LeaseRenewal(ID, 600.0), "tenant/b"),
    said("renew", "active", tenant="b"),
    asked("lease.release", ById(ID), "tenant/b"),
    said("end", "ending", tenant="b"),
    said("release", "released", tenant="b"),
    asked("site.cordon", CordonWanted("north"), "operator", lease=""),
    Cordoned(),
    asked("site.uncordon", CordonWanted("north"), "operator", lease=""),
    Uncordoned(),
]


def problems(records, trust=TRUST):
    coverage = Coverage(trust)
    found = [problem for record in records for problem in coverage.take(record)]
    return [*found, *coverage.finish()]


def test_a_life_that_was_signed_for():
    assert problems(LIFE) == []


NEEDED = [position for position, record in enumerate(LIFE) if type(record).__name__ == "Requested" and position != 16]


@pytest.mark.parametrize("position", NEEDED)
def test_every_request_is_needed(position):
    """All but that for the end, which the hub may ask by itself."""
    assert problems(LIFE[:position] + LIFE[position + 1 :])
    assert not problems(LIFE[:16] + LIFE[17:])


@pytest.mark.parametrize("position", NEEDED)
def test_every_request_has_to_be_signed_by_who_may(position):
    true = LIFE[position]
    payload = msgspec.json.decode(true.payload)
    for changes in ({"principal": "auditor"}, {"principal": "tenant/c"}, {"pool": "q@0"}):
        body = msgspec.json.encode({**payload, **changes}, order="sorted")
        forged = requested(true.lease, requests.sign(KEY, CERTIFICATE, body))
        assert problems([*LIFE[:position], forged, *LIFE[position + 1 :]])
    bent = msgspec.structs.replace(true, payload=true.payload.replace('"time_ms":1000', '"time_ms":1001'))
    assert problems([*LIFE[:position], bent, *LIFE[position + 1 :]])


@pytest.mark.parametrize(
    ("records", "says"),
    [
        ([STARTED, REQUEST, said("hold", "held", 4)], "hold of lease 0123abcd with 4 devices: tenant/a had signed no"),
        ([STARTED, REQUEST, said("hold", "held", 2, tenant="b")], "tenant/b had signed no request"),
        ([*LIFE[:3], said("commit", "active", for_ms=700_000)], "for 688 s; 600 s were asked for"),
        ([*LIFE[:7], said("resize", "active", 4)], "resize of lease 0123abcd with 4 devices"),
        ([*LIFE[:13], said("transfer", "active", 5, tenant="c")], "goes to c, which nobody had signed"),
        ([*LIFE[:14], said("renew", "active", tenant="b")], "renew of lease 0123abcd: tenant/b had signed no"),
        ([SiteStarted(epoch=1, software="x")], "obeys its hub without signatures"),
        ([STARTED, SiteStarted(epoch=2, software="x")], "without signatures from here on"),
        ([msgspec.structs.replace(STARTED, pool="q@0")], "of the pool 'q@0'"),
        ([msgspec.structs.replace(STARTED, authorities=("SHA256:x",))], "an authority that is not this pool's"),
        (
            [STARTED, asked("lease.request", LeaseWanted("a", 2, 600.0, id="ffffffff"))],
            "about lease 'ffffffff' recorded for",
        ),
        ([STARTED, Cordoned()], "a change of cordons that nobody had signed"),
        ([STARTED, PolicyObeyed(digest="x", text="")], "whose digest is another's"),
    ],
)
def test_what_is_wrong_is_named(records, says):
    assert any(says in problem for problem in problems(records)), problems(records)


def policy(text):
    return PolicyObeyed(digest=digest(text), text=text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[tenants.b]\n", "hold of lease 0123abcd against the site's policy: tenant a may have nothing here"),
        ("[tenants.a]\ngpus = 1\n", "would have 2 devices here; 1 are allowed"),
        ('max_duration = "5m"\n', "commit of lease 0123abcd against the site's policy: 9m"),
        ("max_duration = 9", None),  # of a newer release: not judged
        ('[tenants.a]\ngpus = 2\nmax_duration = "10m"\n', None),
    ],
)
def test_what_the_policy_forbade(text, says):
    records = [STARTED, policy(text), REQUEST, said("hold", "held", 2, for_ms=15000)]
    records.append(said("commit", "active", for_ms=round(1000 * (600 * 1.01 + 5))))
    found = problems(records)
    assert found == [] if says is None else any(says in problem for problem in found), found
    if says is not None:
        assert any(says in problem for problem in problems(records[1:], None)), "also where the hub is believed"


def test_it_goes_on_where_it_ended():
    for cut in range(len(LIFE)):
        first = Coverage(TRUST)
        for record in LIFE[:cut]:
            assert first.take(record) == []
        state = msgspec.json.decode(msgspec.json.encode(first.state()), type=type(first.state()))
        second = Coverage(TRUST, state)
        assert [problem for record in LIFE[cut:] for problem in second.take(record)] == []
        assert second.finish() == []
