"""The ledger of a run: requests as people hand them in, every step they took, and who joined, in one SQLite file.

Every change is one transaction that begins with `BEGIN IMMEDIATE`. Concurrent processes therefore write one after the
other, and a killed process leaves the ledger as it was before or after the change, never between.

SQLite does not check what it stores, so every row carries a digest of itself and of the row before it. All of them
are checked whenever the ledger is opened, before a value is used.
"""

import calendar
import hashlib
import json
import os
import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from ease.errors import Unwritable, UserError
from ease.operations.ledger.states import OPEN, Actor, State, following
from ease.requests.request import REQUESTS, Request
from ease.runs.resolve import request_id
from ease.storage import digest, exclusive, write_atomic

NAME = "ledger.sqlite"
MAKING = ".ledger.lock"
"""Held while the file is made."""
NAMED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")
"""What a request may be called: it is printed, and typed again."""
BUSY_SECONDS = 60.0
"""How long to wait for another process's transaction; each takes milliseconds."""
LONGEST_TEXT = 2000
"""Letters of a reason or a name."""

MIGRATIONS: tuple[str, ...] = (
    """
    CREATE TABLE requests (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        request TEXT NOT NULL,
        method TEXT NOT NULL,
        asked_by TEXT NOT NULL,
        ground TEXT NOT NULL,
        reason TEXT NOT NULL,
        priority INTEGER NOT NULL,
        submitted TEXT NOT NULL,
        deadline TEXT NOT NULL,
        state TEXT NOT NULL,
        why TEXT NOT NULL DEFAULT '',
        batch TEXT NOT NULL DEFAULT '',
        outcome TEXT NOT NULL DEFAULT '{}',
        waived TEXT NOT NULL DEFAULT '',
        digest TEXT NOT NULL DEFAULT ''
    );
    CREATE TABLE events (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        request TEXT NOT NULL REFERENCES requests (id),
        time TEXT NOT NULL,
        before TEXT NOT NULL,
        after TEXT NOT NULL,
        by TEXT NOT NULL,
        why TEXT NOT NULL,
        digest TEXT NOT NULL DEFAULT ''
    );
    CREATE TABLE consents (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        client INTEGER NOT NULL,
        time TEXT NOT NULL,
        given_by TEXT NOT NULL,
        text TEXT NOT NULL,
        pairs INTEGER NOT NULL,
        returned INTEGER NOT NULL,
        digest TEXT NOT NULL DEFAULT ''
    );
    CREATE TABLE chains (
        name TEXT PRIMARY KEY,
        rows INTEGER NOT NULL,
        last TEXT NOT NULL
    );
    """,
)
"""What each version of the schema adds to the one before; `user_version` says how many of them a file has."""

_COLUMNS = (
    "number, id, request, method, asked_by, ground, reason, priority, submitted, deadline, state, why, batch, outcome, "
    "waived"
)
PAGE_BYTES = 1024
"""Of the file: with small pages a request can still be given back on a disk that is nearly full."""
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
"""The one input error that a file causes which is shorter than it says."""
CHAINED = {
    "requests": _COLUMNS,
    "events": "number, request, time, before, after, by, why",
    "consents": "number, client, time, given_by, text, pairs, returned",
}
"""Tables whose rows form a chain of digests, and the columns that a digest covers."""
_IN_TURN = "ORDER BY priority DESC, deadline, number"


@dataclass(frozen=True)
class Entry:
    """One request in the ledger."""

    number: int
    """Order of arrival."""
    id: str
    request: Request
    method: dict[str, Any]
    asked_by: str
    ground: str
    """On what legal or other ground it was asked."""
    reason: str
    priority: int
    """Larger goes first."""
    submitted: str
    deadline: str
    state: State
    why: str
    """Why it is in that state, where there is something to say."""
    batch: str
    """What it is or was worked on together with."""
    outcome: dict[str, Any]
    """What came of it: the answer's name, the number of its release, what was measured."""
    waived: str
    """Hash of the model that a person let pass although retained recall fell."""

    @property
    def released(self) -> bool:
        """Whether its answer is, or may be, what the run continues from, although the request is not done."""
        return self.state in OPEN and "planned" in self.outcome

    def overdue(self, time: datetime) -> bool:
        return self.state in OPEN and self.deadline < stamp(time)

    def as_json(self) -> dict[str, Any]:
        return {**self.__dict__, "request": self.request.model_dump(mode="json")}


