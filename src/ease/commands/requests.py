"""`ease request`, `ease work` and `ease purge`: submit, show and decide requests, and answer those that wait."""

import getpass
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import RenderableType

from ease.commands.forget import recalled
from ease.commands.train import warn_about_threads, warn_if_unfinished
from ease.config import Config
from ease.console import labelled, print_left_out, rounds_bar, status, table
from ease.errors import UserError
from ease.methods import make_method
from ease.methods.base import Unlearner
from ease.operations.ledger.deadlines import day_in, parse_deadline
from ease.operations.ledger.impact import Impact, impact_of, method_for
from ease.operations.ledger.people import person
from ease.operations.ledger.policy import Policy, load_policy
from ease.operations.ledger.records import Consent, Draft, Entry, Event, Outcome, now
from ease.operations.ledger.retention import Override, purge_released, redact_closed
from ease.operations.ledger.states import IN_WORK, OPEN
from ease.operations.ledger.store import Ledger
from ease.operations.ledger.work import Finished, Steps, work
from ease.operations.lost_sites import LostSite, read_lost_sites
from ease.operations.purge import PurgePass
from ease.operations.recipients import read_recipients, to_notify
from ease.requests.request import Request, in_words
from ease.requests.tombstones import read_tombstones
from ease.runs.answers import check_method, check_named, default_method, open_world
from ease.runs.resolve import RequestOptions, check_options, find_clients, parse_request, request_id
from ease.runs.run import Run

PENDING, OVERDUE = 4, 5
"""Exit codes of `ease work`, `ease request due` and `ease status --exit-code`: a request waits, or one is overdue."""


class ListedEntry(Entry):
    """One request of the ledger."""

    meaning: str
    """The request in words."""
    overdue: bool
    until: str
    """Its deadline in words, in the time zone of the policy."""


class EntrySummary(ListedEntry):
    """`ease request add`, `show`, `approve`, `refuse`, `extend` and `cancel`: a request and every step it took."""

    added: bool | None
    """Whether it was submitted by this command. Null if it was only shown or decided."""
    to_notify: tuple[str, ...]
    """Recipients of exported models to notify, because their model contains forgotten pairs."""
    impact: Impact | None
    """Null once the request is closed, and while it is being worked on."""
    events: tuple[Event, ...]
    names: dict[int, str]
    """Client -> its name, if it has one."""
    time_zone: str
    """The time zone in which days end."""

    def render(self) -> Iterator[RenderableType]:
        if self.added is False:
            yield f"{self.id} is in the ledger already; nothing was added"
        overdue = " (OVERDUE)" if self.overdue else ""
        yield labelled("request", f"{self.id}: {self.meaning} by {self.method['method']}")
        yield labelled(
            "asked by",
            f"{self.asked_by or '(removed)'}, {day_in(self.submitted, self.time_zone)}; "
            f"answer until {self.until}{overdue}",
        )
        if self.first_deadline:
            yield labelled("extended", f"from {day_in(self.first_deadline, self.time_zone)}")
        for name in ("ground", "reason"):
            if getattr(self, name):
                yield labelled(name, getattr(self, name))
        yield labelled("state", f"{self.state}{f': {self.why}' if self.why else ''}")
        if self.outcome.answer is not None:
            yield labelled("answer", _answer(self.outcome))
        for name, recipients in (("told", self.notified), ("still to notify", self.to_notify)):
            if recipients:
                yield labelled(name, ", ".join(recipients))
        if self.outcome.verdict:
            yield labelled("verdict", self.outcome.verdict)
        if self.impact is not None:
            yield from _impact(self.impact, self.names)
        rows = [
            [each.time[:16].replace("T", " "), each.after, each.by + (" (signed)" if each.signature else ""), each.why]
            for each in self.events
        ]
        yield table("Steps", ["time (UTC)", "to", "by", "why"], rows, text_columns=4)


def _listed(entry: Entry, names: Mapping[int, str], zone: str) -> ListedEntry:
    until = day_in(entry.deadline, zone)
    meaning = in_words(entry.request, names)
    return ListedEntry(**dict(entry), meaning=meaning, overdue=entry.is_overdue(now()), until=until)


def _answer(outcome: Outcome) -> str:
    """The name of a result, and the release that it became."""
    number = f", release {outcome.release}" if outcome.release else ""
    again = ", trained from the start" if outcome.trained_again else ""
    return f"{outcome.answer or ''}{number}{again}"


