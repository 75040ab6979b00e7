"""The bodies of a round's methods, hub -> site. They carry the messages of `fedpool.secagg`."""

import msgspec

from fedpool.secagg.manifest import Manifest


class RoundWanted(msgspec.Struct, frozen=True):
    """round.open -> KeyMessage: the manifest, and how long the site has to train."""

    manifest: Manifest
    model_bytes: int
    deadline_s: float


class Phase(msgspec.Struct, frozen=True):
    """round.step -> the phase's answer: a question of the round protocol, encoded as its phase says."""

    run: str
    round: int
    attempt: int
    phase: str
    question: bytes


class PhaseAnswer(msgspec.Struct, frozen=True):
    """The answer to a phase's question, encoded."""

    message: bytes


class RoundOver(msgspec.Struct, frozen=True):
    """round.close: the round has an aggregate, or it failed."""

    run: str
    round: int
    attempt: int
    outcome: str