@dataclass(frozen=True)
class Event:
    """One step of a request."""

    request: str
    time: str
    before: str
    after: str
    by: str
    why: str


@dataclass(frozen=True)
class Consent:
    """Why pairs that were not in the training are in it now: a client that joined, or joined again."""

    client: int
    time: str
    given_by: str
    text: str
    pairs: int
    returned: int
    """How many of the pairs had been forgotten before."""

    @property
    def sha256(self) -> str:
        """What the run remembers of it, so that words that were changed later are told from those that were given."""
        return hashlib.sha256(json.dumps([self.given_by, self.time, self.text]).encode()).hexdigest()


@dataclass(frozen=True)
class Draft:
    """A request before it is in the ledger."""

    request: Request
    method: dict[str, Any]
    asked_by: str
    ground: str = ""
    reason: str = ""
    priority: int = 0
    deadline: datetime | None = None
    """Absent: a month after it is handed in."""
    id: str | None = None
    """Absent: derived from what is asked for and by whom."""


def check_text(option: str, text: str) -> None:
    if len(text) > LONGEST_TEXT:
        raise UserError(f"--{option}: more than {LONGEST_TEXT} letters; say it shorter")


def now() -> datetime:
    return datetime.now(UTC)


def stamp(time: datetime) -> str:
    """A time as it is written: in UTC, so that text is ordered as time is."""
    return time.astimezone(UTC).isoformat(timespec="milliseconds")


def month_after(time: datetime) -> datetime:
    """The same day of the next month, or its last."""
    year, month = time.year + time.month // 12, time.month % 12 + 1
    return time.replace(year=year, month=month, day=min(time.day, calendar.monthrange(year, month)[1]))


