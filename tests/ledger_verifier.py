"""A verifier of exported ledgers that shares nothing with the project but the specification: hashlib, json and cryptography.

    python tests/ledger_verifier.py DIRECTORY-OF-A-SITE [KEY]

It is here to show that site/ledger.md says everything that somebody else needs, and to disagree when the project errs.
"""

import base64
import hashlib
import json
import struct
import sys
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

WIDTH = 256
NEXT = {
    ("held", "commit"): "active",
    ("held", "abort"): "aborted",
    ("held", "end"): "ending",
    ("active", "renew"): "active",
    ("active", "resize"): "active",
    ("active", "notify"): "active",
    ("active", "transfer"): "active",
    ("active", "end"): "ending",
    ("ending", "release"): "released",
    ("ending", "expire"): "expired",
    ("ending", "revoke"): "revoked",
    ("ending", "fail"): "failed",
}


class Wrong(Exception):
    """What is wrong with a ledger."""


def path(directory, kind, index, width):
    parts = [f"{index % 1000:03}"]
    while index := index // 1000:
        parts.insert(0, f"x{index % 1000:03}")
    name = "/".join(parts) + ("" if width == WIDTH else f".p/{width}")
    return directory / "tile" / kind / name


def checkpoint(directory, key):
    """(size, root) that the key has signed."""
    name, key_id, encoded = key.split("+", 2)
    public = base64.b64decode(encoded)
    if public[0] != 1 or hashlib.sha256(name.encode() + b"\n" + public).digest()[:4].hex() != key_id:
        raise Wrong("the key is malformed")
    text, _, signatures = (directory / "checkpoint").read_text().rpartition("\n\n")
    text += "\n"
    if not signatures.endswith("\n"):
        raise Wrong("the checkpoint is cut short")
    for line in signatures[:-1].split("\n"):
        dash, who, signature = line.split(" ")
        data = base64.b64decode(signature)
        if dash == "—" and who == name and data[:4].hex() == key_id:
            try:
                Ed25519PublicKey.from_public_bytes(public[1:]).verify(data[4:], text.encode())
            except InvalidSignature:
                raise Wrong("the checkpoint's signature is not of the key") from None
            origin, size, root = text.split("\n")[:3]
            if origin != name:
                raise Wrong("the checkpoint is of another ledger")
            return int(size), base64.b64decode(root)
    raise Wrong("the checkpoint is not signed by the key")


def records(directory, size):
    for index in range(-(-size // WIDTH)):
        width = min(WIDTH, size - index * WIDTH)
        data, count = path(directory, "entries", index, width).read_bytes(), 0
        while data:
            (length,) = struct.unpack(">H", data[:2])
            yield data[2 : 2 + length]
            data, count = data[2 + length :], count + 1
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
        match record["kind"]:
            case "site.started":
                if record["epoch"] < self.token:
                    raise Wrong("the site's tokens go back")
                self.token = record["epoch"]
            case "lease":
                self.lease(record)
            case "lease.devices":
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
            if NEXT.get((now, event)) != state:
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
    """How many records the ledger in a directory has.

    Raises:
        Wrong: it is not whole.
    """
    directory = Path(directory)
    size, root = checkpoint(directory, key or (directory / "key").read_text().strip())
    hashes, rules = [], Rules()
    for number, data in enumerate(records(directory, size)):
        hashes.append(hashlib.sha256(b"\x00" + data).digest())
        record = json.loads(data)
        if json.dumps(record, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode() != data:
            raise Wrong(f"record {number} is not in canonical form")
        try:
            rules.take(record)
        except (Wrong, KeyError) as error:
            raise Wrong(f"record {number}: {error}") from None
    if len(hashes) != size or (root_of(hashes) if hashes else hashlib.sha256().digest()) != root:
        raise Wrong("the records are not those that were signed")
    check_tiles(directory, hashes)
    return size


if __name__ == "__main__":
    print(verify(*sys.argv[1:]), "records, whole")
