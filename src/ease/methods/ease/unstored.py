"""Updates that the server did not store: the clients that sent them repeat the rounds, or stored rounds stand for them.

A round from the same state, with the same batches and nothing left out, is the same update. Only where its client is
not here, or no longer has the pairs it had, is it made up: U_t = M_t + |M_t| / |M_s| (U_s - M_s), M being what a round
did and s a round that is stored. Most of what sets a client apart is another thing in every round (cosines of 0.1), so
that this is far off by its length; what stays is what is remembered, and of that it takes no less than there is.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ease.errors import UserError
from ease.federation.protocol import Federation, Replay
from ease.methods.base import Trained
from ease.methods.ease.replay import REPLAY, read_sum
from ease.params import Params
from ease.requests.request import SampleRequest

LONGEST_REPLAY = 3.0
"""A replayed sum is believed up to so many times the length of what the client sent in the same rounds."""
Groups = tuple[Params, Params]
"""Of the early rounds and of the late ones, in double precision."""


@dataclass(frozen=True)
class Unstored:
    """An update that is not stored, and what it counts in the sum of its group."""

    round: int
    client: int
    late: bool
    factor: float


@dataclass(frozen=True)
class Filled:
    """Whose rounds were not stored, and what took their place."""

    replayed: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """Client -> rounds that it repeated."""
    stood_for: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """Client -> rounds that others of its rounds stand for."""

    def __or__(self, other: "Filled") -> "Filled":
        def both(mine: Mapping[int, frozenset[int]], theirs: Mapping[int, frozenset[int]]) -> dict[int, frozenset[int]]:
            none = frozenset[int]()
            return {c: mine.get(c, none) | theirs.get(c, none) for c in sorted({*mine, *theirs})}

        return Filled(both(self.replayed, other.replayed), both(self.stood_for, other.stood_for))

    @property
    def why(self) -> str:
        """What an answer has to say of it: nothing, unless something was made up."""
        return "; ".join(
            f"client {client} did not repeat {len(rounds)} of its rounds that are not stored: those that are stand "
            "for them"
            for client, rounds in self.stood_for.items()
        )


NOTHING_LACKED = Filled()


def zeros(trained: Trained) -> Params:
    return trained.start.map(lambda tensor: tensor.double() * 0)


def stale_clients(trained: Trained, federation: Federation, rounds: Sequence[int]) -> set[int]:
    """Clients whose stored updates come from more pairs than they hold now, because requests are closed since."""
    now = {client: len(ids) for client, ids in federation.held.items()} if trained.gone else {}
    told = [trained.history.pairs(number) for number in rounds if now]
    return {client for client, count in now.items() if any(pairs.get(client, 0) > count for pairs in told)}


def able_to_repeat(trained: Trained, federation: Federation) -> frozenset[int]:
    """Clients that are here with all the pairs that they had."""
    stale = stale_clients(trained, federation, range(1, trained.training.rounds + 1))
    return frozenset(federation.clients) - stale


def sent_length(trained: Trained, number: int, client: int) -> float:
    """Of what a client sent in a round; where that is not known, as long as all the others' could make it."""
    if trained.history.stores(number, client):
        return trained.history.update_length(number, client)
    return len(trained.history.clients(number)) * trained.history.moved_length(number)


def filled_in(
    trained: Trained,
    federation: Federation,
    wanted: Sequence[Unstored],
    able: Collection[int],
    leaving: Collection[int],
) -> tuple[Groups, Filled]:
    """The sum of what is wanted, by those who are `able` to repeat it, and by what is stored of the others."""
    asked = [each for each in wanted if each.client in able]
    try:
        sums, told = _replayed(trained, federation, asked)
    except UserError as error:
        if any(each.client in leaving for each in asked):
            error.args = (f"{error}; if it is gone for good, let stored rounds stand for it: --set farewell=nobody",)
        raise
    rest = [each for each in wanted if each.client not in told]
    made_up = _stood_for(trained, rest)
    total = sums[0] + made_up[0], sums[1] + made_up[1]
    return total, Filled(_rounds([each for each in asked if each.client in told]), _rounds(rest))


def _rounds(updates: Sequence[Unstored]) -> dict[int, frozenset[int]]:
    clients = sorted({each.client for each in updates})
    return {client: frozenset(each.round for each in updates if each.client == client) for client in clients}


def _replayed(trained: Trained, federation: Federation, wanted: Sequence[Unstored]) -> tuple[Groups, set[int]]:
    """What clients tell of rounds that they repeat, and who told."""
    total, questions, longest = [zeros(trained), zeros(trained)], list[Replay](), dict[tuple[int, bool], float]()
    for each in wanted:
        # What was averaged was shortened.
        factor = each.factor * trained.history.record(each.round).get("clipped", {}).get(str(each.client), 1.0)
        start = trained.history.start(each.round)
        questions.append(Replay(each.round, start, factor, int(each.late), (each.client,)))
        most = LONGEST_REPLAY * abs(factor) * sent_length(trained, each.round, each.client)
        longest[each.client, each.late] = longest.get((each.client, each.late), 0.0) + most
    clients = sorted({each.client for each in wanted})
    if not clients:
        return (total[0], total[1]), set()
    # Not in a lower precision: this is an update, and no difference of two.
    job = trained.training_job(0, request=SampleRequest(ids=()), objective=REPLAY, replays=tuple(questions))
    answers = {answer.client: answer for answer in federation.run(trained.start, job, clients)}
    told = set()
    for client, answer in sorted(answers.items()):
        sums = {late: read_sum(answer.values, int(late), trained.start) for c, late in longest if c == client}
        if all(summed is not None for summed in sums.values()):
            told.add(client)
        for late, summed in sums.items():
            if summed is not None and client in told:
                total[late] = total[late] + summed.within(longest[client, late])
    return (total[0], total[1]), told


def _stood_for(trained: Trained, wanted: Sequence[Unstored]) -> Groups:
    """By what sets a client apart in those of its rounds that are stored."""
    history, total = trained.history, [zeros(trained), zeros(trained)]
    numbers = range(1, trained.training.rounds + 1)
    for client in sorted({each.client for each in wanted}):
        stored = [number for number in numbers if client in history.pairs(number) and history.stores(number, client)]
        if not stored:
            raise UserError(
                f"client {client}: none of its updates is stored (training.history_every, training.history_share) and "
                "it is not here to repeat its rounds; wait for it, let the others repeat theirs with --set "
                "farewell=others, or use --method retrain"
            )
        counts: dict[tuple[int, bool], float] = {}
        for each in wanted:
            if each.client == client:
                moved = history.moved(each.round)
                total[each.late] = total[each.late] + each.factor * moved
                for number, share in neighbours(stored, each.round).items():
                    grown = each.factor * share * moved.norm() / max(history.moved(number).norm(), 1e-30)
                    counts[number, each.late] = counts.get((number, each.late), 0.0) + grown
        for (number, late), count in counts.items():
            change = history.update(number, client).change.map(torch.Tensor.double)
            total[late] = total[late] + count * (change - history.moved(number))
    return total[0], total[1]


def neighbours(stored: Sequence[int], number: int) -> dict[int, float]:
    """The stored rounds before and after a round, the nearer one with the larger share; one alone at either end."""
    before = max((each for each in stored if each < number), default=None)
    after = min((each for each in stored if each > number), default=None)
    if before is None or after is None:
        only = after if before is None else before
        assert only is not None  # some are stored, and this one is not
        return {only: 1.0}
    return {before: (after - number) / (after - before), after: (number - before) / (after - before)}
