"""Weighted sums of the updates of past rounds, read at the server or reported by clients that keep their own.

Let a_k be a client's weight in a round, U_k its update and M = w_t - w_(t-1) what the round did. M is the mean of all
updates, so with A = sum a_k a sum with other weights b_k is

    sum b_k U_k = A M + sum (b_k - a_k) U_k

and only clients whose weights differ have to be read or asked: those that leave, or that hold pairs to forget. If some
of them are gone for good, the remaining clients report theirs instead, and M is not needed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from ease.errors import UserError
from ease.federation.client import ClientData
from ease.federation.codec import encode_state
from ease.federation.container import content_hash
from ease.federation.expected import Expected, Value
from ease.federation.objectives import Measurement, register
from ease.federation.protocol import Federation, LocalJob, Replay, Update
from ease.methods.base import Trained
from ease.methods.ease.missing_updates import MissingUpdate, able_to_repeat, repeated_sum, zeros
from ease.model.dual_encoder import DualEncoder
from ease.params import Params
from ease.requests.request import ClientRequest, Request, leaving_clients

OWN_UPDATES = "sum of own updates"
AGAIN = "delete the journal folder of the answer and run the same command to ask it again, or use --method retrain"
ROUNDING = 1e-4
"""Relative difference that single precision may leave between a sum and its parts."""
Source = Literal["leaving", "remaining"]
"""Which clients report the updates that the server has not stored: those that leave, or all others."""


# --- a client's side ---


def own_sum(model: DualEncoder, params: Params, client: ClientData, job: LocalJob) -> dict[str, Tensor]:
    """The weighted sum of the updates that this client keeps, in single precision.

    Half precision is not enough: the server subtracts something that may be nearly as large.
    """
    total: dict[str, Tensor] = {}
    for each in job.replays:
        assert isinstance(each.state, str)  # a hash is enough, because nobody trains from this state
        for name, tensor in client.required_history.change(each.round, each.state).tensors.items():
            total[name] = total.get(name, 0) + each.weight * tensor.double()
    return {name: tensor.float() for name, tensor in total.items()}


def expected_sum(state: Params, job: LocalJob, client: int, held: int) -> Expected:
    """One tensor like each of the model's."""
    sums = {name: Value(tuple(tensor.shape), torch.float32) for name, tensor in state.tensors.items()}
    return Expected(values=sums, abstains=False)


register(OWN_UPDATES, Measurement(measure=own_sum, expects=expected_sum, passes=0.0))


# --- the server's side ---


@dataclass(frozen=True)
class RoundWeights:
    """One round of a sum: `scale` times the clients' updates, each times its weight."""

    round: int
    scale: float
    weights: Mapping[int, float]


@dataclass(frozen=True)
class UpdateSum:
    """A sum over rounds in double precision, and which rounds clients repeated for it."""

    total: Params
    repeated: Mapping[int, frozenset[int]] = field(default_factory=dict)


def sum_updates(
    trained: Trained, request: Request, federation: Federation, rounds: Sequence[RoundWeights], source: Source
) -> UpdateSum:
    """The weighted sum of past updates, from the server's history or from the clients that keep theirs."""
    if not trained.history.updates:
        return UpdateSum(_reported(trained, request, federation, rounds, source))
    return _stored(trained, request, federation, rounds, source)


def start_of(trained: Trained, number: int) -> Params | str:
    """The state that a round started from, or its hash if clients keep the state themselves."""
    start = trained.history.start(number)
    return start if trained.history.updates else content_hash(encode_state(start))


def with_and_without(
    trained: Trained, request: ClientRequest, federation: Federation, rounds: Sequence[int], source: Source
) -> tuple[UpdateSum, UpdateSum]:
    """Sums of the rounds as they were, and as they would have been without the leaving clients."""
    leaving, here = set(request.clients), set(federation.clients) | set(request.clients)
    held = federation.members if trained.gone else {}  # closed requests left fewer pairs, and so less weight
    did: list[RoundWeights] = []
    would: list[RoundWeights] = []
    took_part = False
    for number in rounds:
        weights = {
            client: trained.training.weight(len(held[client])) if client in held else weight
            for client, weight in round_weights(trained, number).items()
            if not trained.gone or client in here
        }
        rest = {client: weight for client, weight in weights.items() if client not in leaving}
        took_part = took_part or len(rest) < len(weights)
        for sums, kept in ((did, weights), (would, rest)):
            if any(kept.values()):
                sums.append(RoundWeights(number, 1 / sum(kept.values()), kept))
    if not took_part:
        raise never_took_part(request)
    return (
        sum_updates(trained, request, federation, did, "leaving"),
        sum_updates(trained, request, federation, would, source),
    )


def never_took_part(request: ClientRequest) -> UserError:
    names = ", ".join(map(str, request.clients))
    return UserError(f"client {names}: it never took part in a training round, so there is nothing to forget")


def round_weights(trained: Trained, number: int) -> dict[int, float]:
    """Client -> its weight in the mean of a stored round."""
    return {client: trained.training.weight(pairs) for client, pairs in trained.history.pairs(number).items()}


