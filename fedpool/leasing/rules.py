"""Every rule of a site's ledger at once: how leases go, who had signed for what, who held how much; from any seam on."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from fedpool.errors import IntegrityError
from fedpool.identity import sshsig
from fedpool.identity.trust import Trust
from fedpool.leasing.coverage import Coverage, CoverageState
from fedpool.leasing.holdings import Holdings, HoldingsState
from fedpool.leasing.recorded import Replay, ReplayState
from fedpool.ledger import merkle
from fedpool.ledger.records import Kept, LeaseSaid, LedgerSeam, Record, RosterObeyed, decode
from fedpool.ledger.retention import text_of


class RulesState(msgspec.Struct):
    """How far the rules have been followed, from which it goes on another time."""

    replayed: ReplayState = msgspec.field(default_factory=ReplayState)
    covered: CoverageState = msgspec.field(default_factory=CoverageState)
    held: HoldingsState = msgspec.field(default_factory=HoldingsState)
    roster: int = 0


class LedgerRules:
    """Follows one site's records.

    Args:
        trust: whom the verifier believes about who signed what, or None.
        state: where an earlier one ended.
        check: checks a signature, or puts that off.

    Attributes:
        holdings: who held what.
        signatures: how many were checked.
        roster: number of the roster that the site goes by.
    """

    def __init__(
        self,
        trust: Trust | None,
        state: RulesState | None = None,
        check: Callable[[sshsig.Signature, bytes, str, bytes], None] = sshsig.check,
    ) -> None:
        self._trust = trust
        self._check = check
        self._blind = False  # records are forgotten: the next seam says how things stand
        self._leaves: dict[int, bytes] = {}  # of records before it
        self._seam: LedgerSeam | None = None
        self._to_come = 0
        self._begins = False  # whether the rules begin with this seam
        self._left_out: set[str] = set()
        self.signatures = 0
        self._follow(state or RulesState())

    def _follow(self, state: RulesState) -> None:
        self._replay = Replay(state.replayed)
        self._coverage = Coverage(self._trust, state.covered, self._check)
        self.holdings = Holdings(state.held)
        self.roster = state.roster

    @property
    def leases(self) -> int:
        """How many became active."""
        return self._replay.leases

    def state(self) -> RulesState:
        """Where it is."""
        return RulesState(self._replay.state(), self._coverage.state(), self.holdings.state(), self.roster)

    def hashed(self, number: int, leaf: bytes, is_forgotten: bool) -> None:
        """A record is there, or only its hash is."""
        self._blind = self._blind or is_forgotten
        if self._blind:
            self._leaves[number] = leaf

    def take(self, number: int, record: Record) -> list[str]:
        """One more record; returns what is wrong with it."""
        match record:
            case LedgerSeam():
                return self._at_seam(record)
            case Kept():
                return self._repeated(record)
        found = []
        if self._to_come:
            found.append(f"{self._to_come} records that the seam repeats are missing before it")
            self._to_come = 0
        return found if self._blind else [*found, *self._follows(number, record)]

    def _follows(self, number: int, record: Record) -> list[str]:
        self.holdings.take(number, record)
        if isinstance(record, RosterObeyed):
            self.roster = record.number
        before = self._coverage.requests
        found = [*self._replay.take(record), *self._coverage.take(record)]
        self.signatures += self._coverage.requests - before
        return found

    def _at_seam(self, seam: LedgerSeam) -> list[str]:
        self._seam, self._to_come, self._begins = seam, seam.kept, self._blind
        if self._blind:
            self._follow(RulesState())
            return self._after_seam(seam) if not seam.kept else []
        state = self._replay.state()
        self._left_out = set(state.known)
        if (seam.token, seam.term) != (state.token, state.term):
            return [
                f"the seam says token {seam.token} and term {seam.term}; the records before it come to {state.token} "
                f"and {state.term}"
            ]
        return self._after_seam(seam) if not seam.kept else []

    def _repeated(self, said: Kept) -> list[str]:
        if not self._to_come or self._seam is None:
            return ["a record is repeated outside a seam"]
        self._to_come -= 1
        found: list[str] = []
        try:
            text = text_of(said)
            record = decode(text)
            if self._begins:
                leaf = self._leaves.get(said.number)
                if leaf is not None and leaf != merkle.leaf_hash(text):
                    found.append(f"record {said.number} is repeated otherwise than it was written")
                elif record is not None:
                    found += self._follows(said.number, record)
            elif isinstance(record, LeaseSaid):
                self._left_out.discard(record.lease)
        except IntegrityError as error:
            found.append(error.message)
        return found if self._to_come else [*found, *self._after_seam(self._seam)]

    def _after_seam(self, seam: LedgerSeam) -> list[str]:
        self._seam = None
        if self._begins:
            self._blind, self._leaves = False, {}
            self._replay.stands_at(seam.token, seam.term)
            return []
        missing, self._left_out = sorted(self._left_out), set()
        return [f"the seam leaves out lease {lease}, which lives" for lease in missing]

    def finish(self) -> list[str]:
        """What is wrong with the whole, after its last record."""
        if self._blind:
            return ["records are forgotten, and no seam follows that says how things stood"]
        return self._coverage.finish()
