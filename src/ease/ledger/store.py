"""The ledger of a run: requests as people hand them in, every step they took, and who joined, in one SQLite file.

Whatever changes does so in one transaction that begins with `BEGIN IMMEDIATE`: processes that come at the same moment
go one after the other, and a killed one leaves the ledger as it was before or after, never between.
"""

import calendar
import hashlib
import json
import os
import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ease.errors import Unwritable, UserError
from ease.ledger.states import FOLLOWS, OPEN, State
from ease.requests.request import REQUESTS, Request
from ease.runs.resolve import request_id
from ease.storage import digest

NAME = "ledger.sqlite"
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
        waived TEXT NOT NULL DEFAULT ''
    );
    CREATE TABLE events (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        request TEXT NOT NULL REFERENCES requests (id),
        time TEXT NOT NULL,
        before TEXT NOT NULL,
        after TEXT NOT NULL,
        by TEXT NOT NULL,
        why TEXT NOT NULL
    );
    CREATE TABLE consents (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        client INTEGER NOT NULL,
        time TEXT NOT NULL,
        given_by TEXT NOT NULL,
        text TEXT NOT NULL,
        pairs INTEGER NOT NULL,
        returned INTEGER NOT NULL
    );
    """,
)
"""What each version of the schema adds to the one before; `user_version` says how many of them a file has."""

_COLUMNS = (
    "number, id, request, method, asked_by, ground, reason, priority, submitted, deadline, state, why, batch, outcome, "
    "waived"
)
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
        """Take requests to another state together, all or none; a step that the table does not know is refused."""
        with self._writing() as ledger:
            for id in ids:
                _step(ledger, _find(ledger, id, self.folder), state, by, why)
                if outcome is not None:
                    text = json.dumps(outcome, sort_keys=True)
                    ledger.execute("UPDATE requests SET outcome = ? WHERE id = ?", (text, id))

    def plan(self, ids: Sequence[str], outcome: dict[str, Any]) -> None:
        """Say what is about to be done for running requests, so that whoever goes on does the same."""
        with self._writing() as ledger:
            for id in ids:
                text = json.dumps(outcome, sort_keys=True)
                ledger.execute("UPDATE requests SET outcome = ? WHERE id = ? AND state = 'running'", (text, id))

    def approve(self, id: str, by: str) -> Entry:
        """Let a request be worked on; of one whose model is held, let that model pass."""
        with self._writing() as ledger:
            found = _find(ledger, id, self.folder)
            _step(ledger, found, "approved", by, "")
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
                _step(ledger, each, "running", by, "")
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
        with closing(self._connected()) as ledger:
            ledger.execute("VACUUM")
            ledger.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    # --- connections ---

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with closing(self._connected()) as ledger, _told(self.path):
            yield ledger

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with closing(self._connected()) as ledger, _told(self.path):
            ledger.execute("BEGIN IMMEDIATE")
            try:
                yield ledger
            except BaseException:
                ledger.execute("ROLLBACK")
                raise
            ledger.execute("COMMIT")

    def _connected(self) -> sqlite3.Connection:
        """An open ledger of the newest schema, readable by its owner alone: made for no one before it is filled."""
        if not self.folder.is_dir():
            raise UserError(f"{self.folder}: no such run")
        with _told(self.path):
            with suppress(FileExistsError):
                os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            ledger = connect(self.path)
            try:
                ledger.execute("PRAGMA journal_mode = WAL")
                ledger.execute("PRAGMA synchronous = FULL")
                ledger.execute("PRAGMA secure_delete = ON")
                ledger.execute("PRAGMA foreign_keys = ON")
                _migrate(ledger, self.path)
            except BaseException:
                ledger.close()
                raise
        return ledger


def connect(path: Path) -> sqlite3.Connection:
    """Transactions begin and end where we say so."""
    return sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None)


@contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise Unwritable(
            f"{path}: cannot be read or written as a ledger ({error}); restore it or free space"
        ) from error


def _migrate(ledger: sqlite3.Connection, path: Path) -> None:
    """Bring a ledger to the newest schema, one version after the other, in one transaction."""
    version = ledger.execute("PRAGMA user_version").fetchone()[0]
    if version > len(MIGRATIONS):
        raise UserError(f"{path}: schema {version}, and this version knows {len(MIGRATIONS)}; use a newer ease")
    if version == len(MIGRATIONS):
        return
    ledger.execute("BEGIN IMMEDIATE")
    try:
        version = ledger.execute("PRAGMA user_version").fetchone()[0]  # another process may have done it since
        for script in MIGRATIONS[version:]:
            for statement in filter(str.strip, script.split(";")):
                ledger.execute(statement)
        ledger.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")
    except BaseException:
        ledger.execute("ROLLBACK")
        raise
    ledger.execute("COMMIT")


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


def _step(ledger: sqlite3.Connection, entry: Entry, state: State, by: str, why: str) -> None:
    if state not in FOLLOWS[entry.state]:
        after = ", ".join(sorted(FOLLOWS[entry.state])) or "nothing more"
        raise UserError(f"{entry.id}: is {entry.state} and cannot be {state}; what can follow: {after}")
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
