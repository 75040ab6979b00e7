"""Keys, certificates and signatures against the real ssh-keygen, and what a party believes."""

import subprocess

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedpool.errors import NotAuthorised, UsageError
from fedpool.identity import certificates, requests, sshsig
from fedpool.identity.keys import fingerprint, key_blob, parse_public, public_line
from fedpool.identity.trust import Denied, Trust
from fedpool.wire.messages import LeaseWanted

NOW = 1_800_000_000.0
VALID = (int(NOW) - 60, int(NOW) + 3600)
POOL = "fedhealth@0123456789ab"
AUTHORITY, KEY, OTHER = (Ed25519PrivateKey.generate() for _ in range(3))
ONCOLOGY = "tenant/oncology"


def raw(key):
    return key.public_key().public_bytes_raw()


def certificate(principals=(ONCOLOGY,), kind=certificates.USER, key=KEY, authority=AUTHORITY, serial=7, valid=VALID):
    return certificates.issue(authority, kind, raw(key), principals, "ana's laptop", serial, valid)


def trust():
    return Trust(POOL, (key_blob(raw(AUTHORITY)),))


def signed(wanted=None, principal=ONCOLOGY, pool=POOL, key=KEY, cert=None, method="lease.request", time=NOW):
    wanted = wanted or LeaseWanted(tenant="oncology", gpus=4, duration_s=3600.0, id="0123abcd")
    payload = requests.compose(pool, method, wanted, principal, (), int(time * 1000), "00ff")
    return requests.sign(key, cert or certificate(), payload)


def keygen(*words, **more):
    return subprocess.run(["ssh-keygen", *map(str, words)], capture_output=True, text=True, check=True, **more).stdout


def test_a_fingerprint_is_that_of_ssh_keygen(tmp_path):
    (tmp_path / "key.pub").write_text(public_line(raw(KEY)))
    assert fingerprint(raw(KEY)) in keygen("-l", "-f", tmp_path / "key.pub")
    assert parse_public(public_line(raw(KEY)) + " ana@laptop", "key") == raw(KEY)


def test_ssh_keygen_reads_a_certificate(tmp_path):
    (tmp_path / "key-cert.pub").write_text(certificate().line + "\n")
    said = keygen("-L", "-f", tmp_path / "key-cert.pub")
    assert "user certificate" in said and "Serial: 7" in said and ONCOLOGY in said
    assert f"Signing CA: ED25519 {fingerprint(raw(AUTHORITY))}" in said


def test_a_certificate_of_ssh_keygen_is_believed(tmp_path):
    private = AUTHORITY.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    (tmp_path / "ca").write_bytes(private)
    (tmp_path / "ca").chmod(0o600)
    (tmp_path / "key.pub").write_text(public_line(raw(KEY)) + "\n")
    keygen(
        "-q", "-s", tmp_path / "ca", "-I", "ana", "-n", ONCOLOGY, "-z", 9, "-V", "always:forever", tmp_path / "key.pub"
    )
    found = certificates.parse((tmp_path / "key-cert.pub").read_text(), "it")
    trust().require(found, certificates.USER, ONCOLOGY, NOW)
    assert found.serial == 9 and found.public == raw(KEY)


def test_ssh_keygen_accepts_a_signed_request(tmp_path):
    made = signed()
    (tmp_path / "signature").write_text(sshsig.armor(made.signature))
    (tmp_path / "allowed").write_text(
        f'{ONCOLOGY} cert-authority,namespaces="{requests.NAMESPACE}" {public_line(raw(AUTHORITY))}\n'
    )
    words = ["-Y", "verify", "-f", "allowed", "-I", ONCOLOGY, "-n", requests.NAMESPACE, "-s", "signature"]
    at = "-Overify-time=20270115080000Z"  # NOW
    assert "Good" in keygen(*words, at, input=made.payload.decode(), cwd=tmp_path)
    with pytest.raises(subprocess.CalledProcessError):
        keygen(*words, at, input=made.payload.decode() + " ", cwd=tmp_path)


def test_a_signature_of_ssh_keygen_is_accepted(tmp_path):
    private = KEY.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    (tmp_path / "key").write_bytes(private)
    (tmp_path / "key").chmod(0o600)
    (tmp_path / "key.pub").write_text(public_line(raw(KEY)) + "\n")
    (tmp_path / "key-cert.pub").write_text(certificate().line + "\n")
    payload = signed().payload
    (tmp_path / "payload").write_bytes(payload)
    keygen("-q", "-Y", "sign", "-f", tmp_path / "key-cert.pub", "-n", requests.NAMESPACE, tmp_path / "payload")
    made = requests.Signed(payload, sshsig.dearmor((tmp_path / "payload.sig").read_text()))
    opened = requests.open_(made, trust(), "lease.request", LeaseWanted, NOW)
    assert opened.body.gpus == 4 and opened.certificate.serial == 7


def test_a_request_is_opened_by_whom_it_is_for():
    opened = requests.open_(signed(), trust(), "lease.request", LeaseWanted, NOW)
    assert opened.body == LeaseWanted(tenant="oncology", gpus=4, duration_s=3600.0, id="0123abcd")
    assert opened.payload.principal == ONCOLOGY


STRANGER = Ed25519PrivateKey.generate()


