"""A run at the hub: a fold of entries, and what follows from it. After a restart the fold says where to go on.

    created ─ lease ─▶ leased ─ rounds … ─▶ finished
       │                 │    ◀─ resume ─┐
       └──────▶ failed / stopped ────────┘

A round that failed before any site released shares is tried again, a new attempt with new keys. One that failed later is never
repeated (sites would refuse: a second sum over another set of sites could reveal one site's update); the next number is taken.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from fedpool.errors import Refused
from fedpool.federation import schedule
from fedpool.federation.plan import Plan
from fedpool.records import Signed
from fedpool.wire.messages import LeaseWanted


class RunCreated(msgspec.Struct, frozen=True, tag="run.created"):
    """A run exists. Durable before anything is leased.

    Attributes:
        lease: what is to be leased for it, where that was signed.
        signed: what was.
    """

    run: str
    plan_text: str
    model: str
    lease: LeaseWanted | None = None
    signed: Signed | None = None


class RunLeased(msgspec.Struct, frozen=True, tag="run.leased"):
    """The run's lease is active at these sites."""

    lease: str
    sites: tuple[str, ...]


class RoundOpened(msgspec.Struct, frozen=True, tag="run.round_opened"):
    """An attempt at a round began; `manifest` is its encoding."""

    round: int
    attempt: int
    manifest: bytes


class RoundJournal(msgspec.Struct, frozen=True, tag="run.round_journal"):
    """An event that the round's machine accepted, encoded."""

    event: bytes


class RoundEnded(msgspec.Struct, frozen=True, tag="run.round_ended"):
    """A round has an aggregate; `summary` goes into the history."""

    round: int
    model: str
    summary: dict[str, Any]


class RoundLost(msgspec.Struct, frozen=True, tag="run.round_lost"):
    """An attempt at a round failed.

    Attributes:
        released: whether sites may have released shares: then that round's number is never used again.
    """

    round: int
    attempt: int
    reason: str
    released: bool = False


class RunEnded(msgspec.Struct, frozen=True, tag="run.ended"):
    """The run finished, failed or was stopped."""

    state: str
    reason: str


class RunResumed(msgspec.Struct, frozen=True, tag="run.resumed"):
    """Somebody resumed it; the lease is for the case that the old one is over."""

    lease: LeaseWanted | None = None
    signed: Signed | None = None


RunEntry: TypeAlias = (
    RunCreated | RunLeased | RoundOpened | RoundJournal | RoundEnded | RoundLost | RunEnded | RunResumed
)


class Run:
    """The state of one run.

    Attributes:
        state: created, leased, finished, failed, stopped.
        round: the last finished round.
        model_round: the last one that trained; its model is where the next begins.
        burned: the last round that failed after shares were released.
        attempt: attempts at the round after that.
        manifest: encoding of the attempt in progress, or b"".
        journal: events of the attempt in progress.
        history: summaries of the finished rounds.
        wanted: what is to be leased for it next, where that was signed.
        requests: {lease: what was signed}.
    """

    def __init__(self, run: str, plan: Plan) -> None:
        self.id = run
        self.plan = plan
        self.plan_text = ""
        self.state = "created"
        self.reason = ""
        self.lease = ""
        self.sites: tuple[str, ...] = ()
        self.round = 0
        self.model_round = 0
        self.burned = 0
        self.attempt = 0
        self.model = ""
        self.manifest = b""
        self.journal: list[bytes] = []
        self.history: list[dict[str, Any]] = []
        self.wanted: LeaseWanted | None = None
        self.requests: dict[str, Signed] = {}

    def apply(self, entry: RunEntry) -> None:
        """Fold one durable entry into the state."""
        match entry:
            case RunCreated():
                self.plan_text, self.model = entry.plan_text, entry.model
                self._signed(entry)
            case RunLeased():
                self.state, self.lease, self.sites = "leased", entry.lease, entry.sites
            case RoundOpened():
                self.attempt, self.manifest, self.journal = entry.attempt, entry.manifest, []
            case RoundJournal():
                self.journal.append(entry.event)
            case RoundEnded():
                self.round, self.model, self.attempt = entry.round, entry.model, 0
                self.manifest, self.journal = b"", []
                self.history.append(entry.summary)
                if schedule.is_training(entry.summary):
                    self.model_round = entry.round
            case RoundLost():
                self.manifest, self.journal = b"", []
                if entry.released:
                    self.burned, self.attempt = entry.round, 0
            case RunEnded():
                self.state, self.reason = entry.state, entry.reason
            case RunResumed():
                self.state, self.reason = "leased" if self.lease else "created", ""
                self._signed(entry)

    def _signed(self, entry: RunCreated | RunResumed) -> None:
        if entry.lease is not None and entry.signed is not None:
            self.wanted = entry.lease
            self.requests[entry.lease.id] = entry.signed

    @property
    def is_over(self) -> bool:
        """Whether nothing more happens unless somebody resumes it."""
        return self.state in ("finished", "failed", "stopped")

    def next_action(self) -> str:
        """What to do now: lease, round, finish, or nothing."""
        if self.is_over:
            return "nothing"
        if self.state == "created":
            return "lease"
        return "finish" if self.next_kind is None else "round"

    @property
    def next_kind(self) -> str | None:
        """Whether the next round trains or evaluates; None where the plan is done."""
        return schedule.next_kind(self.plan.rounds, self.plan.evaluation, self.plan.best, self.history)

    @property
    def step(self) -> int:
        """1, 2, …: the round of training that is next."""
        return schedule.trained(self.history) + 1

    @property
    def best(self) -> schedule.Measured | None:
        """The best model so far, by what the plan calls the best."""
        best = self.plan.best
        return schedule.standing(best, self.plan.evaluation, self.history).best if best is not None else None

    @property
    def models_kept(self) -> set[int]:
        """The rounds whose models are kept: the initial one, the two latest, the best."""
        numbers = [entry["round"] for entry in self.history if schedule.is_training(entry)]
        return {0, *numbers[-2:]} | ({self.best.model} if self.best is not None else set())

    @property
    def next_round(self) -> int:
        """The number of the round to open next."""
        return max(self.round, self.burned) + 1

    def may_resume(self) -> None:
        """Check that resuming makes sense.

        Raises:
            Refused: it is finished.
        """
        if self.state == "finished":
            raise Refused(
                f"run {self.id} is finished: all {self.plan.rounds} rounds are done", "start a new one: fed run"
            )
