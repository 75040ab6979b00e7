"""The bodies of a round's methods, hub -> site. They carry the messages of `fedpool.secagg`."""

from typing import Any

import msgspec

from fedpool.secagg.manifest import Manifest


class RoundWanted(msgspec.Struct, frozen=True):
    """round.open -> KeyMessage: the manifest, how long the site has to train, and what its program is told.

    Attributes:
        step: 1, 2, …: the round of training this is, or the one after which this evaluates.
        config: the program's configuration in it.
    """

    manifest: Manifest
    model_bytes: int
    deadline_s: float
    step: int = 1
    config: dict[str, Any] = {}


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
