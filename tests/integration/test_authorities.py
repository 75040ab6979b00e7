"""A pool's authority on tokens: PKCS#11 (SoftHSM, a real one in software) and FIDO, through a real ssh-agent's protocol."""

import base64
import os
import subprocess

import pytest
from cryptography.hazmat.primitives import serialization
from integration.token_agent import SoftToken, agent_with

from fedpool.errors import NotAuthorised, UsageError
from fedpool.identity import certificates, sshsig
from fedpool.identity.authorities import (
    SK_ECDSA_P256,
    SK_ED25519,
    authority_fingerprint,
    authority_line,
    parse_authority,
    require_signed,
)

pytestmark = pytest.mark.integration
SOFTHSM = "/usr/lib/softhsm/libsofthsm2.so"


def run(*words, **environment):
    return subprocess.run(
        words, env={**os.environ, **environment}, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL
    ).stdout


@pytest.fixture(params=[SK_ED25519, SK_ECDSA_P256], ids=["ed25519-sk", "ecdsa-sk"])
def token(request):
    return SoftToken(request.param)


@pytest.fixture
def hsm(need, tmp_path):
    """An ssh-agent that has a key in SoftHSM: (its environment, file with the public half)."""
    need("softhsm2-util", "softhsm2")
    need("ssh-agent", "openssh-client")
    (tmp_path / "tokens").mkdir()
    (tmp_path / "softhsm2.conf").write_text(f"directories.tokendir = {tmp_path}/tokens\nlog.level = ERROR\n")
    conf = {"SOFTHSM2_CONF": str(tmp_path / "softhsm2.conf")}
    run("softhsm2-util", "--init-token", "--free", "--label", "ibshell", "--pin", "1234", "--so-pin", "1234", **conf)
    run("ssh-keygen", "-q", "-t", "ecdsa", "-b", "256", "-N", "", "-f", str(tmp_path / "key"))
    key = serialization.load_ssh_private_key((tmp_path / "key").read_bytes(), None)
    pem = tmp_path / "key.pem"
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    pem.write_bytes(key.private_bytes(*form))
    words = ("--token", "ibshell", "--label", "ca", "--id", "01", "--pin", "1234")
    run("softhsm2-util", "--import", str(pem), *words, **conf)
    pem.unlink()
    (tmp_path / "key").unlink()
    public = tmp_path / "ca.pub"
    public.write_text(run("ssh-keygen", "-D", SOFTHSM, **conf))
    ask = tmp_path / "ask"
    ask.write_text("#!/bin/sh\necho 1234\n")
    ask.chmod(0o700)
    socket = tmp_path / "agent"
    agent = subprocess.Popen(["ssh-agent", "-D", "-P", "/usr/lib/*", "-a", str(socket)], env={**os.environ, **conf})
    try:
        asks = {"SSH_AUTH_SOCK": str(socket), "SSH_ASKPASS": str(ask), "SSH_ASKPASS_REQUIRE": "force"}
        while not socket.exists():
            assert agent.poll() is None
        run("ssh-add", "-q", "-s", SOFTHSM, **conf, **asks)
        yield {"SSH_AUTH_SOCK": str(socket)}, public
    finally:
        agent.terminate()
        agent.wait()


@pytest.fixture
def founded(make_pool, monkeypatch):
    """Makes a pool whose authority only an agent has, and does everything that the authority is needed for."""
    return lambda environment, public: found(make_pool, monkeypatch, environment, public)


def found(make_pool, monkeypatch, environment, public):
    monkeypatch.setenv("SSH_AUTH_SOCK", environment["SSH_AUTH_SOCK"])
    pool = make_pool(1, start=False, authority=public)
    assert not (pool.authority / "identity").exists()
    pool.start_all()
    pool.joined("zurich")
    process = pool.agent("site", "--config", str(pool.work / "zurich" / "site.toml"))
    try:
        pool.until(lambda: "zurich" in pool.sites_up())
        pool.person_joins("ana", "--tenant", "a")
        pool.cli("lease", "request", "-t", "a", "-g", "4", "--sites", "2", **pool.person("ana"))
        refused = pool.cli("lease", "request", "-t", "b", "-g", "1", status=4).stderr
        assert "tenant/b is needed" in refused, "a token is not asked to let its operator act as anybody"
        pool.cli("pool", "revoke", "12345")
        assert pool.json("pool", "show")["authorities"] == [
            authority_fingerprint(parse_authority(public.read_text(), "it"))
        ]
        rows = pool.json("ledger", "verify")["items"]
        assert {row["result"] for row in rows} == {"whole"} and all(row["signatures"] for row in rows)
        proof = pool.work / "lease.json"
        [lease] = [row["id"] for row in pool.rows("lease")]
        pool.cli("ledger", "prove", lease, "--file", str(proof))
        pool.cli("ledger", "verify", str(proof), "--authority", public.read_text().strip())
    finally:
        process.terminate()
        process.communicate(timeout=20)