def _impact(impact: Impact, names: Mapping[int, str]) -> Iterator[RenderableType]:
    if nothing := impact.refusal or impact.already_done:
        yield labelled("impact", nothing)
        return
    before = f", {impact.already_forgotten} more were forgotten before" if impact.already_forgotten else ""
    yield labelled("touches", f"{impact.to_forget} of {impact.remaining} training pairs{before}")
    if impact.untrained:
        yield labelled("erases", f"{impact.untrained_words}, on which no model was trained")
    if not impact.to_forget:
        return
    yield labelled("forgotten then", f"{impact.forgotten_fraction:.0%} of what the model was trained on")
    clients = ", ".join(f"{names.get(client, client)} ({count})" for client, count in impact.clients.items())
    yield labelled("clients", f"{clients}; in {len(impact.rounds)} rounds")
    yield labelled("models", ", ".join(impact.models) or "none")
    seconds = "" if impact.seconds is None else f"about {impact.seconds:.0f} s, "
    again = "; training from the start, because so much is forgotten" if impact.method == "retrain" else ""
    yield labelled("cost", f"{seconds}{impact.cost_fraction:.0%} of retraining{again}")


class LedgerSummary(Config):
    """`ease request list`: all requests of a run in the order in which they are worked on."""

    requests: tuple[ListedEntry, ...]
    consents: tuple[Consent, ...]
    """Consents of clients that joined."""

    def render(self) -> Iterator[RenderableType]:
        rows = [
            [
                each.id,
                each.meaning,
                each.state + (f": {each.why}" if each.why else ""),
                each.until + (" OVERDUE" if each.overdue else ""),
            ]
            for each in self.requests
        ]
        yield table(f"{len(rows)} requests", ["id", "forget", "state", "until"], rows, text_columns=4)
        if self.consents:
            given = [
                [str(each.client), str(each.pairs), str(each.returned), each.given_by, _day(each.time), each.text[:60]]
                for each in self.consents
            ]
            yield table("Joined by consent", ["client", "pairs", "again", "by", "on", "words"], given, text_columns=6)


class WorkSummary(Config):
    """`ease work`: the requests that were answered, and what was purged afterwards."""

    finished: tuple[Finished, ...]
    purged: tuple[PurgePass, ...]
    to_notify: dict[str, tuple[str, ...]]
    """Request -> recipients of exported models to notify, because their model contains forgotten pairs."""

    @property
    def exit_code(self) -> int:
        """4 if a request that was worked on still waits, for a person or for another try."""
        return PENDING if any(each.state in OPEN for each in self.finished) else 0

    def render(self) -> Iterator[RenderableType]:
        if not self.finished:
            yield "Nothing waits: approve submitted requests with ease request approve"
            return
        rows = [
            [
                ", ".join(each.ids),
                each.state,
                _answer(each.outcome),
                f"{_figure(each.outcome.retain_before)} → {_figure(each.outcome.retain_after)}",
                _figure(each.outcome.seconds),
            ]
            for each in self.finished
        ]
        yield table("Worked on", ["request", "state", "result", "retain R@1", "seconds"], rows, text_columns=3)
        for each in self.finished:
            name = ", ".join(each.ids)
            if each.why:
                yield labelled(f"{name} is {each.state}", each.why, "dim" if each.state == "done" else "yellow")
            if each.outcome.verdict:
                yield labelled(f"verdict on {name}", each.outcome.verdict)
        for id, names in self.to_notify.items():
            yield labelled(f"{id}: to notify (ease request notify)", ", ".join(names), "yellow")
        if self.purged:
            yield from PurgeSummary(purged=self.purged, lost_sites=()).render()


class PurgeSummary(Config):
    """`ease purge`: what was deleted, what was computed again, and what stayed."""

    purged: tuple[PurgePass, ...]
    lost_sites: tuple[LostSite, ...]
    """Sites that are gone for good, whose copies no purge has reached."""

    def render(self) -> Iterator[RenderableType]:
        for site in self.lost_sites:
            when = f"{_day(site.time)} by {site.by}"
            yield labelled(f"client {site.client} is gone for good", f"{site.why} (recorded {when})", "yellow")
        if not self.purged:
            yield "Nothing to purge: no request was released, or not long enough ago"
        for each in self.purged:
            kinds = (("removed", each.removed), ("made again", each.rederived), ("stayed", each.stayed))
            rows = [[kind, line.what, line.why] for kind, lines in kinds for line in lines]
            yield table(f"Purged: {request_id(each.request)}", ["", "what", "why"], rows, text_columns=3)


def _day(time: str) -> str:
    return time[:10]


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def someone(name: str | None) -> str:
    """The given name, or the user of this machine."""
    if name:
        return name
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # no such user in a container
        return "unknown"


def add_request(
    folder: Path,
    wanted: RequestOptions,
    method: Unlearner | None,
    by: str | None,
    ground: str,
    reason: str,
    priority: int,
    due: str | None,
    id: str | None,
    approve: bool,
    key: Path | None,
    quiet: bool,
) -> EntrySummary:
    """Hand a request in; it is resolved now, so that what is approved is what will be done."""
    run, policy = Run.load(folder), load_policy(folder)
    method = method or default_method(run)
    zone = policy.time_zone
    deadline = None if due is None else parse_deadline(due, zone)
    who = person(policy.approval, someone(None), key) if approve or key else None  # `by` is who asked
    check_method(run, method)
    check_options(run, wanted)
    with status("preparing data and backbone", quiet):
        request = _resolved(run, wanted)
    draft = Draft(request, method.model_dump(mode="json"), someone(by), ground, reason, priority, deadline, id, zone)
    if refusal := impact_of(run, request, method).refusal:
        raise UserError(refusal)
    ledger = Ledger(folder)
    entry, added = ledger.add(draft, None if who is None else who.key)
    if approve and who is not None and entry.state == "submitted":
        ledger.approve(entry.id, who.name, who.key, policy.approval.people)
    return shown_entry(run, entry.id, added)


