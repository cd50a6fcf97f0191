"""The ledger of a run: who asked for what, every step a request took, and who consented to join."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ease.errors import UserError
from ease.operations.evidence.keys import SigningKey
from ease.operations.ledger.database import NAME, Tables, reading, rewrite, writing
from ease.operations.ledger.deadlines import extended, month_later
from ease.operations.ledger.records import (
    NOTHING,
    Consent,
    Draft,
    Entry,
    Event,
    Outcome,
    RequestPlan,
    check_text,
    now,
    stamp,
)
from ease.operations.ledger.states import IN_WORK, Actor, State, check_move, may_move
from ease.operations.ledger.steps import FIRST_OF_SEVERAL, check_chain, new_step, redacted
from ease.requests.request import Request
from ease.runs.resolve import request_id
from ease.storage import digest

VALID_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")
"""An id is printed and typed again, so it has no letters that look like others."""
REDACTED = ("asked_by", "ground", "reason", "why")
"""Fields of a request that people wrote."""


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

    def check(self) -> tuple[int, str]:
        """Refuse steps that were altered, left out or put in; return their number and the hash of the last one."""
        steps, last = self._checked()
        return len(steps), last

    def checked_events(self) -> list[Event]:
        """Return every step of all requests, once the chain of steps is found whole."""
        return self._checked()[0]

    def _checked(self) -> tuple[list[Event], str]:
        with reading(self.path) as tables:
            steps, entries = tables.read(Event), {each.id: each for each in tables.read(Entry)}
        return steps, check_chain(steps, entries, str(self.path))

    def consents(self) -> list[Consent]:
        with reading(self.path) as tables:
            return tables.read(Consent)

    def check_idle(self) -> None:
        """Refuse if a request is being worked on, or was when its worker ended too early."""
        for entry in self.entries():
            if entry.state in IN_WORK:
                raise UserError(f"{self.folder}: {entry.id} is not finished; first run: ease work {self.folder}")

    # --- people ---

    def add(self, draft: Draft, key: SigningKey | None = None) -> tuple[Entry, bool]:
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
                deadline=stamp(draft.deadline or month_later(time, draft.zone)),
            )
            tables.write(entry.number, entry)
            _note(tables, entry, None, draft.asked_by, entry.reason, entry.deadline, key)
            return entry, True

    def approve(self, id: str, by: str, key: SigningKey | None = None, people: int = 1) -> Entry:
        """Let a request be worked on once so many people approved; if its model is held, accept that model."""
        check_text("by", by)
        with writing(self.path) as tables:
            entry = self._find(tables, id)
            check_move(id, "person", entry.state, "approved")
            approved = (*entry.approved_by, by)
            if by in entry.approved_by:
                raise UserError(f"{id}: {by} has approved it already; another person has to")
            if len(approved) < people:
                why = f"{FIRST_OF_SEVERAL} {len(approved)} of {people}"
                return _stay(tables, entry, by, why, key, approved_by=approved)
            accepted = entry.outcome.model_sha256 if entry.state == "held" else None
            return _move(tables, entry, "person", "approved", by, "", key, waived=accepted or "", approved_by=approved)

    def refuse(self, id: str, by: str, why: str, key: SigningKey | None = None) -> Entry:
        """Decline a request for a reason that has to be given to the person who asked (Art. 12(4) GDPR)."""
        if not why.strip():
            raise UserError(f"{id}: say with --reason why it is refused; the reason goes into the letter")
        check_text("reason", why)
        with writing(self.path) as tables:
            return _move(tables, self._find(tables, id), "person", "refused", by, why, key)

    def extend(self, id: str, days: int, by: str, why: str, zone: str = "UTC", key: SigningKey | None = None) -> Entry:
        """Move the deadline of an open request once, by two further months at most (Art. 12(3) GDPR)."""
        if not why.strip():
            raise UserError(f"{id}: say with --reason why more time is needed; the reason goes into the letter")
        check_text("reason", why)
        with writing(self.path) as tables:
            entry = self._find(tables, id)
            if not entry.is_open:
                raise UserError(f"{id}: is {entry.state}; only an open request can be extended")
            until = stamp(extended(entry, days, now(), zone))
            return _stay(tables, entry, by, why, key, deadline=until, first_deadline=entry.deadline)

    def cancel(self, id: str, by: str, why: str, key: SigningKey | None = None) -> Entry:
        """Take a request back, unless it is being worked on or its model is released."""
        check_text("reason", why)
        with writing(self.path) as tables:
            return _move(tables, self._find(tables, id), "person", "cancelled", by, why, key)

    def notify(self, id: str, recipient: str, by: str, key: SigningKey | None = None) -> Entry:
        """Record that the recipient of an exported model was asked to replace it (Art. 19 GDPR)."""
        check_text("recipient", recipient)
        with writing(self.path) as tables:
            entry = self._find(tables, id)
            if recipient in entry.notified:
                return entry
            return _stay(tables, entry, by, f"notified {recipient}", key, notified=(*entry.notified, recipient))

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

    def plan(self, ids: Sequence[str], plan: RequestPlan) -> None:
        """Store how running requests are about to be answered."""
        with writing(self.path) as tables:
            for id in ids:
                entry = self._find(tables, id)
                tables.write(entry.number, entry.model_copy(update={"outcome": Outcome(plan=plan)}))

    def finish(self, ids: Sequence[str], state: State, by: str, why: str = "", outcome: Outcome = NOTHING) -> None:
        """Take running requests to another state together, all or none."""
        with writing(self.path) as tables:
            for id in ids:
                entry = self._find(tables, id)
                changes: dict[str, Any] = (
                    {"approved_by": ()} if state == "held" else {}
                )  # people decide anew on a held model
                _move(tables, entry, "worker", state, by, why, outcome=outcome, **changes)

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
            # The salt of the first step goes too: with it, ids could be guessed from the step's hash.
            for number, step in enumerate(tables.read(Event), start=1):
                if step.request in requests and step.before is None:
                    tables.write(number, step.model_copy(update={"salt": ""}))
        rewrite(self.path)

    def redact(self, ids: Sequence[str]) -> None:
        """Remove names and words that people wrote about some requests, and leave nothing of them in the file."""
        with writing(self.path) as tables:
            for id in ids:
                entry = self._find(tables, id)
                tables.write(entry.number, entry.model_copy(update=dict.fromkeys(REDACTED, "")))
            for number, step in enumerate(tables.read(Event), start=1):
                if step.request in ids:
                    tables.write(number, redacted(step))
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


def _move(
    tables: Tables,
    entry: Entry,
    actor: Actor,
    state: State,
    by: str,
    why: str = "",
    key: SigningKey | None = None,
    **changes: Any,
) -> Entry:
    """Take a request to another state, if the table allows this actor to."""
    check_move(entry.id, actor, entry.state, state)
    moved = entry.model_copy(update={"state": state, "why": why, **changes})
    tables.write(moved.number, moved)
    _note(tables, moved, entry.state, by, why, key=key)
    return moved


def _stay(tables: Tables, entry: Entry, by: str, why: str, key: SigningKey | None, **changes: Any) -> Entry:
    """Change something else about a request, which is a step as well."""
    changed = entry.model_copy(update=changes)
    tables.write(changed.number, changed)
    _note(tables, changed, entry.state, by, why, changes.get("deadline", ""), key)
    return changed


def _note(
    tables: Tables,
    entry: Entry,
    before: State | None,
    by: str,
    why: str,
    deadline: str = "",
    key: SigningKey | None = None,
) -> None:
    last = tables.last(Event)
    tables.write(tables.next_number(Event), new_step(last, entry, stamp(now()), before, by, why, deadline, key))
