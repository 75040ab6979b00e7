"""The hub's side of one round, as a machine without input or output.

    keys ─▶ shares ─▶ confirm ─▶ input ─▶ survivors ─▶ release ─▶ unmask ─▶ (done)
      └────────┴─────────┴─────────┴──────────┴──────────┴──────▶ failed

In each phase the hub asks every site still in, and goes on when all have answered or are lost, or at the phase's deadline.
Too few left fails the round: nothing has been revealed unless `release` was reached, and there fewer than a threshold.

Every event that was accepted is an entry. A hub that restarts steps a new machine through the recorded entries: the machine
uses no clock and no randomness, so it ends in the same state and `outstanding()` says which questions to ask again. Sites
answer a repeated question with the first answer, so the same round goes on and nobody trains twice.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from fedpool.errors import IntegrityError, LocalProtocolError
from fedpool.secagg import agreement, masks, sealing, shamir, transcript
from fedpool.secagg.client import (
    LABEL_PAIR,
    AgreeSurvivors,
    BeginMasking,
    ConfirmPairs,
    DealShares,
    ReleaseShares,
    own_label,
    pair_sign,
)
from fedpool.secagg.manifest import Manifest
from fedpool.secagg.messages import (
    KIND_BOX,
    KIND_OWN,
    ConfirmHeader,
    ConfirmMessage,
    KeyMessage,
    ReleaseMessage,
    ShareMessage,
    SurvivorMessage,
    VectorMessage,
    key_context,
    secret_check,
    share_check,
)
from fedpool.step import Decision

PHASES = ("keys", "shares", "confirm", "input", "survivors", "release", "unmask")

Answer: TypeAlias = KeyMessage | ShareMessage | ConfirmMessage | VectorMessage | SurvivorMessage | ReleaseMessage
Question: TypeAlias = Manifest | DealShares | ConfirmPairs | BeginMasking | AgreeSurvivors | ReleaseShares

_ANSWERS: dict[str, type[Answer]] = {
    "keys": KeyMessage,
    "shares": ShareMessage,
    "confirm": ConfirmMessage,
    "input": VectorMessage,
    "survivors": SurvivorMessage,
    "release": ReleaseMessage,
}


class Answered(msgspec.Struct, frozen=True, tag="round.answered"):
    """A site's answer to a phase's question; `message` is its encoding, as it is journalled."""

    phase: str
    index: int
    message: bytes

    @staticmethod
    def of(phase: str, message: Answer) -> Answered:
        """Wrap a message."""
        return Answered(phase, message.index, msgspec.msgpack.encode(message))


class Lost(msgspec.Struct, frozen=True, tag="round.lost"):
    """A site is out of this round, and why."""

    index: int
    phase: str
    reason: str


class PhaseEnded(msgspec.Struct, frozen=True, tag="round.phase_ended"):
    """The phase's deadline has passed: whoever has not answered is lost."""

    phase: str


HubEvent: TypeAlias = Answered | Lost | PhaseEnded


class Ask(msgspec.Struct, frozen=True):
    """Put a phase's question to a site; its answer or its silence is the next event."""

    index: int
    phase: str
    question: Question


class Unmask(msgspec.Struct, frozen=True):
    """Add the survivors' masked vectors, then remove these streams: what remains is the sum of their encodings."""

    survivors: list[int]
    removal: list[masks.Stream]


class Fail(msgspec.Struct, frozen=True):
    """The round is over without an aggregate."""

    phase: str
    reason: str


HubEffect: TypeAlias = Ask | Unmask | Fail
HubDecision: TypeAlias = Decision[HubEvent, None, HubEffect]


