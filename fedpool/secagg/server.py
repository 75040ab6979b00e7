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
from fedpool.secagg import agreement, graph, masks, sealing, shamir, transcript
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
    ShareDelivery,
    ShareMessage,
    SurvivorMessage,
    VectorMessage,
    key_context,
    list_digest,
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
    """Add the survivors' masked vectors, then remove these masks: what remains is the sum of their encodings."""

    survivors: list[int]
    removal: masks.Masks


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
        self._near: dict[int, list[int]] = {}
        self._rebuildable = 0
        self._dealers: list[int] = []
        self._asked: set[int] = set(self.members)
        self._answered: set[int] = set()
        self._keys: dict[int, KeyMessage] = {}
        self._shares: dict[int, ShareMessage] = {}
        self._deliveries: dict[int, dict[int, ShareDelivery]] = {}
        self._confirms: dict[int, ConfirmMessage] = {}
        self._masked_for: list[int] = []
        self._masked_digest = b""
        self._vectors: dict[int, VectorMessage] = {}
        self._signatures: dict[int, SurvivorMessage] = {}
        self._releases: dict[int, ReleaseMessage] = {}

    @property
    def survivors(self) -> list[int]:
        """The sites whose vectors arrived in full, ascending; complete from the survivors phase on."""
        return sorted(self._vectors)

    @property
    def vectors(self) -> dict[int, VectorMessage]:
        """The signed digests of the vectors that arrived, by index."""
        return self._vectors

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
                holders = self._holders(index)
                if [d.holder for d in message.dealings] != holders:
                    raise IntegrityError(f"{self.name(index)} did not deal to all of its neighbours")
                digest = ShareMessage.digest(
                    self._context, index, holders, [d.digest() for d in message.dealings],
                    message.own_check, message.box_check,
                )  # fmt: skip
                self._verify(index, message.signature, digest)
                self._shares[index] = message
            case ConfirmMessage():
                if message.dealers != self._dealers:
                    raise IntegrityError(f"{self.name(index)} confirmed another set of sites")
                box_digest = transcript.digest(message.box)
                digest = ConfirmHeader.digest(self._context, index, message.dealers, box_digest, message.checks)
                self._verify(index, message.signature, digest)
                self._confirms[index] = message
            case VectorMessage():
                digest = VectorMessage.digest(self._context, index, self._masked_digest, message.vector)
                self._verify(index, message.signature, digest)
                self._vectors[index] = message
            case SurvivorMessage():
                digests = [self._vectors[i].vector for i in self.survivors]
                digest = SurvivorMessage.digest(self._context, self._masked_digest, self.survivors, digests)
                self._verify(index, message.signature, digest)
                self._signatures[index] = message
            case ReleaseMessage():
                self._check_release(message)
                self._releases[index] = message

    def _verify(self, index: int, signature: bytes, digest: bytes) -> None:
        agreement.verify(self.manifest.participant(index).identity, signature, digest, self.name(index))

    def _check_release(self, message: ReleaseMessage) -> None:
        held = [i for i in self._holders(message.index) if i in self._confirms]
        survived, dropped = ([i for i in held if (i in self._vectors) is alive] for alive in (True, False))
        if [r.dealer for r in message.own] != survived or [r.dealer for r in message.box] != dropped:
            raise IntegrityError(f"{self.name(message.index)} revealed shares of other sites than were asked for")
        for kind, revealed in ((KIND_OWN, message.own), (KIND_BOX, message.box)):
            for r in revealed:
                dealing = next(d for d in self._shares[r.dealer].dealings if d.holder == message.index)
                committed = dealing.own_check if kind == KIND_OWN else dealing.box_check
                if share_check(self._context, r.dealer, message.index, kind, r.share, r.salt) != committed:
                    raise IntegrityError(f"{self.name(message.index)} revealed a wrong share of {self.name(r.dealer)}")

    def _neighbours(self, index: int) -> list[int]:
        return self._near[index]

    def _holders(self, index: int) -> list[int]:
        """The sites that hold a share of this one's secrets: its neighbours and itself."""
        return sorted([*self._neighbours(index), index])

    def _question(self, index: int) -> Question:
        match self.phase:
            case "keys":
                return self.manifest
            case "shares":
                near = self._holders(index)
                others = [self._keys[i].header(self._digest) for i in sorted(self._keys.keys() - set(near))]
                return DealShares([self._keys[i] for i in near], others)
            case "confirm":
                peers = [i for i in self._neighbours(index) if i in self._shares]
                return ConfirmPairs([self._deliveries[i][index] for i in peers], self._dealers)
            case "input":
                peers = [i for i in self._neighbours(index) if i in self._confirms]
                return BeginMasking([self._confirms[i].header() for i in peers], self._masked_for)
            case "survivors":
                return AgreeSurvivors([self._vectors[i] for i in self.survivors])
            case _:
                return ReleaseShares([self._signatures[i] for i in sorted(self._signatures)])

    def _advance(self) -> list[HubEffect]:
        """Go to the next phase when this one is complete, or fail when it cannot be."""
        if self.phase == "release":
            return self._end()
        possible = len(self._asked)
        if possible < self.manifest.quorum:
            cohort = len(self.manifest.participants)
            return [self._fail(f"{possible} of {cohort} sites left, {self.manifest.quorum} needed")]
        if len(self._answered) < possible:
            return []
        match self.phase:
            case "keys":
                headers = [key.header(self._digest) for key in self._keys.values()]
                self._context = key_context(self._digest, headers)
                ring = graph.order(self._context, sorted(self._keys))
                self._near = {i: graph.neighbours(ring, self.manifest.degree, i) for i in ring}
            case "shares":
                self._dealers = sorted(self._shares)
                self._deliveries = {i: message.deliveries() for i, message in self._shares.items()}
            case "confirm":
                self._masked_for = sorted(self._confirms)
                self._masked_digest = list_digest(self._masked_for)
        if (short := self._short(self._answered)) is not None:
            return [self._fail(short)]
        self.phase = PHASES[PHASES.index(self.phase) + 1]
        self._asked, self._answered = self._answered, set()
        return list(self.outstanding())

    def _is_rebuildable(self, index: int, holders: set[int]) -> bool:
        return len(holders.intersection(self._holders(index))) >= self.manifest.share_threshold

    def _short(self, holders: set[int]) -> str | None:
        """Which secret cannot be rebuilt any more by those who hold its shares, in words; None where all can."""
        for index in self._masked_for or sorted(holders):
            if not self._is_rebuildable(index, holders):
                left = len(holders.intersection(self._holders(index)))
                needed = self.manifest.share_threshold
                return f"{left} of those who hold shares of {self.name(index)} are left, {needed} needed"
        return None

    def _end(self) -> list[HubEffect]:
        """The release: over as soon as every secret can be rebuilt, or when one never will."""
        if (short := self._short(self._asked)) is not None:
            return [self._fail(short)]
        # Answers only grow, so the secrets that can be rebuilt are counted from where the last look stopped.
        while self._rebuildable < len(self._masked_for):
            if not self._is_rebuildable(self._masked_for[self._rebuildable], self._answered):
                return []
            self._rebuildable += 1
        try:
            removal = self._removal()
        except IntegrityError as error:
            return [self._fail(str(error))]
        self.phase = "unmask"
        return [Unmask(self.survivors, removal)]

    def _fail(self, reason: str) -> Fail:
        because = "; ".join(f"{self.name(i)}: {why}" for i, (_, why) in sorted(self.lost.items()))
        failed = Fail(self.phase, f"{reason} ({because})" if because else reason)
        self.phase = "failed"
        return failed

    def _removal(self) -> masks.Masks:
        """Rebuild the secrets and derive every mask that is still in the sum."""
        parts = []
        for index in self.survivors:
            seed = self._rebuild(index, KIND_OWN)
            parts.append(masks.expand(seed, self._context, own_label(index), -1))
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
            parts += [
                masks.expand(seeds[survivor], self._context, LABEL_PAIR, -pair_sign(survivor, index))
                for survivor in self._neighbours(index)
                if survivor in self._vectors
            ]
        return masks.joined(parts)

    def _rebuild(self, dealer: int, kind: bytes) -> bytes:
        shares = {}
        for index in self._holders(dealer):
            if index in self._releases:
                message = self._releases[index]
                revealed = message.own if kind == KIND_OWN else message.box
                shares[index] = next(r.share for r in revealed if r.dealer == dealer)
        secret = shamir.join(shares, self.manifest.share_threshold)
        dealt = self._shares[dealer]
        if secret_check(self._context, dealer, kind, secret) != (
            dealt.own_check if kind == KIND_OWN else dealt.box_check
        ):
            raise IntegrityError(f"{self.name(dealer)} dealt shares of another secret than it committed to")
        return secret
