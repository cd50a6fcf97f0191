"""Farewell: sums of stored updates, read at the server, or told by clients that keep their updates themselves.

Let a_k be a client's weight in a round, U_k its update and M = w_t - w_(t-1) what the round did. M is the mean of all
updates, so with A = sum a_k a sum with other weights b_k is

    sum b_k U_k = A M + sum (b_k - a_k) U_k

and only those whose weights differ have to tell of theirs: clients that leave, or that hold pairs to forget. Where some
of these are gone for good, the others tell of theirs instead, and M is not needed. What the server has not stored is
filled in (`unstored`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ease.errors import UserError
from ease.federation.client import ClientData
from ease.federation.codec import encode_state
from ease.federation.container import content_hash
from ease.federation.expected import Expected, Value
from ease.federation.objectives import Objective, register
from ease.federation.protocol import Federation, LocalJob, Replay, Update
from ease.methods.base import Trained
from ease.methods.ease.unstored import NOTHING_LACKED, Filled, Groups, Unstored, able_to_repeat, filled_in, zeros
from ease.model.dual_encoder import DualEncoder
from ease.params import Params
from ease.requests.request import ClientRequest, Request, leaving_clients

FAREWELL = "farewell"
Teller = Literal["leaving", "others", "nobody"]
"""Who tells of what clients that leave have sent, where it is not stored."""


# --- a client's side ---


def own_sums(model: DualEncoder, params: Params, client: ClientData, job: LocalJob) -> dict[str, Tensor]:
    """Weighted sums of the updates that this client keeps, one for each group of rounds, in single precision.

    Not in half: what is subtracted from them at the server may be nearly as large.
    """
    total: dict[str, Tensor] = {}
    for each in job.replays:
        assert isinstance(each.state, str)  # a name is enough: no one trains from it
        for name, tensor in client.memory.change(each.round, each.state).tensors.items():
            key = f"{each.group}/{name}"
            total[key] = total.get(key, 0) + each.weight * tensor.double()
    return {key: tensor.float() for key, tensor in total.items()}


def told_sums(state: Params, job: LocalJob, client: int, held: int) -> Expected:
    """A client's answer: for each group of rounds it is asked about, one tensor like each of the model's."""
    groups = sorted({each.group for each in job.replays})
    sums = {
        f"{group}/{name}": Value(tuple(t.shape), torch.float32) for group in groups for name, t in state.tensors.items()
    }
    return Expected(values=sums, abstains=False)


register(FAREWELL, Objective(measure=own_sums, expects=told_sums, passes=0.0))


# --- the server's side ---


@dataclass(frozen=True)
class Wanted:
    """Of one round: `scale` times the sum of some clients' updates, each times its weight."""

    round: int
    late: bool
    scale: float
    weights: Mapping[int, float]


@dataclass(frozen=True)
class Added:
    """Sums over rounds, and whose updates they had to do without."""

    sums: Groups
    filled: Filled = NOTHING_LACKED


def added_up(
    trained: Trained, request: Request, federation: Federation, wanted: Sequence[Wanted], teller: Teller = "leaving"
) -> Added:
    """What is wanted of the rounds, added up: from the server's history, or by asking those who keep it.

    By the teller, clients that leave are asked, or all the others are, or what is stored has to do.
    """
    if not trained.history.updates:
        return Added(_told(trained, request, federation, wanted, teller == "others"))
    return _read(trained, request, federation, wanted, teller)


def started(trained: Trained, number: int) -> Params | str:
    """The state that a round began from; its name, where clients keep it."""
    start = trained.history.start(number)
    return start if trained.history.updates else content_hash(encode_state(start))


def with_and_without(
    trained: Trained,
    request: ClientRequest,
    federation: Federation,
    rounds: Sequence[int],
    early: int,
    teller: Teller,
) -> tuple[Added, Added]:
    """What the rounds did, and what they would have done without the clients that leave."""
    leaving, here = set(request.clients), set(federation.clients) | set(request.clients)
    held = federation.held if trained.gone else {}  # fewer pairs than when they were trained on, and so less weight
    did: list[Wanted] = []
    would: list[Wanted] = []
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
                sums.append(Wanted(number, number > early, 1 / sum(kept.values()), kept))
    if not took_part:
        raise never_took_part(request)
    return added_up(trained, request, federation, did), added_up(trained, request, federation, would, teller)


def never_took_part(request: ClientRequest) -> UserError:
    names = ", ".join(map(str, request.clients))
    return UserError(f"client {names} never took part in a training round: the history has nothing of it to excise")


def round_weights(trained: Trained, number: int) -> dict[int, float]:
    """Client -> its weight in the mean of a stored round."""
    return {client: trained.training.weight(pairs) for client, pairs in trained.history.pairs(number).items()}


