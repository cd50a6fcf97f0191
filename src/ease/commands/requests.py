"""What `ease request` and `ease work` do: hand requests in, look at them, decide, and answer what waits."""

import getpass
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from ease.commands.forget import recalled
from ease.commands.train import tell_threads
from ease.console import labelled, rounds_bar, status, table, tell_left_out
from ease.errors import UserError
from ease.methods import make_method
from ease.methods.base import Unlearner
from ease.operations.ledger.impact import Outlook, answering, outlook
from ease.operations.ledger.policy import Policy, load_policy
from ease.operations.ledger.retention import purge_released
from ease.operations.ledger.store import Consent, Draft, Entry, Event, Ledger, now
from ease.operations.ledger.work import Finished, Steps, work
from ease.operations.purge import Pass
from ease.requests.request import Request, in_words
from ease.requests.tombstones import read_tombstones
from ease.runs.answers import check_method, check_named, open_world, usual_method
from ease.runs.resolve import Wanted, check_wanted, parse_request, request_id
from ease.runs.run import Run


@dataclass(frozen=True)
class EntrySummary:
    """One request: what it is, what it touches, and every step it took."""

    entry: Entry
    seen: Outlook | None
    """None once nothing more is to be done for it."""
    events: tuple[Event, ...]
    added: bool | None = None
    """Whether it was handed in just now; None: it was only looked at."""
    names: Mapping[int, str] = field(default_factory=dict)
    """Of clients, where they have some."""

    def as_json(self) -> dict[str, Any]:
        told = {**self.entry.as_json(), "overdue": self.entry.overdue(now())}
        touches = None if self.seen is None else self.seen.as_json()
        return {**told, "added": self.added, "touches": touches, "events": [each.__dict__ for each in self.events]}

    def render(self) -> Iterator[RenderableType]:
        entry = self.entry
        if self.added is False:
            yield f"{entry.id} is in the ledger already; nothing was added"
        overdue = " (OVERDUE)" if entry.overdue(now()) else ""
        yield labelled("request", f"{entry.id}: {in_words(entry.request, self.names)} by {entry.method['method']}")
        yield labelled(
            "asked by", f"{entry.asked_by}, {_day(entry.submitted)}; answer until {_day(entry.deadline)}{overdue}"
        )
        for name in ("ground", "reason"):
            if getattr(entry, name):
                yield labelled(name, getattr(entry, name))
        yield labelled("state", f"{entry.state}{f': {entry.why}' if entry.why else ''}")
        if "answer" in entry.outcome:
            yield labelled("answer", _answer(entry.outcome))
        if self.seen is not None:
            yield from _touched(self.seen, self.names)
        rows = [[each.time[:19], each.before, each.after, each.by, each.why] for each in self.events]
        yield table("Steps", ["time (UTC)", "from", "to", "by", "why"], rows, text_columns=5)


def _answer(outcome: Mapping[str, Any]) -> str:
    """Where an answer lies, and what it became."""
    number, again = outcome.get("release"), outcome.get("trained_again")
    return (
        str(outcome.get("answer", ""))
        + (f", release {number}" if number else "")
        + (", trained from the start" if again else "")
    )


def _touched(seen: Outlook, names: Mapping[int, str]) -> Iterator[RenderableType]:
    if seen.refusal or seen.settled:
        yield labelled("outlook", seen.refusal or seen.settled)
        return
    before = f", {seen.gone} more were forgotten before" if seen.gone else ""
    yield labelled("touches", f"{seen.fresh} of {seen.left} training pairs{before}")
    yield labelled("gone then", f"{seen.worn:.0%} of what the model was trained on")
    held = ", ".join(f"{names.get(client, client)} ({count})" for client, count in seen.clients.items())
    yield labelled("clients", f"{held}; in {len(seen.rounds)} rounds")
    yield labelled("models", ", ".join(seen.models) or "none")
    seconds = "" if seen.seconds is None else f"about {seen.seconds:.0f} s, "
    again = "; training from the start, for so much is gone" if seen.method == "retrain" else ""
    yield labelled("cost", f"{seconds}{seen.share:.0%} of retraining{again}")


@dataclass(frozen=True)
class LedgerSummary:
    """All requests of a run in the order in which they are worked on."""

    entries: tuple[Entry, ...]
    consents: tuple[Consent, ...] = ()
    """Of those who joined."""
    names: Mapping[int, str] = field(default_factory=dict)
    """Of clients, where they have some."""

    def as_json(self) -> dict[str, Any]:
        time = now()
        requests = [{**each.as_json(), "overdue": each.overdue(time)} for each in self.entries]
        return {"requests": requests, "consents": [each.__dict__ for each in self.consents]}

    def render(self) -> Iterator[RenderableType]:
        time = now()
        rows = [
            [
                each.id,
                in_words(each.request, self.names),
                each.state + (" (OVERDUE)" if each.overdue(time) else ""),
                each.why[:60],
                str(each.priority),
                _day(each.deadline),
            ]
            for each in self.entries
        ]
        columns = ["id", "forget", "state", "why", "priority", "until"]
        yield table(f"{len(rows)} requests", columns, rows, text_columns=4)
        if self.consents:
            given = [
                [str(each.client), str(each.pairs), str(each.returned), each.given_by, _day(each.time), each.text[:60]]
                for each in self.consents
            ]
            yield table("Joined by consent", ["client", "pairs", "again", "by", "on", "words"], given, text_columns=6)


