"""Protection against clients that fail or send false answers: only sound answers pass, and the other clients are named.

`Checked` checks every answer before it is journaled. `Quorum` passes sound answers on and stops if there are too few.
"""

import math
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence

from ease.errors import ClientError, Diverged, TooFew, UserError
from ease.federation.expected import answer_fault
from ease.federation.local import promoted
from ease.federation.objectives import objective
from ease.federation.protocol import NOT_FINITE, Federation, LocalJob, Middleware, Update, own_jobs
from ease.params import Params

ATTEMPTS = 2
"""How often a client is asked that reports an error."""
LONGEST_REASON = 300
NAMED = 3
"""Clients that an error names one by one."""


class Checked(Middleware):
    """A federation that gives one answer for each client that was asked: a sound one, or why there is none.

    A client fails by a `ClientError`, by a refusal or by silence. Any other exception is a fault of this program and
    passes, because a bug that is blamed on a client would be found by nobody.
    """

    def __init__(self, inner: Federation, deadline: float | None = None):
        super().__init__(inner)
        self.deadline = deadline
        """Seconds to wait for an answer; absent: as long as it takes."""

    def run(self, params: Params, job: LocalJob, clients: Sequence[int]) -> Iterator[Update]:
        # An answer names its sender by itself. Asked one by one, no client can speak for another; engines that must
        # have all at once are believed where each client has one answer.
        jobs, found = own_jobs(self.inner, job, clients), dict[int, list[Update]]()
        if self.inner.capabilities.concurrent:
            found = self._all(params, job, clients)
        for client in clients:
            answers = found.get(client, [])
            update = answers[0] if len(answers) == 1 else self._alone(params, job, client)
            yield update if update.refused else self._judged(update, params, jobs[client])
        for stranger in sorted(found.keys() - set(clients)):
            yield refusal(stranger, "it was not asked")

    def _all(self, params: Params, job: LocalJob, clients: Sequence[int]) -> dict[int, list[Update]]:
        """The answers to one message to all, by client; after a client's error, the answers before it."""
        found: dict[int, list[Update]] = {}
        try:
            for update in self._in_time(params, job, clients):
                found.setdefault(update.client, []).append(update)
        except (ClientError, TimeoutError):
            pass  # whose it was shows when each is asked alone
        return found

    def _in_time(self, params: Params, job: LocalJob, clients: Sequence[int]) -> Iterator[Update]:
        """The answers; with a deadline, a longer wait for the next one is a TimeoutError."""
        if self.deadline is None:
            return self.inner.run(params, job, clients)
        return within(self.deadline, lambda: self.inner.run(params, job, clients))

    def _alone(self, params: Params, job: LocalJob, client: int) -> Update:
        """One client's own answer, or why there is none."""
        reason = ""
        for _ in range(ATTEMPTS):
            try:
                answers = list(self._in_time(params, job, [client]))
            except TimeoutError:
                return refusal(client, f"it did not answer within {self.deadline:g} s")
            except ClientError as error:
                reason = f"it failed: {error}"
                continue
            others = sorted({answer.client for answer in answers} - {client})
            if others:
                return refusal(client, f"it answered as client {others[0]}")
            if len(answers) != 1:
                return refusal(client, "it answered more than once" if answers else "it did not answer")
            return answers[0]
        return refusal(client, reason)

    def _judged(self, update: Update, params: Params, job: LocalJob) -> Update:
        """The answer if it is sound, else its refusal."""
        held = self.inner.members.get(update.client, ())
        expected = objective(job.objective).expects(params, job, update.client, len(held))
        reason = answer_fault(update, expected, params.map(promoted), len(held))
        return update if reason is None else refusal(update.client, reason)


class Quorum(Middleware):
    """A federation that passes on only sound answers; with too few of them it raises an error that names the other
    clients."""

    def __init__(
        self, inner: Federation, share: float, patient: bool, everyone: bool, left_out: MutableMapping[int, str]
    ):
        super().__init__(inner)
        self.share = share
        self.patient = patient
        """Whether jobs on forget pairs need the answers of all clients that are asked."""
        self.everyone = everyone
        """Whether every job does."""
        self.left_out = left_out
        """Client -> why it was left out; added to at the end of each call."""

    def run(self, params: Params, job: LocalJob, clients: Sequence[int]) -> Iterator[Update]:
        sound, refused = 0, {}
        for update in self.inner.run(params, job, clients):
            if update.refused:
                refused[update.client] = update.refused
            else:
                sound += 1
                yield update
        self.left_out.update(refused)
        patient = self.patient or objective(job.objective).all_forget
        everyone = self.everyone or (patient and (bool(job.replays) or job.data == "forget"))
        needed = len(clients) if everyone else math.ceil(self.share * len(clients))
        if sound < needed:
            raise too_few(job, sound, len(clients), needed, refused, everyone)


def each_reason(reasons: Mapping[int, str]) -> str:
    """Why clients have no answer, one after the other."""
    return "; ".join(f"client {client}: {reason}" for client, reason in sorted(reasons.items()))


def too_few(
    job: LocalJob, sound: int, asked: int, needed: int, refused: Mapping[int, str], everyone: bool = False
) -> UserError:
    """The error of a round that cannot continue."""
    named = each_reason(dict(sorted(refused.items())[:NAMED]))
    more = f"; and {len(refused) - NAMED} more" if len(refused) > NAMED else ""
    if refused and not sound and all(NOT_FINITE in reason for reason in refused.values()):
        return Diverged(f"round {job.round}: every update was rejected ({named}{more}); lower training.learning_rate")
    return TooFew(
        f"round {job.round}, {job.objective}: {sound} of {asked} clients gave a sound answer and {needed} are needed "
        f"({named}{more}); nothing of theirs was kept: run the same command again once they answer"
        + ("" if everyone else ", or lower training.quorum")
    )


def refusal(client: int, reason: str) -> Update:
    """Replaces an answer that is missing or must not be used."""
    line = " ".join("".join(c if c.isprintable() else " " for c in reason).split())
    return Update(client, 0, None, refused=line[:LONGEST_REASON])


def within(seconds: float, start: Callable[[], Iterator[Update]]) -> Iterator[Update]:
    """The same answers; a wait of more than so many seconds for the next one is a TimeoutError.

    What does not answer cannot be stopped from here. It continues in its own thread, and its result is ignored.
    """
    arrived: queue.SimpleQueue[Update | BaseException | None] = queue.SimpleQueue()

    def listen() -> None:
        try:
            for update in start():
                arrived.put(update)
            arrived.put(None)
        except BaseException as error:  # reported to the waiting caller
            arrived.put(error)

    threading.Thread(target=listen, daemon=True).start()
    while True:
        try:
            came = arrived.get(timeout=seconds)
        except queue.Empty:
            raise TimeoutError from None
        if came is None:
            return
        if isinstance(came, BaseException):
            raise came
        yield came
