"""A site's side of one round, as a machine without input or output.

    opened ── DealShares ──▶ dealt ── ConfirmPairs ──▶ confirmed ── BeginMasking ──▶ masking ── VectorSent ──▶ masked
                                                                                                               │
                              released ◀── ReleaseShares ── agreed ◀────────── AgreeSurvivors ─────────────────┘

What it guarantees to its own site, whatever the hub sends:
- it answers each step once: the same request again gets the same answer, another request for a step already answered is
  refused. So one set of keys, one masked vector, one survivor list a round.
- it reveals shares only for a survivor list that `threshold` members signed, that it signed itself, and that keeps the
  minimum cohort; for each dealer either the own-mask share or the box share, never both.
- the decision to reveal is an entry, durable before the reply leaves; the site's policy refuses that round ever after.

Rules for changing it: everything that decides stands here; files, sockets and arithmetic on vectors stand in the driver.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedpool.errors import IntegrityError, LocalProtocolError, Refused
from fedpool.secagg import agreement, graph, masks, sealing, shamir, transcript
from fedpool.secagg.agreement import Encapsulation, RoundKeys
from fedpool.secagg.manifest import Manifest, SitePolicy
from fedpool.secagg.messages import (
    KIND_BOX,
    KIND_OWN,
    ConfirmHeader,
    ConfirmMessage,
    Dealing,
    KeyHeader,
    KeyMessage,
    ReleaseMessage,
    RevealedShare,
    ShareDelivery,
    ShareMessage,
    SurvivorMessage,
    VectorMessage,
    key_context,
    list_digest,
    pair_check,
    secret_check,
    share_check,
)
from fedpool.secagg.shamir import Entropy
from fedpool.step import Decision

SALT_BYTES = 16
LABEL_SELF = b"self"
LABEL_PAIR = b"pair"


class DealShares(msgspec.Struct, frozen=True):
    """The hub hands out the public keys of this site and its neighbours, and the digests of all others."""

    keys: list[KeyMessage]
    others: list[KeyHeader]


class ConfirmPairs(msgspec.Struct, frozen=True):
    """The hub hands this site its neighbours' shares for it, and names everybody who dealt."""

    shares: list[ShareDelivery]
    dealers: list[int]


class BeginMasking(msgspec.Struct, frozen=True):
    """The hub names the sites that confirmed, the set the vector is masked for, and shows the neighbours' confirmations."""

    confirms: list[ConfirmHeader]
    members: list[int]


class VectorSent(msgspec.Struct, frozen=True):
    """The driver has masked the vector; its SHA-256."""

    digest: bytes


class AgreeSurvivors(msgspec.Struct, frozen=True):
    """The hub names the sites whose vectors it holds in full, with their signed digests."""

    vectors: list[VectorMessage]


class ReleaseShares(msgspec.Struct, frozen=True):
    """The hub presents the members' signatures on the survivor list."""

    signatures: list[SurvivorMessage]


SiteEvent: TypeAlias = DealShares | ConfirmPairs | BeginMasking | VectorSent | AgreeSurvivors | ReleaseShares
SiteReply: TypeAlias = ShareMessage | ConfirmMessage | VectorMessage | SurvivorMessage | ReleaseMessage


class SharesReleased(msgspec.Struct, frozen=True, tag="round.released"):
    """Durable before a share leaves: this site will never release for that round again."""

    federation: str
    round: int
    manifest: bytes
    survivors: tuple[str, ...]
    dropped: tuple[str, ...]


class MaskVector(msgspec.Struct, frozen=True):
    """Mask the encoded update with these streams and send it."""

    streams: masks.Masks
    rounding_key: bytes
    rounding_tail: bytes


SiteDecision: TypeAlias = Decision[SharesReleased, SiteReply, MaskVector]

TRANSITIONS: dict[tuple[str, type], str] = {
    ("opened", DealShares): "dealt",
    ("dealt", ConfirmPairs): "confirmed",
    ("confirmed", BeginMasking): "masking",
    ("masking", VectorSent): "masked",
    ("masked", AgreeSurvivors): "agreed",
    ("agreed", ReleaseShares): "released",
}
STATES = ("opened", "dealt", "confirmed", "masking", "masked", "agreed", "released")


