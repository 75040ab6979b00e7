"""Entries in SQLite: append-only streams, durable when `append` returns (WAL, synchronous=FULL), one writer.

A stream is the history of one thing: `leases`, `rounds`, `run/7f3a…`. An entry is a tagged Struct, kept as JSON, with the clock
of its writing. State is the fold of a stream; nothing is ever updated.
"""

import asyncio
import json
import sqlite3
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from agent import clock
from fedpool.errors import IntegrityError, StorageFailed

SCHEMA_VERSION = 2

_SCHEMA = """
CREATE TABLE entries (
  seq INTEGER PRIMARY KEY, stream TEXT NOT NULL, at REAL NOT NULL, boot TEXT NOT NULL, wall TEXT NOT NULL, body TEXT NOT NULL
) STRICT;
CREATE INDEX entries_stream ON entries (stream, seq);
"""


_Row = tuple[str, float, str, str, str]


def _settle(done: asyncio.Future[None], failure: StorageFailed | None) -> None:
    if done.cancelled():
        return
    if failure is None:
        done.set_result(None)
    else:
        done.set_exception(StorageFailed(failure.message, failure.hint))


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
    """One agent's durable entries.

    Args:
        path: of the database; made if it is not there.

    Raises:
        IntegrityError: it is damaged, or newer than this code.
        StorageFailed: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting: deque[tuple[list[_Row], asyncio.Future[None], asyncio.AbstractEventLoop]] = deque()
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
                self._migrate()
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
                "restore it from a backup; do not delete it, it holds the fencing tokens already given out",
            ) from None
        except OSError as error:
            raise StorageFailed(f"{self.path} cannot be opened: {error.strerror}") from None

    def _migrate(self) -> None:
        """Bring an older file forward, in one transaction."""
        self._db.execute("BEGIN IMMEDIATE")
        for seq, body in self._db.execute("SELECT seq, body FROM entries WHERE stream = 'leases'").fetchall():
            newer = json.dumps(entry_from_1(json.loads(body)), separators=(",", ":"))
            self._db.execute("UPDATE entries SET body = ? WHERE seq = ?", (newer, seq))
        self._db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
        self._db.execute("COMMIT")

    async def append(self, stream: str, entries: Sequence[msgspec.Struct]) -> None:
        """Write entries; durable when it returns, all or none of them. What waits to be written is written in one transaction.

        Raises:
            StorageFailed: the disk is full, read-only or broken.
        """
        if not entries:
            return
        at, boot, wall = clock.now(), clock.boot(), clock.wall()
        rows = [(stream, at, boot, wall, msgspec.json.encode(entry).decode()) for entry in entries]
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        self._waiting.append((rows, done, loop))
        self._thread.submit(self._write_waiting)
        await done

    def _write_waiting(self) -> None:
        group = []
        while self._waiting:
            group.append(self._waiting.popleft())
        if not group:
            return  # an earlier call wrote it together with its own
        failure: StorageFailed | None = None
        try:
            self._db.execute("BEGIN IMMEDIATE")
            rows = [row for rows, _, _ in group for row in rows]
            self._db.executemany("INSERT INTO entries (stream, at, boot, wall, body) VALUES (?, ?, ?, ?, ?)", rows)
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            failure = StorageFailed(
                f"{self.path} cannot be written: {error}", "make room on the disk; nothing was changed"
            )
        for _, done, loop in group:
            loop.call_soon_threadsafe(_settle, done, failure)

    def read(self, stream: str, kinds: Any) -> list[Any]:
        """Every entry of a stream, in order.

        Args:
            stream: which.
            kinds: the tagged Struct type, or union of them.
        """
        rows = self._thread.submit(
            lambda: self._db.execute("SELECT body FROM entries WHERE stream = ? ORDER BY seq", (stream,)).fetchall()
        ).result()
        decoder = msgspec.json.Decoder(kinds)
        try:
            return [decoder.decode(body) for (body,) in rows]
        except msgspec.MsgspecError as error:
            raise IntegrityError(f"{self.path}: an entry of {stream} cannot be read: {error}") from None

    def streams(self, prefix: str) -> list[str]:
        """The streams whose name begins with a prefix, oldest first."""
        rows = self._thread.submit(
            lambda: self._db.execute(
                "SELECT stream FROM entries WHERE substr(stream, 1, ?) = ? GROUP BY stream ORDER BY min(seq)",
                (len(prefix), prefix),
            ).fetchall()
        ).result()
        return [stream for (stream,) in rows]

    def last_written(self) -> tuple[float, str | None]:
        """Clock and boot of the latest entry; (0, None) when there is none."""
        row = self._thread.submit(
            lambda: self._db.execute("SELECT at, boot FROM entries ORDER BY seq DESC LIMIT 1").fetchone()
        ).result()
        return (0.0, None) if row is None else (row[0], row[1])

    def close(self) -> None:
        """Finish what is queued and close."""
        self._thread.submit(self._db.close).result()
        self._thread.shutdown()
