"""Updates that the server did not store: the clients that sent them compute them again.

A round from the same state with the same batches gives the same update.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ease.errors import UserError
from ease.federation.protocol import Federation, Replay
from ease.methods.base import Trained
from ease.methods.ease.replay import REPLAY, read_sum
from ease.params import Params
from ease.requests.request import SampleRequest

LONGEST_REPLAY = 3.0
"""A replayed sum is accepted up to this multiple of the norms that the client's updates had in the same rounds."""
OTHERWISE = "let the others repeat theirs with --set contribution_source=remaining, or use --method retrain"


@dataclass(frozen=True)
class MissingUpdate:
    """An update that is not stored, and its factor in a sum."""

    round: int
    client: int
    factor: float


def zeros(trained: Trained) -> Params:
    """A state of zeros in double precision."""
    return trained.start.map(lambda tensor: tensor.double() * 0)


def stale_clients(trained: Trained, federation: Federation, rounds: Sequence[int]) -> set[int]:
    """Clients whose stored updates were trained on pairs that closed requests have removed since."""
    now = {client: len(ids) for client, ids in federation.members.items()} if trained.gone else {}
    before = [trained.history.pairs(number) for number in rounds if now]
    return {client for client, count in now.items() if any(pairs.get(client, 0) > count for pairs in before)}


def able_to_repeat(trained: Trained, federation: Federation) -> frozenset[int]:
    """Clients that are present and still hold all pairs that they trained on."""
    stale = stale_clients(trained, federation, range(1, trained.training.rounds + 1))
    return frozenset(federation.clients) - stale


def sent_length(trained: Trained, number: int, client: int) -> float:
    """Norm of a client's update in a round; if it is not stored, an upper bound from the norm of the mean."""
    if trained.history.stores(number, client):
        return trained.history.update_length(number, client)
    return len(trained.history.clients(number)) * trained.history.moved_length(number)


def repeated_sum(
    trained: Trained, federation: Federation, missing: Sequence[MissingUpdate], able: Collection[int]
) -> tuple[Params, dict[int, frozenset[int]]]:
    """The weighted sum of missing updates, computed again by their clients; and client -> rounds that it repeated."""
    rounds: dict[int, set[int]] = {}
    for each in missing:
        rounds.setdefault(each.client, set()).add(each.round)
    for client in sorted(rounds.keys() - set(able)):
        raise UserError(
            f"client {client}: {len(rounds[client])} of its updates are not stored (training.history_every) and it is "
            f"not here with all its pairs to repeat them; wait for it, {OTHERWISE}"
        )
    total, questions, longest = zeros(trained), list[Replay](), dict[int, float]()
    for each in missing:
        # The server averaged a clipped update, and clients compute the unclipped one.
        clipped = _clip_factors(trained, each.round).get(each.client, 1.0)
        factor, start = each.factor * clipped, trained.history.start(each.round)
        questions.append(Replay(each.round, start, factor, 0, (each.client,)))
        most = LONGEST_REPLAY * abs(factor) * sent_length(trained, each.round, each.client)
        longest[each.client] = longest.get(each.client, 0.0) + most
    # In full precision: this sum is an update itself, not a difference of two.
    job = trained.training_job(0, request=SampleRequest(ids=()), objective=REPLAY, replays=tuple(questions))
    try:
        answers = {answer.client: answer for answer in federation.run(trained.start, job, sorted(rounds))}
    except UserError as error:  # too few of them answered
        raise UserError(f"{error}; or {OTHERWISE}") from error
    for client in sorted(rounds):
        summed = read_sum(answers[client].values, 0, trained.start) if client in answers else None
        if summed is None:
            raise UserError(
                f"client {client}: it did not repeat {len(rounds[client])} rounds whose updates are not stored; run "
                f"the same command again when it answers, {OTHERWISE}"
            )
        total = total + summed.within(longest[client])
    return total, {client: frozenset(numbers) for client, numbers in sorted(rounds.items())}


def _clip_factors(trained: Trained, number: int) -> Mapping[int, float]:
    return trained.history.record(number).clipped
