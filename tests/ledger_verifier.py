"""A verifier of exported ledgers that shares nothing with the project but the specification: hashlib, json and cryptography.

    python tests/ledger_verifier.py DIRECTORY-OF-A-SITE [KEY]

It is here to show that site/ledger.md says everything that somebody else needs, and to disagree when the project errs.
"""

import base64
import hashlib
import json
import sys
import zlib
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

WIDTH = 256
NEXT = {
    "held": {"commit": "active", "abort": "aborted", "end": "ending"},
    "active": {"renew": "active", "resize": "active", "notify": "active", "transfer": "active", "end": "ending"},
    "ending": {"release": "released", "expire": "expired", "revoke": "revoked", "fail": "failed"},
}


class Wrong(Exception):
    """What is wrong with a ledger."""


def path(directory, kind, index, width):
    parts = [f"{index % 1000:03}"]
    while index := index // 1000:
        parts.insert(0, f"x{index % 1000:03}")
    name = "/".join(parts) + ("" if width == WIDTH else f".p/{width}")
    return directory / "tile" / kind / name


def parse_key(line, kind):
    """(name, id, public key) of a line."""
    name, key_id, encoded = line.split("+", 2)
    public = base64.b64decode(encoded, validate=True)
    if public[:1] != bytes([kind]) or hashlib.sha256(name.encode() + b"\n" + public).digest()[:4].hex() != key_id:
        raise Wrong("the key is malformed")
    return name, key_id, Ed25519PublicKey.from_public_bytes(public[1:])


def checkpoint(directory, key, witnesses):
    """(size, root) that the key, and all the witnesses, have signed."""
    *others, cut = witnesses.split("\n")
    keys = [parse_key(key, 1), *(parse_key(line, 4) for line in others)]
    text, _, signatures = (directory / "checkpoint").read_text().rpartition("\n\n")
    text, lines = text + "\n", signatures.split("\n")
    origin, size, root = text.split("\n")[:3]
    if cut or lines.pop() or len(lines) != len(keys) or origin != keys[0][0]:
        raise Wrong("the checkpoint is of another ledger, or does not bear as many signatures as there are keys")
    for line, (name, key_id, public) in zip(lines, keys, strict=True):
        dash, who, signature = line.split(" ")
        data = base64.b64decode(signature, validate=True)
        if (dash, who, data[:4].hex()) != ("—", name, key_id):
            raise Wrong("the checkpoint is not signed by the key")
        message, data = text, data[4:]
        if public is not keys[0][2]:
            message, data = f"cosignature/v1\ntime {int.from_bytes(data[:8])}\n{text}", data[8:]
        try:
            public.verify(data, message.encode())
        except InvalidSignature:
            raise Wrong("the checkpoint's signature is not of the key") from None
    return int(size), base64.b64decode(root)


