"""The worker: it answers each request of the queue from the last release, measures and releases the result, once.

The worker holds `.work.lock`, which the system drops when its process ends. A request that is running when another
process gets the lock belongs to a process that died, and is continued. Each step can be repeated: an answer resumes
from its journal, a finished one is kept, and a release that was made is found in the run's head.
"""

import shutil
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from ease.audit.at_sites import retained_recalls
from ease.audit.records import current_audit
from ease.config import Config
from ease.data.membership import Holding
from ease.errors import Busy, Unwritable, UserError
from ease.federation.middleware import Guarded
from ease.methods import make_method
from ease.methods.base import Step, Unlearner
from ease.methods.retrain import Retrain
from ease.operations.evidence import attest
from ease.operations.ledger.impact import impact_of, method_for
from ease.operations.ledger.judging import audit_answer, audit_settings
from ease.operations.ledger.people import missing_approval
from ease.operations.ledger.policy import Policy
from ease.operations.ledger.records import NO_AUDIT, NOTHING, Entry, Event, Outcome, RequestPlan
from ease.operations.ledger.states import State
from ease.operations.ledger.store import Ledger
from ease.requests.request import Request, combined, leaving_clients, listed_ids, named_in, remaining
from ease.requests.tombstones import read_tombstones
from ease.runs.answers import StoredAnswer, answer_of, open_world, release, start_hash, trained_of
from ease.runs.evaluation import evaluation_sets, measure
from ease.runs.forget import forget, trains_on
from ease.runs.records import Metrics
from ease.runs.run import Run
from ease.runs.world import World
from ease.storage import exclusive, sha256

LOCK = ".work.lock"
RETRY_SECONDS = 0.1
"""Time before a busy lock is tried again."""
RETAINED = "retain/recall@1"
AUDITS = {False: "its audit did not pass", None: "its audit is inconclusive"}
"""Why an answer is held, by the verdict on it."""

Steps = Iterator[tuple[Step, Metrics]]
Follow = Callable[[Steps, Request, Unlearner], None]
"""Iterates over the steps of an answer to its end, and may show progress."""


class Finished(Config):
    """The result of requests that were worked on together."""

    ids: tuple[str, ...]
    state: State
    why: str
    outcome: Outcome


def work(
    run: Run, policy: Policy, by: str, together: bool, follow: Follow, audited: bool | None = None
) -> Iterator[Finished]:
    """Answer everything that waits, in turn; a request that has to wait longer is tried once.

    `audited` says whether answers are audited before their release; None: as the policy says.

    Several processes may do so at the same time. Each takes its next request between two requests of another.
    """
    ledger, passed = Ledger(run.folder), list[str]()
    with worker_lock(run.folder):
        attest(run)  # logs what a process that died had released; an altered log stops the queue
    while ledger.exists:
        with worker_lock(run.folder):
            steps = ledger.checked_events()  # an altered ledger stops the queue
            entries = ledger.claim(by, together, passed)
            if not entries:
                return
            passed += [entry.id for entry in entries]
            batch = Batch(run, ledger, policy, by, follow, entries, audited)
            finished = [*batch.hold_unapproved(steps), *batch.answer()]
        yield from finished


@contextmanager
def worker_lock(folder: Path) -> Iterator[None]:
    """Hold the worker's lock of a run; wait for another worker to end its request."""
    busy = f"{folder}: another process works through its requests; wait for it"
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(exclusive(folder / LOCK, busy))
                break
            except Busy:
                time.sleep(RETRY_SECONDS)
        yield


