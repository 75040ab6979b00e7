"""Write the protocol's test vectors: python tests/vectors.py

They stand under site/vectors. Rounds contain ML-KEM encapsulations, whose randomness the library draws itself, so each run
writes another round; everything in a file follows from what stands in the same file.
"""

import hashlib
import itertools
import json
import random
import sys
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedpool.secagg import encoding, graph, masks, ring, shamir, transcript, vector
from fedpool.secagg.client import SiteRound, VectorSent
from fedpool.secagg.manifest import Manifest, Participant, SitePolicy, ValueRange, default_threshold
from fedpool.secagg.server import Answered, Ask, HubRound, Lost, Unmask

DIRECTORY = Path(__file__).parent.parent / "site" / "vectors"
DROPPED = 3


def drawn(seed):
    """A source of bytes that another run repeats."""
    generator = random.Random(seed)
    return generator.randbytes


def hashes():
    """Hashing with length prefixes, integers, HKDF."""
    t, key = transcript, bytes(range(32))
    lists = [[], [b""], [b"ab", b"c"], [b"a", b"bc"], [transcript.LABEL_KEYS, t.u32(7) + t.u64(1 << 40) + t.f64(-0.5)]]
    return {
        "digests": [{"parts": [p.hex() for p in parts], "digest": t.digest(*parts).hex()} for parts in lists],
        "numbers": {"u32 7": t.u32(7).hex(), "u64 2^40": t.u64(1 << 40).hex(), "f64 -0.5": t.f64(-0.5).hex()},
        "extract": {"salt": key.hex(), "key": key[::-1].hex(), "out": t.extract(key, key[::-1]).hex()},
        "expand": {"key": key.hex(), "info": b"info".hex(), "out": t.expand(key, b"info").hex()},
    }


def keystreams():
    """Keys and keystream words at offsets, in every ring."""
    seed, context = bytes(range(32)), bytes(range(32, 64))
    found = []
    for purpose, part in ((b"pair", b"body"), (b"self" + transcript.u32(3), b"tail")):
        key = masks.keystream_key(seed, context, purpose, part)
        for bits, first in itertools.product(ring.WIDTHS, (0, 5, (1 << 40) + 3)):
            words = ring.of(bits).zeros(4)
            masks.apply(words, [masks.Stream(key, 1)], first)
            found.append(
                {
                    "seed": seed.hex(), "context": context.hex(), "purpose": purpose.hex(), "part": part.decode(),
                    "key": key.hex(), "ring_bits": bits, "first": first,
                    "words": [int(word) % (1 << bits) for word in words],
                }
            )  # fmt: skip
    return {"keystreams": found}


def encodings():
    """Values to words and back."""
    found, key = [], bytes(range(32))
    values = np.array([0.0, 0.25, -0.25, 1e-7, -3.0, 0.999, 3.4e38, -1e-45], np.float32)
    base = np.array([0, 0.125, 0.125, 0, 0, 1, 0, 0], np.float32)
    for bits, (cohort, weight) in itertools.product(ring.WIDTHS, ((2, 100), (16, 37), (400, 1))):
        fixed, words = encoding.fit(1.0, 100, cohort, bits), ring.of(bits).zeros(len(values))
        count = masks.mask(values, base, 1.0, fixed.factor(weight), key, [], 1000, words).saturated
        found.append(
            {
                "ring_bits": bits, "clip": 1.0, "max_weight": 100, "sites": cohort, "weight": weight,
                "fraction_bits": fixed.fraction_bits, "rounding_key": key.hex(), "first": 1000,
                "values": values.tobytes().hex(), "base": base.tobytes().hex(), "clipped": count,
                "words": [int(word) % (1 << bits) for word in words],
            }
        )  # fmt: skip
    return {"encodings": found}


def shares():
    """Secrets and their shares."""
    entropy, found = drawn(1), []
    for threshold, holders in ((1, [1]), (2, [1, 2]), (3, [1, 4, 5, 900]), (5, [2, 3, 5, 7, 11, 13])):
        secret = entropy(32)
        split = shamir.split(secret, threshold, holders, entropy)
        found.append(
            {
                "secret": secret.hex(), "threshold": threshold,
                "shares": {str(holder): share.hex() for holder, share in split.items()},
            }
        )  # fmt: skip
    return {"shares": found}


def graphs():
    """Degrees, thresholds and the ring's order."""
    sizes = {}
    for size in (2, 32, 33, 64, 100, 200, 500, 1000):
        found = graph.choose(size, default_threshold(size))
        sizes[size] = {"degree": found.degree, "share_threshold": found.share_threshold}
    context, members = bytes(32), list(range(1, 12))
    order = graph.order(context, members)
    near = {str(i): graph.neighbours(order, 4, i) for i in members}
    return {"sizes": sizes, "context": context.hex(), "order": order, "degree": 4, "neighbours": near}


