"""Copies of an agent's database: taken while it runs, and put back in place of a damaged one."""

import os
import sqlite3
import time
from contextlib import closing
from pathlib import Path

from agent.store.sqlite import SCHEMA_VERSION
from fedpool.errors import IntegrityError, NotFound, Refused, StorageFailed


def _check(path: Path) -> int:
    """Entries of a database that is whole.

    Raises:
        NotFound, IntegrityError: there is none, or it is not.
    """
    if not path.exists():
        raise NotFound(f"no database at {path}")
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
            (verdict,) = db.execute("PRAGMA integrity_check(1)").fetchone()
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if verdict != "ok":
                raise sqlite3.DatabaseError(verdict)
            if not 0 < version <= SCHEMA_VERSION:
                raise IntegrityError(f"{path} has schema {version}; this release knows up to {SCHEMA_VERSION}")
            (entries,) = db.execute("SELECT count(*) FROM entries").fetchone()
    except sqlite3.DatabaseError as error:
        raise IntegrityError(f"{path} is damaged: {error}", "take another copy") from None
    return int(entries)


def backup(database: Path, copy: Path) -> int:
    """Copy a database while its agent goes on writing; returns how many entries the copy holds.

    Raises:
        Refused: the copy exists already.
        NotFound, IntegrityError, StorageFailed: nothing is left at `copy`.
    """
    if copy.exists():
        raise Refused(f"{copy} exists already", "name a file that does not")
    if not database.exists():
        raise NotFound(f"no database at {database}", "it lies in the agent's state directory: hub.db or site.db")
    temporary = copy.with_name(f"{copy.name}.new")
    try:
        with closing(sqlite3.connect(database)) as source, closing(sqlite3.connect(temporary)) as target:
            source.backup(target, pages=1000)
            target.execute("PRAGMA journal_mode=DELETE")
        entries = _check(temporary)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.rename(copy)
    except (sqlite3.Error, OSError) as error:
        raise StorageFailed(f"{database} cannot be copied to {copy}: {error}", "make room on its disk") from None
    finally:
        temporary.unlink(missing_ok=True)
    return entries


def restore(copy: Path, database: Path) -> tuple[int, Path | None]:
    """Put a copy in place of a database; returns its entries, and where the old file was put.

    Nothing that was given out since the copy is issued again: at its next start a site's tokens jump to where the time of day
    puts them, past everything it can have given.

    Raises:
        Refused: an agent has the database open.
        NotFound, IntegrityError: the copy is of no use; nothing has changed.
    """
    entries = _check(copy)
    users = _users(database)
    if users:
        raise Refused(f"process {users[0]} has {database} open", "stop the agent first")
    aside: Path | None = None
    if database.exists():
        aside = database.with_name(f"{database.name}.replaced-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}")
        database.rename(aside)
        for suffix in ("-wal", "-shm"):
            log = database.with_name(database.name + suffix)
            if log.exists():
                log.rename(aside.with_name(aside.name + suffix))
    temporary = database.with_name(f"{database.name}.new")
    temporary.write_bytes(copy.read_bytes())
    with temporary.open("rb+") as file:
        os.fsync(file.fileno())
    temporary.chmod(0o600)
    temporary.rename(database)
    return entries, aside


def _users(path: Path) -> list[int]:
    """Processes that have a file open, of this user (of everybody for root)."""
    if not path.exists():
        return []
    wanted = path.stat()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                opened = [os.stat(link) for link in (entry / "fd").iterdir() if link.exists()]
            except OSError:
                continue  # ended meanwhile, or another user's
            if any((one.st_dev, one.st_ino) == (wanted.st_dev, wanted.st_ino) for one in opened):
                found.append(int(entry.name))
    return found