def _stored(
    trained: Trained, request: Request, federation: Federation, rounds: Sequence[RoundWeights], source: Source
) -> UpdateSum:
    """Read the updates whose weights differ from those of training, if that is fewer than reading all.

    Rounds in which no weight differs count by what they did. The global states at both ends of a run of such rounds
    give their sum, so the cost grows with the rounds that a leaving client took part in, not with all rounds.
    """
    history, total, missing = trained.history, zeros(trained), list[MissingUpdate]()
    by_scale: dict[float, list[int]] = {}
    able = able_to_repeat(trained, federation)
    if source == "remaining":
        able -= leaving_clients(request)
    for each in rounds:
        stored = round_weights(trained, each.round)
        weights: Mapping[int, float] = _differences(stored, each)
        from_mean = len(weights) < len(each.weights)
        if any(not history.stores(each.round, client) and client not in able for client in weights):
            from_mean = False  # the contribution of these clients to the mean is unknown
        if trained.training.aggregation == "mean" and from_mean:
            by_scale.setdefault(_rounded(each.scale * sum(stored.values())), []).append(each.round)
        else:
            weights = each.weights
        for client, weight in weights.items():
            if not history.stores(each.round, client):
                missing.append(MissingUpdate(each.round, client, each.scale * weight))
                continue
            change = history.update(each.round, client).change.map(torch.Tensor.double)
            total = total + (each.scale * weight) * change
    for scale, numbers in by_scale.items():
        total = total + scale * history.moved_over(numbers)
    if not missing:
        return UpdateSum(total)
    rest, repeated = repeated_sum(trained, federation, missing, able)
    return UpdateSum(total + rest, repeated)


def _rounded(scale: float) -> float:
    """Remove the last bit that a division and its inverse may leave on a scale of one."""
    return 1.0 if abs(scale - 1) < 1e-12 else scale


def _differences(stored: Mapping[int, float], wanted: RoundWeights) -> dict[int, float]:
    """Client -> how much its weight differs from its weight in training, if it does."""
    differ = {client: wanted.weights.get(client, 0.0) - weight for client, weight in stored.items()}
    return {client: difference for client, difference in differ.items() if difference}


def _reported(
    trained: Trained, request: Request, federation: Federation, rounds: Sequence[RoundWeights], source: Source
) -> Params:
    total, here = zeros(trained), set(federation.clients)
    questions: list[Replay] = []
    weights: dict[int, dict[int, float]] = {}
    towards: dict[int, Params] = {}
    for each in rounds:
        stored = round_weights(trained, each.round)
        differ = _differences(stored, each)
        from_mean = len(differ) < len(stored) and differ.keys() <= here and not (source == "remaining" and differ)
        moved = trained.history.moved(each.round)
        if from_mean:
            total = total + (each.scale * sum(stored.values())) * moved
        asked = differ if from_mean else each.weights
        if asked:
            start = start_of(trained, each.round)
            clipped = trained.history.record(each.round).clipped  # clients keep unclipped updates
            factors = {c: asked[c] * each.scale * clipped.get(c, 1.0) for c in asked}
            questions += [Replay(each.round, start, factors[c], 0, (c,)) for c in asked]
            for client in asked:
                weights.setdefault(client, {})[each.round] = factor = asked[client] * each.scale
                towards[client] = towards.get(client, zeros(trained)) + factor * moved
    clients = sorted({client for each in questions for client in each.clients})
    absent = [client for client in clients if client not in here]
    if absent:
        raise UserError(
            f"client {absent[0]} keeps updates that are needed, and it is not here; wait for it, use --method retrain, "
            'or a run trained with training.history = "server"'
        )
    if clients:
        job = trained.training_job(0, request=request, objective=OWN_UPDATES, replays=tuple(questions))
        answers = {update.client: update for update in federation.run(trained.start, job, clients)}
        silent = [client for client in clients if client not in answers]
        if silent:
            raise UserError(
                f"client {silent[0]}: no sound answer about the updates it keeps; ask it again with the same command, "
                "or use --method retrain"
            )
        for client, answer in sorted(answers.items()):
            reported, longest = _sum_of(answer, trained.start), trained.history.longest_sum(client, weights[client])
            if longest is not None and not _fits(reported, longest, towards[client]):
                reported = _piece_by_piece(trained, request, federation, client, weights[client])
            total = total + reported
    return total


def _fits(reported: Params, longest: float, towards: Params) -> bool:
    """Whether a sum may be one of a client's own updates: not longer than they are together, and not against the way
    that the same rounds went, of which they are a part.

    An honest sum may be refused by the second rule. It then costs messages and nothing else.
    """
    return reported.norm() <= longest * (1 + ROUNDING) and reported.dot(towards) >= 0


def _piece_by_piece(
    trained: Trained, request: Request, federation: Federation, client: int, factors: Mapping[int, float]
) -> Params:
    """The same sum from the client's updates, one by one: each must be bit-identical to the one that it sent."""
    total, history = zeros(trained), trained.history
    for number, factor in factors.items():
        replay = Replay(number, start_of(trained, number), 1.0, 0, (client,))
        job = trained.training_job(0, request=request, objective=OWN_UPDATES, replays=(replay,))
        answers = [each for each in federation.run(trained.start, job, [client]) if each.client == client]
        change = _sum_of(answers[0], trained.start).map(torch.Tensor.float) if answers else None
        if change is None or not history.is_sent(number, client, change):
            raise UserError(
                f"client {client}: its sum of updates does not fit what it sent, and neither does its update of round "
                f"{number}; {AGAIN}"
            )
        clipped = history.record(number).clipped.get(client, 1.0)  # clients keep unclipped updates
        total = total + (factor * clipped) * change.map(torch.Tensor.double)
    return total


def _sum_of(answer: Update, like: Params) -> Params:
    """A client's reported sum in double precision, refused if tensors are missing or not finite."""
    sums = {
        name: tensor.double()
        for name, like_tensor in like.tensors.items()
        if (tensor := answer.values.get(name)) is not None
        and tensor.shape == like_tensor.shape
        and bool(torch.isfinite(tensor).all())
    }
    if len(sums) < len(like.tensors):
        raise UserError(
            f"client {answer.client}: its sum of updates lacks tensors of the model, or values are not finite; {AGAIN}"
        )
    return Params(sums, like.blocks)