@dataclass(frozen=True)
class WorkSummary:
    """What came of the queue."""

    finished: tuple[Finished, ...]
    purged: tuple[Pass, ...] = ()

    def as_json(self) -> dict[str, Any]:
        finished = [{**each.__dict__, "ids": list(each.ids)} for each in self.finished]
        return {"finished": finished, **PurgeSummary(self.purged).as_json()}

    def render(self) -> Iterator[RenderableType]:
        if not self.finished:
            yield "Nothing waits: approve what was handed in with ease request approve"
            return
        rows = [
            [
                ", ".join(each.ids),
                each.state,
                each.why or _answer(each.outcome),
                *(_figure(each.outcome.get(name)) for name in ("retain_before", "retain_after", "seconds")),
            ]
            for each in self.finished
        ]
        columns = ["request", "state", "", "retain R@1 before", "after", "seconds"]
        yield table("Worked on", columns, rows, text_columns=3)
        if self.purged:
            yield from PurgeSummary(self.purged).render()


@dataclass(frozen=True)
class PurgeSummary:
    """What went, what was made again and what stayed."""

    passes: tuple[Pass, ...]

    def as_json(self) -> dict[str, Any]:
        return {"purged": [each.model_dump(mode="json") for each in self.passes]}

    def render(self) -> Iterator[RenderableType]:
        if not self.passes:
            yield "Nothing to purge: no request was released, or not long enough ago"
        for each in self.passes:
            kinds = (("removed", each.removed), ("made again", each.rederived), ("stayed", each.stayed))
            rows = [[kind, line.what, line.why] for kind, lines in kinds for line in lines]
            yield table(f"Purged: {request_id(each.request)}", ["", "what", "why"], rows, text_columns=3)


def _day(time: str) -> str:
    return time[:10]


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def someone(name: str | None) -> str:
    """Who does something: as told, or the user of this machine."""
    if name:
        return name
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # no such user in a container
        return "unknown"


def add_request(
    folder: Path,
    wanted: Wanted,
    method: Unlearner | None,
    by: str | None,
    ground: str,
    reason: str,
    priority: int,
    due: str | None,
    id: str | None,
    approve: bool,
    quiet: bool,
) -> EntrySummary:
    """Hand a request in; it is resolved now, so that what is approved is what will be done."""
    run = Run.load(folder)
    method = method or usual_method(run)
    deadline = None if due is None else _date(due)
    check_method(run, method)
    check_wanted(run, wanted)
    with status("preparing data and backbone", quiet):
        request = _resolved(run, wanted)
    draft = Draft(request, method.model_dump(mode="json"), someone(by), ground, reason, priority, deadline, id)
    if refusal := outlook(run, request, method).refusal:
        raise UserError(f"the request {refusal}" if refusal.startswith(("matches", "names")) else refusal)
    ledger = Ledger(folder)
    entry, added = ledger.add(draft)
    if approve and entry.state == "submitted":
        ledger.approve(entry.id, someone(by))
    return _shown(run, entry.id, added)


def _resolved(run: Run, wanted: Wanted) -> Request:
    found = parse_request(open_world(run), wanted).request
    check_named(run, found)
    return read_tombstones(run.folder).renamed(found)  # what was purged is not written down again


def _date(text: str) -> datetime:
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise UserError(f"--due {text}: write a date such as 2030-01-31") from error
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def _shown(run: Run, id: str, added: bool | None = None) -> EntrySummary:
    ledger = Ledger(run.folder)
    entry = ledger.entry(id)
    waits = entry.state in ("submitted", "approved", "pending")
    method = make_method(entry.method["method"], table=entry.method)
    if waits:
        method = answering(run, entry.request, method, load_policy(run.folder))
    seen = outlook(run, entry.request, method) if waits else None
    return EntrySummary(entry, seen, tuple(ledger.events(id)), added, _names(run))


def _names(run: Run) -> dict[int, str]:
    known = run.known()
    return {} if known is None else known[0].names


def show_request(folder: Path, id: str) -> EntrySummary:
    return _shown(Run.load(folder), id)


def list_requests(folder: Path) -> LedgerSummary:
    ledger = Ledger(Run.load(folder).folder)
    if not ledger.exists:
        return LedgerSummary(())
    return LedgerSummary(tuple(ledger.entries()), tuple(ledger.consents()), _names(Run.load(folder)))


def approve_request(folder: Path, id: str, by: str | None) -> EntrySummary:
    run = Run.load(folder)
    Ledger(folder).approve(id, someone(by))
    return _shown(run, id)


def cancel_request(folder: Path, id: str, by: str | None, reason: str) -> EntrySummary:
    run = Run.load(folder)
    Ledger(folder).cancel(id, someone(by), reason)
    return _shown(run, id)


def work_run(folder: Path, policy: Policy, by: str | None, together: bool, quiet: bool) -> WorkSummary:
    """Answer what waits, with a bar over the rounds of each answer."""
    run = Run.load(folder)
    tell_threads(run)

    def follow(steps: Steps, request: Request, method: Unlearner) -> None:
        total = method.rounds(run.config.training, request)
        with rounds_bar(f"{request_id(request)[:20]:20}", total, 0, quiet) as bar:
            for step, metrics in steps:
                bar.step(phase=step.phase, **{"forget R@1": recalled(metrics, "forget/recall@1")})
                tell_left_out(f"{request_id(request)}, {step.phase}", step.notes.get("rejected", {}), quiet)
            bar.end()

    finished = tuple(work(run, policy, someone(by), together, follow))
    days = policy.purge.after_days
    return WorkSummary(finished, () if days is None else tuple(purge_released(folder, days)))


def purge_run(folder: Path, older_than_days: float, quiet: bool) -> PurgeSummary:
    """Remove or make again what released requests left on disk."""
    with status("purging", quiet):
        return PurgeSummary(tuple(purge_released(folder, older_than_days)))
