"""The SQLite file of a ledger: JSON records in tables, all of which are checked whenever the file is opened.

Every change is one transaction that begins with `BEGIN IMMEDIATE`. Concurrent processes therefore write one after the
other, and a killed process leaves the file as it was before or after its change.

SQLite does not check what it stores. So each row carries the digest of its record, and each table has one digest over
those of its rows. Both are checked before any value is used.
"""

import hashlib
import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from ease.config import Config
from ease.errors import Unwritable, UserError
from ease.operations.ledger.records import Consent, Entry, Event
from ease.storage import exclusive, write_atomic

NAME = "ledger.sqlite"
CREATION_LOCK = ".ledger.lock"
VERSION = 2
"""Version of tables and records; raise it when older files can no longer be read."""
BUSY_SECONDS = 60.0
"""How long to wait for another process's transaction; each takes milliseconds."""
PAGE_BYTES = 1024
"""With small pages a request can still be given back on a disk that is nearly full."""
TABLES: dict[type[Config], str] = {Entry: "requests", Event: "events", Consent: "consents"}
SCHEMA = (
    *(
        f"CREATE TABLE {name} (number INTEGER PRIMARY KEY, record TEXT NOT NULL, digest TEXT NOT NULL)"
        for name in TABLES.values()
    ),
    "CREATE TABLE digests (name TEXT PRIMARY KEY, digest TEXT NOT NULL)",
)
MACHINE_FAULTS = frozenset(
    {
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_AUTH,
    }
)
"""Primary error codes of SQLite that say nothing about the file's content; any other means that it is damaged."""
IOERR_SHORT_READ = 522
"""The only input error that a damaged file causes: the file is shorter than its header says."""
C = TypeVar("C", bound=Config)


@dataclass(frozen=True)
class Tables:
    """The checked tables of an open ledger within one transaction."""

    connection: sqlite3.Connection
    path: Path

    def read(self, kind: type[C]) -> list[C]:
        """Return all records of one kind, by their numbers."""
        rows = self.connection.execute(f"SELECT record FROM {TABLES[kind]} ORDER BY number")
        try:
            return [kind.model_validate_json(text) for (text,) in rows]
        except ValidationError as error:
            raise UserError(
                f"{self.path}: {TABLES[kind]}: written by another version of ease; open it with that version"
            ) from error

    def last(self, kind: type[C]) -> C | None:
        """Return the record with the largest number; None if there is none."""
        query = f"SELECT record FROM {TABLES[kind]} ORDER BY number DESC LIMIT 1"
        row = self.connection.execute(query).fetchone()
        return None if row is None else kind.model_validate_json(row[0])

    def write(self, number: int, record: Config) -> None:
        """Store a record under a number, in place of the one that has it."""
        name, text = TABLES[type(record)], record.model_dump_json()
        row = (number, text, _digest(name, number, text))
        self.connection.execute(f"INSERT OR REPLACE INTO {name} (number, record, digest) VALUES (?, ?, ?)", row)

    def next_number(self, kind: type[Config]) -> int:
        (last,) = self.connection.execute(f"SELECT max(number) FROM {TABLES[kind]}").fetchone()
        return 1 + (last or 0)

    def seal(self) -> None:
        """Store the digest of each table."""
        for name in TABLES.values():
            rows = self.connection.execute(f"SELECT digest FROM {name} ORDER BY number")
            total = _digest(name, *(each for (each,) in rows))
            self.connection.execute("INSERT OR REPLACE INTO digests (name, digest) VALUES (?, ?)", (name, total))

    def check(self) -> None:
        """Refuse a file that is not, to the last value, what was written."""
        (version,) = self.connection.execute("PRAGMA user_version").fetchone()
        if version < 1:
            raise _damaged(self.path, "it has no tables")
        if version != VERSION:
            raise UserError(f"{self.path}: version {version}, and this ease reads {VERSION}; use the one that wrote it")
        (found,) = self.connection.execute("PRAGMA integrity_check(1)").fetchone()
        if found != "ok":
            raise _damaged(self.path, found)
        if _schema(self.connection) != _expected_schema():
            raise _damaged(self.path, "its tables are not those that were made")
        totals = dict(self.connection.execute("SELECT name, digest FROM digests"))
        for name in TABLES.values():
            digests = []
            for number, record, digest in self.connection.execute(f"SELECT * FROM {name} ORDER BY number"):
                if digest != _digest(name, number, record):
                    raise _damaged(self.path, f"{name}: row {number} does not have its digest")
                digests.append(digest)
            if totals.pop(name, None) != _digest(name, *digests):
                raise _damaged(self.path, f"{name}: its {len(digests)} rows are not all that were written")
        if totals:
            raise _damaged(self.path, "it has more tables than were made")


