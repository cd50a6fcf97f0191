"""What the register's commands do: refuse, extend, due, letters, notices to recipients, and the export."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from ease.commands.requests import EntrySummary, shown_entry, someone
from ease.console import labelled, table
from ease.errors import UserError
from ease.operations.ledger.deadlines import Due, due, in_words
from ease.operations.ledger.letters import kind_of, letter
from ease.operations.ledger.people import person
from ease.operations.ledger.policy import NAME, load_policy
from ease.operations.ledger.records import now
from ease.operations.ledger.register import write_register
from ease.operations.ledger.reminders import check_address, remind
from ease.operations.ledger.store import Ledger
from ease.operations.recipients import read_recipients, to_notify
from ease.runs.run import Run
from ease.storage import write_atomic

PENDING, OVERDUE = 4, 5
"""Exit codes of `ease request due` and `ease status --exit-code`: something is due soon, or overdue."""
COLOURS = {"overdue": "red", "soon": "yellow", "later": "green"}


def refuse_request(folder: Path, id: str, by: str | None, key: Path | None, reason: str) -> EntrySummary:
    run = Run.load(folder)
    who = person(load_policy(folder).approval, someone(by), key)
    Ledger(folder).refuse(id, who.name, reason, who.key)
    return shown_entry(run, id)


def extend_request(folder: Path, id: str, days: int, by: str | None, key: Path | None, reason: str) -> EntrySummary:
    run, policy = Run.load(folder), load_policy(folder)
    who = person(policy.approval, someone(by), key)
    Ledger(folder).extend(id, days, who.name, reason, policy.time_zone, who.key)
    return shown_entry(run, id)


@dataclass(frozen=True)
class DueSummary:
    """Open requests that are overdue or due soon."""

    dues: tuple[Due, ...]
    within: int
    reminded: str
    """Where a reminder was posted to; empty: nowhere."""

    @property
    def exit_code(self) -> int:
        if any(each.urgency == "overdue" for each in self.dues):
            return OVERDUE
        return PENDING if self.dues else 0

    def as_json(self) -> dict[str, Any]:
        return {"due": [each.model_dump(mode="json") for each in self.dues], "reminded": self.reminded}

    def render(self) -> Iterator[RenderableType]:
        if not self.dues:
            yield f"Nothing is due within {self.within} days"
            return
        rows: list[list[str | Text]] = [
            [each.id, Text(in_words(each), COLOURS[each.urgency]), each.state, each.waits_for] for each in self.dues
        ]
        yield table(f"Due within {self.within} days", ["id", "when", "state", "waits for"], rows, text_columns=4)
        if self.reminded:
            yield labelled("reminder sent to", self.reminded)


def due_requests(folder: Path, within: int | None, notify: bool) -> DueSummary:
    """Find what is due soon; post it to the address of the policy if `notify`."""
    run, policy = Run.load(folder), load_policy(folder)
    days = policy.remind.within_days if within is None else within
    if notify:
        if not policy.remind.url:
            raise UserError(f"--notify: name an address as remind.url in {folder / NAME}")
        check_address(policy.remind.url)
    found = due(Ledger(folder).entries(), now(), policy.time_zone, days)
    urgent = tuple(each for each in found if each.urgency != "later")
    if notify and urgent:
        remind(policy.remind.url, run.folder.name, urgent)
    return DueSummary(urgent, days, policy.remind.url if notify and urgent else "")


@dataclass(frozen=True)
class LetterSummary:
    id: str
    kind: str
    text: str
    path: Path | None

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "kind": self.kind,
            "text": self.text,
            "path": None if self.path is None else str(self.path),
        }

    def render(self) -> Iterator[RenderableType]:
        yield self.text.rstrip() if self.path is None else f"letter in {self.path}"


def write_letter(folder: Path, id: str, kind: str | None, out: Path | None) -> LetterSummary:
    """Write the letter to whoever asked, by default to the screen."""
    Run.load(folder)
    ledger, policy = Ledger(folder), load_policy(folder)
    entry = ledger.entry(id)
    text = letter(entry, ledger.events(id), policy, entry.notified, kind)
    if out is not None:
        write_atomic(out, text.encode())
    return LetterSummary(id, kind_of(entry, kind), text, out)


@dataclass(frozen=True)
class NotifySummary:
    id: str
    told: tuple[str, ...]
    open: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return {"id": self.id, "notified": list(self.told), "to_notify": list(self.open)}

    def render(self) -> Iterator[RenderableType]:
        yield labelled("told", ", ".join(self.told) or "nobody yet")
        yield labelled("still to be told", ", ".join(self.open) or "nobody")


def notify_recipient(folder: Path, id: str, recipient: str | None, by: str | None, key: Path | None) -> NotifySummary:
    """Record that a recipient was told, or list who has to be."""
    Run.load(folder)
    ledger, known = Ledger(folder), read_recipients(folder)
    if recipient is not None:
        if recipient not in {each.recipient for each in known.exports}:
            names = ", ".join(dict.fromkeys(each.recipient for each in known.exports)) or "nobody"
            raise UserError(f"--recipient {recipient}: has no model of {folder}; those who have one: {names}")
        who = person(load_policy(folder).approval, someone(by), key)
        ledger.notify(id, recipient, who.name, who.key)
    entry = ledger.entry(id)
    return NotifySummary(id, entry.notified, tuple(to_notify(known, entry)))


@dataclass(frozen=True)
class RegisterSummary:
    files: tuple[Path, ...]

    def as_json(self) -> dict[str, Any]:
        return {"files": [str(each) for each in self.files]}

    def render(self) -> Iterator[RenderableType]:
        yield from map(str, self.files)


def export_register(folder: Path, out: Path) -> RegisterSummary:
    """Write the register as CSV and as a page to print, and the consents as records."""
    if out.is_file():
        raise UserError(f"--out {out}: is a file; choose a folder")
    return RegisterSummary(tuple(write_register(Run.load(folder), load_policy(folder), out)))