@dataclass(frozen=True)
class Ledger:
    """Reads and writes the ledger of one run; every call is a connection of its own."""

    folder: Path

    @property
    def path(self) -> Path:
        return self.folder / NAME

    @property
    def exists(self) -> bool:
        return self.path.is_file()

    # --- reading ---

    def entries(self) -> list[Entry]:
        """All requests in the order in which they would be worked on."""
        with self._reading() as ledger:
            return [_entry(row) for row in ledger.execute(f"SELECT {_COLUMNS} FROM requests {_IN_TURN}")]

    def entry(self, id: str) -> Entry:
        with self._reading() as ledger:
            return _find(ledger, id, self.folder)

    def events(self, id: str | None = None) -> list[Event]:
        """Every step of one request, or of all, in order."""
        where, values = ("", ()) if id is None else ("WHERE request = ?", (id,))
        with self._reading() as ledger:
            rows = ledger.execute(
                f"SELECT request, time, before, after, by, why FROM events {where} ORDER BY number", values
            )
            return [Event(*row) for row in rows]

    def consents(self) -> list[Consent]:
        with self._reading() as ledger:
            columns = "client, time, given_by, text, pairs, returned"
            return [Consent(*row) for row in ledger.execute(f"SELECT {columns} FROM consents ORDER BY number")]

    # --- writing ---

    def add(self, draft: Draft) -> tuple[Entry, bool]:
        """Hand a request in; the same one again is the one that is there already. Says whether it is new."""
        content = draft.request.model_dump(mode="json")
        id = draft.id or f"{request_id(draft.request)[:60]}-{digest(content, draft.method, draft.asked_by)[:6]}"
        if not NAMED.fullmatch(id):
            raise UserError(f"--id {id[:80]!r}: use letters, digits, dots, lines and underscores, 80 at most")
        for field in ("asked_by", "ground", "reason"):
            check_text(field.replace("asked_", ""), getattr(draft, field))
        time = now()
        with self._writing() as ledger:
            found = _found(ledger, id)
            if found is not None:
                if (found.request, found.method) != (draft.request, draft.method):
                    raise UserError(f"--id {id}: another request has this id (ease request show); choose another one")
                return found, False
            ledger.execute(
                "INSERT INTO requests (id, request, method, asked_by, ground, reason, priority, submitted, deadline, "
                "state) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 'submitted')",
                (
                    id,
                    json.dumps(content, sort_keys=True),
                    json.dumps(draft.method, sort_keys=True),
                    draft.asked_by,
                    draft.ground,
                    draft.reason,
                    draft.priority,
                    stamp(time),
                    stamp(draft.deadline or month_after(time)),
                ),
            )
            _note(ledger, id, "", "submitted", draft.asked_by, draft.reason, time)
            return _find(ledger, id, self.folder), True

    def move(
        self, ids: Sequence[str], state: State, by: str, why: str = "", outcome: dict[str, Any] | None = None
    ) -> None:
        """Take running requests to another state together, all or none; only the worker does."""
        with self._writing() as ledger:
            for id in ids:
                _step(ledger, _find(ledger, id, self.folder), "worker", state, by, why)
                if outcome is not None:
                    text = json.dumps(outcome, sort_keys=True)
                    ledger.execute("UPDATE requests SET outcome = ? WHERE id = ?", (text, id))

    def plan(self, ids: Sequence[str], outcome: dict[str, Any]) -> None:
        """Say what is about to be done for running requests, so that whoever goes on does the same."""
        with self._writing() as ledger:
            for id in ids:
                text = json.dumps(outcome, sort_keys=True)
                ledger.execute("UPDATE requests SET outcome = ? WHERE id = ? AND state = 'running'", (text, id))

    def cancel(self, id: str, by: str, why: str) -> None:
        """Take a request back that nobody works on and whose answer is not released."""
        check_text("reason", why)
        with self._writing() as ledger:
            found = _find(ledger, id, self.folder)
            if found.released:
                raise UserError(f"{id}: its answer is released and cannot be taken back; complete it with `ease work`")
            _step(ledger, found, "person", "cancelled", by, why)

    def approve(self, id: str, by: str) -> Entry:
        """Let a request be worked on; of one whose model is held, let that model pass."""
        with self._writing() as ledger:
            found = _find(ledger, id, self.folder)
            _step(ledger, found, "person", "approved", by, "")
            held = found.outcome.get("model_sha256", "") if found.state == "pending" else ""
            ledger.execute("UPDATE requests SET waived = ? WHERE id = ?", (held, id))
            return _find(ledger, id, self.folder)

    def claim(self, by: str, together: bool, passed: Sequence[str] = ()) -> list[Entry]:
        """Take what is next in turn, alone or with all others of its method, leaving `passed` ones alone.

        Whoever calls holds the right to work, so one that is still running is of a process that died: it comes first,
        with all that it was worked on together with.
        """
        with self._writing() as ledger:
            left = [_entry(row) for row in ledger.execute(f"SELECT {_COLUMNS} FROM requests {_IN_TURN}")]
            orphans = [each for each in left if each.state == "running"]
            if orphans:
                return [each for each in orphans if each.batch == orphans[0].batch]
            waiting = [each for each in left if each.id not in passed and _may_run(each)]
            if not waiting:
                return []
            first = waiting[0]
            chosen = [each for each in waiting if together and each.method == first.method] or [first]
            for each in chosen:
                _step(ledger, each, "worker", "running", by, "")
                ledger.execute("UPDATE requests SET batch = ? WHERE id = ?", (first.id, each.id))
            return [_find(ledger, each.id, self.folder) for each in chosen]

    def consent(self, consent: Consent) -> None:
        """Write down why a client is there, in the place of what a process said of it that died before it was."""
        with self._writing() as ledger:
            ledger.execute("DELETE FROM consents WHERE client = ?", (consent.client,))
            ledger.execute(
                "INSERT INTO consents (client, time, given_by, text, pairs, returned) VALUES (?, ?, ?, ?, ?, ?)",
                (consent.client, consent.time, consent.given_by, consent.text, consent.pairs, consent.returned),
            )

    def rename(self, requests: dict[str, Request]) -> None:
        """Put other requests in the place of those of some ids, and leave nothing of the old text in the file."""
        with self._writing() as ledger:
            for id, request in requests.items():
                text = json.dumps(request.model_dump(mode="json"), sort_keys=True)
                ledger.execute("UPDATE requests SET request = ? WHERE id = ?", (text, id))
        with closing(self._connected()) as ledger, _told(self.path):
            ledger.execute("VACUUM")

    # --- connections ---

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """A checked ledger; the statements of one context see the same state of it."""
        with closing(self._connected(writing=False)) as ledger, _told(self.path):
            ledger.execute("BEGIN")
            _check(ledger, self.path)
            yield ledger
            ledger.execute("COMMIT")

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """A checked ledger in one transaction, whose rows are chained anew at its end."""
        with closing(self._connected()) as ledger, _told(self.path):
            ledger.execute("BEGIN IMMEDIATE")
            try:
                _check(ledger, self.path)
                yield ledger
                _chain(ledger)
                ledger.execute("COMMIT")
            except BaseException:
                _roll_back(ledger)
                raise

    def _connected(self, writing: bool = True) -> sqlite3.Connection:
        """An open ledger of the newest schema, readable by its owner alone; on a disk that is read-only, to read."""
        if not self.folder.is_dir():
            raise UserError(f"{self.folder}: no such run")
        writable = os.access(self.folder, os.W_OK) and (not self.exists or os.access(self.path, os.W_OK))
        with _told(self.path):
            if not writing and not writable:
                return connect(f"{self.path.absolute().as_uri()}?mode=ro")
            if not self.exists:
                self._make()
            ledger = connect(self.path.absolute().as_uri())
            try:
                # No write-ahead log: one that is damaged loses its last transactions in silence, and it cannot be
                # read on a read-only disk.
                ledger.execute("PRAGMA journal_mode = DELETE")
                ledger.execute("PRAGMA synchronous = EXTRA")
                ledger.execute("PRAGMA secure_delete = ON")
                ledger.execute("PRAGMA foreign_keys = ON")
                _migrate(ledger, self.path)
            except BaseException:
                ledger.close()
                raise
        return ledger

    def _make(self) -> None:
        """Write an empty ledger, whole or not at all: a file without tables is therefore always a damaged one."""
        with exclusive(self.folder / MAKING, f"{self.path}: another process makes it", BUSY_SECONDS):
            if not self.exists:
                with closing(_fresh(MIGRATIONS)) as fresh:
                    fresh.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")
                    _chain(fresh)
                    write_atomic(self.path, fresh.serialize())


