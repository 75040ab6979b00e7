"""Reading sites' ledgers through the hub, and what this machine remembers of them: each site's key and how far it was verified."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from fedpool.client.connection import Connection
from fedpool.errors import IntegrityError, NotAuthorised, NotFound
from fedpool.leasing.rules import RulesState
from fedpool.ledger import merkle, notes
from fedpool.ledger.retention import told
from fedpool.ledger.verification import Verified, read_checkpoint
from fedpool.names import NAME
from fedpool.wire.messages import (
    LedgerAsked,
    LedgerHead,
    LedgerProof,
    Listing,
    Nothing,
    ProofWanted,
    RecordsPage,
    RecordsWanted,
    SeenCheckpoints,
)
from ibshell import diagnostics, settings

PAGE = 4096


def site_names(connection: Connection, wanted: Sequence[str]) -> list[str]:
    """The sites to ask: those that are wanted, or all.

    Raises:
        NotFound: there is no such site.
    """
    known = [site["name"] for site in connection.call("site.list", Nothing(), Listing).items]
    for name in wanted:
        if name not in known:
            raise NotFound(f"no site {name!r}", "ibshell site list shows them")
    return list(wanted) or known


class Seen(msgspec.Struct):
    """What is remembered of a site's ledger; an earlier release remembered the rules otherwise, then they are followed anew.

    Attributes:
        key: that signs it, in the form of c2sp.org's notes.
        verified: how far its records were verified.
        rules: how far the rules were followed, over the same records.
    """

    key: str
    verified: Verified
    rules: RulesState | None = None


class Ledger:
    """A site's ledger as the hub passes it on.

    Args:
        connection: to the hub.
        site: its name.

    Raises:
        Unreachable, NotFound: it cannot be asked.
        IntegrityError: its checkpoint is not signed by its key.
        NotAuthorised: its key is another one than before.
    """

    def __init__(self, connection: Connection, site: str) -> None:
        self.site = site
        self._connection = connection
        if not NAME.fullmatch(site):
            raise NotFound(f"no site {site!r}", "ibshell site list shows them")
        self._path = settings.pool_directory(settings.pool_name().replace("/", "_")) / "ledgers" / f"{site}.json"
        self.seen = _read(self._path)
        self.update()

    def update(self) -> None:
        """Ask again how far it has come."""
        head = self._connection.call("ledger.head", LedgerAsked(self.site), LedgerHead)
        key = notes.parse_key(head.key)
        if self.seen is not None and self.seen.key != head.key:
            self._leave_former(key, self.seen)
        self.key = key
        self.note, self.witnessed = head.note, head.witnessed
        self.size = read_checkpoint(head.note, self.key).size

    def _leave_former(self, key: notes.Key, seen: Seen) -> None:
        """A site that joined again with a new key has a new ledger; what is remembered of the former one is put aside.

        Raises:
            NotAuthorised: the pool's roster does not name that key.
        """
        signer = self._connection.signer
        if signer is None or signer.trust().sites.get(self.site) != key.public:
            raise NotAuthorised(
                f"the ledger of {self.site} is signed by another key than before: {key.line()}",
                f"if its operator confirms the new key, remove {self._path}",
            )
        former = notes.parse_key(seen.key).name.rpartition("/")[2]
        kept = self._path.with_name(f"{self.site}.{former}.json")
        self._path.replace(kept)
        self.seen = None
        diagnostics.say(
            f"{self.site} has joined again and begun a new ledger; the former one had {seen.verified.size} records when "
            f"it was verified here last, and what is known of it lies in {kept}"
        )

    def records(self, first: int, last: int) -> Iterator[tuple[int, bytes]]:
        """(number, record) of records first..last - 1.

        Raises:
            IntegrityError: the site does not give what it signed.
        """
        while first < last:
            wanted = RecordsWanted(self.site, first, min(PAGE, last - first))
            page = self._connection.call("ledger.records", wanted, RecordsPage)
            if not page.records:
                raise IntegrityError(f"{self.site} signed {self.size} records and gives only {first}")
            yield from enumerate(page.records, first)
            first += len(page.records)

    def told(self) -> Iterator[tuple[int, bytes]]:
        """See `fedpool.ledger.retention.told`, of all that is there."""
        return told(self.records(0, self.size))

    @property
    def witnessed_size(self) -> int:
        """How many records the latest checkpoint that others have cosigned covers."""
        return read_checkpoint(self.witnessed, self.key).size if self.witnessed else 0

    def inclusion(self, number: int, size: int) -> list[bytes]:
        """The proof that a record is among the first `size`."""
        return self._connection.call("ledger.proof", ProofWanted(self.site, size, number), LedgerProof).hashes

    def require_consistent(self, old: int, old_root: bytes, size: int, root: bytes) -> None:
        """Check that this ledger continues what somebody has seen of it.

        Raises:
            IntegrityError: it does not.
        """
        asked = ProofWanted(self.site, size, old=old)
        proof = self._connection.call("ledger.proof", asked, LedgerProof).hashes if 0 < old < size else []
        merkle.require_consistency(old, size, old_root, root, proof)

    def remember(self, verified: Verified, rules: RulesState) -> None:
        """Keep how far it was verified, for the next time."""
        self.seen = Seen(self.key.line(), verified, rules)
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary = self._path.with_suffix(".new")
        temporary.write_bytes(msgspec.json.encode(self.seen))
        temporary.replace(self._path)


def seen_by(connection: Connection, site: str) -> dict[str, bytes]:
    """{site: the checkpoint of its ledger that this site has cosigned}.

    Raises:
        Unreachable, NotFound: it cannot be asked.
    """
    return connection.call("ledger.seen", LedgerAsked(site), SeenCheckpoints).notes


def _read(path: Path) -> Seen | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Seen)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise IntegrityError(
            f"{path} cannot be read: {error}", "remove it; the whole ledger is verified anew"
        ) from None
