"""Ledgers as files in the layout of c2sp.org/tlog-tiles: written by `ibshell ledger export`, verified without any hub.

A directory a site: `checkpoint` (the signed note, with the cosignatures of witnesses), `key` and `witnesses` (whose signatures it
bears, in order), `tile/…` (hashes and records). It is sealed: nothing in it can be changed without the signatures of site and
witnesses. Beside those directories lies `rosters.json`: what the pool's authority has signed about who belongs to it.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from fedpool.errors import IntegrityError, NotFound, Refused, StorageFailed
from fedpool.leasing.rules import RulesState
from fedpool.ledger import merkle, notes, tiles
from fedpool.ledger.retention import FORGOTTEN, is_forgotten, leaf_of
from fedpool.ledger.verification import Verified, read_checkpoint
from fedpool.records import Signed
from ibshell.ledger.asked import Ledger
from ibshell.progress import Bar

ROSTERS = "rosters.json"


class Written(msgspec.Struct, frozen=True):
    """What was written: records, files, and bytes in them."""

    records: int
    files: int
    size: int


def write_rosters(directory: Path, rosters: Sequence[Signed]) -> None:
    """Write who belongs to the pool, beside the directories of its sites' ledgers.

    Raises:
        StorageFailed: there is no room.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / ROSTERS).write_bytes(msgspec.json.encode(list(rosters)) + b"\n")
    except OSError as error:
        raise StorageFailed(f"{directory} cannot be written: {error.strerror}", "name another place") from None


def write(ledger: Ledger, directory: Path, witnesses: Sequence[notes.Key], bar: Bar) -> Written:
    """Write a site's ledger up to the latest checkpoint that was witnessed, or else up to the latest.

    Args:
        ledger: the site's.
        directory: where a directory for the site is made.
        witnesses: keys whose cosignatures are kept.
        bar: shows how far it is.

    Raises:
        Refused: it is there already.
        IntegrityError: the records are not those that the site signed; nothing is left.
        StorageFailed: there is no room; nothing is left.
    """
    target = directory / ledger.site
    if target.exists():
        raise Refused(f"{target} exists already", "name a directory that has no ledger of this site yet")
    made = directory / f"{ledger.site}.new"
    shutil.rmtree(made, ignore_errors=True)
    try:
        written = _write(ledger, made, witnesses, bar)
        made.rename(target)
    except OSError as error:
        raise StorageFailed(f"{made} cannot be written: {error.strerror}", "make room, or name another place") from None
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return written


