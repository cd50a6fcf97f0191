"""What the forget pairs really wrote into the model: what the rounds did less what they would have done without them.

For clients that leave it comes from the history, or from what they tell where clients keep it; for classes and single
pairs by replay.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from ease.data.partition import MINIMUM_PAIRS
from ease.federation.aggregation import aggregated
from ease.federation.protocol import Federation, Replay
from ease.methods.base import Trained
from ease.methods.ease.farewell import Wanted, added_up, never_took_part, started, with_and_without
from ease.methods.ease.replay import REPLAY, read_sum
from ease.params import Params
from ease.requests.request import ClientRequest, Request, SampleRequest

EARLY = 0.2
"""Share of the rounds whose contribution is told apart: after so many, what later rounds made up for is still small."""
USUAL_REPLAY, MOST_REPLAYED = 0.5, 32
"""Share and number of the rounds that `auto` replays where many clients are concerned; others stand for the rest."""
LONGEST_REPLAY = 3.0
"""A replayed sum is believed up to so many times the length of what the client sent in the same rounds."""
MENDED = 0.5
"""Share of the rounds that `auto` replays for what closed requests left in stored updates; a fifth was too rough."""
FEW = 1 / 3
"""Share of the clients up to which every round is replayed: exactness is cheap then."""


@dataclass(frozen=True)
class Written:
    """What the forget pairs added to the global state, in two groups of rounds, and what the others did meanwhile."""

    early: Params
    late: Params
    retained: tuple[Params, Params]
    last_early: int
    """Round at which the first group ends."""
    rounds: tuple[int, ...]
    """Rounds it was taken from."""
    clients: int
    """Clients that replayed something."""

    @property
    def total(self) -> Params:
        """S."""
        return self.early + self.late


def written_by(
    trained: Trained,
    request: Request,
    federation: Federation,
    forget_pairs: Mapping[int, int | None],
    replay: float | str,
    farewell: str = "leaving",
) -> Written:
    """S of a request: D_t = (mean update of round t) - (what it would have been without the forget pairs).

    `forget_pairs` says how many of them each client holds; who did not tell is asked to replay all the same. `farewell`
    says who tells of clients that leave.
    """
    rounds = range(1, trained.training.rounds + 1)
    early = max(1, round(EARLY * len(rounds)))
    if isinstance(request, ClientRequest):
        concerned, used = 0, tuple(rounds)
        if trained.training.aggregation == "mean":
            did, would = with_and_without(trained, request, federation, rounds, early, farewell == "others")
            stale = stale_clients(trained, federation, rounds)
            if stale:
                weights = _chosen(trained, rounds, early, mended_count(len(rounds), replay))
                now = {client: len(ids) for client, ids in federation.held.items()}
                rest = {client: count for client, count in now.items() if client not in request.clients}
                excess = _excess(trained, stale, now, rest, weights)
                did = _mended(trained, federation, did, excess, early)
                concerned = len(stale)
            parts = _parts(trained, did, would)
        else:
            parts = _from_history(trained, request, federation, rounds, early)
    else:
        held = {client: len(ids) for client, ids in federation.held.items()}
        kept = {c: max(0, held[c] - (count or 0)) for c, count in forget_pairs.items() if count != 0}
        count = replay_count(len(rounds), len(kept) / len(federation.clients), replay)
        weights = _chosen(trained, rounds, early, count)
        parts, concerned = _from_replay(trained, request, federation, kept, weights, early, replay), len(kept)
        used = tuple(weights)
    (first, first_rest), (second, second_rest) = parts
    return Written(first, second, (first_rest, second_rest), early, used, concerned)


def _chosen(trained: Trained, rounds: Sequence[int], early: int, count: int) -> dict[int, float]:
    """The rounds that are replayed, and how many like itself each stands for; a damaged state is refused."""
    return standing_for([trained.history.moved(number).norm() for number in rounds], early, count)


def replay_count(rounds: int, concerned: float, replay: float | str) -> int:
    """How many rounds are replayed: a share of them, or by `auto` as many as are cheap."""
    if replay != "auto":
        return max(1, round(float(replay) * rounds))
    return rounds if concerned <= FEW else min(max(1, round(USUAL_REPLAY * rounds)), MOST_REPLAYED)


def mended_count(rounds: int, replay: float | str) -> int:
    """How many rounds are replayed for closed requests alone."""
    return (
        min(max(1, round(MENDED * rounds)), MOST_REPLAYED)
        if replay == "auto"
        else max(1, round(float(replay) * rounds))
    )


def standing_for(moved: Sequence[float], early: int, count: int) -> dict[int, float]:
    """The rounds that are replayed, and how many like itself each stands for.

    The early ones one by one if there are enough, for levels are compared after them. The later ones are parted into
    stretches in which the model `moved` equally far, each stood for by its middle round: rounds that moved it more
    wrote more.
    """
    if count >= len(moved):
        return dict.fromkeys(range(1, len(moved) + 1), 1.0)
    exact = early if count >= 2 * early else 0
    way, stretches, length = 0.0, dict[int, list[int]](), sum(moved[exact:])
    for number, step in enumerate(moved[exact:], start=exact + 1):
        place = int((count - exact) * way / length + 1e-9) if length else 0
        stretches.setdefault(place, []).append(number)
        way += step
    weights = dict.fromkeys(range(1, exact + 1), 1.0)
    for stretch in stretches.values():
        middle = stretch[(len(stretch) - 1) // 2]
        far = sum(moved[number - 1] for number in stretch)
        weights[middle] = far / moved[middle - 1] if far else float(len(stretch))
    return weights


Parts = tuple[tuple[Params, Params], tuple[Params, Params]]
"""(written, the retained clients' movement) of the early rounds, and of the late ones."""


def _from_history(
    trained: Trained, request: ClientRequest, federation: Federation, rounds: Sequence[int], early: int
) -> Parts:
    """Without communication: the mean of a round's stored updates, with and without those of the leaving clients."""
    history, leaving, here = trained.history, set(request.clients), set(federation.clients) | set(request.clients)
    zeros = trained.start.map(lambda tensor: tensor.double() * 0)
    did, would, took_part = [zeros, zeros], [zeros, zeros], False
    for number in rounds:
        there = [client for client in history.clients(number) if not trained.gone or client in here]
        updates = [history.update(number, client) for client in there]
        weighted = [(trained.training.weight(update.pairs), update.client, update.change) for update in updates]
        mean = _aggregated(trained, [(weight, change) for weight, _, change in weighted])
        rest = [(weight, change) for weight, client, change in weighted if client not in leaving]
        took_part = took_part or len(rest) < len(weighted)
        late = number > early
        did[late] = did[late] + mean.map(torch.Tensor.double)
        if rest:
            would[late] = would[late] + _aggregated(trained, rest).map(torch.Tensor.double)
    if not took_part:
        raise never_took_part(request)
    return _parts(trained, did, would)


# What closed requests leave in stored updates
#
# Let V_k be what a client would have sent without the pairs of closed requests, and U_k what is stored. The model no
# longer holds U_k - V_k. A request that changes the client's weight from a to b must therefore take (a - b) V_k from
# it. Taking (a - b) U_k instead would write (b - a) (U_k - V_k) back, a little with every client that leaves.


def stale_clients(trained: Trained, federation: Federation, rounds: Sequence[int]) -> set[int]:
    """Clients whose stored updates come from more pairs than they hold now, because requests are closed since."""
    now = {client: len(ids) for client, ids in federation.held.items()} if trained.gone else {}
    told = [trained.history.record(number)["pairs"] for number in rounds if now]
    return {client for client, count in now.items() if any(pairs.get(str(client), 0) > count for pairs in told)}


def _excess(
    trained: Trained,
    stale: Collection[int],
    pairs: Mapping[int, int],
    would: Mapping[int, int],
    used: Mapping[int, float],
) -> dict[int, dict[int, float]]:
    """Round -> stale client -> by how much its weight in what the round did exceeds that in what it would have done.

    `pairs` says how many each client trains on, `would` how many without what the request names.
    """
    found: dict[int, dict[int, float]] = {}
    for number, stands_for in used.items():
        shares = [_shares(trained, number, each) for each in (pairs, would)]
        found[number] = {
            client: stands_for * (shares[0].get(client, 0.0) - shares[1].get(client, 0.0))
            for client in sorted(shares[0].keys() & set(stale))
        }
    return {number: clients for number, clients in found.items() if clients}


def _shares(trained: Trained, number: int, pairs: Mapping[int, int]) -> dict[int, float]:
    """Client -> its share in the mean of a round, were each to train on so many pairs."""
    there = [client for client in trained.history.clients(number) if pairs.get(client, 0) >= MINIMUM_PAIRS]
    weights = {client: trained.training.weight(pairs[client]) for client in there}
    return {client: weight / sum(weights.values()) for client, weight in weights.items()}


def _mended(
    trained: Trained,
    federation: Federation,
    did: tuple[Params, Params],
    excess: Mapping[int, Mapping[int, float]],
    early: int,
) -> tuple[Params, Params]:
    """What the rounds did with V_k in the place of U_k, where it makes a difference; who is silent stays as it is."""
    nothing = SampleRequest(ids=())
    replays = [
        Replay(number, started(trained, number), share, int(number > early), (client,))
        for number, shares in excess.items()
        for client, share in sorted(shares.items())
    ]
    asked = sorted({client for each in replays for client in each.clients})
    job = trained.training_job(0, request=nothing, objective=REPLAY, replays=tuple(replays))
    answers = {answer.client: answer for answer in federation.run(trained.start, job, asked)} if asked else {}
    wanted = [
        Wanted(number, number > early, -1.0, {client: share for client, share in shares.items() if client in answers})
        for number, shares in excess.items()
    ]
    stored = added_up(trained, nothing, federation, [each for each in wanted if each.weights])
    total = [one + other for one, other in zip(did, stored, strict=True)]
    for client, answer in sorted(answers.items()):
        for group in (0, 1):
            summed = read_sum(answer, group, trained.start)
            own = [number for number, shares in excess.items() if client in shares and int(number > early) == group]
            if summed is not None:
                most = sum(abs(excess[number][client]) * _length(trained, number, client) for number in own)
                total[group] = total[group] + summed.within(LONGEST_REPLAY * most)
    return total[0], total[1]


def _from_replay(
    trained: Trained,
    request: Request,
    federation: Federation,
    kept: Mapping[int, int],
    used: Mapping[int, float],
    early: int,
    replay: float | str,
) -> Parts:
    """Holders of forget pairs, who keep so many, repeat the rounds; everybody else's stored updates only weigh more.

    Once earlier requests are closed, what the rounds did is not what is stored: holders repeat that too, without the
    pairs that are gone.
    """
    now = {client: len(ids) for client, ids in federation.held.items()}
    nothing = SampleRequest(ids=())
    did = _moved(trained, nothing, federation, now, kept if trained.gone else (), used, early)
    rounds = range(1, trained.training.rounds + 1)
    stale = stale_clients(trained, federation, rounds) - kept.keys()
    if stale:
        weights = _chosen(trained, rounds, early, min(len(used), mended_count(len(rounds), replay)))
        did = _mended(trained, federation, did, _excess(trained, stale, now, {**now, **kept}, weights), early)
    return _parts(trained, did, _moved(trained, request, federation, {**now, **kept}, kept, used, early))


def _moved(
    trained: Trained,
    request: Request,
    federation: Federation,
    pairs: Mapping[int, int],
    holders: Collection[int],
    used: Mapping[int, float],
    early: int,
) -> tuple[Params, Params]:
    """What the rounds add up to, early and late ones, when holders repeat theirs without what a request names.

    `pairs` says how many each client trains on, `used` how many rounds each of them stands for.
    """
    history = trained.history
    wanted, replays, lengths = [], [], dict[tuple[int, int], float]()
    for number, stands_for in used.items():
        there = [client for client in history.clients(number) if client in pairs]
        weights = {c: trained.training.weight(pairs[c]) for c in there if pairs[c] >= MINIMUM_PAIRS}
        share = stands_for / sum(weights.values()) if weights else 0.0
        stored = {client: weight for client, weight in weights.items() if client not in holders}
        wanted.append(Wanted(number, number > early, share, stored))
        took_part = tuple(client for client in weights if client in holders)
        for client in took_part:
            place = client, int(number > early)
            lengths[place] = lengths.get(place, 0.0) + share * _length(trained, number, client)
        if took_part:
            replays.append(Replay(number, started(trained, number), share, int(number > early), took_part))
    total = list(added_up(trained, request, federation, wanted))
    if replays:
        job = trained.training_job(0, request=request, objective=REPLAY, replays=tuple(replays))
        answers = {answer.client: answer for answer in federation.run(trained.start, job, sorted(holders))}
        silent = {client for each in replays for client in each.clients}.difference(answers)
        if silent:  # what they would have done is not known: they count as if they had left
            others = {client: count for client, count in pairs.items() if client not in silent}
            return _moved(trained, request, federation, others, set(holders) - silent, used, early)
        for _, answer in sorted(answers.items()):
            for group in (0, 1):
                summed = read_sum(answer, group, trained.start)
                if summed is not None:
                    most = LONGEST_REPLAY * lengths.get((answer.client, group), 0.0)
                    weight = trained.training.weight(pairs[answer.client])
                    total[group] = total[group] + weight * summed.within(most)
    return total[0], total[1]


def _parts(trained: Trained, did: Sequence[Params], would: Sequence[Params]) -> Parts:
    """From what early and late rounds did and would have done, added up in double precision."""

    def single(params: Params) -> Params:
        return params.zip(lambda tensor, like: tensor.to(like.dtype), trained.start)

    (first, second) = ((single(one - other), single(other)) for one, other in zip(did, would, strict=True))
    return first, second


def _length(trained: Trained, number: int, client: int) -> float:
    """Of what a client sent in a round; where that is not known, as long as all the others' could make it."""
    if trained.history.updates:
        return trained.history.update(number, client).change.norm()
    return len(trained.history.clients(number)) * trained.history.moved(number).norm()


def _aggregated(trained: Trained, changes: Sequence[tuple[float, Params]]) -> Params:
    """As the training made one change of those of a round."""
    return aggregated(changes, trained.training.aggregation, trained.training.hostile)