class SiteRound:
    """One round at one site.

    Args:
        manifest: the round, already admitted by `policy`.
        policy: what this site demands.
        identity: its signing key.
        entropy: source of random bytes.
        last_released: last round of this federation for which this site released shares, or 0.

    Raises:
        UsageError, Refused: see `SitePolicy.admit`.
    """

    def __init__(
        self,
        manifest: Manifest,
        policy: SitePolicy,
        identity: Ed25519PrivateKey,
        entropy: Entropy,
        last_released: int,
    ) -> None:
        self.index = policy.admit(manifest, last_released)
        self.manifest = manifest
        self._holds_model = False
        self.state = "opened"
        self._identity = identity
        self._entropy = entropy
        self._digest = manifest.digest()
        self._keys = RoundKeys(entropy)
        self._own_seed = entropy(shamir.SECRET_BYTES)
        self._box_key = entropy(shamir.SECRET_BYTES)
        self._rounding_seed = entropy(shamir.SECRET_BYTES)
        self._context = b""
        self._ring: list[int] = []
        self._neighbours: list[int] = []
        self._dealers: list[int] = []
        self._sent: dict[int, Encapsulation] = {}
        self._exchanged: dict[int, bytes] = {}
        self._held: dict[int, tuple[RevealedShare, RevealedShare]] = {}
        self._seeds: dict[int, bytes] = {}
        self._masked_for: list[int] = []
        self._masked_digest = b""
        self._vector = b""
        self._survivors: list[int] = []
        self._survivor_digest = b""
        self._answers: dict[type, tuple[bytes, SiteReply]] = {}
        signature = agreement.sign(identity, KeyMessage.digest(self._digest, self.index, self._keys.public))
        self.key_message = KeyMessage(self.index, self._keys.public, signature)

    def hold(self, model: bytes) -> None:
        """Say which global parameters this site really loaded: without the right ones nothing is masked.

        Args:
            model: their SHA-256.

        Raises:
            Refused: they are not those of the manifest.
        """
        if model != self.manifest.model:
            named = self.manifest.model.hex()[:16]
            raise Refused(
                f"round {self.manifest.round} names model {named}, this site holds {model.hex()[:16]}",
                "the hub may be showing different sites different models",
            )
        self._holds_model = True

    def step(self, event: SiteEvent) -> SiteDecision:
        """Decide what follows from an event. See `fedpool.step`.

        Raises:
            Refused: the step was answered before, for another request.
            IntegrityError: the hub or a peer sent something that does not verify; the message names whom.
            LocalProtocolError: the event does not belong to the present state.
        """
        kind = type(event)
        if kind in self._answers:
            request, reply = self._answers[kind]
            if request == msgspec.msgpack.encode(event):
                return Decision(replies=(reply,))
            raise Refused(
                f"round {self.manifest.round}: {kind.__name__} was already answered for another list",
                "a site answers each step of a round once",
            )
        after = TRANSITIONS.get((self.state, kind))
        if after is None:
            raise LocalProtocolError(f"round {self.manifest.round}: {kind.__name__} does not follow state {self.state}")
        decision = self._decide(event)
        self.state = after
        for reply in decision.replies:
            self._answers[kind] = (msgspec.msgpack.encode(event), reply)
        return decision

    def remember(self, event: BeginMasking, reply: SiteReply) -> None:
        """Keep the answer that an effect's result gave to the question that started it, for when it is asked again."""
        self._answers[type(event)] = (msgspec.msgpack.encode(event), reply)

    def _decide(self, event: SiteEvent) -> SiteDecision:
        match event:
            case DealShares():
                return self._deal(event)
            case ConfirmPairs():
                return self._confirm(event)
            case BeginMasking():
                return self._begin(event)
            case VectorSent():
                return self._vector_sent(event)
            case AgreeSurvivors():
                return self._agree(event)
            case ReleaseShares():
                return self._release(event)

    def _name(self, index: int) -> str:
        return self.manifest.participant(index).name

    def _verify(self, index: int, signature: bytes, digest: bytes) -> None:
        site = self.manifest.participant(index)
        agreement.verify(site.identity, signature, digest, site.name)

    def _members(self, indices: list[int], what: str) -> list[int]:
        """The indices, checked: ascending, known, a quorum."""
        if indices != sorted(set(indices)) or not all(1 <= i <= len(self.manifest.participants) for i in indices):
            raise IntegrityError(f"round {self.manifest.round}: the list of {what} is malformed")
        if len(indices) < self.manifest.quorum:
            raise Refused(
                f"round {self.manifest.round}: {len(indices)} {what}, {self.manifest.quorum} needed",
                "nothing is revealed; more sites must stay in",
            )
        return indices

    def _key_headers(self, event: DealShares) -> list[KeyHeader]:
        """Everybody's keys as digests, checked: signed, this site's own among them."""
        whole = [key.header(self._digest) for key in event.keys]
        headers = sorted([*whole, *event.others], key=lambda header: header.index)
        members = self._members([header.index for header in headers], "sites with keys")
        if self.key_message not in event.keys:
            raise IntegrityError(f"round {self.manifest.round}: the key list does not hold this site's own key")
        for key in event.keys:
            if len(key.public) != agreement.PUBLIC_BYTES:
                raise IntegrityError(f"the round key of {self._name(key.index)} is malformed")
        for header in headers:
            self._verify(header.index, header.signature, header.key)
        if len({key.public for key in event.keys}) < len(event.keys):
            raise IntegrityError(f"round {self.manifest.round}: two sites present the same round key")
        context = key_context(self._digest, headers)
        self._ring = graph.order(context, members)
        self._neighbours = self._neighbours_of(self.index)
        if [key.index for key in event.keys] != sorted([*self._neighbours, self.index]):
            raise IntegrityError(f"round {self.manifest.round}: the keys are not those of this site's neighbours")
        return headers

    def _neighbours_of(self, index: int) -> list[int]:
        return graph.neighbours(self._ring, self.manifest.degree, index)

    def _deal(self, event: DealShares) -> SiteDecision:
        context = key_context(self._digest, self._key_headers(event))
        holders = sorted([*self._neighbours, self.index])
        own_shares = shamir.split(self._own_seed, self.manifest.share_threshold, holders, self._entropy)
        box_shares = shamir.split(self._box_key, self.manifest.share_threshold, holders, self._entropy)
        dealings, sent, exchanged, held = [], {}, {}, {}
        for key in event.keys:
            holder = key.index
            salts = self._entropy(SALT_BYTES), self._entropy(SALT_BYTES)
            own, box = own_shares[holder], box_shares[holder]
            if holder == self.index:
                held[holder] = (RevealedShare(holder, own, salts[0]), RevealedShare(holder, box, salts[1]))
                ciphertext, sealed = b"", b""
            else:
                exchanged[holder] = self._keys.exchange(key.public)
                sent[holder] = agreement.encapsulate(key.public)
                ciphertext = sent[holder].ciphertext
                secret = agreement.share_key(context, self.index, holder, exchanged[holder], sent[holder])
                sealed = sealing.seal(secret, salts[0] + own + salts[1] + box, context)
            dealings.append(
                Dealing(
                    holder=holder,
                    ciphertext=ciphertext,
                    sealed=sealed,
                    own_check=share_check(context, self.index, holder, KIND_OWN, own, salts[0]),
                    box_check=share_check(context, self.index, holder, KIND_BOX, box, salts[1]),
                )
            )
        checks = (
            secret_check(context, self.index, KIND_OWN, self._own_seed),
            secret_check(context, self.index, KIND_BOX, self._box_key),
        )
        digest = ShareMessage.digest(context, self.index, holders, [d.digest() for d in dealings], *checks)
        message = ShareMessage(self.index, dealings, *checks, agreement.sign(self._identity, digest))
        self._context, self._sent, self._exchanged = context, sent, exchanged
        self._held.update(held)
        return Decision(replies=(message,))

    def _open_delivery(self, delivery: ShareDelivery) -> tuple[RevealedShare, RevealedShare, Encapsulation]:
        """Check one dealer's message and open its shares."""
        dealer, dealing = delivery.index, delivery.dealing
        digest = ShareMessage.digest(
            self._context, dealer, delivery.holders, delivery.digests, delivery.own_check, delivery.box_check
        )
        self._verify(dealer, delivery.signature, digest)
        listed = dict(zip(delivery.holders, delivery.digests, strict=True))
        if dealing.holder != self.index or listed.get(self.index) != dealing.digest():
            raise IntegrityError(f"the shares of {self._name(dealer)} are not those it signed")
        received = Encapsulation(self._keys.decapsulate(dealing.ciphertext), dealing.ciphertext)
        secret = agreement.share_key(self._context, dealer, self.index, self._exchanged[dealer], received)
        plain = sealing.unseal(secret, dealing.sealed, self._context, f"the shares of {self._name(dealer)}")
        own_salt, own, box_salt, box = _cut(plain, SALT_BYTES, shamir.SHARE_BYTES, SALT_BYTES, shamir.SHARE_BYTES)
        for kind, share, salt, check in (
            (KIND_OWN, own, own_salt, dealing.own_check),
            (KIND_BOX, box, box_salt, dealing.box_check),
        ):
            if share_check(self._context, dealer, self.index, kind, share, salt) != check:
                raise IntegrityError(f"a share of {self._name(dealer)} is not the one it committed to")
        return RevealedShare(dealer, own, own_salt), RevealedShare(dealer, box, box_salt), received

    def _confirm(self, event: ConfirmPairs) -> SiteDecision:
        dealers = self._members(event.dealers, "sites with shares")
        if self.index not in dealers or not set(dealers) <= set(self._ring):
            raise IntegrityError(f"round {self.manifest.round}: the list of dealers is not of this round's members")
        dealt = set(dealers)
        expected = [i for i in self._neighbours if i in dealt]
        if [delivery.index for delivery in event.shares] != expected:
            raise IntegrityError(f"round {self.manifest.round}: the shares are not those of this site's neighbours")
        held, seeds = {}, {}
        for delivery in event.shares:
            own, box, received = self._open_delivery(delivery)
            dealer = delivery.index
            held[dealer] = (own, box)
            low, high = sorted((dealer, self.index))
            up, down = (received, self._sent[dealer]) if dealer == low else (self._sent[dealer], received)
            seeds[dealer] = agreement.pair_seed(self._context, low, high, self._exchanged[dealer], up, down)
        plain = b"".join(transcript.u32(i) + seeds[i] for i in sorted(seeds))
        box_text = sealing.seal(self._box_key, plain, self._context)
        checks = [pair_check(self._context, i, self.index, seeds[i]) for i in expected]
        digest = ConfirmHeader.digest(self._context, self.index, dealers, transcript.digest(box_text), checks)
        message = ConfirmMessage(self.index, dealers, box_text, checks, agreement.sign(self._identity, digest))
        self._held.update(held)
        self._seeds, self._dealers = seeds, dealers
        return Decision(replies=(message,))

    def _check_confirmation(self, header: ConfirmHeader) -> None:
        """A neighbour was shown the same sites and derived the same seed."""
        peer, name = header.index, self._name(header.index)
        digest = ConfirmHeader.digest(self._context, peer, header.dealers, header.box_digest, header.checks)
        self._verify(peer, header.signature, digest)
        dealers = set(self._dealers)
        checked = [i for i in self._neighbours_of(peer) if i in dealers]
        if header.dealers != self._dealers or len(header.checks) != len(checked):
            raise IntegrityError(
                f"{name} was shown another set of sites than this one",
                "the hub or the network showed different sites different lists",
            )
        expected = pair_check(self._context, peer, self.index, self._seeds[peer])
        if header.checks[checked.index(self.index)] != expected:
            raise IntegrityError(f"{name} derived another pair seed: the masks would not cancel")

    def _begin(self, event: BeginMasking) -> SiteDecision:
        if not self._holds_model:
            raise LocalProtocolError(f"round {self.manifest.round}: masking before the model was loaded")
        masked_for = self._members(event.members, "sites that confirmed")
        if self.index not in masked_for or not set(masked_for) <= set(self._dealers):
            raise IntegrityError(
                f"round {self.manifest.round}: the list of confirmations is not of this round's members"
            )
        members = set(masked_for)
        peers = [i for i in self._seeds if i in members]
        if [header.index for header in event.confirms] != sorted(peers):
            raise IntegrityError(
                f"round {self.manifest.round}: the confirmations are not those of this site's neighbours"
            )
        for header in event.confirms:
            self._check_confirmation(header)
        self._masked_for, self._masked_digest = masked_for, list_digest(masked_for)
        streams = masks.joined(
            [
                masks.expand(self._own_seed, self._context, own_label(self.index), 1),
                *(masks.expand(self._seeds[i], self._context, LABEL_PAIR, pair_sign(self.index, i)) for i in peers),
            ]
        )
        rounding = masks.expand(self._rounding_seed, self._context, transcript.LABEL_ROUNDING, 1)
        return Decision(effects=(MaskVector(streams, rounding.body[0].key, rounding.tail[0].key),))

    def _vector_sent(self, event: VectorSent) -> SiteDecision:
        digest = VectorMessage.digest(self._context, self.index, self._masked_digest, event.digest)
        self._vector = event.digest
        return Decision(replies=(VectorMessage(self.index, event.digest, agreement.sign(self._identity, digest)),))

    def _agree(self, event: AgreeSurvivors) -> SiteDecision:
        survivors = self._members([vector.index for vector in event.vectors], "survivors")
        if not set(survivors) <= set(self._masked_for):
            raise IntegrityError(f"round {self.manifest.round}: a survivor never masked")
        for vector in event.vectors:
            digest = VectorMessage.digest(self._context, vector.index, self._masked_digest, vector.vector)
            self._verify(vector.index, vector.signature, digest)
            if vector.index == self.index and vector.vector != self._vector:
                raise IntegrityError(f"round {self.manifest.round}: the hub holds another vector than this site sent")
        digests = [vector.vector for vector in event.vectors]
        self._survivor_digest = SurvivorMessage.digest(self._context, self._masked_digest, survivors, digests)
        self._survivors = survivors
        return Decision(replies=(SurvivorMessage(self.index, agreement.sign(self._identity, self._survivor_digest)),))

    def _release(self, event: ReleaseShares) -> SiteDecision:
        signers = self._members([message.index for message in event.signatures], "signatures on the survivors")
        if not set(signers) <= set(self._survivors):
            raise IntegrityError(f"round {self.manifest.round}: a signature of a site that did not survive")
        for message in event.signatures:
            self._verify(message.index, message.signature, self._survivor_digest)
        survivors = set(self._survivors)
        dropped = [i for i in self._masked_for if i not in survivors]
        entry = SharesReleased(
            federation=self.manifest.federation,
            round=self.manifest.round,
            manifest=self._digest,
            survivors=tuple(self._name(i) for i in self._survivors),
            dropped=tuple(self._name(i) for i in dropped),
        )
        reply = ReleaseMessage(
            self.index,
            own=[self._held[i][0] for i in self._survivors if i in self._held],
            box=[self._held[i][1] for i in dropped if i in self._held],
        )
        return Decision(entries=(entry,), replies=(reply,))


def own_label(index: int) -> bytes:
    """Keystream label of a site's own mask."""
    return LABEL_SELF + transcript.u32(index)


def pair_sign(index: int, peer: int) -> int:
    """Whether `index` adds (+1) or subtracts (-1) the mask it shares with `peer`: the lower index adds."""
    return 1 if index < peer else -1


def _cut(text: bytes, *lengths: int) -> tuple[bytes, ...]:
    if len(text) != sum(lengths):
        raise IntegrityError(f"a sealed message has {len(text)} bytes, {sum(lengths)} expected")
    parts, position = [], 0
    for length in lengths:
        parts.append(text[position : position + length])
        position += length
    return tuple(parts)