def _resolved(run: Run, wanted: RequestOptions) -> Request:
    found = parse_request(open_world(run), wanted).request
    check_named(run, found)
    return read_tombstones(run.folder).renamed(found)  # what was purged is not written down again


def shown_entry(run: Run, id: str, added: bool | None = None) -> EntrySummary:
    """Return everything about one request."""
    ledger, policy = Ledger(run.folder), load_policy(run.folder)
    entry = ledger.entry(id)
    impact = None
    if entry.state in OPEN - IN_WORK:
        method = make_method(entry.method["method"], table=entry.method)
        impact = impact_of(run, entry.request, method_for(run, entry.request, method, policy))
    to_tell = tuple(to_notify(read_recipients(run.folder), entry))
    names = _names(run)
    return EntrySummary(
        **dict(_listed(entry, names, policy.time_zone)),
        added=added,
        to_notify=to_tell,
        impact=impact,
        events=tuple(ledger.events(id)),
        names=names,
        time_zone=policy.time_zone,
    )


def _names(run: Run) -> dict[int, str]:
    known = run.known()
    return {} if known is None else known[0].names


def show_request(folder: Path, id: str) -> EntrySummary:
    return shown_entry(Run.load(folder), id)


def list_requests(folder: Path) -> LedgerSummary:
    run, ledger = Run.load(folder), Ledger(folder)
    names, zone = _names(run), load_policy(folder).time_zone
    listed = tuple(_listed(each, names, zone) for each in ledger.entries())
    return LedgerSummary(requests=listed, consents=tuple(ledger.consents()))


def approve_request(folder: Path, id: str, by: str | None, key: Path | None = None) -> EntrySummary:
    run, policy = Run.load(folder), load_policy(folder).approval
    who = person(policy, someone(by), key)
    Ledger(folder).approve(id, who.name, who.key, policy.people)
    return shown_entry(run, id)


def cancel_request(folder: Path, id: str, by: str | None, key: Path | None, reason: str) -> EntrySummary:
    run = Run.load(folder)
    who = person(load_policy(folder).approval, someone(by), key)
    Ledger(folder).cancel(id, who.name, reason, who.key)
    return shown_entry(run, id)


def work_run(
    folder: Path, policy: Policy, by: str | None, together: bool, audited: bool | None, quiet: bool
) -> WorkSummary:
    """Answer approved requests, with a progress bar for each."""
    run = Run.load(folder)
    warn_about_threads(run)
    warn_if_unfinished(run)

    def follow(steps: Steps, request: Request, method: Unlearner) -> None:
        total = method.rounds(run.training, request)
        with rounds_bar(f"{request_id(request)[:20]:20}", total, 0, quiet) as bar:
            for step, metrics in steps:
                bar.step(phase=step.phase, **{"forget R@1": recalled(metrics, "forget/recall@1")})
                print_left_out(f"{request_id(request)}, {step.phase}", step.notes.get("rejected", {}), quiet)
            bar.end()

    finished = tuple(work(run, policy, someone(by), together, follow, audited))
    days, ledger, known = policy.purge.after_days, Ledger(folder), read_recipients(folder)
    done = [id for each in finished if each.state == "done" for id in each.ids] if known.exports else []
    to_tell = {id: names for id in done if (names := tuple(to_notify(known, ledger.entry(id))))}
    purged = () if days is None else tuple(purge_released(folder, days))
    _retain(folder, policy)
    return WorkSummary(finished=finished, purged=purged, to_notify=to_tell)


def _retain(folder: Path, policy: Policy) -> None:
    """Remove names and words of requests that the policy keeps no longer."""
    if policy.retention.closed_days is not None:
        redact_closed(folder, policy.retention.closed_days)


def purge_run(
    folder: Path, older_than_days: float, lost: Sequence[str], by: str | None, why: str, quiet: bool
) -> PurgeSummary:
    """Remove or make again what released requests left on disk, and record which sites are `lost` for good."""
    override = None
    if lost:
        known = Run.load(folder, purging=True).known()
        clients = () if known is None else find_clients(known[0], lost, "--lost-site")
        override = Override(clients, someone(by), why)
    with status("purging", quiet):
        passes = tuple(purge_released(folder, older_than_days, override))
    _retain(folder, load_policy(folder))
    return PurgeSummary(purged=passes, lost_sites=read_lost_sites(folder).sites)
