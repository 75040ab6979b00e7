"""Entries in SQLite: append-only streams, durable when `append` returns (WAL, synchronous=FULL), one writer, groups of entries.

A stream is the history of one thing: `leases`, `rounds`, `run/7f3a…`. An entry is a tagged Struct, kept as JSON, with the clock
of its writing. State is the fold of a stream from its latest snapshot on; nothing is ever updated.
"""

import asyncio
import json
import sqlite3
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from agent import clock
from fedpool.errors import IntegrityError, StorageFailed
from fedpool.step import Instant

SCHEMA_VERSION = 5

_SNAPSHOTS = "CREATE TABLE snapshots (stream TEXT PRIMARY KEY, seq INTEGER NOT NULL) STRICT;"
_RECORDS = "CREATE TABLE records (number INTEGER PRIMARY KEY, body BLOB NOT NULL) STRICT;"  # the first is number 1
_SCHEMA = f"""
CREATE TABLE entries (
  seq INTEGER PRIMARY KEY, stream TEXT NOT NULL, at REAL NOT NULL, boot TEXT NOT NULL, wall TEXT NOT NULL, body TEXT NOT NULL
) STRICT;
CREATE INDEX entries_stream ON entries (stream, seq);
{_SNAPSHOTS}
{_RECORDS}
"""
_RECORD = "INSERT INTO records (body) VALUES (?)"
_INSERT = "INSERT INTO entries (stream, at, boot, wall, body) VALUES (?, ?, ?, ?, ?)"
# The entries stay; a snapshot says nothing that they do not.
_SUPERSEDED = "DELETE FROM entries WHERE seq = (SELECT seq FROM snapshots WHERE stream = ?)"
_MARK = "INSERT INTO snapshots VALUES (?, ?) ON CONFLICT (stream) DO UPDATE SET seq = excluded.seq"

Result = TypeVar("Result")
_Row = tuple[str, float, str, str, str]


@dataclass(frozen=True)
class _Waiting:
    """What one `append` wants written; `basis` is the reading of the stream that it rests on."""

    stream: str
    basis: int
    rows: list[_Row]
    snapshot: bool
    records: Sequence[bytes]
    done: asyncio.Future[None]
    loop: asyncio.AbstractEventLoop


def entry_from_1(entry: dict[str, Any]) -> dict[str, Any]:
    """A lease's entry as schema 1 wrote it, as schema 2 reads it: grants became lists, the hub's leases got a demand."""
    lease = entry.get("lease")
    if lease is None:
        return entry
    for holder in (lease, *lease.get("parts", ())):
        if "grants" in holder:
            holder["grants"] = [[grant["uuid"], grant["token"]] for grant in holder["grants"]]
    if entry["type"] == "lease.recorded":
        lease["demand"] = {"gpus": max(1, sum(part["gpus"] for part in lease["parts"]))}
        lease["started"] = 0.0 if lease["state"] in ("requested", "held", "aborted") else lease.get("deadline", 0.0)
    return entry