@dataclass
class Batch:
    """Claimed requests that one model answers."""

    run: Run
    ledger: Ledger
    policy: Policy
    by: str
    follow: Follow
    entries: list[Entry]
    """Those that are not finished yet."""
    audited: bool | None = None
    """Whether answers are audited before their release; None: as the policy says."""

    def hold_unapproved(self, steps: Sequence[Event]) -> Iterator[Finished]:
        """Give back what its steps do not show to be approved as the policy asks, whatever its row says."""
        for entry in list(self.entries):
            released = entry.outcome.plan is not None and entry.outcome.plan.request in self.run.head.gone
            if not released and (why := missing_approval(entry.id, steps, self.policy.approval)):
                yield self._finish([entry], "held", why)

    def answer(self) -> Iterator[Finished]:
        """Take every request to the end of its turn."""
        if not self.entries:
            return
        plan = self.entries[0].outcome.plan
        try:
            if plan is not None:
                self._check_plan(plan)
            else:
                yield from self._close_those_without_work()
                if not self.entries:
                    return
                plan = yield from self._planned()
                self.ledger.plan([entry.id for entry in self.entries], plan)
            waived = {entry.waived for entry in self.entries}
            state, why, outcome = _answered(self.run, plan, self.policy, waived, self.follow, self.audited)
            yield self._finish(self.entries, state, why, outcome)
        except (Busy, Unwritable) as fault:  # the machine's, so the request comes first again
            self._give_back(plan, "approved", fault)
            raise
        except UserError as error:
            yield self._give_back(plan, "pending", error)

    def _close_those_without_work(self) -> Iterator[Finished]:
        trained_of(self.run)  # refuses a run without a finished round, which can answer nothing
        for entry in list(self.entries):
            impact = impact_of(self.run, entry.request, make_method(entry.method["method"], table=entry.method))
            if impact.refusal:
                yield self._finish([entry], "refused", impact.refusal)
            elif impact.already_done:
                yield self._finish([entry], "done", impact.already_done)

    def _planned(self) -> Generator[Finished, None, RequestPlan]:
        """Decide what is answered, and by which method."""
        settings = self.entries[0].method
        method = make_method(settings["method"], table=settings)
        request = self._remaining()
        if len(self.entries) > 1 and (why := impact_of(self.run, request, method).refusal):
            yield self._finish(self.entries[1:], "approved", f"not together: {why}")
            request = self._remaining()
        method = method_for(self.run, request, method, self.policy)
        return RequestPlan(request=request, method=method.model_dump(mode="json"))

    def _check_plan(self, plan: RequestPlan) -> None:
        """Refuse a plan that names more than its requests do: no step in the chain holds it."""
        if plan.request in self.run.head.gone:
            return  # it is released; what is left is to say so
        holdings, stones = self._holdings(), read_tombstones(self.run.folder)

        def named(request: Request) -> set[str | int]:
            known = stones.renamed(request)
            return {*named_in(known, holdings), *listed_ids([known]), *leaving_clients(known)}

        if strange := named(plan.request) - set[str | int]().union(*(named(entry.request) for entry in self.entries)):
            raise UserError(
                f"{self.ledger.path}: what was planned names {len(strange)} pairs or clients that the request does "
                "not; the plan is dropped, and the next `ease work` makes a new one"
            )

    def _holdings(self) -> Sequence[Holding]:
        known = self.run.known()
        assert known is not None  # it is trained
        return known[0].clients

    def _remaining(self) -> Request:
        """The union of the requests, without pairs that are forgotten already."""
        holdings = self._holdings()
        whole = combined([entry.request for entry in self.entries], holdings)
        return remaining(read_tombstones(self.run.folder).renamed(whole), holdings, self.run.head.gone)

    def _give_back(self, plan: RequestPlan | None, state: State, error: Exception) -> Finished:
        """Leave the requests to a later turn; if their model is released, only the worker may move them."""
        if plan is not None and plan.request in self.run.head.gone:
            return self._finish(self.entries, "released", str(error), Outcome(plan=plan))
        return self._finish(self.entries, state, str(error))

    def _finish(self, entries: Sequence[Entry], state: State, why: str, outcome: Outcome = NOTHING) -> Finished:
        ids = tuple(entry.id for entry in entries)
        self.ledger.finish(ids, state, self.by, why, outcome)
        self.entries = [entry for entry in self.entries if entry.id not in ids]
        return Finished(ids=ids, state=state, why=why, outcome=outcome)


