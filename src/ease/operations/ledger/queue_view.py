"""Content of the queue page: the list by urgency, and one request with impact, steps, verdict and certificate."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from ease.errors import UserError
from ease.methods import make_method
from ease.operations.evidence import read_certificate
from ease.operations.ledger.deadlines import Due, day_in, due, in_words
from ease.operations.ledger.impact import Impact, impact_of, method_for
from ease.operations.ledger.policy import Policy, load_policy
from ease.operations.ledger.records import Entry, now
from ease.operations.ledger.register import verdict_of_answer
from ease.operations.ledger.states import IN_WORK, OPEN, may_move
from ease.operations.ledger.store import Ledger
from ease.operations.recipients import read_recipients, to_notify
from ease.requests.request import in_words as request_in_words
from ease.runs.answers import answer_of
from ease.runs.run import Run
from ease.show.template import render, source

STAGES = ("submitted", "approved", "running", "done")
"""The way of a request that nothing stops."""
REACHED = {"pending": 1, "held": 2, "released": 2}
"""How far requests are that something stops, in `STAGES`."""
STANDING = {True: "good", False: "bad", None: "unknown"}


@dataclass(frozen=True)
class Row:
    """One request in the list."""

    entry: Entry
    forget: str
    day: str
    due: Due | None
    """None once it is closed."""

    @property
    def urgency(self) -> str:
        return "closed" if self.due is None else self.due.urgency

    @property
    def when(self) -> str:
        return f"was due on {self.day}" if self.due is None else in_words(self.due)


@dataclass(frozen=True)
class Detail:
    """Everything about one request."""

    line: Row
    impact: Impact | None
    clients: tuple[str, ...]
    """Names of the clients that the request touches, with their numbers of pairs."""
    steps: tuple[dict[str, str], ...]
    stage: int
    """How far the request is in `STAGES`; -1 if it left that way."""
    answered_jobs: int | None
    """Jobs that clients answered so far; null unless it is running."""
    verdict: tuple[str, str] | None
    """How the audit ended, and in words."""
    certificate: Path | None
    to_notify: tuple[str, ...]
    token: str
    """Changes with every step, so that nobody decides on what they have not seen."""
    choices: tuple[str, ...]
    """Decisions that are possible in its state."""


def lines(run: Run, policy: Policy) -> list[Row]:
    """Return open requests by urgency, then closed ones, the latest first."""
    entries = Ledger(run.folder).entries()
    dues = {each.id: each for each in due(entries, now(), policy.time_zone, policy.remind.within_days)}
    known = run.known()
    names = {} if known is None else known[0].names
    found = [
        Row(each, request_in_words(each.request, names), day_in(each.deadline, policy.time_zone), dues.get(each.id))
        for each in entries
    ]
    still = sorted((each for each in found if each.due), key=lambda each: (each.entry.deadline, each.entry.id))
    return still + sorted((each for each in found if not each.due), key=lambda each: -each.entry.number)


def detail(run: Run, id: str) -> Detail:
    """Return everything about one request."""
    policy, ledger = load_policy(run.folder), Ledger(run.folder)
    entry, events = ledger.entry(id), ledger.events(id)
    line = next(each for each in lines(run, policy) if each.entry.id == id)
    impact = None
    if entry.state in OPEN - IN_WORK:
        method = make_method(entry.method["method"], table=entry.method)
        impact = impact_of(run, entry.request, method_for(run, entry.request, method, policy))
    known = run.known()
    names = {} if known is None else known[0].names
    touched = {} if impact is None else impact.clients
    choices = [name for name, state in (("approve", "approved"), ("refuse", "refused")) if _possible(entry, state)]
    return Detail(
        line=line,
        impact=impact,
        clients=tuple(f"{names.get(client, f'client {client}')} ({count})" for client, count in touched.items()),
        steps=tuple(
            {
                "time": each.time[:16].replace("T", " "),
                "after": each.after,
                "by": each.by + (" (signed)" if each.signature else ""),
                "why": each.why,
            }
            for each in events
        ),
        stage=STAGES.index(entry.state) if entry.state in STAGES else REACHED.get(entry.state, -1),
        answered_jobs=_answered_jobs(run, entry),
        verdict=_verdict(run, entry),
        certificate=certificate_path(run, entry),
        to_notify=tuple(to_notify(read_recipients(run.folder), entry)),
        token=events[-1].content,
        choices=tuple(choices),
    )


def _possible(entry: Entry, state: Any) -> bool:
    return may_move("person", entry.state, state)


def _answered_jobs(run: Run, entry: Entry) -> int | None:
    plan = entry.outcome.plan
    if entry.state != "running" or plan is None:
        return None
    stored = answer_of(run, plan.request, make_method(plan.method["method"], table=plan.method))
    return len(list((stored.folder / "journal").glob("*.update")))


def _verdict(run: Run, entry: Entry) -> tuple[str, str] | None:
    verdict = verdict_of_answer(run, entry)
    if verdict is not None:
        return STANDING[verdict.passed], verdict.words
    return (STANDING[entry.outcome.passed], entry.outcome.verdict) if entry.outcome.verdict else None


def certificate_path(run: Run, entry: Entry) -> Path | None:
    """Return where the certificate of a request's answer is; None if none was issued."""
    if entry.outcome.answer is None:
        return None
    path = run.folder / "requests" / entry.outcome.answer / "certificate.json"
    if not path.is_file():
        return None
    try:
        read_certificate(path)
    except UserError:
        return None
    return path


# --- pages ---


def list_page(run: Run, problem: str = "") -> str:
    """Return the page with all requests."""
    policy = load_policy(run.folder)
    found = lines(run, policy)
    counts = {name: sum(each.urgency == name for each in found) for name in ("overdue", "soon", "later", "closed")}
    return _page("queue.html", run, problem, lines=found, counts=counts, zone=policy.time_zone)


def detail_page(run: Run, id: str, decider: str | None, token: str, problem: str = "") -> str:
    """Return the page of one request; with forms if `decider` may decide, each with a `token` of the server."""
    found = detail(run, id)
    zone = load_policy(run.folder).time_zone
    return _page(
        "request.html", run, problem, found=found, decider=decider, token=token, stages=STAGES, zone=zone, day_in=day_in
    )


def _page(name: str, run: Run, problem: str, **values: Any) -> str:
    style = source("page.css") + source("register.css")
    return render(name, style=Markup(style), run=run.folder.name, problem=problem, **values)