@pytest.mark.parametrize(
    ("made", "now", "reason"),
    [
        (lambda: signed(pool="other@0123456789ab"), NOW, "for the pool 'other@0123456789ab'"),
        (lambda: signed(method="lease.renew"), NOW, "a signature for 'lease.renew'"),
        (lambda: signed(principal="tenant/radiology"), NOW, "not for tenant/radiology"),
        (lambda: signed(principal="operator"), NOW, "not for operator"),
        (lambda: signed(cert=certificate(authority=STRANGER)), NOW, "not this pool's"),
        (lambda: signed(cert=certificate(kind=certificates.HOST)), NOW, "a user certificate is needed"),
        (lambda: signed(key=STRANGER), NOW, "does not fit"),
        (lambda: signed(), NOW + 3600, "expired at 2027-01-15T09:00:00Z"),
        (lambda: signed(), NOW - 61, "holds from"),
    ],
)
def test_a_request_that_is_not_what_it_says_is_refused(made, now, reason):
    with pytest.raises(NotAuthorised, match=reason):
        requests.open_(made(), trust(), "lease.request", LeaseWanted, now)


@pytest.mark.parametrize("denied", [Denied(serials=frozenset({7})), Denied(keys=frozenset({fingerprint(raw(KEY))}))])
def test_what_is_revoked_is_believed_no_longer(denied):
    believing = trust()
    requests.open_(signed(), believing, "lease.request", LeaseWanted, NOW)
    believing.denied = denied
    with pytest.raises(NotAuthorised, match="has been revoked"):
        requests.open_(signed(), believing, "lease.request", LeaseWanted, NOW)


@pytest.mark.parametrize(
    ("role", "other_key", "denied", "now", "ok"),
    [
        ("site/north", False, False, NOW, True),
        ("site/north", False, False, VALID[1] + 1e6, True),  # the roster names its key
        ("site/north", True, False, NOW, True),
        ("site/north", True, False, VALID[1] + 1, False),
        ("site/north", False, True, VALID[1] + 1, False),
        ("site/north", False, False, VALID[0] - 1, False),
        ("hub", False, False, VALID[1] + 1, False),
    ],
)
def test_a_site_in_the_roster_is_believed_although_its_certificate_has_ended(role, other_key, denied, now, ok):
    key = OTHER if other_key else KEY
    found, believes = certificate((role,), certificates.HOST, key), trust()
    believes.sites["north"] = raw(KEY)
    believes.denied = Denied(keys=frozenset([fingerprint(raw(key))] if denied else []))
    if ok:
        believes.require_host(found, role, now)
    else:
        with pytest.raises(NotAuthorised):
            believes.require_host(found, role, now)


def test_every_changed_byte_of_a_request_is_found():
    made, believing = signed(), trust()
    for at in range(len(made.payload)):
        changed = bytearray(made.payload)
        changed[at] ^= 1
        with pytest.raises((NotAuthorised, UsageError)):
            requests.open_(
                requests.Signed(bytes(changed), made.signature), believing, "lease.request", LeaseWanted, NOW
            )
    for at in range(len(made.signature)):
        changed = bytearray(made.signature)
        changed[at] ^= 1
        with pytest.raises((NotAuthorised, UsageError)):
            requests.open_(requests.Signed(made.payload, bytes(changed)), believing, "lease.request", LeaseWanted, NOW)


@pytest.mark.parametrize(("late", "ok"), [(0, True), (299, True), (301, False), (-299, True), (-301, False)])
def test_a_request_is_fresh_for_five_minutes(late, ok):
    payload = requests.read(signed())
    if ok:
        requests.require_fresh(payload, NOW + late)
        return
    with pytest.raises(NotAuthorised, match="clocks"):
        requests.require_fresh(payload, NOW + late)


def test_what_waits_may_come_later():
    requests.require_fresh(requests.read(signed()), NOW + 3000, patience_s=3600)


@pytest.mark.parametrize("role", ["root", "tenant/", "tenant/../x", "site/a b", "tenant/a\n", "operator/x"])
def test_no_certificate_is_made_for_a_role_that_does_not_exist(role):
    with pytest.raises(UsageError, match=r"is no (role|name)"):
        certificate(principals=(role,))


def test_a_certificate_with_a_forced_command_is_not_taken_for_one_without(tmp_path):
    private = AUTHORITY.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    (tmp_path / "ca").write_bytes(private)
    (tmp_path / "ca").chmod(0o600)
    (tmp_path / "key.pub").write_text(public_line(raw(KEY)) + "\n")
    keygen("-q", "-s", tmp_path / "ca", "-I", "x", "-n", ONCOLOGY, "-O", "force-command=true", tmp_path / "key.pub")
    with pytest.raises(UsageError, match="critical option force-command"):
        certificates.parse((tmp_path / "key-cert.pub").read_text(), "it")


@pytest.mark.parametrize(
    "line", ["", "ssh-ed25519-cert-v01@openssh.com", "ssh-ed25519-cert-v01@openssh.com !!", "ssh-rsa AAAA"]
)
def test_what_is_no_certificate_is_refused(line):
    with pytest.raises(UsageError):
        certificates.parse(line, "it")
    with pytest.raises(UsageError):
        certificates.from_blob(key_blob(raw(KEY)), "it")