def _read(
    trained: Trained, request: Request, federation: Federation, wanted: Sequence[Wanted], teller: Teller
) -> Added:
    """By the same identity: of a round only those updates are read whose weights differ, if they are fewer.

    Where none differ, a round counts for what it did, and global states at both ends of a stretch of such rounds tell
    their sum: what is read grows with the rounds that a leaving client took part in, not with all.
    """
    history, total, unstored = trained.history, [zeros(trained), zeros(trained)], list[Unstored]()
    alike: dict[tuple[bool, float], list[int]] = {}
    spared = frozenset[int]() if teller == "leaving" else leaving_clients(request)
    able = able_to_repeat(trained, federation) - spared if history.thinned else frozenset[int]()
    for each in wanted:
        stored = round_weights(trained, each.round)
        weights: Mapping[int, float] = _differences(stored, each)
        by_mean = len(weights) < len(each.weights)
        lacking = {client for client in weights if not history.stores(each.round, client)}
        if lacking and teller == "others":
            by_mean = False
        elif lacking - able:
            # What stands for them is off by much. It has to be in what the rounds did and in what they would have done
            # alike, so that little is left of it in the difference, unless neither needs it.
            by_mean = bool(each.weights) or bool(weights.keys() & able)
        if trained.training.aggregation == "mean" and by_mean:
            alike.setdefault((each.late, _round_off(each.scale * sum(stored.values()))), []).append(each.round)
        else:
            weights = each.weights
        for client, weight in weights.items():
            if not history.stores(each.round, client):
                unstored.append(Unstored(each.round, client, each.late, each.scale * weight))
                continue
            change = history.update(each.round, client).change.map(torch.Tensor.double)
            total[each.late] = total[each.late] + (each.scale * weight) * change
    for (late, scale), rounds in alike.items():
        total[late] = total[late] + scale * history.moved_over(rounds)
    if not unstored:
        return Added((total[0], total[1]))
    rest, filled = filled_in(trained, federation, unstored, able, leaving_clients(request))
    return Added((total[0] + rest[0], total[1] + rest[1]), filled)


def _round_off(scale: float) -> float:
    """A scale of one, without the last bit that a division and its inverse may leave."""
    return 1.0 if abs(scale - 1) < 1e-12 else scale


def _differences(stored: Mapping[int, float], wanted: Wanted) -> dict[int, float]:
    """Client -> by how much its weight differs from the one it had, where it does."""
    differ = {client: wanted.weights.get(client, 0.0) - weight for client, weight in stored.items()}
    return {client: difference for client, difference in differ.items() if difference}


def _told(trained: Trained, request: Request, federation: Federation, wanted: Sequence[Wanted], others: bool) -> Groups:
    total, here = [zeros(trained), zeros(trained)], set(federation.clients)
    questions: list[Replay] = []
    for each in wanted:
        stored = round_weights(trained, each.round)
        differ = _differences(stored, each)
        known = len(differ) < len(stored) and differ.keys() <= here and not (others and differ)
        if known:
            moved = trained.history.moved(each.round)
            total[each.late] = total[each.late] + (each.scale * sum(stored.values())) * moved
        asked = differ if known else each.weights
        if asked:
            start = started(trained, each.round)
            shortened = trained.history.record(each.round).get("clipped", {})  # clients keep what they sent, whole
            factors = {c: asked[c] * each.scale * shortened.get(str(c), 1.0) for c in asked}
            questions += [Replay(each.round, start, factors[c], int(each.late), (c,)) for c in asked]
    clients = sorted({client for each in questions for client in each.clients})
    absent = [client for client in clients if client not in here]
    if absent:
        raise UserError(
            f"client {absent[0]} keeps updates that are needed, and it is not here; wait for it, use --method retrain, "
            'or a run trained with training.history = "server"'
        )
    if clients:
        job = trained.training_job(0, request=request, objective=FAREWELL, replays=tuple(questions))
        answers = {update.client: update for update in federation.run(trained.start, job, clients)}
        silent = [client for client in clients if client not in answers]
        if silent:
            raise UserError(
                f"client {silent[0]}: no sound answer about the updates it keeps; ask it again with the same command, "
                "or use --method retrain"
            )
        for _, answer in sorted(answers.items()):
            for group in (0, 1):
                if any(group == each.group and answer.client in each.clients for each in questions):
                    total[group] = total[group] + _sum_of(answer, group, trained.start)
    return total[0], total[1]


def _sum_of(answer: Update, group: int, like: Params) -> Params:
    """A client's sum over one group of rounds, refused if it is not one."""
    told = {name: answer.values.get(f"{group}/{name}") for name in like.tensors}
    sums = {
        name: tensor.double()
        for name, tensor in told.items()
        if tensor is not None and tensor.shape == like[name].shape and bool(torch.isfinite(tensor).all())
    }
    if len(sums) < len(told):
        raise UserError(
            f"client {answer.client}: its farewell lacks tensors of the model, or their values are not finite; ask it "
            "again, or use --method retrain"
        )
    return Params(sums, like.blocks)
