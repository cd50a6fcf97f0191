"""Working through the queue: each request answered from the head, looked at, released, and closed, exactly once.

Who works holds `.work.lock`, which the system drops with its process. So a request that is still running when someone
gets the lock is of a process that died, and is gone on with. Each step can be repeated: an answer goes on from its
journal, one that is finished stays, a release that was made is found in the head.
"""

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ease.errors import Busy, Unwritable, UserError
from ease.methods import make_method
from ease.methods.base import Step, Unlearner
from ease.operations.evidence import attest
from ease.operations.ledger.impact import answering, outlook
from ease.operations.ledger.policy import Policy
from ease.operations.ledger.states import State
from ease.operations.ledger.store import Entry, Ledger
from ease.requests.request import REQUESTS, Request, combined, remaining
from ease.requests.tombstones import read_tombstones
from ease.runs.answers import answer_of, open_world, release, start_hash, trained_of
from ease.runs.evaluation import evaluation_sets, measure
from ease.runs.forget import forget
from ease.runs.records import Metrics
from ease.runs.run import Run
from ease.storage import exclusive, sha256

LOCK = ".work.lock"
BETWEEN_TRIES = 0.1
"""Seconds before a busy lock is tried again."""
RETAINED = "retain/recall@1"

Steps = Iterator[tuple[Step, Metrics]]
Follow = Callable[[Steps, Request, Unlearner], None]
"""Goes through the steps of an answer to its end, showing what it likes."""


@dataclass(frozen=True)
class Finished:
    """What came of requests that were worked on together."""

    ids: tuple[str, ...]
    state: State
    why: str
    outcome: dict[str, Any]


def work(run: Run, policy: Policy, by: str, together: bool, follow: Follow) -> Iterator[Finished]:
    """Answer everything that waits, in turn; what has to wait longer is tried once.

    Several processes may do so at the same time: each takes the next request once the others are between two.
    """
    ledger, passed = Ledger(run.folder), list[str]()
    with alone(run.folder):
        attest(run)  # what a process that died had released; a log that was tampered with stops the queue
    while ledger.exists:
        with alone(run.folder):
            entries = ledger.claim(by, together, passed)
            if not entries:
                return
            passed += [entry.id for entry in entries]
            finished = list(_answered(run, ledger, entries, policy, by, follow))
        yield from finished


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Be the one who works here; wait for another one to end its request."""
    busy = f"{folder}: another process works through its requests; wait for it"
    with ExitStack() as held:
        while True:
            try:
                held.enter_context(exclusive(folder / LOCK, busy))
                break
            except Busy:
                time.sleep(BETWEEN_TRIES)
        yield


def _answered(
    run: Run, ledger: Ledger, entries: Sequence[Entry], policy: Policy, by: str, follow: Follow
) -> Iterator[Finished]:
    """Take claimed requests to their ends."""
    left = {entry.id: entry for entry in entries}
    request: Request | None = None

    def given_back() -> dict[str, Any]:
        """What is remembered of requests that come here again: of a release that was made, what it was to forget."""
        made = request is not None and request in run.head.gone
        return _plan(request, method) if request is not None and made else {}

    def ended(these: Sequence[str], state: State, why: str, outcome: dict[str, Any] | None = None) -> Finished:
        ledger.move(these, state, by, why, outcome)
        for id in these:
            del left[id]
        return Finished(tuple(these), state, why, outcome or {})

    try:
        planned, by_method = (entries[0].outcome.get(name) for name in ("planned", "method"))
        settings = by_method or entries[0].method
        method = make_method(settings["method"], table=settings)
        if planned is None:
            trained_of(run)  # an unfinished training can answer nothing
            for entry in entries:
                seen = outlook(run, entry.request, method)
                if seen.refusal or seen.settled:
                    yield ended([entry.id], "refused" if seen.refusal else "done", seen.refusal or seen.settled)
            if not left:
                return
            request = _left_of(run, [entry.request for entry in left.values()])
            if len(left) > 1 and (why := outlook(run, request, method).refusal):
                yield ended(list(left)[1:], "approved", f"not together: {why}")
                request = _left_of(run, [entry.request for entry in left.values()])
            method = answering(run, request, method, policy)
            ledger.plan(list(left), _plan(request, method))
        else:
            request = REQUESTS.validate_python(planned)
        waived = {entry.waived for entry in left.values()}
        outcome, held = _released(run, request, method, policy, waived, follow)
    except (Busy, Unwritable) as fault:  # none of the request's: it comes first again
        ended(list(left), "approved", str(fault), given_back())
        raise
    except UserError as error:
        yield ended(list(left), "pending", str(error), given_back())
        return
    yield ended(list(left), "pending" if held else "done", held, outcome)


def _plan(request: Request, method: Unlearner) -> dict[str, Any]:
    """What is about to be done, for whoever has to go on with it."""
    return {"planned": request.model_dump(mode="json"), "method": method.model_dump(mode="json")}


def _left_of(run: Run, requests: Sequence[Request]) -> Request:
    """What several requests name together, less what is gone already."""
    known = run.known()
    assert known is not None  # the outlook has looked
    whole = read_tombstones(run.folder).renamed(combined(requests, known[0].clients))
    return remaining(whole, known[0].clients, run.head.gone)


def _released(
    run: Run, request: Request, method: Unlearner, policy: Policy, waived: set[str], follow: Follow
) -> tuple[dict[str, Any], str]:
    """Answer a request and release the answer, or say why it is held; what is done already is not done again.

    The log tells of a release before the ledger says `done`: should the process die between, it comes here again.
    """
    stored = answer_of(run, request, method)
    name = stored.folder.relative_to(run.folder / "requests").as_posix()
    closed = request in run.head.gone
    world = open_world(run, request if closed else None)
    if not closed:
        if stored.done and stored.record().trained_sha256 != start_hash(run):
            shutil.rmtree(stored.folder)  # begun from a model that the run has left behind
        follow(forget(run, world, request, method), request, method)
    before = measure(world, trained_of(run, request).start, evaluation_sets(world, request))
    record, model = stored.record(), sha256(stored.model_path)
    fall = before.get(RETAINED, 0.0) - record.metrics.get(RETAINED, 0.0)
    outcome = {
        "answer": name,
        "model_sha256": model,
        "retain_before": before.get(RETAINED),
        "retain_after": record.metrics.get(RETAINED),
        "seconds": record.metrics.get("cost/seconds"),
    }
    if not closed:
        if fall > policy.hold.retain_points and model not in waived:
            why = (
                f"held: recall@1 of retained pairs fell by {fall:.1f} points, and {policy.hold.retain_points:g} are "
                "allowed; look at it, then approve or cancel"
            )
            return {**outcome, "held": True}, why
        release(run, name)
    attest(run)
    place = next(number for number, each in enumerate(run.head.releases, start=1) if each.request == request)
    again = {"trained_again": True} if run.head.releases[place - 1].rounds else {}
    return {**outcome, "release": place, **again}, ""
