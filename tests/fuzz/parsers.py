"""Every parser of what others wrote: hubs, sites, people, files. Each refuses what it cannot read with an error of ours."""

from fedpool.errors import IbshellError
from fedpool.federation import plan
from fedpool.identity import authorities, certificates, keys, requests, roster, sshsig, tokens
from fedpool.identity.keys import key_blob
from fedpool.identity.trust import Trust
from fedpool.leasing import policy
from fedpool.leasing.holdings import over_limits
from fedpool.leasing.rules import LedgerRules
from fedpool.ledger import canonical, notes, records, retention
from fedpool.records import Signed
from fedpool.sim import scenario
from fedpool.transport import known_hosts
from fedpool.wire import frames
from fedpool.wire.session import Session
from ibshell import policy_trial


def _text(data):
    return data.decode("utf-8", "surrogateescape").encode("utf-8", "replace").decode()


def _session(data):
    session = Session("hub", "x")
    session.receive(session.start() + data)


def _record(data):
    record = records.decode(data)
    if record is not None:
        rules = LedgerRules(Trust("p@0", (key_blob(bytes(32)),)))
        rules.take(0, record)
        rules.finish()
        over_limits({"a": rules.holdings})


def _authority(data):
    blob = authorities.parse_authority(_text(data), "it")
    authorities.require_signed(blob, data, b"message")


def _signed_by_authority(data):
    for kind in authorities.TYPES:
        blob = AUTHORITY_KEYS[kind]
        try:
            authorities.require_signed(blob, keys.ssh_string(kind) + data, b"message")
        except IbshellError:
            continue


def _request(data):
    signed = Signed(data, data[:2000])
    requests.read(signed)
    requests.open_(signed, Trust("p@0", (key_blob(bytes(32)),)), "lease.request", dict, 0.0)


_POINT = bytes.fromhex(  # P-256's generator
    "046b17d1f2e12c4247f8bce6e563a440f277037d812deb33a0f4a13945d898c296"
    "4fe342e2fe1a7f9b8ee7eb4a7c0f9e162bce33576b315ececbb6406837bf51f5"
)
AUTHORITY_KEYS = {
    kind: b"".join(map(keys.ssh_string, (kind, *([b"nistp256", _POINT] if b"ecdsa" in kind else [bytes(32)]), *rest)))
    for kind, rest in zip(authorities.TYPES, ([], [], [b"ssh:"], [b"ssh:"]), strict=True)
}
# {name: takes bytes}
PARSERS = {
    "frame": lambda data: list(frames.FrameReader().receive(data)),
    "session": _session,
    "record": _record,
    "canonical": canonical.decode,
    "note": notes.decode,
    "verifier key": lambda data: notes.parse_key(_text(data)),
    "certificate": lambda data: certificates.from_blob(data, "it"),
    "certificate line": lambda data: certificates.parse(_text(data), "it"),
    "public key": lambda data: keys.parse_public(_text(data), "it"),
    "authority": _authority,
    "authority's signature": _signed_by_authority,
    "repeated record": lambda data: retention.text_of(records.Kept(number=1, record=_text(data))),
    "signature": sshsig.parse,
    "armoured signature": lambda data: sshsig.dearmor(_text(data)),
    "request": _request,
    "roster": lambda data: roster.read(Signed(data, b"")),
    "token": lambda data: tokens.parse(_text(data)),
    "token's content": lambda data: tokens.parse(tokens.PREFIX + _text(data)),
    "plan": lambda data: plan.parse(_text(data)),
    "policy": lambda data: policy.parse(_text(data), "it"),
    "request in words": lambda data: policy_trial.tried("", "it", _text(data)),
    "scenario": lambda data: scenario.parse(_text(data), "it"),
    "known_hosts": lambda data: known_hosts.keys(known_hosts.parse(_text(data), "it"), "host", 22),
}
# What each can read, for a fuzzer to begin with.
SEEDS = {
    "plan": [b'name = "r"\ntenant = "a"\nprogram = ["true"]\ninitial = "i"\nrounds = 2\nsites = 3\n'],
    "policy": [b'[tenants.a]\ngpus = 1\nhours = ["mon-fri 18:00-08:00"]\n'],
    "scenario": [b'[[site]]\nname = "a"\ncount = 2\n'],
    "known_hosts": [b"|1|AAAA|BBBB ssh-ed25519 AAAA\n@revoked *.x,!y ssh-ed25519 AAAA\n"],
    "request in words": [b"tenant=a gpus=4 for=2h at=2026-12-02T22:00Z program='a b' data=x,y"],
    "authority's signature": [b"\x00\x00\x00\x40" + bytes(64) + b"\x01\x00\x00\x00\x01"],
    "repeated record": [b"eJyrVsrOzEtRslIyUKoFABQqA5s="],
    "record": [
        b'{"kept":1,"kind":"seam","token":1}',
        b'{"kind":"devices","kinds":[{"devices":["G"],"kind":"h100"}]}',
        b'{"kind":"kept","number":1,"record":"eJyrVsrOzEtRslIyUKoFABQqA5s="}',
        b'{"event":"hold","grants":[{"devices":["G"],"token":1}],"kind":"lease","lease":"a","state":"held","tenant":"t"}',
    ],
    "request": [
        b'{"body":{},"format":1,"method":"m","nonce":"","pool":"p@0","principal":"operator","sites":[],"time_ms":0}'
    ],
    "roster": [b'{"authorities":["ssh-ed25519 AAAA"],"format":1,"number":1,"pool":"p","time_ms":0}'],
    "note": [b"origin\n1\nAAAA\n\n\xe2\x80\x94 origin AAAA\n"],
    "armoured signature": [b"-----BEGIN SSH SIGNATURE-----\nU1NIU0lH\n-----END SSH SIGNATURE-----\n"],
    "signature": [b"SSHSIG\x00\x00\x00\x01\x00\x00\x00\x00"],
}


def feed(name, data):
    """Put bytes to a parser; whatever it raises but an error of ours is a bug."""
    try:
        PARSERS[name](data)
    except IbshellError:
        return