def _answered(
    run: Run, plan: RequestPlan, policy: Policy, waived: set[str], follow: Follow, audited: bool | None
) -> tuple[State, str, Outcome]:
    """Compute an answer and release it, or say why it is held; what is done already is not done again.

    The log has the release before the ledger says `done`: if the process dies in between, both are completed here.
    """
    request, method = plan.request, make_method(plan.method["method"], table=plan.method)
    closed = next((each for each in run.head.releases if each.request == request), None)
    stored = answer_of(run, request, method) if closed is None else StoredAnswer(run.model_path(closed).parent)
    name = stored.folder.relative_to(run.folder / "requests").as_posix()
    world = open_world(run, None if closed is None else request).erasing(request)
    if closed is None:
        if stored.done and stored.record().trained_sha256 != start_hash(run):
            shutil.rmtree(stored.folder)  # it began from a model that another release has replaced
        follow(forget(run, world, request, method), request, method)
    record, model = stored.record(), sha256(stored.model_path)
    before, after = _retained(run, world, request, stored, closed is not None)
    outcome = Outcome(
        answer=name,
        model_sha256=model,
        retain_before=before,
        retain_after=after,
        seconds=record.metrics.get("cost/seconds"),
    )
    fall = 0.0 if before is None or after is None else before - after
    if closed is None and fall > policy.hold.retain_points and model not in waived:
        why = (
            f"recall@1 of retained pairs fell by {fall:.1f} points, and {policy.hold.retain_points:g} are allowed; "
            "look at the model, then approve, refuse or cancel the request"
        )
        return "held", why, outcome
    wanted = policy.release == "after_audit" if audited is None else audited
    # Retraining is what others are compared with, and pairs outside training changed no model.
    auditable = wanted and not isinstance(method, Retrain) and trains_on(world, request)
    if closed is None and auditable:
        outcome = _audited(run, world, stored, request, method, follow, outcome, bool(audited))
        if outcome.passed is not True and (audited or stored.audit_path.is_file()) and model not in waived:
            audit = "it could not be audited" if outcome.verdict.startswith(NO_AUDIT) else AUDITS[outcome.passed]
            return "held", f"{audit}; read the verdict, then approve, refuse or cancel the request", outcome
    release(run, name)  # has no effect on one that is released
    attest(run)
    place, made = next(
        (place, each) for place, each in enumerate(run.head.releases, start=1) if each.request == request
    )
    found = current_audit(stored)
    if found is not None:
        outcome = outcome.model_copy(update={"passed": found.verdict.passed, "verdict": found.verdict.words})
    elif closed is not None and auditable:  # a process that died after the release had not recorded why
        settings = audit_settings(run, world, request, method, bool(audited))
        outcome = outcome.model_copy(update={"verdict": _no_audit(settings)} if isinstance(settings, str) else {})
    return "done", "", outcome.model_copy(update={"release": place, "trained_again": bool(made.rounds)})


def _retained(
    run: Run, world: World, request: Request, stored: StoredAnswer, closed: bool
) -> tuple[float | None, float | None]:
    """Recall@1 of retained pairs before and after an answer. With pairs on site, sites measure it."""
    trained = trained_of(run, request)
    if not run.config.partition.on_site:
        before = measure(world, trained.start, evaluation_sets(world, request))
        return before.get(RETAINED), stored.record().metrics.get(RETAINED)
    if closed:
        return None, None
    everyone = Guarded(run.hosted(world).federation, run.config.training)
    before_after = retained_recalls(world, request, (trained.start, stored.model()), everyone)
    return before_after[0], before_after[1]


def _no_audit(why: str) -> str:
    return f"{NO_AUDIT}: {why}."


def _audited(
    run: Run,
    world: World,
    stored: StoredAnswer,
    request: Request,
    method: Unlearner,
    follow: Follow,
    outcome: Outcome,
    asked_for: bool,
) -> Outcome:
    """The outcome with the verdict on an answer, or with why there is none."""
    settings = audit_settings(run, world, request, method, asked_for)
    if isinstance(settings, str):
        return outcome.model_copy(update={"verdict": _no_audit(settings)})
    for asked, again, steps in audit_answer(run, world, stored, request, method, settings):
        follow(steps, asked, again)
    found = current_audit(stored)
    assert found is not None  # it was kept just now
    return outcome.model_copy(update={"passed": found.verdict.passed, "verdict": found.verdict.words})
