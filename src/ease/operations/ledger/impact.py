"""Scope and cost of a request, reported before anything is computed."""

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from statistics import median

from ease.config import Config
from ease.data.membership import Holding, Membership
from ease.errors import UserError
from ease.methods.base import Unlearner
from ease.methods.retrain import Retrain
from ease.operations.ledger.policy import Policy
from ease.requests.request import (
    ClassRequest,
    ClientRequest,
    Request,
    SampleRequest,
    every_id,
    named_in,
    untrained_in,
)
from ease.requests.tombstones import read_tombstones
from ease.runs.run import Run
from ease.trainers import trainer_of

SHARED_REPLAY, DEEP_REPLAY = 0.5, 1.2
"""Cost of repeating a round, in rounds of training, measured on CPUs. Replays of small models share their passes. With
adapters in transformers every replay runs through the blocks and saves nothing."""


class Impact(Config):
    """Scope and cost of a request. It is computed from membership, records and releases, without a model."""

    named: int
    """Training pairs that the request names."""
    already_forgotten: int
    """Those among them that were forgotten before."""
    remaining: int
    """Training pairs that the run has now, including those that are named."""
    clients: Mapping[int, int]
    """Client -> how many of its pairs are still to be forgotten."""
    rounds: tuple[int, ...]
    """Rounds in which these clients took part."""
    models: tuple[str, ...]
    """The trained model and the releases that contain what is to be forgotten, oldest first."""
    seconds: float | None
    """How long an answer is expected to take; null if no round was timed."""
    cost_fraction: float
    """Expected cost relative to retraining."""
    method: str
    """The method that will answer: the requested one, or `retrain` if the policy trains from the start."""
    forgotten_fraction: float
    """Fraction of the last training's pairs that will be forgotten once this is answered."""
    unknown: tuple[str, ...]
    """Ids, clients or classes that this run does not have."""
    untrained: Mapping[str, int] = {}
    """Split -> how many pairs outside training (held out by clients, for validation, for testing) are still to be
    erased. They are removed from evaluation, caches, galleries and search, and no model changes."""
    already_erased: int = 0
    """Pairs outside training that it names and that were erased before."""

    @property
    def to_forget(self) -> int:
        """Training pairs that are still to be forgotten."""
        return self.named - self.already_forgotten

    @property
    def untrained_words(self) -> str:
        """Pairs outside training that are erased, such as "1 test and 2 held-out pairs"; empty without any."""
        parts = [f"{count} {split.replace('_', '-')}" for split, count in self.untrained.items()]
        total = sum(self.untrained.values())
        return f"{' and '.join(parts)} pair{'' if total == 1 else 's'}" if parts else ""

    @property
    def refusal(self) -> str:
        """Why the request cannot be answered; empty if it can."""
        if self.unknown:
            more = "" if len(self.unknown) == 1 else f" and {len(self.unknown) - 1} more"
            return f"unknown in this run: {self.unknown[0]}{more}"
        if not self.named and not self.untrained and not self.already_erased:
            return "the request matches no pair of this run: there is nothing to forget"
        if self.to_forget and self.to_forget == self.remaining:
            return "the request names all training data that are left: delete the run instead"
        return ""

    @property
    def already_done(self) -> str:
        """Why nothing has to be done; empty if something has."""
        done = not self.refusal and not self.to_forget and not self.untrained
        return "nothing left to forget: everything it names was forgotten before" if done else ""


