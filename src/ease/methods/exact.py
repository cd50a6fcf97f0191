"""Exact forgetting of a closed-form head: the sums of the forget pairs are subtracted, and the maps solved anew."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Literal

from ease.errors import UserError
from ease.federation.fedavg import Round, TrainingConfig
from ease.federation.history import History
from ease.federation.protocol import Federation, Update
from ease.methods.base import Step, Trained, Unlearner, step_of
from ease.model.closed_form import Sums, widths
from ease.requests.request import ClientRequest, Request, leaving_clients
from ease.trainers import TrainerName
from ease.trainers.sums import (
    Collected,
    Sent,
    all_asked,
    check_features,
    securely_collected,
    sum_and_solve,
    sums_job,
)


class Exact(Unlearner):
    """Subtract the sums of the forget pairs and solve again: the result is the retrained model, bit for bit.

    Sums are whole numbers, so that what is left is what the other pairs alone would have given. Clients that stay send
    the sums of their forget pairs. The server subtracts the stored sums of a client that leaves. If it stores
    only the total (`training.history = "client"`), the others send their sums again, which is one round. With
    `training.secure` the server learns only totals, also of forget pairs.
    """

    name: ClassVar[str] = "exact"
    title: ClassVar[str] = "Exact"
    source: ClassVar[str] = "sufficient statistics of a closed-form head, subtracted"
    trainers: ClassVar[frozenset[TrainerName]] = frozenset({"sums"})
    method: Literal["exact"] = "exact"

    def unlearn(self, trained: Trained, request: Request, federation: Federation) -> Iterator[Step]:
        finished = self._without(trained, request, federation)
        yield replace(step_of(finished, "subtraction"), round=finished)

    def _without(self, trained: Trained, request: Request, federation: Federation) -> Round:
        """The round of a training without the forget pairs."""
        history, leaving = trained.history, leaving_clients(request)
        recipe = trained.initial, federation, trained.training, trained.seed, trained.temperature
        stay = [client for client in history.clients(1) if client not in leaving]
        if leaving and not history.updates:
            return sum_and_solve(*recipe, stay, request, history)
        job, sides = (
            sums_job(trained.training, trained.seed, trained.temperature, request, "forget"),
            widths(trained.start),
        )
        if trained.training.secure:
            total = securely_collected(federation, trained.start, job, stay, everyone=True)
            check_features(history, total.checksums)
            return _total_left(history, stay, total, sides).solved(trained.initial, history.ridge(1))
        arriving = [] if isinstance(request, ClientRequest) else all_asked(federation, trained.start, job, stay)
        if history.updates:
            sent = dict(arriving)
            check_features(history, {client: each.checksums for client, each in sent.items()})
            forgotten = {client: each for client, each in sent.items() if each.sums.count}
            left = _each_left(history, stay, forgotten, sides)
        else:  # added as they arrive, so that memory does not grow with the number of clients
            total = Collected.of(arriving, kept=False)
            check_features(history, total.checksums)
            left = _total_left(history, stay, total, sides)
        return left.solved(trained.initial, history.ridge(1))

    def rounds(self, training: TrainingConfig, request: Request) -> int:
        return 1


def _each_left(
    history: History, clients: Sequence[int], forgotten: Mapping[int, Sent], sides: tuple[int, int]
) -> Collected:
    """The stored sums of each client, minus the client's forget pairs."""
    found, features = Collected(), history.features(1)
    for client in clients:
        left, checksum = Sums.from_state(history.update(1, client).change), features.get(client, 0)
        if client in forgotten:
            sent = forgotten[client]
            left, checksum = _sound(left - sent.sums, f"client {client}", sides), sent.checksums.others
        found.add(client, left, checksum, kept=True)
    return found


def _total_left(history: History, clients: Sequence[int], forgotten: Collected, sides: tuple[int, int]) -> Collected:
    """The total less all forget pairs, where the server knows of each client how many pairs it has."""
    total, pairs, features = Sums.from_state(history.sums(1)), history.pairs(1), history.features(1)
    if forgotten.total is not None:
        total -= forgotten.total
    for client, update in forgotten.updates.items():
        pairs[client] -= update.pairs
        features[client] = forgotten.checksums[client].others
    updates = {client: Update(client, pairs[client], None) for client in clients if pairs[client]}
    left = {client: features[client] for client in updates if client in features}
    return Collected(_sound(total, "the total", sides), updates, features=left)


def _sound(left: Sums, whose: str, sides: tuple[int, int]) -> Sums:
    """The remaining sums; sums that no pairs could have are refused."""
    if fault := left.fault(*sides):
        raise UserError(
            f"{whose}: without the sums of its forget pairs {fault.removeprefix('its ')}: other pairs were subtracted "
            "than it trained on; answer the request with --method retrain"
        )
    return left