def records(directory, size):
    """(leaf hash, record) of each; None where the record is forgotten."""
    for index in range(-(-size // WIDTH)):
        width = min(WIDTH, size - index * WIDTH)
        file, count = path(directory, "entries", index, width), 0
        if width == WIDTH and not file.exists():
            data = path(directory, "0", index, width).read_bytes()
            yield from ((data[at : at + 32], None) for at in range(0, len(data), 32))
            continue
        data = file.read_bytes()
        while data:
            end = 2 + int.from_bytes(data[:2])
            record, data, count = data[2:end], data[end:], count + 1
            yield hashlib.sha256(b"\x00" + record).digest(), record
        if count != width:
            raise Wrong(f"bundle {index} has {count} records")


def root_of(hashes):
    """RFC 9162, 2.1.1, by its definition."""
    if len(hashes) == 1:
        return hashes[0]
    split = 1 << ((len(hashes) - 1).bit_length() - 1)
    return hashlib.sha256(b"\x01" + root_of(hashes[:split]) + root_of(hashes[split:])).digest()


def check_tiles(directory, level):
    """Every tile of hashes is there and right."""
    number = 0
    while level:
        for index in range(-(-len(level) // WIDTH)):
            here = level[index * WIDTH : (index + 1) * WIDTH]
            if path(directory, str(number), index, len(here)).read_bytes() != b"".join(here):
                raise Wrong(f"tile {index} of level {number} is not of these records")
        level = [root_of(level[at : at + WIDTH]) for at in range(0, len(level) - WIDTH + 1, WIDTH)]
        number += 1


class Rules:
    """No device twice, tokens only grow, a lease goes through its states."""

    def __init__(self):
        self.time = self.token = self.floor = 0
        self.leases, self.used, self.before = {}, {}, {}

    def take(self, record):
        if record["time"] < self.time:
            raise Wrong("it goes back in time")
        self.time = record["time"]
        if record["kind"] == "site.started":
            if record["epoch"] < self.token:
                raise Wrong("the site's tokens go back")
            self.token = record["epoch"]
        elif record["kind"] == "lease":
            self.lease(record)
        elif record["kind"] == "lease.devices":
            self.grant(self.leases[record["lease"]][1], record["grants"], False)

    def lease(self, record):
        name, event, state = record["lease"], record["event"], record["state"]
        if event in ("hold", "carried"):
            if name in self.leases and self.leases[name][0] != "held":
                raise Wrong(f"{name} is granted again")
            self.free(self.leases.pop(name, (None, {}))[1])
            self.leases[name] = (state, {})
        else:
            now, held = self.leases[name]
            if NEXT[now].get(event) != state:
                raise Wrong(f"{name} is {now}; {event} does not make it {state}")
            self.leases[name] = (state, held)
        held = self.leases[name][1]
        if "grants" in record:
            self.before, self.floor = dict(held), self.token
            self.free(held)
            self.grant(held, record["grants"], event == "carried")
        if state not in ("held", "active", "ending"):
            self.free(held)
            del self.leases[name]

    def free(self, held):
        for device, (_, milli) in held.items():
            self.used[device] -= milli
        held.clear()

    def grant(self, held, groups, carried):
        for group in groups:
            token, milli = group["token"], group.get("milli", 1000)
            for device in group["devices"]:
                if not carried and self.before.get(device, (None,))[0] != token and token <= self.floor:
                    raise Wrong(f"{device} is granted with an old token")
                self.used[device] = self.used.get(device, 0) + milli
                if self.used[device] > 1000:
                    raise Wrong(f"{device} is granted twice")
                held[device] = (token, milli)
            self.token = max(self.token, token)


def verify(directory, key=""):
    """How many records the ledger in a directory has; raises Wrong where it is not whole."""
    directory, named = Path(directory), Path(directory) / "witnesses"
    witnesses = named.read_text() if named.exists() else ""
    size, root = checkpoint(directory, key or (directory / "key").read_text()[:-1], witnesses)
    hashes, rules, blind, to_come, token = [], Rules(), False, 0, 0
    for number, (leaf, data) in enumerate(records(directory, size)):
        hashes.append(leaf)
        blind = blind or data is None
        record = json.loads(data or b"{}")
        if data and json.dumps(record, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode() != data:
            raise Wrong(f"record {number} is not in canonical form")
        if record.get("kind") == "seam" and blind:
            blind, to_come, token = False, record["kept"], record["token"]
            continue
        if record.get("kind") == "kept" and to_come:
            to_come, record = to_come - 1, json.loads(zlib.decompress(base64.b64decode(record["record"])))
        elif blind:
            continue
        try:
            rules.take(record)
            rules.token = rules.token if to_come else max(rules.token, token)
        except (Wrong, KeyError) as error:
            raise Wrong(f"record {number}: {error}") from None
    if blind or len(hashes) != size or (root_of(hashes) if hashes else hashlib.sha256().digest()) != root:
        raise Wrong("the records are not those that were signed")
    check_tiles(directory, hashes)
    return size


if __name__ == "__main__":
    print(verify(*sys.argv[1:]), "records, whole")