class SqliteStore:
    """One agent's durable entries; see `agent.ports.Store`.

    Args:
        path: of the database; made if it is not there.

    Raises:
        IntegrityError: it is damaged, or newer than this code.
        StorageFailed: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting: deque[_Waiting] = deque()
        self._in_flight: Counter[str] = Counter()
        self._basis: Counter[str] = Counter()  # how often each stream has been read
        self._failed: set[tuple[str, int]] = set()  # (stream, basis) on which nothing can be built any more
        self._broken = ""
        self._lost = asyncio.Event()
        # One thread owns the connection: appends queue there and never hold up the event loop.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._thread.submit(self._open).result()

    def _open(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._db = sqlite3.connect(self.path, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            if version == 0:
                self._db.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version={SCHEMA_VERSION}; COMMIT")
            elif version < SCHEMA_VERSION:
                self._migrate(version)
            elif version > SCHEMA_VERSION:
                raise IntegrityError(
                    f"{self.path} has schema {version}; this release knows up to {SCHEMA_VERSION}",
                    "run the newer release that wrote it",
                )
            (verdict,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
            if verdict != "ok":
                raise sqlite3.DatabaseError(verdict)
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                raise StorageFailed(
                    f"{self.path} cannot be opened: {error}", "is the disk full or read-only?"
                ) from None
            raise IntegrityError(
                f"{self.path} is damaged: {error}",
                "stop the agent and restore a backup: ibshell-agent restore --help; do not delete the file, it holds the "
                "fencing tokens already given out",
            ) from None
        except OSError as error:
            raise StorageFailed(f"{self.path} cannot be opened: {error.strerror}") from None

    def _migrate(self, version: int) -> None:
        """Bring an older file forward, in one transaction."""
        self._db.execute("BEGIN IMMEDIATE")
        if version < 2:
            for seq, body in self._db.execute("SELECT seq, body FROM entries WHERE stream = 'leases'").fetchall():
                newer = json.dumps(entry_from_1(json.loads(body)), separators=(",", ":"))
                self._db.execute("UPDATE entries SET body = ? WHERE seq = ?", (newer, seq))
        if version < 4:
            self._db.execute(_SNAPSHOTS)
        self._db.execute(_RECORDS)
        self._db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
        self._db.execute("COMMIT")

    # --- writing

    async def append(
        self,
        stream: str,
        entries: Sequence[msgspec.Struct],
        *,
        snapshot: bool = False,
        records: Sequence[bytes] = (),
    ) -> None:
        """See `Store.append`. What waits to be written is written in one transaction.

        Raises:
            StorageFailed: the disk is full, read-only or broken.
        """
        basis = self._basis[stream]
        if (stream, basis) in self._failed or self._broken:
            raise self._refusal(stream)
        if not entries and not records and not self._in_flight[stream]:
            return
        at, boot, wall = clock.now(), clock.boot(), clock.wall()
        rows = [(stream, at, boot, wall, msgspec.json.encode(entry).decode()) for entry in entries]
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        self._in_flight[stream] += 1
        self._waiting.append(_Waiting(stream, basis, rows, snapshot, records, done, loop))
        self._thread.submit(self._write_waiting)
        await done

    def _refusal(self, stream: str) -> StorageFailed:
        if self._broken:
            return StorageFailed(
                f"{self.path} failed before: {self._broken}", "look at the disk, then start the agent again"
            )
        return StorageFailed(f"{self.path}: what came before in {stream} was not written", "ask again")

    def _write_waiting(self) -> None:
        group = []
        while self._waiting:
            group.append(self._waiting.popleft())
        refused = [one for one in group if (one.stream, one.basis) in self._failed or self._broken]
        for one in refused:
            self._settle(one, self._refusal(one.stream))
        group = [one for one in group if one not in refused]
        if not group:
            return  # an earlier call wrote it together with its own
        failure: StorageFailed | None = None
        try:
            self._write(group)
        except sqlite3.Error as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            failure = StorageFailed(
                f"{self.path} cannot be written: {error}", "make room on the disk; nothing was changed"
            )
            self._failed.update((one.stream, one.basis) for one in group if one.rows or one.records)
            if error.sqlite_errorname.startswith("SQLITE_IOERR"):
                # After a failed fsync the kernel may have dropped what it could not write: only a fresh start tells what stands.
                self._broken = str(error)
        for one in group:
            self._settle(one, failure)

    def _write(self, group: list[_Waiting]) -> None:
        if not any(one.rows or one.records for one in group):
            return
        self._db.execute("BEGIN IMMEDIATE")
        for one in group:
            if one.snapshot:
                self._db.execute(_SUPERSEDED, (one.stream,))
                seq = self._db.execute(_INSERT, one.rows[0]).lastrowid
                self._db.execute(_MARK, (one.stream, seq))
            self._db.executemany(_INSERT, one.rows[1:] if one.snapshot else one.rows)
            self._db.executemany(_RECORD, ((record,) for record in one.records))
        self._db.execute("COMMIT")

    def _settle(self, one: _Waiting, failure: StorageFailed | None) -> None:
        def told() -> None:
            if self._broken:
                self._lost.set()
            self._in_flight[one.stream] -= 1
            if one.done.cancelled():
                return
            if failure is None:
                one.done.set_result(None)
            else:
                one.done.set_exception(StorageFailed(failure.message, failure.hint))

        one.loop.call_soon_threadsafe(told)

    # --- reading

    async def _ask(self, question: Callable[[], Result]) -> Result:
        return await asyncio.wrap_future(self._thread.submit(question))

    async def read(self, stream: str, kinds: Any) -> list[Any]:
        """See `Store.read`.

        Raises:
            IntegrityError: an entry is not what was written.
        """
        self._basis[stream] += 1

        def question() -> list[tuple[str]]:
            return self._db.execute(
                "SELECT body FROM entries WHERE stream = ? AND seq >= "
                "coalesce((SELECT seq FROM snapshots WHERE stream = ?), 0) ORDER BY seq",
                (stream, stream),
            ).fetchall()

        rows = await self._ask(question)
        decoder = msgspec.json.Decoder(kinds)
        try:
            return [decoder.decode(body) for (body,) in rows]
        except msgspec.MsgspecError as error:
            raise IntegrityError(f"{self.path}: an entry of {stream} cannot be read: {error}") from None

    async def streams(self, prefix: str) -> list[str]:
        """See `Store.streams`."""

        def question() -> list[tuple[str]]:
            return self._db.execute(
                "SELECT stream FROM entries WHERE stream >= ? AND stream < ? GROUP BY stream ORDER BY min(seq)",
                (prefix, prefix + chr(0x10FFFF)),
            ).fetchall()

        return [stream for (stream,) in await self._ask(question)]

    async def recorded(self) -> int:
        """See `Store.recorded`."""
        (last,) = await self._ask(lambda: self._db.execute("SELECT max(number) FROM records").fetchone())
        return last or 0

    async def records(self, first: int, count: int) -> list[bytes]:
        """See `Store.records`.

        Raises:
            IntegrityError: one is missing.
        """

        def question() -> list[tuple[int, bytes]]:
            return self._db.execute(
                "SELECT number, body FROM records WHERE number > ? ORDER BY number LIMIT ?", (first, count)
            ).fetchall()

        rows = await self._ask(question)
        for position, (number, _) in enumerate(rows, first + 1):
            if number != position:
                raise IntegrityError(f"{self.path}: record {position - 1} of the ledger is missing")
        return [body for _, body in rows]

    async def replace_records(self, first: int, records: Sequence[bytes]) -> None:
        """See `Store.replace_records`.

        Raises:
            StorageFailed: the disk is full, read-only or broken.
        """
        rows = [(record, number) for number, record in enumerate(records, first + 1)]

        def change() -> None:
            try:
                self._db.execute("BEGIN IMMEDIATE")
                self._db.executemany("UPDATE records SET body = ? WHERE number = ?", rows)
                self._db.execute("COMMIT")
            except sqlite3.Error as error:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise StorageFailed(f"{self.path} cannot be written: {error}", "make room on the disk") from None

        await self._ask(change)

    async def last_written(self) -> Instant:
        """See `Store.last_written`."""
        row = await self._ask(
            lambda: self._db.execute("SELECT at, boot, wall FROM entries ORDER BY seq DESC LIMIT 1").fetchone()
        )
        return Instant() if row is None else Instant(row[0], row[1], datetime.fromisoformat(row[2]).timestamp())

    async def lost(self) -> None:
        """See `Store.lost`."""
        await self._lost.wait()
        raise self._refusal("")

    async def close(self) -> None:
        """See `Store.close`."""
        await self._ask(self._db.close)
        self._thread.shutdown()
