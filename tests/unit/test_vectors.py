"""The protocol's test vectors, checked by an implementation written from site/protocol.md alone: nothing of fedpool here."""

import hashlib
import hmac
import json
import math
import struct
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

DIRECTORY = Path(__file__).parent.parent.parent / "site" / "vectors"
PREFIX = b"ibshell/sa2/"
PRIME = 2**521 - 1
LIMITS = {16: 2**15, 24: 2**23, 32: 2**30, 64: 2**52}


def read(name):
    return json.loads((DIRECTORY / f"{name}.json").read_text())


def u32(value):
    return value.to_bytes(4, "big")


def u64(value):
    return value.to_bytes(8, "big")


def f64(value):
    return struct.pack(">d", value)


def H(*parts):
    return hashlib.sha256(b"".join(u64(len(part)) + part for part in parts)).digest()


def extract(salt, key):
    return hmac.digest(salt, key, "sha256")


def expand(key, info):
    return hmac.digest(key, info + b"\x01", "sha256")


def stream(key, offset, size):
    """AES-256-CTR from a byte offset."""
    first, skip = divmod(offset, 16)
    cipher = Cipher(algorithms.AES(key), modes.CTR(first.to_bytes(16, "big"))).encryptor()
    return cipher.update(bytes(skip + size))[skip:]


def width(bits):
    return 4 if bits == 24 else bits // 8


def words(key, bits, first, count):
    raw = stream(key, first * width(bits), count * width(bits))
    return [int.from_bytes(raw[i : i + width(bits)], "little") % (1 << bits) for i in range(0, len(raw), width(bits))]


def keystream_key(seed, context, purpose, part):
    return expand(seed, H(PREFIX + b"keystream", context, purpose, part))


def fraction_bits(clip, sites, bits):
    limit = min((2 ** (bits - 1) - 1) // sites, LIMITS[bits] - 1)
    return max(f for f in range(-60, 64) if math.ceil(math.ldexp(clip, f)) <= limit)


def encoded(values, base, clip, factor, rounding_key, first):
    """Integers and how many were clipped."""
    random, found, clipped = stream(rounding_key, 2 * first, 2 * len(values)), [], 0
    for place, (value, old) in enumerate(zip(values, base, strict=True)):
        x = value - old
        clipped += abs(x) > clip
        r = int.from_bytes(random[2 * place : 2 * place + 2], "little")
        found.append(math.floor(max(-clip, min(clip, x)) * factor + r / 65536))
    return found, clipped


def rebuilt(shares, threshold):
    points = sorted((int(x), int.from_bytes(bytes.fromhex(y), "big")) for x, y in shares.items())[:threshold]
    total = 0
    for x, y in points:
        for other, _ in points:
            if other != x:
                y = y * other * pow(other - x, -1, PRIME) % PRIME
        total += y
    return (total % PRIME).to_bytes(32, "big")


def floats(text):
    return [value for (value,) in struct.iter_unpack("<f", bytes.fromhex(text))]


def test_hashes():
    found = read("hashes")
    for case in found["digests"]:
        assert H(*map(bytes.fromhex, case["parts"])).hex() == case["digest"]
    assert list(found["numbers"].values()) == [u32(7).hex(), u64(1 << 40).hex(), f64(-0.5).hex()]
    for name, work, one, other in (("extract", extract, "salt", "key"), ("expand", expand, "key", "info")):
        case = found[name]
        assert work(bytes.fromhex(case[one]), bytes.fromhex(case[other])).hex() == case["out"]


def test_keystreams():
    for case in read("keystreams")["keystreams"]:
        seed, context, purpose = (bytes.fromhex(case[name]) for name in ("seed", "context", "purpose"))
        key = keystream_key(seed, context, purpose, case["part"].encode())
        assert key.hex() == case["key"]
        assert words(key, case["ring_bits"], case["first"], 4) == case["words"]


def test_encodings():
    for case in read("encodings")["encodings"]:
        bits, clip = case["ring_bits"], case["clip"]
        assert fraction_bits(clip, case["sites"], bits) == case["fraction_bits"]
        factor = math.ldexp(case["weight"] / case["max_weight"], case["fraction_bits"])
        key = bytes.fromhex(case["rounding_key"])
        found, clipped = encoded(floats(case["values"]), floats(case["base"]), clip, factor, key, case["first"])
        assert ([x % (1 << bits) for x in found], clipped) == (case["words"], case["clipped"])


def test_shares():
    for case in read("shares")["shares"]:
        assert rebuilt(case["shares"], case["threshold"]).hex() == case["secret"]


def test_graphs():
    found = read("graphs")
    context, members, half = bytes.fromhex(found["context"]), range(1, len(found["order"]) + 1), found["degree"] // 2
    order = sorted(members, key=lambda i: H(PREFIX + b"graph", context, u32(i)))
    assert order == found["order"]
    for place, index in enumerate(order):
        near = {order[(place + step) % len(order)] for step in range(-half, half + 1)} - {index}
        assert sorted(near) == found["neighbours"][str(index)]
    assert all(size["degree"] == 0 for n, size in found["sizes"].items() if int(n) <= 32)


class Round:
    """The recorded round, recomputed from the sites' secrets."""

    def __init__(self):
        self.data = read("round")
        self.sites = sorted(self.data["manifest"]["participants"], key=lambda site: site["index"])
        self.context = bytes.fromhex(self.data["HK"])
        self.secrets = {int(i): secret for i, secret in self.data["secrets"].items()}

    def answers(self, phase):
        return {answer["index"]: answer for answer in self.data["answers"] if answer["phase"] == phase}

    def signed(self, answer, digest):
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(self.sites[answer["index"] - 1]["identity"]))
        key.verify(bytes.fromhex(answer["signature"]), PREFIX + b"signature" + digest)

    def secret(self, index, name):
        return bytes.fromhex(self.secrets[index][name])

    def exchanged(self, i, j):
        public = bytes.fromhex(self.answers("keys")[j]["public"])[:32]
        own = X25519PrivateKey.from_private_bytes(self.secret(i, "x25519"))
        return own.exchange(X25519PublicKey.from_public_bytes(public))

    def encapsulated(self, i, j):
        """ct_ij and ss_ij."""
        [dealing] = [d for d in self.answers("shares")[i]["dealings"] if d["holder"] == j]
        ct = bytes.fromhex(dealing["ciphertext"])
        return ct, MLKEM768PrivateKey.from_seed_bytes(self.secret(j, "mlkem_seed")).decapsulate(ct)

    def pair_seed(self, i, j):
        i, j = sorted((i, j))
        (up, ss_up), (down, ss_down) = self.encapsulated(i, j), self.encapsulated(j, i)
        key = extract(H(PREFIX + b"pair", self.context), self.exchanged(i, j) + ss_up + ss_down)
        return expand(key, H(PREFIX + b"seed", u32(i), u32(j), up, down))

    def opened(self, i, j):
        """The shares that i dealt to j."""
        ct, ss = self.encapsulated(i, j)
        key = extract(H(PREFIX + b"pair", self.context), self.exchanged(i, j) + ss)
        key = expand(key, H(PREFIX + b"share-key", u32(i), u32(j), ct))
        [dealing] = [d for d in self.answers("shares")[i]["dealings"] if d["holder"] == j]
        plain = AESGCM(key).decrypt(bytes(12), bytes.fromhex(dealing["sealed"]), self.context)
        return plain[16:82], plain[98:164]