@pytest.mark.waits
def test_the_authority_may_be_on_a_pkcs11_token(founded, hsm):
    founded(*hsm)


@pytest.mark.waits
def test_the_authority_may_be_on_a_fido_token(founded, need, tmp_path, token):
    need("ssh-keygen", "openssh-client")
    public = tmp_path / "ca.pub"
    public.write_text(authority_line(token.blob) + "\n")
    with agent_with(token, tmp_path / "agent") as environment:
        founded(environment, public)
    assert token.counter >= 5


def test_what_a_token_signs_ssh_keygen_accepts_and_so_do_we(need, tmp_path, token):
    need("ssh-keygen", "openssh-client")
    public, message = tmp_path / "ca.pub", tmp_path / "message"
    public.write_text(authority_line(token.blob) + "\n")
    message.write_bytes(b"a roster")
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "user"))
    with agent_with(token, tmp_path / "agent") as environment:
        run(
            "ssh-keygen",
            "-q",
            "-U",
            "-s",
            str(public),
            "-I",
            "ana",
            "-n",
            "operator",
            f"{tmp_path}/user.pub",
            **environment,
        )
        run("ssh-keygen", "-q", "-Y", "sign", "-f", str(public), "-n", "roster@ibshell", str(message), **environment)
    line = (tmp_path / "user-cert.pub").read_text()
    assert authority_fingerprint(token.blob) in run("ssh-keygen", "-L", "-f", f"{tmp_path}/user-cert.pub")
    found = certificates.parse(line, "it")
    assert (found.authority, found.principals) == (token.blob, ("operator",))
    signature = sshsig.parse(sshsig.dearmor((tmp_path / "message.sig").read_text()))
    sshsig.check_by_authority(signature, token.blob, "roster@ibshell", b"a roster")
    allowed = tmp_path / "allowed"
    allowed.write_text(f"ca {authority_line(token.blob)}\n")
    words = ("-f", str(allowed), "-I", "ca", "-n", "roster@ibshell", "-s", f"{message}.sig")
    subprocess.run(["ssh-keygen", "-Y", "verify", *words], input=b"a roster", check=True, capture_output=True)
    with pytest.raises(NotAuthorised, match="does not fit"):
        sshsig.check_by_authority(signature, token.blob, "roster@ibshell", b"another")


def test_every_changed_byte_of_a_certificate_is_found(need, tmp_path, token):
    need("ssh-keygen", "openssh-client")
    (tmp_path / "ca.pub").write_text(authority_line(token.blob) + "\n")
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "user"))
    with agent_with(token, tmp_path / "agent") as environment:
        words = ("-U", "-s", f"{tmp_path}/ca.pub", "-I", "ana", "-n", "operator", f"{tmp_path}/user.pub")
        run("ssh-keygen", "-q", *words, **environment)
    blob = base64.b64decode((tmp_path / "user-cert.pub").read_text().split()[1])
    for at in range(len(blob)):
        for bent in (blob[:at] + bytes([blob[at] ^ 1]) + blob[at + 1 :], blob[:at], blob[:at] + blob[at + 1 :]):
            with pytest.raises(UsageError):
                certificates.from_blob(bent, "it")


def test_a_token_that_nobody_touched_vouches_for_nothing():
    token = SoftToken(flags=0)
    with pytest.raises(NotAuthorised, match="nobody touched the token"):
        require_signed(token.blob, token.sign(b"a roster"), b"a roster")


@pytest.mark.parametrize("words", [("-t", "rsa"), ("-t", "ecdsa", "-b", "384")])
def test_keys_of_other_types_are_no_authority(need, tmp_path, words):
    need("ssh-keygen", "openssh-client")
    run("ssh-keygen", "-q", *words, "-N", "", "-f", str(tmp_path / "key"))
    with pytest.raises(UsageError, match="is no public key of an authority"):
        parse_authority((tmp_path / "key.pub").read_text(), "authorities")


def test_a_key_of_one_type_does_not_stand_for_another():
    """A signature says of what type it is, and has to be of the key's."""
    token = SoftToken(SK_ED25519)
    plain = token.sign(b"x").replace(SK_ED25519, b"ssh-ed25519")
    with pytest.raises(NotAuthorised):
        require_signed(token.blob, plain, b"x")