class HubRound:
    """One round at the hub.

    Args:
        manifest: the round.

    Attributes:
        phase: where the round is; `failed` at the end of one that came to nothing.
        members: sites still in, by index.
        lost: {index: (phase, reason)} of the others.
    """

    def __init__(self, manifest: Manifest) -> None:
        manifest.validate()
        self.manifest = manifest
        self.phase = "keys"
        self.members: set[int] = {site.index for site in manifest.participants}
        self.lost: dict[int, tuple[str, str]] = {}
        self._digest = manifest.digest()
        self._context = b""
        self._asked: set[int] = set(self.members)
        self._answered: set[int] = set()
        self._keys: dict[int, KeyMessage] = {}
        self._shares: dict[int, ShareMessage] = {}
        self._confirms: dict[int, ConfirmMessage] = {}
        self._masked_for: list[int] = []
        self._vectors: dict[int, VectorMessage] = {}
        self._signatures: dict[int, SurvivorMessage] = {}
        self._releases: dict[int, ReleaseMessage] = {}

    @property
    def survivors(self) -> list[int]:
        """The sites whose vectors arrived in full, ascending; complete from the survivors phase on."""
        return sorted(self._vectors)

    def name(self, index: int) -> str:
        """The site's name."""
        return self.manifest.participant(index).name

    def outstanding(self) -> list[Ask]:
        """The questions of this phase that nobody has answered yet."""
        if self.phase not in _ANSWERS:
            return []
        return [Ask(i, self.phase, self._question(i)) for i in sorted(self._asked - self._answered)]

    def step(self, event: HubEvent) -> HubDecision:
        """Decide what follows from an event. A late or repeated answer changes nothing.

        Raises:
            LocalProtocolError: the event names a phase or a site that is not of this round.
        """
        if self.phase in ("failed", "unmask"):
            return Decision()
        match event:
            case Answered():
                if event.phase not in _ANSWERS or event.index not in range(1, len(self.manifest.participants) + 1):
                    raise LocalProtocolError(f"no site {event.index} or phase {event.phase!r} in this round")
                if event.phase != self.phase or event.index not in self._asked - self._answered:
                    return Decision()
                try:
                    message = msgspec.msgpack.decode(event.message, type=_ANSWERS[event.phase])
                    self._accept(event.index, message)
                except (IntegrityError, msgspec.MsgspecError) as error:
                    return self.step(Lost(event.index, self.phase, str(error)))
                self._answered.add(event.index)
            case Lost():
                if event.index not in self._asked - self._answered:
                    return Decision()
                self._lose(event.index, event.reason)
            case PhaseEnded():
                if event.phase != self.phase:
                    return Decision()
                for index in sorted(self._asked - self._answered):
                    self._lose(index, f"no answer in the {self.phase} phase before its deadline")
        return Decision(entries=(event,), effects=tuple(self._advance()))

    def _lose(self, index: int, reason: str) -> None:
        self._asked.discard(index)
        self.members.discard(index)
        self.lost[index] = (self.phase, reason)

    def _accept(self, index: int, message: Answer) -> None:
        """Check an answer and keep it."""
        if message.index != index:
            raise IntegrityError(f"{self.name(index)} answered in the name of site {message.index}")
        match message:
            case KeyMessage():
                self._verify(index, message.signature, KeyMessage.digest(self._digest, index, message.public))
                self._keys[index] = message
            case ShareMessage():
                if [d.holder for d in message.dealings] != sorted(self._keys):
                    raise IntegrityError(f"{self.name(index)} did not deal to every member")
                digest = ShareMessage.digest(
                    self._context, index, sorted(self._keys), [d.digest() for d in message.dealings],
                    message.own_check, message.box_check,
                )  # fmt: skip
                self._verify(index, message.signature, digest)
                self._shares[index] = message
            case ConfirmMessage():
                if message.dealers != sorted(self._shares):
                    raise IntegrityError(f"{self.name(index)} confirmed another set of sites")
                box_digest = transcript.digest(message.box)
                digest = ConfirmHeader.digest(self._context, index, message.dealers, box_digest, message.checks)
                self._verify(index, message.signature, digest)
                self._confirms[index] = message
            case VectorMessage():
                digest = VectorMessage.digest(self._context, index, self._masked_for, message.vector)
                self._verify(index, message.signature, digest)
                self._vectors[index] = message
            case SurvivorMessage():
                digests = [self._vectors[i].vector for i in self.survivors]
                digest = SurvivorMessage.digest(self._context, self._masked_for, self.survivors, digests)
                self._verify(index, message.signature, digest)
                self._signatures[index] = message
            case ReleaseMessage():
                self._check_release(message)
                self._releases[index] = message

    def _verify(self, index: int, signature: bytes, digest: bytes) -> None:
        agreement.verify(self.manifest.participant(index).identity, signature, digest, self.name(index))

    def _check_release(self, message: ReleaseMessage) -> None:
        dropped = [i for i in self._masked_for if i not in self._vectors]
        if [r.dealer for r in message.own] != self.survivors or [r.dealer for r in message.box] != dropped:
            raise IntegrityError(f"{self.name(message.index)} revealed shares of other sites than were asked for")
        for kind, revealed in ((KIND_OWN, message.own), (KIND_BOX, message.box)):
            for r in revealed:
                dealing = next(d for d in self._shares[r.dealer].dealings if d.holder == message.index)
                committed = dealing.own_check if kind == KIND_OWN else dealing.box_check
                if share_check(self._context, r.dealer, message.index, kind, r.share, r.salt) != committed:
                    raise IntegrityError(f"{self.name(message.index)} revealed a wrong share of {self.name(r.dealer)}")

    def _question(self, index: int) -> Question:
        match self.phase:
            case "keys":
                return self.manifest
            case "shares":
                return DealShares([self._keys[i] for i in sorted(self._keys)])
            case "confirm":
                return ConfirmPairs([self._shares[i].header(index) for i in sorted(self._shares) if i != index])
            case "input":
                return BeginMasking([self._confirms[i].header() for i in self._masked_for])
            case "survivors":
                return AgreeSurvivors([self._vectors[i] for i in self.survivors])
            case _:
                return ReleaseShares([self._signatures[i] for i in sorted(self._signatures)])

    def _advance(self) -> list[HubEffect]:
        """Go to the next phase when this one is complete, or fail when it cannot be."""
        quorum, threshold = self.manifest.quorum, self.manifest.threshold
        enough = threshold if self.phase == "release" else quorum
        possible = len(self._asked)
        if possible < enough:
            return [self._fail(f"{possible} of {len(self.manifest.participants)} sites left, {enough} needed")]
        # Any threshold of shares will do; every phase before wants every site that is still there.
        if len(self._answered) < (enough if self.phase == "release" else possible):
            return []
        if self.phase == "release":
            try:
                removal = self._removal()
            except IntegrityError as error:
                return [self._fail(str(error))]
            self.phase = "unmask"
            return [Unmask(self.survivors, removal)]
        if self.phase == "keys":
            self._context = key_context(self._digest, list(self._keys.values()))
        if self.phase == "confirm":
            self._masked_for = sorted(self._confirms)
        self.phase = PHASES[PHASES.index(self.phase) + 1]
        self._asked, self._answered = self._answered, set()
        return list(self.outstanding())

    def _fail(self, reason: str) -> Fail:
        because = "; ".join(f"{self.name(i)}: {why}" for i, (_, why) in sorted(self.lost.items()))
        failed = Fail(self.phase, f"{reason} ({because})" if because else reason)
        self.phase = "failed"
        return failed

    def _removal(self) -> list[masks.Stream]:
        """Rebuild the secrets and derive every mask that is still in the sum."""
        streams = []
        for index in self.survivors:
            seed = self._rebuild(index, KIND_OWN)
            streams.append(masks.Stream(masks.keystream_key(seed, self._context, own_label(index)), -1))
        for index in self._masked_for:
            if index in self._vectors:
                continue
            box_key = self._rebuild(index, KIND_BOX)
            what = f"the sealed seeds of {self.name(index)}"
            plain = sealing.unseal(box_key, self._confirms[index].box, self._context, what)
            width = 4 + shamir.SECRET_BYTES
            seeds = {
                int.from_bytes(plain[at : at + 4], "big"): plain[at + 4 : at + width]
                for at in range(0, len(plain), width)
            }
            for survivor in self.survivors:
                key = masks.keystream_key(seeds[survivor], self._context, LABEL_PAIR)
                streams.append(masks.Stream(key, -pair_sign(survivor, index)))
        return streams

    def _rebuild(self, dealer: int, kind: bytes) -> bytes:
        shares = {}
        for index, message in self._releases.items():
            revealed = message.own if kind == KIND_OWN else message.box
            shares[index] = next(r.share for r in revealed if r.dealer == dealer)
        secret = shamir.join(shares, self.manifest.threshold)
        dealt = self._shares[dealer]
        if secret_check(self._context, dealer, kind, secret) != (
            dealt.own_check if kind == KIND_OWN else dealt.box_check
        ):
            raise IntegrityError(f"{self.name(dealer)} dealt shares of another secret than it committed to")
        return secret