@pytest.fixture(scope="module")
def recorded():
    return Round()


def test_the_manifest_and_the_keys(recorded):
    m = recorded.data["manifest"]
    texts = [m["metrics"], m["exclude"]]
    parts = [u32(m["version"]), m["suite"].encode(), m["federation"].encode(), u64(m["round"]), u64(m["attempt"])]
    parts += [bytes.fromhex(m["plan"]), bytes.fromhex(m["model"])]
    parts += [u32(m[k]) for k in ("threshold", "share_threshold", "degree", "minimum_cohort", "ring_bits")]
    parts += [u64(m["parameters"]), f64(m["metric_range"]), u64(m["max_weight"]), f64(m["norm_clip"])]
    for names in texts:
        parts += [u32(len(names)), *(name.encode() for name in names)]
    parts += [u32(len(m["ranges"])), *(u64(r["values"]) + f64(r["clip"]) for r in m["ranges"])]
    for site in recorded.sites:
        parts += [u32(site["index"]), site["name"].encode(), bytes.fromhex(site["identity"])]
    manifest = H(PREFIX + b"manifest", *parts)
    assert manifest.hex() == recorded.data["HM"]
    digests = []
    for index, answer in sorted(recorded.answers("keys").items()):
        digest = H(PREFIX + b"key-message", manifest, u32(index), bytes.fromhex(answer["public"]))
        recorded.signed(answer, digest)
        digests.append(u32(index) + digest)
    assert H(PREFIX + b"keys", manifest, *digests) == recorded.context


def test_the_shares_are_those_committed_to_and_rebuild_the_secrets(recorded):
    everybody = sorted(recorded.secrets)
    for i in everybody:
        message = recorded.answers("shares")[i]
        for place, kind in enumerate(("own", "box")):
            secret = recorded.secret(i, "own_seed" if kind == "own" else "box_key")
            check = H(PREFIX + b"secret-check", recorded.context, u32(i), kind.encode(), secret)
            assert check.hex() == message[f"{kind}_check"]
            shares = {str(j): recorded.opened(i, j)[place].hex() for j in everybody if j != i}
            assert rebuilt(shares, recorded.data["manifest"]["share_threshold"]) == secret