def plain(value):
    """A message as JSON: bytes in hexadecimal."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "__struct_fields__"):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    return value


def a_round():
    """Four sites with five values and a metric; the third masks and then drops out."""
    entropy = drawn(2)
    identities = {i: Ed25519PrivateKey.from_private_bytes(entropy(32)) for i in range(1, 5)}
    public = {i: key.public_key().public_bytes_raw() for i, key in identities.items()}
    manifest = Manifest(
        federation="f016dfdc", round=3, attempt=1, plan=entropy(32), model=entropy(32),
        participants=tuple(Participant(i, f"site-{i}", public[i]) for i in public),
        threshold=3, share_threshold=3, degree=0, minimum_cohort=3, parameters=5, metrics=("loss",),
        ranges=(ValueRange(3, 1.0), ValueRange(2, 0.25)), metric_range=16.0, max_weight=100, norm_clip=2.0,
        exclude=("head.*",), ring_bits=24,
    )  # fmt: skip
    hub, sites, said, vectors, secrets = HubRound(manifest), {}, [], {}, {}

    def answer(ask):
        index = ask.index
        if ask.phase == "keys":
            secret = drawn(100 + index)
            peers = {f"site-{i}": key for i, key in public.items() if i != index}
            policy = SitePolicy(f"site-{index}", public[index], peers, 3)
            sites[index] = SiteRound(manifest, policy, identities[index], secret, 2)
            sites[index].hold(manifest.model)
            names = [("x25519", 32), ("mlkem_seed", 64), ("own_seed", 32), ("box_key", 32), ("rounding_seed", 32)]
            again = drawn(100 + index)
            secrets[index] = {name: again(size).hex() for name, size in names}
            secrets[index]["identity"] = identities[index].private_bytes_raw().hex()
            return sites[index].key_message
        decision = sites[index].step(ask.question)
        for effect in decision.effects:
            vectors[index] = masked(manifest, index, effect)
            digest = manifest.vector.digest_of(np.frombuffer(vectors[index], np.uint8), 1)
            return sites[index].step(VectorSent(digest)).replies[0]
        return decision.replies[0]

    questions = hub.outstanding()
    while questions:
        ask = questions.pop(0)
        if ask.phase == "input" and ask.index == DROPPED:
            event = Lost(ask.index, ask.phase, "gone")
        else:
            message = answer(ask)
            said.append({"phase": ask.phase, **plain(message)})
            event = Answered.of(ask.phase, message)
        for effect in hub.step(event).effects:
            if isinstance(effect, Ask):
                questions.append(effect)
            else:
                assert isinstance(effect, Unmask)
                total = unmasked(manifest, [vectors[i] for i in effect.survivors], effect.removal)
    return {
        "manifest": plain(manifest), "HM": manifest.digest().hex(), "HK": hub._context.hex(),
        "secrets": secrets, "dropped": DROPPED, "answers": said,
        "updates": {i: {"weight": WEIGHTS[i], "values": update(i).tobytes().hex(), "loss": 0.5 * i} for i in vectors},
        "vectors": {i: data.hex() for i, data in vectors.items()}, "sum": total,
    }  # fmt: skip


WEIGHTS = {1: 100, 2: 50, 4: 7}


def update(index):
    """What a site trained, minus the global parameters: within norm and ranges, so that nothing is scaled."""
    return np.array([0.5 / index, -0.25, 1e-4, 0.2, -0.125 * index / 4], np.float32)


def masked(manifest, index, effect):
    """The bytes of a site's vector."""
    layout, file = manifest.vector, np.zeros(manifest.vector.size, np.uint8)
    words, values = layout.ring.zeros(5), update(index)
    for first, last, clip in ((0, 3, 1.0), (3, 5, 0.25)):
        factor = manifest.value_encoding(clip).factor(WEIGHTS[index])
        masks.mask(values[first:last], None, clip, factor, effect.rounding_key, (), first, words[first:last])
    masks.apply(words, effect.streams.body, 0)
    layout.ring.write(words, file[:15])
    tail = layout.tail(file)
    tail[vector.WEIGHT] = WEIGHTS[index]
    fixed, loss = manifest.metric_encoding(), np.array([0.5 * index], np.float32)
    masks.mask(
        loss, None, fixed.clip, fixed.factor(WEIGHTS[index]), effect.rounding_tail, (), 0, tail[vector.METRICS :]
    )
    masks.apply(tail, effect.streams.tail, 0)
    return file.tobytes()


def unmasked(manifest, found, removal):
    """The sum of the survivors' encodings, as integers."""
    layout, files = manifest.vector, [np.frombuffer(data, np.uint8) for data in found]
    words, tail = layout.ring.zeros(5), np.zeros(layout.tail_words, "<u8")
    for file in files:
        masks.add(words, layout.ring.read(file[:15]))
        masks.add(tail, layout.tail(file))
    masks.apply(words, removal.body, 0)
    masks.apply(tail, removal.tail, 0)
    lifted = (words << layout.ring.lift).view(np.int32) >> layout.ring.lift
    return {"values": lifted.tolist(), "tail": tail.view(np.int64).tolist()}


FILES = {
    "hashes": hashes, "keystreams": keystreams, "encodings": encodings, "shares": shares, "graphs": graphs,
    "round": a_round,
}  # fmt: skip


def main():
    """Write every file."""
    DIRECTORY.mkdir(exist_ok=True)
    for name, make in FILES.items():
        text = json.dumps(make(), indent=1)
        (DIRECTORY / f"{name}.json").write_text(text + "\n")
        print(f"{name}.json", hashlib.sha256(text.encode()).hexdigest()[:8], len(text))


if __name__ == "__main__":
    sys.exit(main())
