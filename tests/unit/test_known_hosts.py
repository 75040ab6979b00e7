"""known_hosts as OpenSSH reads it (ssh-keygen -F is the reference), and one refusal more: revoked is revoked on any port."""

import base64
import hashlib
import hmac
import subprocess

import pytest

from fedpool.errors import NotAuthorised
from fedpool.identity.keys import public_line
from fedpool.transport import known_hosts

A, B = public_line(bytes(range(32))), public_line(bytes(range(1, 33)))


def hashed(name):
    salt = hashlib.sha1(name.encode()).digest()
    value = hmac.digest(salt, name.encode(), hashlib.sha1)
    return f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(value).decode()}"


# Case 037: the same key is trusted for everybody and revoked for one host, without a port.
REVOKED = f"* {A}\n@revoked 203.0.113.40 {A}\n"
# Case 038: one hash a name; the same host at another port has another key.
HASHED = f"# comment\n\n{hashed('n1.x.test')} {A}\n{hashed('203.0.113.21')} {A}\n{hashed('[n1.x.test]:2222')} {B}\n"


def keygen(path, name):
    done = subprocess.run(["ssh-keygen", "-F", name, "-f", str(path)], capture_output=True, text=True)
    return [line.split()[-2] + " " + line.split()[-1] for line in done.stdout.splitlines() if not line.startswith("#")]


def test_a_key_that_is_revoked_for_a_host_is_refused_at_every_port():
    entries = known_hosts.parse(REVOKED, "known_hosts")
    with pytest.raises(NotAuthorised, match=r"revoked \(known_hosts:2\)"):
        known_hosts.require(entries, "203.0.113.40", 22, A)
    with pytest.raises(NotAuthorised, match=r"the key is revoked for 203.0.113.40 \(known_hosts:2\)"):
        known_hosts.require(entries, "203.0.113.40", 2212, A)
    [warning] = known_hosts.require(entries, "203.0.113.40", 2212, A, other_ports=True)
    assert warning == "the key is revoked for 203.0.113.40 (known_hosts:2)"
    assert known_hosts.require(entries, "203.0.113.41", 22, A) == []
    with pytest.raises(NotAuthorised, match="is not known by the key"):
        known_hosts.require(entries, "203.0.113.41", 22, B)


@pytest.mark.parametrize(
    ("host", "port", "expected"),
    [
        ("n1.x.test", 22, [A]),
        ("203.0.113.21", 22, [A]),
        ("n1.x.test", 2222, [B]),
        ("n2.x.test", 22, []),
    ],
)
def test_hashed_names(tmp_path, host, port, expected):
    (tmp_path / "known_hosts").write_text(HASHED)
    entries = known_hosts.parse(HASHED, "f")
    assert known_hosts.keys(entries, host, port) == expected
    assert keygen(tmp_path / "known_hosts", host if port == 22 else f"[{host}]:{port}") == expected
    assert {entry.shown for entry in entries} == {"(hashed)"}


@pytest.mark.parametrize(
    "hosts", ["*.x.test,!n9.x.test", "n?.x.test", "n1.x.test,203.0.113.1", "[n1.x.test]:2222", "*", "n1.X.test"]
)
@pytest.mark.parametrize(
    ("host", "port"), [("n1.x.test", 22), ("n9.x.test", 22), ("n1.x.test", 2222), ("n10.x.test", 22)]
)
def test_patterns_are_those_of_ssh_keygen(tmp_path, hosts, host, port):
    text = f"{hosts} {A}\n"
    (tmp_path / "known_hosts").write_text(text)
    mine = known_hosts.keys(known_hosts.parse(text, "f"), host, port)
    assert mine == keygen(tmp_path / "known_hosts", host if port == 22 else f"[{host}]:{port}")


def test_lines_that_are_none_are_passed_over():
    text = f"|1|x|y {A}\nnonsense\n@revoked\n@cert-authority *.x.test {B}\n\x00\n"
    entries = known_hosts.parse(text, "f")
    assert known_hosts.keys(entries, "n1.x.test", 22) == []
    assert [entry.marker for entry in entries] == ["", "@cert-authority"]
