"""`ease request refuse`, `extend`, `due`, `letter`, `notify` and `export`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from rich.console import RenderableType
from rich.text import Text

from ease.commands.requests import OVERDUE, PENDING, EntrySummary, shown_entry, someone
from ease.config import Config
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
from ease.requests.request import named_in
from ease.runs.run import Run
from ease.storage import write_atomic

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


class DueSummary(Config):
    """`ease request due`: open requests that are overdue or due soon, the most urgent first."""

    due: tuple[Due, ...]
    within_days: int
    reminded: str
    """Address to which a reminder was posted. Empty if none was."""

    @property
    def exit_code(self) -> int:
        if any(each.urgency == "overdue" for each in self.due):
            return OVERDUE
        return PENDING if self.due else 0

    def render(self) -> Iterator[RenderableType]:
        if not self.due:
            yield f"Nothing is due within {self.within_days} days"
            return
        rows: list[list[str | Text]] = [
            [each.id, Text(in_words(each), COLOURS[each.urgency]), each.state, each.waits_for] for each in self.due
        ]
        yield table(f"Due within {self.within_days} days", ["id", "when", "state", "waits for"], rows, text_columns=4)
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
    reminded = policy.remind.url if notify and urgent else ""
    return DueSummary(due=urgent, within_days=days, reminded=reminded)


class LetterSummary(Config):
    """`ease request letter`: a letter to the person who asked."""

    id: str
    kind: Literal["received", "extended", "granted", "refused"]
    text: str
    path: Path | None
    """The file of the letter. Null if it was only printed."""

    def render(self) -> Iterator[RenderableType]:
        yield from self.text.rstrip().split("\n") if self.path is None else [f"letter in {self.path}"]


def write_letter(folder: Path, id: str, kind: str | None, out: Path | None) -> LetterSummary:
    """Write the letter to the person who asked, by default to the screen."""
    ledger, policy, known = Ledger(folder), load_policy(folder), Run.load(folder).known()
    entry = ledger.entry(id)
    trained = known is None or bool(named_in(entry.request, known[0].clients))
    text = letter(entry, ledger.events(id), policy, entry.notified, kind, trained)
    if out is not None:
        write_atomic(out, text.encode())
    return LetterSummary(id=id, kind=kind_of(entry, kind), text=text, path=out)


class NotifySummary(Config):
    """`ease request notify`: the recipients of exported models."""

    id: str
    notified: tuple[str, ...]
    """Recipients who were notified that their model contains forgotten pairs."""
    to_notify: tuple[str, ...]
    """Recipients who must still be notified."""

    def render(self) -> Iterator[RenderableType]:
        yield labelled("notified", ", ".join(self.notified) or "nobody yet")
        yield labelled("still to notify", ", ".join(self.to_notify) or "nobody")


def notify_recipient(folder: Path, id: str, recipient: str | None, by: str | None, key: Path | None) -> NotifySummary:
    """Record that a recipient was notified, or list who has to be."""
    Run.load(folder)
    ledger, known = Ledger(folder), read_recipients(folder)
    if recipient is not None:
        if recipient not in {each.recipient for each in known.exports}:
            names = ", ".join(dict.fromkeys(each.recipient for each in known.exports)) or "nobody"
            raise UserError(f"--recipient {recipient}: has no model of {folder}; those who have one: {names}")
        who = person(load_policy(folder).approval, someone(by), key)
        ledger.notify(id, recipient, who.name, who.key)
    entry = ledger.entry(id)
    return NotifySummary(id=id, notified=entry.notified, to_notify=tuple(to_notify(known, entry)))


class RegisterSummary(Config):
    """`ease request export`: the files of the register."""

    files: tuple[Path, ...]

    def render(self) -> Iterator[RenderableType]:
        yield from map(str, self.files)


def export_register(folder: Path, out: Path) -> RegisterSummary:
    """Write the register as CSV and as a page to print, and the consents as records."""
    if out.is_file():
        raise UserError(f"--out {out}: is a file; choose a folder")
    return RegisterSummary(files=tuple(write_register(Run.load(folder), load_policy(folder), out)))