def connect(uri: str) -> sqlite3.Connection:
    """A connection that begins and ends transactions only where this module says so."""
    return sqlite3.connect(uri, timeout=BUSY_SECONDS, isolation_level=None, uri=True)


@contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        if _is_of_the_machine(error):
            raise Unwritable(f"{path}: cannot be read or written ({error}); free space or restore the file") from error
        raise _damaged(path, str(error)) from error
    except UnicodeDecodeError as error:  # SQLite quotes the damaged text
        raise _damaged(path, "its schema is no text") from error


def _is_of_the_machine(error: sqlite3.Error) -> bool:
    code = getattr(error, "sqlite_errorcode", 0)
    return (code & 0xFF) in MACHINE_FAULTS or ((code & 0xFF) == sqlite3.SQLITE_IOERR and code != IOERR_SHORT_READ)


def _damaged(path: Path, why: str) -> UserError:
    return UserError(f"{path}: damaged ({' '.join(why.split())[:200]}); restore it from a backup, nothing was done")


def _migrate(ledger: sqlite3.Connection, path: Path) -> None:
    """Bring a ledger to the newest schema, one version after the other, in one transaction."""
    version = _version(ledger, path)
    if version == len(MIGRATIONS):
        return
    ledger.execute("BEGIN IMMEDIATE")
    try:
        version = _version(ledger, path)  # another process may have done it since
        _check_rows(ledger, path)
        for script in MIGRATIONS[version:]:
            for statement in filter(str.strip, script.split(";")):
                ledger.execute(statement)
        ledger.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")
        _chain(ledger)
        ledger.execute("COMMIT")
    except BaseException:
        _roll_back(ledger)
        raise


def _roll_back(ledger: sqlite3.Connection) -> None:
    """Undo a transaction, unless SQLite has done so itself, as it does on a full disk."""
    if ledger.in_transaction:
        ledger.execute("ROLLBACK")


def _version(ledger: sqlite3.Connection, path: Path) -> int:
    version = int(ledger.execute("PRAGMA user_version").fetchone()[0])
    if version < 1:
        raise _damaged(path, "it has no tables")
    if version > len(MIGRATIONS):
        raise UserError(f"{path}: schema {version}, and this version knows {len(MIGRATIONS)}; use a newer ease")
    return version


# --- checks ---


def _check(ledger: sqlite3.Connection, path: Path) -> None:
    """Refuse a ledger that is not, to the last value, what was written."""
    if _version(ledger, path) != len(MIGRATIONS):
        raise UserError(f"{path}: of an older schema on a disk that is read-only; copy the run to another disk")
    found = ledger.execute("PRAGMA integrity_check(1)").fetchone()[0]
    if found != "ok":
        raise _damaged(path, found)
    if _schema(ledger) != _newest_schema(MIGRATIONS):
        raise _damaged(path, "its tables are not those that were made")
    _check_rows(ledger, path)