def _write(ledger: Ledger, directory: Path, witnesses: Sequence[notes.Key], bar: Bar) -> Written:
    note, cosigners = _sealed(ledger.witnessed or ledger.note, ledger.key, witnesses)
    checkpoint = read_checkpoint(note, ledger.key)
    bar.total = checkpoint.size
    files = size = 0

    def put(name: str, data: bytes) -> None:
        nonlocal files, size
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        files, size = files + 1, size + len(data)

    tree = merkle.Frontier()
    hashes: list[list[bytes]] = []
    lot: list[bytes] = []
    for number, record in ledger.records(0, checkpoint.size):
        bar.at(number, ledger.site)
        lot.append(record)
        for level, _, found in tree.append(leaf_of(record)):
            if level % tiles.HEIGHT == 0:
                if level // tiles.HEIGHT == len(hashes):
                    hashes.append([])
                hashes[level // tiles.HEIGHT].append(found)
        if len(lot) == tiles.WIDTH and all(map(is_forgotten, lot)):
            lot = []
        elif len(lot) == tiles.WIDTH:
            put(tiles.path("entries", number // tiles.WIDTH), tiles.bundle(lot))
            lot = []
    if lot:
        put(tiles.path("entries", checkpoint.size // tiles.WIDTH, len(lot)), tiles.bundle(lot))
    for level, index, width in tiles.tiles(checkpoint.size):
        first = index * tiles.WIDTH
        put(tiles.path(str(level), index, width), b"".join(hashes[level][first : first + width]))
    if tree.root() != checkpoint.root:
        raise IntegrityError(
            f"the records of {ledger.site} are not those it signed", f"ibshell ledger verify --site {ledger.site}"
        )
    put("key", ledger.key.line().encode() + b"\n")
    put("checkpoint", note)
    if cosigners:
        put("witnesses", "".join(key.line() + "\n" for key in cosigners).encode())
    return Written(checkpoint.size, files, size)


def _sealed(note: bytes, key: notes.Key, witnesses: Sequence[notes.Key]) -> tuple[bytes, list[notes.Key]]:
    """A checkpoint with the signatures of the site and of witnesses, in that order and no others; and who those witnesses are."""
    found = notes.decode(note)
    names = notes.signers(found, witnesses)
    cosigners = [one for one in witnesses if one.name in names]
    kept = [
        one
        for owner in (key, *cosigners)
        for one in found.signatures
        if (one.name, one.key_id) == (owner.name, owner.id)
    ]
    return notes.Note(found.text, tuple(kept)).encode(), cosigners


class Exported:
    """A ledger that lies in files; `ibshell.ledger.asked.Ledger` is one that is asked for.

    Args:
        directory: of one site.
        key: the line of the key that must have signed it, or "" for the one that lies beside it.

    Attributes:
        witnesses: keys of those who have cosigned it.

    Raises:
        NotFound: there is none.
        UsageError, IntegrityError: it is none, or not signed by the key.
    """

    seen = None

    def __init__(self, directory: Path, key: str) -> None:
        self._directory = directory
        try:
            self.note = (directory / "checkpoint").read_bytes()
            line = key or (directory / "key").read_text().strip()
        except FileNotFoundError as error:
            raise NotFound(f"no ledger in {directory}: {error.filename} is missing", "ibshell ledger export") from None
        except (OSError, UnicodeDecodeError) as error:
            raise IntegrityError(f"the ledger in {directory} cannot be read: {error}") from None
        self.key = notes.parse_key(line)
        self.site = self.key.name.split("/")[1] if self.key.name.count("/") == 2 else self.key.name
        self.size = read_checkpoint(self.note, self.key).size
        self.witnesses = self._witnesses()
        signed = [(one.name, one.key_id) for one in notes.decode(self.note).signatures]
        if signed != [(one.name, one.id) for one in (self.key, *self.witnesses)]:
            raise IntegrityError(f"the checkpoint in {directory} bears other signatures than of the keys beside it")
        if len(notes.signers(notes.decode(self.note), self.witnesses)) != len(self.witnesses):
            raise IntegrityError(f"a witness is named twice in {directory}")

    def _witnesses(self) -> list[notes.Key]:
        path = self._directory / "witnesses"
        try:
            lines = path.read_text().split("\n") if path.exists() else [""]
        except (OSError, UnicodeDecodeError) as error:
            raise IntegrityError(f"{path} cannot be read: {error}") from None
        if lines.pop():
            raise IntegrityError(f"{path} is cut short")
        keys = [notes.parse_key(line) for line in lines]
        if any(one.kind != notes.COSIGNATURE for one in keys):
            raise IntegrityError(f"{path} has keys that are not of witnesses")
        return keys

    @property
    def witnessed(self) -> bytes:
        """The checkpoint bears what signatures it has."""
        return self.note

    def rosters(self) -> list[Signed]:
        """What the pool's authorities have signed about who belongs to it.

        Raises:
            IntegrityError: it cannot be read.
        """
        path = self._directory.absolute().parent / ROSTERS
        try:
            return msgspec.json.decode(path.read_bytes(), type=list[Signed])
        except (OSError, msgspec.MsgspecError, RecursionError) as error:
            raise IntegrityError(f"{path} cannot be read: {error}") from None

    def records(self, first: int, last: int) -> Iterator[tuple[int, bytes]]:
        """(number, record) of records first..last - 1.

        Raises:
            IntegrityError: a file is missing or cut short, or hashes are not of these records.
        """
        for index in range(first // tiles.WIDTH, -(-last // tiles.WIDTH)):
            width = min(tiles.WIDTH, self.size - index * tiles.WIDTH)
            if width == tiles.WIDTH and not (self._directory / tiles.path("entries", index)).exists():
                hashes = self._read("0", index, width)  # its records are forgotten
                size = merkle.HASH_BYTES
                bundle = [FORGOTTEN + hashes[at : at + size] for at in range(0, len(hashes), size)]
            else:
                bundle = tiles.unbundle(self._read("entries", index, width))
            if len(bundle) != width:
                raise IntegrityError(
                    f"{self._directory}: {tiles.path('entries', index, width)} has {len(bundle)} records, not {width}"
                )
            self._require_tile(0, index, [leaf_of(record) for record in bundle])
            for number, record in enumerate(bundle, index * tiles.WIDTH):
                if first <= number < last:
                    yield number, record
        if (first, last) == (0, self.size):
            self._require_upper_tiles()

    def _read(self, kind: str, index: int, width: int) -> bytes:
        path = self._directory / tiles.path(kind, index, width)
        try:
            return path.read_bytes()
        except OSError as error:
            raise IntegrityError(f"{path} cannot be read: {error.strerror}") from None

    def _require_tile(self, level: int, index: int, hashes: Sequence[bytes]) -> None:
        if self._read(str(level), index, len(hashes)) != b"".join(hashes):
            path = tiles.path(str(level), index, len(hashes))
            raise IntegrityError(f"{self._directory}: {path} has hashes that are not of what is below it")

    def _require_upper_tiles(self) -> None:
        """Every tile above the lowest is made of the roots of those below it, which have been checked."""
        for level, index, width in tiles.tiles(self.size):
            if level:
                below = range(index * tiles.WIDTH, index * tiles.WIDTH + width)
                roots = [_root(self._read(str(level - 1), n, tiles.WIDTH)) for n in below]
                self._require_tile(level, index, roots)

    def require_consistent(self, old: int, old_root: bytes, size: int, root: bytes) -> None:
        """Files are verified from their first record on, which leaves nothing to be shown."""

    def remember(self, verified: Verified, rules: RulesState) -> None:
        """Nothing is remembered of files."""


def _root(tile: bytes) -> bytes:
    """What a full tile's hashes come to."""
    tree = merkle.Frontier()
    for at in range(0, len(tile), merkle.HASH_BYTES):
        tree.append(tile[at : at + merkle.HASH_BYTES])
    return tree.root()


def found_in(path: Path) -> list[Path]:
    """The directories of ledgers at or below a path.

    Raises:
        NotFound: there are none.
    """
    found = [path] if (path / "checkpoint").exists() else sorted(one.parent for one in path.glob("*/checkpoint"))
    if not found:
        raise NotFound(f"no ledger in {path}", "ibshell ledger export DIR writes one")
    return found
