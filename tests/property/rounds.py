"""A whole round in memory: the real machines of every site and of the hub, the driver reduced to a loop over questions.

A fault is (phase, index) -> what happens to that site's answer in that phase: "lost", or a function that alters it.
"""

import hashlib
import os
import random

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedpool.errors import IbshellError
from fedpool.secagg import masks
from fedpool.secagg.client import MaskVector, SiteRound, VectorSent
from fedpool.secagg.manifest import Manifest, Participant, SitePolicy, ValueRange
from fedpool.secagg.server import Answered, Ask, Fail, HubRound, Lost, Unmask

MODEL = b"m" * 32


class World:
    """A cohort and its vectors.

    Attributes:
        encoded: each site's words before masking.
        masked: what the hub got.
        revealed: every entry that a site recorded before it released shares.
    """

    def __init__(self, cohort, threshold, minimum=2, words=7, seed=0, degree=0, share_threshold=0, bits=32):
        self.identities = {i: Ed25519PrivateKey.generate() for i in range(1, cohort + 1)}
        self.public = {i: key.public_key().public_bytes_raw() for i, key in self.identities.items()}
        self.manifest = Manifest(
            federation="run",
            round=1,
            attempt=1,
            plan=b"p" * 32,
            model=MODEL,
            participants=tuple(Participant(i, f"s{i}", self.public[i]) for i in self.identities),
            threshold=threshold,
            share_threshold=share_threshold or threshold,
            degree=degree,
            minimum_cohort=minimum,
            parameters=words,
            metrics=(),
            ranges=(ValueRange(words, 1.0),),
            metric_range=16.0,
            max_weight=100,
            ring_bits=bits,
        )
        rng = np.random.default_rng(seed)
        kind = self.manifest.vector.ring.dtype
        self.encoded = {i: rng.integers(0, np.iinfo(kind).max, words, kind, True) for i in self.identities}
        self.masked = {}
        self.revealed = []
        self.sites = {}
        self.hub = HubRound(self.manifest)
        self.journal = []
        self.refusals = {}

    def policy(self, index, minimum=2):
        peers = {f"s{i}": key for i, key in self.public.items() if i != index}
        return SitePolicy(f"s{index}", self.public[index], peers, minimum)

    def open(self, index, manifest=None, model=MODEL, last_released=0):
        policy = self.policy(index)
        self.sites[index] = SiteRound(
            manifest or self.manifest, policy, self.identities[index], os.urandom, last_released
        )
        self.sites[index].hold(model)
        return self.sites[index].key_message

    def answer(self, ask):
        """What the site answers."""
        if ask.phase == "keys":
            return self.open(ask.index)
        site = self.sites[ask.index]
        decision = site.step(ask.question)
        for effect in decision.effects:
            assert isinstance(effect, MaskVector)
            words = self.encoded[ask.index].copy()
            masks.apply(words, effect.streams.body, 0)
            self.masked[ask.index] = words
            decision = site.step(VectorSent(hashlib.sha256(words.tobytes()).digest()))
            site.remember(ask.question, decision.replies[0])
        self.revealed += decision.entries
        return decision.replies[0]

    def run(self, faults=None, order=None):
        """Run to the end; returns `Unmask` or `Fail`."""
        shuffle = random.Random(order)
        queue = self.hub.outstanding()
        while queue:
            ask = queue.pop(shuffle.randrange(len(queue)) if order is not None else 0)
            fault = (faults or {}).get((ask.phase, ask.index))
            if fault == "lost":
                event = Lost(ask.index, ask.phase, "gone")
            else:
                try:
                    message = self.answer(ask)
                    event = Answered.of(ask.phase, fault(message) if fault else message)
                except IbshellError as error:
                    self.refusals[ask.index] = error
                    event = Lost(ask.index, ask.phase, error.message)
            for effect in self.step(event):
                if isinstance(effect, Ask):
                    queue.append(effect)
                else:
                    return effect
        raise AssertionError("the round neither ended nor went on")

    def step(self, event):
        decision = self.hub.step(event)
        self.journal += decision.entries
        return decision.effects

    def total(self, unmask: Unmask):
        """The sum that the hub gets."""
        words = np.zeros_like(self.encoded[1])
        for index in unmask.survivors:
            masks.add(words, self.masked[index])
        masks.apply(words, unmask.removal.body, 0)
        return words

    def plain(self, survivors):
        """The sum of the survivors' encodings, in the ring."""
        words = np.zeros_like(self.encoded[1])
        for index in survivors:
            words += self.encoded[index]
        return words


__all__ = ["Fail", "World"]