def impact_of(run: Run, request: Request, method: Unlearner) -> Impact:
    """Return what a request would touch if it were answered now."""
    known = run.known()
    if known is None:
        raise UserError(f"{run.folder}: nothing is trained here yet; finish it with `ease train`")
    holdings, head = known[0].clients, run.head
    request = read_tombstones(run.folder).renamed(request)
    gone, named = _pairs(holdings, head.gone), _pairs(holdings, (request,))
    erased = {each for closed in head.gone for each in every_id(closed, known[0])}
    outside = untrained_in(request, known[0])
    left = {split: len(set(ids) - erased) for split, ids in outside.items()}
    remaining = {client: ids - gone[client] for client, ids in _train_ids(holdings).items()}
    clients = {client: len(ids & remaining[client]) for client, ids in named.items() if ids & remaining[client]}
    # A client without training pairs has nothing to withdraw; its held-out pairs can be named by their ids.
    untrained = {split: count for split, count in left.items() if count and (clients or request.scope == "sample")}
    history, training, model = run.history, run.training, run.config.model
    rounds = tuple(number for number in range(1, history.rounds() + 1) if clients.keys() & set(history.clients(number)))
    holders = len(clients) / max(1, sum(map(bool, remaining.values())))
    shared = model.lora == "off" or model.backbone == "tiny"
    replay = SHARED_REPLAY if shared else DEEP_REPLAY
    cost = method.estimated_work(training, request, holders, replay) if clients else 0.0
    each = seconds_per_round(run)
    return Impact(
        named=_count(named),
        already_forgotten=_count(named) - sum(clients.values()),
        remaining=_count(remaining),
        clients=clients,
        rounds=rounds,
        models=(f"trained, round {history.rounds()}", *(each.answer for each in head.releases)) if rounds else (),
        seconds=None if each is None else cost * each,
        cost_fraction=cost / max(1, training.rounds),
        method=method.name,
        forgotten_fraction=_forgotten_fraction(
            holdings, before=head.gone[: head.renewed], since=(*head.gone[head.renewed :], request)
        ),
        unknown=_unknown(known[0], len(known[1]), request),
        untrained=untrained,
        already_erased=sum(map(len, outside.values())) - sum(left.values()),
    )


def method_for(run: Run, request: Request, method: Unlearner, policy: Policy) -> Unlearner:
    """Return the requested method, or a training from the start that later requests build on.

    Subtraction is accurate for small changes only, so the policy retrains once much is forgotten. Exact subtraction has
    no such bound. If clients keep the history, a second training would overwrite the first.
    """
    exact = isinstance(method, Retrain) or trainer_of(run.config.model) == "sums"
    if exact or run.config.training.history == "client":
        return method
    much = impact_of(run, request, method).forgotten_fraction > policy.retrain.forgotten_fraction
    return Retrain(keep=True) if much else method


def seconds_per_round(run: Run) -> float | None:
    """Return the median time between the records of two rounds; the median leaves out pauses between sessions."""
    paths = [run.history.record_path(number) for number in range(1, run.history.rounds() + 1)]
    written = [path.stat().st_mtime for path in paths]
    steps = [later - earlier for earlier, later in pairwise(written) if later > earlier]
    return median(steps) if steps else None


Ids = Mapping[int, Collection[str]]


def _count(ids: Ids) -> int:
    return sum(map(len, ids.values()))


def _train_ids(holdings: Sequence[Holding]) -> dict[int, set[str]]:
    return {holding.client: set(holding.train_ids) for holding in holdings}


def _pairs(holdings: Sequence[Holding], requests: Sequence[Request]) -> dict[int, set[str]]:
    """Client -> ids of its training pairs that some request names."""
    return {
        holding.client: {each for request in requests for each in named_in(request, (holding,))} for holding in holdings
    }


def _forgotten_fraction(holdings: Sequence[Holding], before: Sequence[Request], since: Sequence[Request]) -> float:
    """Fraction of the last training's pairs that requests `since` name; requests `before` it are not part of it."""
    never, forgotten = _pairs(holdings, before), _pairs(holdings, since)
    trained = {client: ids - never[client] for client, ids in _train_ids(holdings).items()}
    return sum(len(ids & forgotten[client]) for client, ids in trained.items()) / max(1, _count(trained))


def _unknown(members: Membership, classes: int, request: Request) -> tuple[str, ...]:
    if isinstance(request, ClientRequest):
        clients = set(request.clients).difference(holding.client for holding in members.clients)
        return tuple(f"client {client}" for client in sorted(clients))
    if isinstance(request, ClassRequest):
        return tuple(f"class {each}" for each in sorted(set(request.classes) - set(range(classes))))
    assert isinstance(request, SampleRequest)  # there is no fourth kind
    return tuple(
        sorted(set(request.ids).difference(*_train_ids(members.clients).values(), *members.untrained().values()))
    )
