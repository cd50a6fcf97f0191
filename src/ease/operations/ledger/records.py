"""Records of the ledger of a run: requests, the steps they took, and the consents of clients that joined."""

import hashlib
import json
from dataclasses import dataclass
from datetime import UTC, datetime

from ease.config import Config
from ease.errors import UserError
from ease.operations.ledger.states import OPEN, State
from ease.requests.request import Request
from ease.runs.records import NamedMethod

LONGEST_TEXT = 2000
"""Characters of a reason or a name."""


def now() -> datetime:
    """Return the current time in UTC."""
    return datetime.now(UTC)


def stamp(time: datetime) -> str:
    """Format a time in UTC, so that stamps are ordered as their times are."""
    return time.astimezone(UTC).isoformat(timespec="milliseconds")


def check_text(option: str, text: str) -> None:
    """Refuse text that is too long or that no file can hold."""
    if len(text) > LONGEST_TEXT:
        raise UserError(f"--{option}: more than {LONGEST_TEXT} characters; shorten it")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"--{option}: is not valid UTF-8; type it again") from error


class RequestPlan(Config):
    """A request with all that it is combined with, and the method that answers it. It is stored before the answer is
    computed, so that the next worker continues the same answer if this one dies."""

    request: Request
    method: NamedMethod


class Outcome(Config):
    """The result of a request so far; what does not exist yet is null."""

    plan: RequestPlan | None = None
    """While the answer is computed."""
    answer: str | None = None
    """The name of the result, as REQUEST/METHOD."""
    model_sha256: str | None = None
    release: int | None = None
    """Number of its release."""
    trained_again: bool = False
    """Whether the policy chose a training from the start."""
    retain_before: float | None = None
    """Recall@1 of retained pairs in percent before the request."""
    retain_after: float | None = None
    """Recall@1 of retained pairs in percent after the request."""
    seconds: float | None = None
    passed: bool | None = None
    """The verdict of its audit; null: it is inconclusive, or there was no audit."""
    verdict: str = ""
    """The verdict in words, or why there was no audit; empty before it was audited."""


NO_AUDIT = "No audit"
"""How the verdict of an answer that was not audited begins."""
NOTHING = Outcome()
"""The outcome of a request that nobody has worked on."""


class Entry(Config):
    """One request in the ledger."""

    number: int
    """Order of arrival."""
    id: str
    request: Request
    method: NamedMethod
    asked_by: str
    ground: str
    """The legal or other ground of the request."""
    reason: str
    priority: int
    """Larger goes first."""
    submitted: str
    deadline: str
    state: State = "submitted"
    why: str = ""
    """Why it is in this state, if there is something to say."""
    batch: str = ""
    """Requests with the same batch are answered together."""
    outcome: Outcome = NOTHING
    waived: str = ""
    """Hash of the model that a person accepted although recall of retained pairs fell."""
    approved_by: tuple[str, ...] = ()
    """Who approved it so far. The policy says how many people have to."""
    first_deadline: str = ""
    """The deadline before it was extended; empty: it was not."""
    notified: tuple[str, ...] = ()
    """Recipients of exported models who were notified that their model contains forgotten pairs."""

    @property
    def is_open(self) -> bool:
        """Whether something is still to be done."""
        return self.state in OPEN

    def is_overdue(self, time: datetime) -> bool:
        """Return whether the request is open after its deadline."""
        return self.is_open and self.deadline < stamp(time)


class StepSignature(Config):
    """A person's Ed25519 signature of a step."""

    key: str
    """The public key, in base64; its hash names it in the policy."""
    signature: str
    """In base64."""


class Event(Config):
    """One step of a request. A step that leaves the state as it is was an approval of several, an extension or a
    notice to a recipient."""

    request: str
    time: str
    before: State | None
    """Null: it was handed in."""
    after: State
    by: str
    why: str
    deadline: str = ""
    """The new deadline, of the first step and of one that moves it."""
    salt: str
    """Salt of `content`; empty once the words were redacted, so that they cannot be guessed from it."""
    content: str
    """Salted hash of the words and of what was handed in."""
    previous: str
    """Hash of the step before it in the ledger."""
    signature: StepSignature | None = None


class Consent(Config):
    """Why pairs that were not in the training are in it now: a client joined, or joined again."""

    client: int
    time: str
    given_by: str
    text: str
    pairs: int
    returned: int
    """How many of the pairs had been forgotten before."""

    @property
    def content_hash(self) -> str:
        """The hash that the run stores, so that a later change of the words is noticed."""
        return hashlib.sha256(json.dumps([self.given_by, self.time, self.text]).encode()).hexdigest()


@dataclass(frozen=True)
class Draft:
    """A request that is not in the ledger yet."""

    request: Request
    method: NamedMethod
    asked_by: str
    ground: str = ""
    reason: str = ""
    priority: int = 0
    deadline: datetime | None = None
    """None: the end of the day a month after it is handed in."""
    id: str | None = None
    """None: derived from the request, the method and who asked."""
    zone: str = "UTC"
    """The time zone in which days end."""
