"""Every parser of what others wrote: hubs, sites, people, files. Each refuses what it cannot read with an error of ours."""

from fedpool.errors import IbshellError
from fedpool.federation import plan
from fedpool.identity import certificates, keys, requests, roster, sshsig, tokens
from fedpool.identity.keys import key_blob
from fedpool.identity.trust import Trust
from fedpool.leasing import policy
from fedpool.leasing.coverage import Coverage
from fedpool.leasing.recorded import Replay
from fedpool.ledger import canonical, notes, records
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
        Replay().take(record)
        Coverage(Trust("p@0", (key_blob(bytes(32)),))).take(record)


def _request(data):
    signed = Signed(data, data[:2000])
    requests.read(signed)
    requests.open_(signed, Trust("p@0", (key_blob(bytes(32)),)), "lease.request", dict, 0.0)


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
    "record": [
        b'{"event":"hold","grants":[{"devices":["G"],"token":1}],"kind":"lease","lease":"a","state":"held","tenant":"t"}'
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
