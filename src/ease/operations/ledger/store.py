"""The ledger of a run: who asked for what, every step a request took, and who consented to join."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ease.errors import UserError
from ease.operations.ledger.database import NAME, Tables, reading, rewrite, writing
from ease.operations.ledger.records import (
    NOTHING,
    Consent,
    Draft,
    Entry,
    Event,
    Outcome,
    Plan,
    check_text,
    month_after,
    now,
    stamp,
)
from ease.operations.ledger.states import IN_WORK, Actor, State, check_move, may_move
from ease.requests.request import Request
from ease.runs.resolve import request_id
from ease.storage import digest

VALID_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")
"""An id is printed and typed again, so it has no letters that look like others."""


@dataclass(frozen=True)
class Ledger:
    """Reads and writes the ledger of one run; every call is one transaction."""

    folder: Path

    @property
    def path(self) -> Path:
        return self.folder / NAME

    @property
    def exists(self) -> bool:
        return self.path.is_file()

    # --- reading ---

    def entries(self) -> list[Entry]:
        """Return all requests in the order in which they are worked on."""
        with reading(self.path) as tables:
            return _in_turn(tables)

    def entry(self, id: str) -> Entry:
        with reading(self.path) as tables:
            return self._find(tables, id)

    def events(self, id: str | None = None) -> list[Event]:
        """Return every step of one request, or of all, in order."""
        with reading(self.path) as tables:
            return [each for each in tables.read(Event) if id in (None, each.request)]

    def consents(self) -> list[Consent]:
        with reading(self.path) as tables:
            return tables.read(Consent)

    def check_idle(self) -> None:
        """Refuse if a request is being worked on, or was when its worker ended too early."""
        for entry in self.entries():
            if entry.state in IN_WORK:
                raise UserError(f"{self.folder}: {entry.id} is not finished; first run: ease work {self.folder}")

    # --- people ---

    def add(self, draft: Draft) -> tuple[Entry, bool]:
        """Hand a request in, and return its entry and whether it is new: the same request again has no effect."""
        content = draft.request.model_dump(mode="json")
        id = draft.id or f"{request_id(draft.request)[:60]}-{digest(content, draft.method, draft.asked_by)[:6]}"
        if not VALID_ID.fullmatch(id):
            raise UserError(f"--id {id[:80]!r}: use up to 80 letters, digits, dots, hyphens and underscores")
        for option, text in (("by", draft.asked_by), ("ground", draft.ground), ("reason", draft.reason)):
            check_text(option, text)
        time = now()
        with writing(self.path) as tables:
            known = {each.id: each for each in tables.read(Entry)}
            if id in known:
                if (known[id].request, known[id].method) != (draft.request, draft.method):
                    raise UserError(f"--id {id}: another request has this id (ease request show); choose another one")
                return known[id], False
            entry = Entry(
                number=tables.next_number(Entry),
                id=id,
                request=draft.request,
                method=draft.method,
                asked_by=draft.asked_by,
                ground=draft.ground,
                reason=draft.reason,
                priority=draft.priority,
                submitted=stamp(time),
                deadline=stamp(draft.deadline or month_after(time)),
            )
            tables.write(entry.number, entry)
            _note(tables, entry, None, draft.asked_by)
            return entry, True

    def approve(self, id: str, by: str) -> Entry:
        """Let a request be worked on; if its model is held, accept that model."""
        with writing(self.path) as tables:
            entry = self._find(tables, id)
            accepted = entry.outcome.model_sha256 if entry.state == "held" else None
            return _move(tables, entry, "person", "approved", by, waived=accepted or "")

    def cancel(self, id: str, by: str, why: str) -> Entry:
        """Take a request back, unless it is being worked on or its model is released."""
        check_text("reason", why)
        with writing(self.path) as tables:
            return _move(tables, self._find(tables, id), "person", "cancelled", by, why)

    # --- the worker ---

    def claim(self, by: str, together: bool, passed: Sequence[str] = ()) -> list[Entry]:
        """Take the next request, or `together` with it all others of its method; `passed` ones wait.

        The caller holds the worker's lock, so a running request belongs to a process that died. Its batch comes first.
        """
        with writing(self.path) as tables:
            entries = _in_turn(tables)
            orphans = [each for each in entries if each.state == "running"]
            if orphans:
                return [each for each in orphans if each.batch == orphans[0].batch]
            waiting = [each for each in entries if each.id not in passed and may_move("worker", each.state, "running")]
            first = waiting[:1]
            chosen = [each for each in waiting if together and each.method == first[0].method] or first
            return [_move(tables, each, "worker", "running", by, batch=first[0].id) for each in chosen]

    def plan(self, ids: Sequence[str], plan: Plan) -> None:
        """Store how running requests are about to be answered."""
        with writing(self.path) as tables:
            for id in ids:
                entry = self._find(tables, id)
                tables.write(entry.number, entry.model_copy(update={"outcome": Outcome(plan=plan)}))

    def finish(self, ids: Sequence[str], state: State, by: str, why: str = "", outcome: Outcome = NOTHING) -> None:
        """Take running requests to another state together, all or none."""
        with writing(self.path) as tables:
            for id in ids:
                _move(tables, self._find(tables, id), "worker", state, by, why, outcome=outcome)

    # --- others ---

    def record_consent(self, consent: Consent) -> None:
        """Store why a client joined, in place of what a process that died stored for the same client."""
        with writing(self.path) as tables:
            tables.write(consent.client, consent)

    def rename(self, requests: Mapping[str, Request]) -> None:
        """Replace the requests of some ids, and leave nothing of the old text in the file."""
        with writing(self.path) as tables:
            for id, request in requests.items():
                entry = self._find(tables, id)
                tables.write(entry.number, entry.model_copy(update={"request": request}))
        rewrite(self.path)

    def _find(self, tables: Tables, id: str) -> Entry:
        entries = tables.read(Entry)
        found = next((each for each in entries if each.id == id), None)
        if found is None:
            latest = ", ".join(each.id for each in reversed(entries[-5:])) or "none"
            raise UserError(f"{id}: no such request in {self.folder}; the latest are: {latest}")
        return found


def _in_turn(tables: Tables) -> list[Entry]:
    return sorted(tables.read(Entry), key=lambda each: (-each.priority, each.deadline, each.number))


def _move(tables: Tables, entry: Entry, actor: Actor, state: State, by: str, why: str = "", **changes: Any) -> Entry:
    """Take a request to another state, if the table allows this actor to."""
    check_move(entry.id, actor, entry.state, state)
    moved = entry.model_copy(update={"state": state, "why": why, **changes})
    tables.write(moved.number, moved)
    _note(tables, moved, entry.state, by)
    return moved


def _note(tables: Tables, entry: Entry, before: State | None, by: str) -> None:
    why = entry.why if before else entry.reason
    event = Event(request=entry.id, time=stamp(now()), before=before, after=entry.state, by=by, why=why)
    tables.write(tables.next_number(Event), event)