def _check_rows(ledger: sqlite3.Connection, path: Path) -> None:
    ends = {name: (rows, last) for name, rows, last in ledger.execute("SELECT name, rows, last FROM chains")}
    if ends.keys() != CHAINED.keys():
        raise _damaged(path, "chains are missing")
    for table in CHAINED:
        rows, last = 0, ""
        for number, stored, expected in _digests(ledger, table):
            if stored != expected:
                raise _damaged(path, f"{table}: row {number} is not what its digest says")
            rows, last = rows + 1, expected
        if ends[table] != (rows, last):
            raise _damaged(path, f"{table}: {rows} rows, which are not all that were written")


def _digests(ledger: sqlite3.Connection, table: str) -> Iterator[tuple[Any, str, str]]:
    """Number, stored digest and expected digest of each row, in order."""
    last = ""
    for stored, *values in ledger.execute(f"SELECT digest, {CHAINED[table]} FROM {table} ORDER BY number"):
        last = hashlib.sha256(json.dumps([table, last, *values], default=repr).encode()).hexdigest()
        yield values[0], stored, last


def _chain(ledger: sqlite3.Connection) -> None:
    """Write the digests of what changed, from the first changed row of each table on."""
    for table in CHAINED:
        found = list(_digests(ledger, table))
        for number, stored, expected in found:
            if stored != expected:
                ledger.execute(f"UPDATE {table} SET digest = ? WHERE number = ?", (expected, number))
        last = found[-1][2] if found else ""
        ledger.execute("INSERT OR REPLACE INTO chains (name, rows, last) VALUES (?, ?, ?)", (table, len(found), last))


def _schema(ledger: sqlite3.Connection) -> list[tuple[str, ...]]:
    return list(ledger.execute("SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY type, name"))


@lru_cache
def _newest_schema(migrations: tuple[str, ...]) -> list[tuple[str, ...]]:
    with closing(_fresh(migrations)) as fresh:
        return _schema(fresh)


def _fresh(migrations: tuple[str, ...]) -> sqlite3.Connection:
    """An empty ledger in memory."""
    fresh = sqlite3.connect(":memory:", isolation_level=None)
    fresh.execute(f"PRAGMA page_size = {PAGE_BYTES}")
    for script in migrations:
        fresh.executescript(script)
    return fresh


# --- rows ---


def _entry(row: tuple[Any, ...]) -> Entry:
    told = dict(zip(_COLUMNS.split(", "), row, strict=True))
    parsed = {"request": REQUESTS.validate_json(told["request"])}
    parsed |= {name: json.loads(told[name]) for name in ("method", "outcome")}
    return Entry(**{**told, **parsed})


def _found(ledger: sqlite3.Connection, id: str) -> Entry | None:
    row = ledger.execute(f"SELECT {_COLUMNS} FROM requests WHERE id = ?", (id,)).fetchone()
    return None if row is None else _entry(row)


def _find(ledger: sqlite3.Connection, id: str, folder: Path) -> Entry:
    found = _found(ledger, id)
    if found is None:
        known = [row[0] for row in ledger.execute("SELECT id FROM requests ORDER BY number DESC LIMIT 5")]
        raise UserError(f"{id}: no such request in {folder}; the latest are: {', '.join(known) or 'none'}")
    return found


def _step(ledger: sqlite3.Connection, entry: Entry, actor: Actor, state: State, by: str, why: str) -> None:
    """Take a request to another state; a step that the table does not give to this actor is refused."""
    allowed = following(actor, entry.state)
    if state not in allowed:
        hint = f"what can follow: {', '.join(sorted(allowed)) or 'nothing more'}"
        if actor == "person" and entry.state == "running":
            hint = "wait for `ease work` to end; if its process died, run `ease work` again"
        raise UserError(f"{entry.id}: is {entry.state} and cannot be {state}; {hint}")
    ledger.execute("UPDATE requests SET state = ?, why = ? WHERE id = ?", (state, why, entry.id))
    _note(ledger, entry.id, entry.state, state, by, why, now())


def _note(ledger: sqlite3.Connection, id: str, before: str, after: str, by: str, why: str, time: datetime) -> None:
    ledger.execute(
        "INSERT INTO events (request, time, before, after, by, why) VALUES (?, ?, ?, ?, ?, ?)",
        (id, stamp(time), before, after, by, why),
    )


def _may_run(entry: Entry) -> bool:
    """Approved ones, and those that wait for clients; one whose model is held waits for a person."""
    return entry.state == "approved" or (entry.state == "pending" and not entry.outcome.get("held"))
