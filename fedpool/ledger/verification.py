"""Checking a ledger from its records alone: that they are what was signed, in one form, in order, and keep the rules.

Whoever verifies needs the checkpoint and the key that signs it; what the rules are is the caller's to say, record by record.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from fedpool.errors import IbshellError, IntegrityError
from fedpool.ledger import canonical, merkle, notes
from fedpool.ledger.records import LedgerOpened, Record, decode, encode, time_of
from fedpool.ledger.retention import is_forgotten, leaf_of

FINDINGS_MAX = 100  # are kept; the others are counted


class Finding(msgspec.Struct, frozen=True):
    """Something that is wrong with a ledger.

    Attributes:
        site: whose it is.
        record: number of the record it was found at, or None where it concerns the whole.
        problem: what it is.
    """

    site: str
    record: int | None
    problem: str


class Verified(msgspec.Struct):
    """How far a verification has come, from which it goes on another time.

    Attributes:
        peaks: hashes of the tree's largest complete subtrees, from the left.
        time: of the latest record.
        unknown: records of kinds that were not known.
    """

    size: int
    peaks: list[bytes]
    time: int
    unknown: int


class Verification:
    """One ledger, record after record from the first, or from where an earlier verification ended.

    Args:
        site: whose ledger it is to be.
        key: that signs its checkpoints.
        rules: takes each record and says what is wrong with it.
        hashed: told of every record before: its number, its leaf hash, and whether no more is left of it.
        since: where an earlier verification ended, or None.

    Attributes:
        findings: what is wrong, the first `FINDINGS_MAX`.
        faults: how much is wrong.
        unknown: records of kinds that this release does not know.
        forgotten: records of which only the hash is left, here.
        earlier: (size, root, who says so) of what somebody has seen of the records before these; a proof has to show it.
    """

    def __init__(
        self,
        site: str,
        key: notes.Key,
        rules: Callable[[Record], Sequence[str]],
        since: Verified | None = None,
        hashed: Callable[[int, bytes, bool], None] = lambda number, leaf, is_forgotten: None,
    ) -> None:
        self.site = site
        self.findings: list[Finding] = []
        self.faults = 0
        self.earlier: list[tuple[int, bytes, str]] = []
        self.unknown = since.unknown if since else 0
        self._key = key
        self._rules = rules
        self._hashed = hashed
        self._texts = 0
        self.forgotten = 0
        self._tree = merkle.Frontier(since.size, since.peaks) if since else merkle.Frontier()
        self._time = since.time if since else 0
        self._expected: dict[int, list[tuple[bytes, str]]] = {}  # {size: (root, who says so)}

    @property
    def size(self) -> int:
        """Records so far."""
        return self._tree.size

    @property
    def root(self) -> bytes:
        """Of the records so far."""
        return self._tree.root()

    def state(self) -> Verified:
        """Where it is."""
        return Verified(self.size, list(self._tree.peaks), self._time, self.unknown)

    def find(self, problem: str, record: int | None = None) -> None:
        """Note something that is wrong."""
        self.faults += 1
        if len(self.findings) < FINDINGS_MAX:
            self.findings.append(Finding(self.site, record, problem))

    def expect(self, size: int, root: bytes, said: str) -> None:
        """The first `size` records must have this root, since somebody has seen them; `said` tells who and when."""
        if size < self.size:
            self.earlier.append((size, root, said))
            return
        self._expected.setdefault(size, []).append((root, said))
        if size == self.size:
            self._compare()

    def _compare(self) -> None:
        """What others have seen of just so many records is what these are."""
        for root, said in self._expected.pop(self.size, ()):
            if root != self.root:
                self.find(
                    f"the first {self.size} records are not {said}: there are two histories", max(0, self.size - 1)
                )

    def take(self, data: bytes) -> None:
        """One more record."""
        number, leaf, gone = self._tree.size, leaf_of(data), is_forgotten(data)
        self._tree.append(leaf)
        if self._tree.size in self._expected:
            self._compare()
        self._hashed(number, leaf, gone)
        if gone:
            self.forgotten += 1
            if self._texts:
                self.find("it is kept back: what is forgotten comes before everything else", number)
            return
        self._texts += 1
        try:
            record = decode(data)
            if record is None or encode(record) != data:
                canonical.decode(data)  # of a newer release, with more than this one knows: still in the one form
            time = time_of(data) if record is None else record.time
        except IbshellError as error:
            self.find(error.message, number)
            return
        if time < self._time:
            self.find(f"it was written at {time} and the record before it at {self._time}", number)
        self._time = max(self._time, time)
        if record is None:
            self.unknown += 1
            return
        if isinstance(record, LedgerOpened) != (number == 0):
            self.find("a ledger is opened by its first record, and by no other", number)
        elif isinstance(record, LedgerOpened) and record.site != self.site:
            self.find(f"it is the ledger of {record.site!r}", number)
        for problem in self._rules(record):
            self.find(problem, number)

    def finish(self, note: bytes) -> notes.Checkpoint | None:
        """The records are all there are: compare them with a checkpoint; returns it where its signature is good."""
        self._expected.pop(0, None)
        for size, seen in sorted(self._expected.items()):
            for _, said in seen:
                self.find(f"it has {self.size} records; {size} were {said}: history was cut off")
        try:
            checkpoint = read_checkpoint(note, self._key)
        except IntegrityError as error:
            self.find(error.message)
            return None
        if (checkpoint.size, checkpoint.root) != (self.size, self.root):
            self.find(
                f"the site signed {checkpoint.size} records with the root {checkpoint.root.hex()[:16]}…; these "
                f"{self.size} have the root {self.root.hex()[:16]}…: one was changed, removed, added or moved"
            )
        return checkpoint


def read_checkpoint(note: bytes, key: notes.Key) -> notes.Checkpoint:
    """A checkpoint whose signature is this key's.

    Raises:
        IntegrityError: it is none, or of another ledger, or not signed by the key.
    """
    found = notes.decode(note)
    checkpoint = notes.parse_checkpoint(found, key.name)
    if key.name not in notes.signers(found, [key]):
        raise IntegrityError(f"a checkpoint of {key.name} without that key's signature")
    return checkpoint
