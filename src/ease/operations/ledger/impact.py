"""What a request touches and will cost, told before anything is computed."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from ease.data.membership import Membership
from ease.errors import UserError
from ease.methods.base import Unlearner
from ease.methods.retrain import Retrain
from ease.operations.ledger.policy import Policy
from ease.requests.request import ClassRequest, ClientRequest, Request, SampleRequest, forget_mask
from ease.requests.tombstones import read_tombstones
from ease.runs.head import Head
from ease.runs.run import Run
from ease.trainers import trainer_of

SHARED_REPLAY, DEEP_REPLAY = 0.5, 1.2
"""Cost of repeating a round, in rounds of training, measured on CPUs. Replays of small models share their passes; with
adapters in transformers every replay runs through the blocks, and saves nothing."""


@dataclass(frozen=True)
class Outlook:
    """Read from who holds what, the records of the rounds and the head; no model is opened."""

    named: int
    """Training pairs that the request names."""
    gone: int
    """Those among them that were forgotten before."""
    left: int
    """Training pairs that are left in the run, those that are named included."""
    clients: Mapping[int, int]
    """Client -> how many of its pairs are still to be forgotten."""
    rounds: tuple[int, ...]
    """Rounds in which these clients took part."""
    models: tuple[str, ...]
    """The trained model and the releases that hold what is to be forgotten, oldest first."""
    seconds: float | None
    """What an answer is expected to take; None where no round was timed."""
    share: float
    """The same as a share of retraining."""
    method: str
    """Which answers it."""
    worn: float
    """Share of the pairs of the last training from the start that will be gone once this is answered."""
    strange: tuple[str, ...]
    """Ids, clients or classes that this run does not have."""

    @property
    def fresh(self) -> int:
        return self.named - self.gone

    @property
    def refusal(self) -> str:
        """Why it cannot be answered; nothing when it can."""
        if self.strange:
            more = "" if len(self.strange) == 1 else f" and {len(self.strange) - 1} more"
            return f"unknown in this run: {self.strange[0]}{more}"
        if not self.named:
            return "matches no training pair of this run: there is nothing to forget"
        if self.fresh and self.fresh == self.left:
            return "names all training data that are left: delete the run instead"
        return ""

    @property
    def settled(self) -> str:
        """Why nothing has to be done; nothing when something has."""
        known = not self.refusal and not self.fresh
        return "nothing left to forget: everything it names was forgotten before" if known else ""

    def as_json(self) -> dict[str, Any]:
        told = {name: value for name, value in self.__dict__.items() if name != "clients"}
        return {**told, "clients": {str(client): count for client, count in self.clients.items()}}


def outlook(run: Run, request: Request, method: Unlearner) -> Outlook:
    """What a request would touch if it were answered now."""
    known = run.known()
    if known is None:
        raise UserError(f"{run.folder}: nothing is trained here yet; finish it with `ease train`")
    members, head = known[0], run.head
    request = read_tombstones(run.folder).renamed(request)
    gone = _named(members, head.gone)
    wanted = _named(members, (request,))
    fresh = {client: ids - gone.get(client, set()) for client, ids in wanted.items()}
    clients = {client: len(ids) for client, ids in fresh.items() if ids}
    history = run.history
    rounds = tuple(number for number in range(1, history.rounds() + 1) if clients.keys() & set(history.clients(number)))
    here = sum(bool(ids - gone.get(holding.client, set())) for holding, ids in _held(members))
    model = run.config.model
    shared = model.lora == "off" or model.backbone == "tiny"
    holders = len(clients) / max(1, here)
    cost = method.estimated_work(run.config.training, request, holders, SHARED_REPLAY if shared else DEEP_REPLAY)
    each = seconds_per_round(run)
    return Outlook(
        named=sum(map(len, wanted.values())),
        gone=sum(len(ids & gone.get(client, set())) for client, ids in wanted.items()),
        left=sum(len(ids - gone.get(holding.client, set())) for holding, ids in _held(members)),
        clients=clients,
        rounds=rounds,
        models=(f"trained, round {history.rounds()}", *(each.answer for each in head.releases)) if rounds else (),
        seconds=None if each is None else cost * each,
        share=cost / run.config.training.rounds,
        method=method.name,
        worn=_worn(members, head, request),
        strange=_strange(members, len(known[1]), request),
    )


def answering(run: Run, request: Request, method: Unlearner, policy: Policy) -> Unlearner:
    """The method that was asked for, or a training from the start that later requests go on from.

    Once much is gone, what is subtracted is no longer true; exact subtractions stay true. Where clients keep the
    history, a second training would overwrite the first.
    """
    stays = isinstance(method, Retrain) or trainer_of(run.config.model) == "sums"
    at_clients = run.config.training.history == "client"
    if stays or at_clients or outlook(run, request, method).worn <= policy.retrain.gone_share:
        return method
    return Retrain(keep=True)


def _worn(members: Membership, head: Head, request: Request) -> float:
    """How much of what the last training from the start had is gone once a request is answered."""
    never = _named(members, head.gone[: head.renewed])
    gone = _named(members, (*head.gone, request))
    had = {holding.client: ids - never.get(holding.client, set()) for holding, ids in _held(members)}
    return sum(len(ids & gone[client]) for client, ids in had.items()) / max(1, sum(map(len, had.values())))


def _held(members: Membership) -> list[tuple[Any, set[str]]]:
    return [(holding, set(holding.train_ids)) for holding in members.clients]


def _named(members: Membership, requests: tuple[Request, ...]) -> dict[int, set[str]]:
    """Client -> ids of its training pairs that some request names."""
    found: dict[int, set[str]] = {}
    for request in requests:
        for holding in members.clients:
            mask = forget_mask(request, holding)
            named = {each for each, is_named in zip(holding.train_ids, mask, strict=True) if is_named}
            found[holding.client] = found.get(holding.client, set()) | named
    return found


def _strange(members: Membership, classes: int, request: Request) -> tuple[str, ...]:
    if isinstance(request, ClientRequest):
        unknown = set(request.clients).difference(holding.client for holding in members.clients)
        return tuple(f"client {client}" for client in sorted(unknown))
    if isinstance(request, ClassRequest):
        return tuple(f"class {each}" for each in sorted(set(request.classes) - set(range(classes))))
    assert isinstance(request, SampleRequest)  # there is no fourth kind
    known = {each for holding in members.clients for each in holding.train_ids}
    return tuple(sorted(set(request.ids) - known))


def seconds_per_round(run: Run) -> float | None:
    """Median time between the records of two rounds, by when each was written; pauses between sessions stand out."""
    paths = [run.history.record_path(number) for number in range(1, run.history.rounds() + 1)]
    written = [path.stat().st_mtime for path in paths]
    steps = [later - earlier for earlier, later in pairwise(written) if later > earlier]
    return median(steps) if steps else None