def _digest(*values: Any) -> str:
    return hashlib.sha256(json.dumps(values, default=repr).encode()).hexdigest()


def _schema(connection: sqlite3.Connection) -> list[tuple[str, ...]]:
    return list(connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY type, name"))


@cache
def _expected_schema() -> list[tuple[str, ...]]:
    with closing(empty()) as connection:
        return _schema(connection)


def empty() -> sqlite3.Connection:
    """Make an empty ledger in memory."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    for statement in (f"PRAGMA page_size = {PAGE_BYTES}", f"PRAGMA user_version = {VERSION}", *SCHEMA):
        connection.execute(statement)
    Tables(connection, Path(NAME)).seal()
    return connection


# --- opening ---


@contextmanager
def reading(path: Path) -> Iterator[Tables]:
    """Open a ledger to read; all statements see the same state of it. A file that does not exist reads as empty."""
    with _named_faults(path), closing(_open_to_read(path)) as connection:
        connection.execute("BEGIN")
        tables = Tables(connection, path)
        tables.check()
        yield tables


@contextmanager
def writing(path: Path) -> Iterator[Tables]:
    """Open a ledger for one transaction, which is undone if an exception leaves the context."""
    with _named_faults(path), closing(_open_to_write(path)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        try:
            tables = Tables(connection, path)
            tables.check()
            yield tables
            tables.seal()
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:  # SQLite itself has undone it on a full disk
                connection.execute("ROLLBACK")
            raise


def rewrite(path: Path) -> None:
    """Write the whole file anew, so that nothing of replaced records remains in it."""
    with _named_faults(path), closing(_open_to_write(path)) as connection:
        connection.execute("VACUUM")


def _open_to_read(path: Path) -> sqlite3.Connection:
    if not path.is_file():
        return empty()
    # A disk that is writable has to be written: a killed process may have left a transaction to undo.
    writable = os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)
    return connect(f"{path.absolute().as_uri()}?mode={'rw' if writable else 'ro'}")


def _open_to_write(path: Path) -> sqlite3.Connection:
    if not path.parent.is_dir():
        raise UserError(f"{path.parent}: no such run")
    if not path.is_file():
        _create(path)
    connection = connect(f"{path.absolute().as_uri()}?mode=rw")
    try:
        # No write-ahead log: a damaged one loses its last transactions unnoticed, and a read-only disk cannot have one.
        for pragma in ("journal_mode = DELETE", "synchronous = EXTRA", "secure_delete = ON"):
            connection.execute(f"PRAGMA {pragma}")
    except BaseException:
        connection.close()
        raise
    return connection


def _create(path: Path) -> None:
    """Write an empty ledger, whole or not at all: a file without tables is therefore always a damaged one."""
    with exclusive(path.parent / CREATION_LOCK, f"{path}: another process creates it; try again", BUSY_SECONDS):
        if not path.is_file():
            with closing(empty()) as connection:
                write_atomic(path, connection.serialize())


def connect(uri: str) -> sqlite3.Connection:
    """Open a connection that begins and ends transactions only where this module says so."""
    return sqlite3.connect(uri, timeout=BUSY_SECONDS, isolation_level=None, uri=True)


@contextmanager
def _named_faults(path: Path) -> Iterator[None]:
    """Turn SQLite's errors into one line, by whether the machine or the file is at fault."""
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0)
        primary = code & 0xFF
        if primary in MACHINE_FAULTS or (primary == sqlite3.SQLITE_IOERR and code != IOERR_SHORT_READ):
            raise Unwritable(f"{path}: cannot be read or written ({error}); free space or restore the file") from error
        raise _damaged(path, str(error)) from error
    except UnicodeDecodeError as error:  # SQLite quotes the damaged text
        raise _damaged(path, "its schema is not text") from error


def _damaged(path: Path, why: str) -> UserError:
    return UserError(f"{path}: damaged ({' '.join(why.split())[:200]}); restore it from a backup, nothing was done")