def test_the_seeds_are_confirmed(recorded):
    for i, answer in recorded.answers("confirm").items():
        others = [j for j in sorted(recorded.secrets) if j != i]
        pairs = [(*map(u32, sorted((i, j))), recorded.pair_seed(i, j)) for j in others]
        checks = [H(PREFIX + b"pair-check", recorded.context, *pair) for pair in pairs]
        assert [check.hex() for check in checks] == answer["checks"]
        plain = AESGCM(recorded.secret(i, "box_key")).decrypt(bytes(12), bytes.fromhex(answer["box"]), recorded.context)
        assert plain == b"".join(u32(j) + recorded.pair_seed(i, j) for j in others)
        dealers = H(*map(u32, answer["dealers"]))
        box = H(bytes.fromhex(answer["box"]))
        recorded.signed(answer, H(PREFIX + b"confirm-message", recorded.context, u32(i), dealers, box, *checks))


def masks_of(recorded, i, part, bits, count):
    """The sum of a site's masks."""
    total = words(
        keystream_key(recorded.secret(i, "own_seed"), recorded.context, b"self" + u32(i), part), bits, 0, count
    )
    for j in recorded.secrets:
        if j != i:
            key = keystream_key(recorded.pair_seed(i, j), recorded.context, b"pair", part)
            sign = 1 if i < j else -1
            total = [a + sign * b for a, b in zip(total, words(key, bits, 0, count), strict=True)]
    return total


def integers(recorded, i):
    """A site's encoding: body and tail."""
    m, update = recorded.data["manifest"], recorded.data["updates"][str(i)]
    sites, weight, values = len(recorded.sites), update["weight"], floats(update["values"])
    body, first = [], 0
    seed = recorded.secret(i, "rounding_seed")
    body_key, tail_key = (
        keystream_key(seed, recorded.context, PREFIX + b"rounding", part) for part in (b"body", b"tail")
    )
    for part in m["ranges"]:
        last = first + part["values"]
        factor = math.ldexp(weight / m["max_weight"], fraction_bits(part["clip"], sites, m["ring_bits"]))
        body += encoded(values[first:last], [0.0] * (last - first), part["clip"], factor, body_key, first)[0]
        first = last
    factor = math.ldexp(weight / m["max_weight"], fraction_bits(m["metric_range"], sites, 64))
    loss, _ = encoded([update["loss"]], [0.0], m["metric_range"], factor, tail_key, 0)
    return body, [weight, 0, *loss]


def test_the_vectors_and_their_sum(recorded):
    m, sums = recorded.data["manifest"], None
    for i, answer in recorded.answers("input").items():
        body, tail = integers(recorded, i)
        masked = zip(body, masks_of(recorded, i, b"body", 24, m["parameters"]), strict=True)
        data = b"".join(((a + b) % (1 << 24)).to_bytes(3, "little") for a, b in masked)
        rest = bytes(-len(data) % 8)
        for a, b in zip(tail, masks_of(recorded, i, b"tail", 64, len(tail)), strict=True):
            rest += ((a + b) % (1 << 64)).to_bytes(8, "little")
        assert (data + rest).hex() == recorded.data["vectors"][str(i)]
        digest = H(
            PREFIX + b"vector", u64(len(data + rest)), hashlib.sha256(data).digest(), hashlib.sha256(rest).digest()
        )
        assert digest.hex() == answer["vector"]
        masked_for = H(*(u32(j) for j in sorted(recorded.secrets)))
        recorded.signed(answer, H(PREFIX + b"vector-message", recorded.context, u32(i), masked_for, digest))
        whole = body + tail
        sums = whole if sums is None else [a + b for a, b in zip(sums, whole, strict=True)]
    assert sums == recorded.data["sum"]["values"] + recorded.data["sum"]["tail"]


def test_the_survivors_and_what_is_released(recorded):
    vectors = recorded.answers("input")
    masked_for = H(*(u32(j) for j in sorted(recorded.secrets)))
    listed = H(*(u32(i) + bytes.fromhex(vectors[i]["vector"]) for i in sorted(vectors)))
    for answer in recorded.answers("survivors").values():
        recorded.signed(answer, H(PREFIX + b"survivor-message", recorded.context, masked_for, listed))
    threshold, dropped = recorded.data["manifest"]["share_threshold"], recorded.data["dropped"]
    own, box = {}, {}
    for holder, answer in recorded.answers("release").items():
        for found, kind in ((own, "own"), (box, "box")):
            for revealed in answer[kind]:
                found.setdefault(revealed["dealer"], {})[str(holder)] = revealed["share"]
    assert sorted(own) == sorted(vectors) and list(box) == [dropped]
    for i, shares in own.items():
        assert rebuilt(shares, threshold) == recorded.secret(i, "own_seed")
    assert rebuilt(box[dropped], threshold) == recorded.secret(dropped, "box_key")
