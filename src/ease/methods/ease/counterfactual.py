"""What the forget pairs really wrote into the model: what the rounds did less what they would have done without them.

For clients that leave it comes from the history, or from what they tell where clients keep it; for classes and single
pairs by replay.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ease.data.partition import MINIMUM_PAIRS
from ease.federation.aggregation import aggregated
from ease.federation.protocol import Federation, Precision, Replay
from ease.methods.base import Trained
from ease.methods.ease.farewell import Added, Teller, Wanted, added_up, never_took_part, started, with_and_without
from ease.methods.ease.replay import REPLAY, read_sum
from ease.methods.ease.unstored import LONGEST_REPLAY, NOTHING_LACKED, Filled, sent_length, stale_clients, zeros
from ease.methods.foundation import Told
from ease.params import Params
from ease.requests.request import ClientRequest, Request, SampleRequest

EARLY = 0.2
"""Share of the rounds whose contribution is told apart: after so many, what later rounds made up for is still small."""
USUAL_REPLAY, MOST_REPLAYED = 0.5, 32
"""Share and number of the rounds that `auto` replays where many clients are concerned; others stand for the rest."""
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
    told: Mapping[int, Told]
    """Client -> what it would have sent without all that is gone by now, of those whose stored updates differ."""
    replayed_rounds: int = 0
    """Rounds that some client went through once more."""
    filled: Filled = NOTHING_LACKED
    """What took the place of updates that are not stored."""

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
    farewell: Teller = "leaving",
    precision: Precision = "float32",
) -> Written:
    """S of a request: D_t = (mean update of round t) - (what it would have been without the forget pairs).

    `forget_pairs` says how many of them each client holds; who did not tell is asked to replay all the same. `farewell`
    says who tells of clients that leave, `precision` how replays multiply.
    """
    numbers = range(1, trained.training.rounds + 1)
    early = max(1, round(EARLY * len(numbers)))
    stale = stale_clients(trained, federation, numbers)
    if isinstance(request, ClientRequest):
        if trained.training.aggregation != "mean":
            return _written(trained, _from_history(trained, request, federation, numbers, early), early, numbers)
        if not stale:
            sums = with_and_without(trained, request, federation, numbers, early, farewell)
            return _written(trained, sums, early, numbers)
    leaving = set(request.clients) if isinstance(request, ClientRequest) else set[int]()
    now = {client: len(ids) for client, ids in federation.held.items()}
    kept = {} if leaving else {c: max(0, now[c] - (count or 0)) for c, count in forget_pairs.items() if count != 0}
    told = {client: each for client, each in trained.told.items() if client in stale}
    untold = stale - told.keys()
    count = replay_count(len(numbers), len(kept.keys() | untold) / len(federation.clients), replay)
    used = _chosen(trained, numbers, early, count)
    rounds, nothing = _Rounds(trained, used, early, precision), SampleRequest(ids=())
    told |= rounds.replayed(nothing, federation, now, untold)
    did = rounds.moved(nothing, federation, now, told)
    fresh = rounds.replayed(request, federation, {**now, **kept}, kept)
    # Of those who keep silent it is not known what they would have done: they count as if they had left.
    absent = leaving | {client for client, left in kept.items() if left >= MINIMUM_PAIRS} - fresh.keys()
    rest = {client: pairs for client, pairs in {**now, **kept}.items() if client not in absent}
    told = {client: each for client, each in {**told, **fresh}.items() if client in rest}
    would = rounds.moved(request, federation, rest, told, farewell)
    return _written(trained, (did, would), early, used, kept.keys() | untold, told)


def _chosen(trained: Trained, rounds: Sequence[int], early: int, count: int) -> dict[int, float]:
    """The rounds that are replayed, and how many like itself each stands for."""
    return standing_for([trained.history.moved_length(number) for number in rounds], early, count)


def replay_count(rounds: int, concerned: float, replay: float | str) -> int:
    """How many rounds are replayed: a share of them, or by `auto` as many as are cheap."""
    if replay != "auto":
        return max(1, round(float(replay) * rounds))
    return rounds if concerned <= FEW else min(max(1, round(USUAL_REPLAY * rounds)), MOST_REPLAYED)


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


Sums = tuple[Added, Added]
"""What the rounds did, and what they would have done."""


def _from_history(
    trained: Trained, request: ClientRequest, federation: Federation, rounds: Sequence[int], early: int
) -> Sums:
    """Without communication: the mean of a round's stored updates, with and without those of the leaving clients."""
    history, leaving, here = trained.history, set(request.clients), set(federation.clients) | set(request.clients)
    none = zeros(trained)
    did, would, took_part = [none, none], [none, none], False
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
    return Added((did[0], did[1])), Added((would[0], would[1]))


# What closed requests leave in stored updates
#
# Let V_k be what a client would have sent without the pairs of closed requests, and U_k what is stored. The model no
# longer holds U_k - V_k, so what the rounds did is a mean of V_k. Clients told of V_k when those requests were
# answered, as sums over rounds; these are kept (`Foundation`). Who has not told is asked to replay.


@dataclass(frozen=True)
class _Rounds:
    """The rounds that stand for all: what clients did in them, and would have done."""

    trained: Trained
    used: Mapping[int, float]
    """Round -> how many like itself it stands for."""
    early: int
    precision: Precision

    def shares(self, pairs: Mapping[int, int]) -> Iterator[tuple[int, float, dict[int, float]]]:
        """Of each round: how much the sum of updates counts, and client -> weight, were each to train on so many."""
        for number, stands_for in self.used.items():
            there = [client for client in self.trained.history.clients(number) if client in pairs]
            weights = {c: self.trained.training.weight(pairs[c]) for c in there if pairs[c] >= MINIMUM_PAIRS}
            yield number, stands_for / sum(weights.values()) if weights else 0.0, weights

    def replayed(
        self, request: Request, federation: Federation, pairs: Mapping[int, int], asked: Collection[int]
    ) -> dict[int, Told]:
        """What clients would have sent without what a request names; who is silent is missing."""
        replays = []
        shares = {client: [0.0, 0.0] for client in asked}
        longest = {client: [0.0, 0.0] for client in asked}
        for number, share, weights in self.shares(pairs):
            took_part, late = tuple(client for client in weights if client in shares), int(number > self.early)
            for client in took_part:
                shares[client][late] += share
                longest[client][late] += LONGEST_REPLAY * share * sent_length(self.trained, number, client)
            if took_part:
                replays.append(Replay(number, started(self.trained, number), share, late, took_part))
        if not replays:
            return {}
        job = self.trained.training_job(
            0, request=request, objective=REPLAY, replays=tuple(replays), precision=self.precision
        )
        answers = federation.run(self.trained.start, job, sorted(asked))
        return {
            answer.client: Told(answer.values, _two(shares[answer.client]), _two(longest[answer.client]))
            for answer in sorted(answers, key=lambda answer: answer.client)
        }

    def moved(
        self,
        request: Request,
        federation: Federation,
        pairs: Mapping[int, int],
        told: Mapping[int, Told],
        teller: Teller = "leaving",
    ) -> Added:
        """What the rounds add up to, early and late ones: by what clients told, else by what is stored of them."""
        wanted, now = [], {client: [0.0, 0.0] for client in told}
        for number, share, weights in self.shares(pairs):
            late = number > self.early
            stored = {client: weight for client, weight in weights.items() if client not in told}
            wanted.append(Wanted(number, late, share, stored))
            for client in weights.keys() & told.keys():
                now[client][late] += share
        added = added_up(self.trained, request, federation, wanted, teller)
        total = list(added.sums)
        for client, sums in sorted(told.items()):
            for group in (0, 1):
                summed = read_sum(sums.values, group, self.trained.start)
                if summed is not None and now[client][group]:
                    # The shares that it was told with are others once clients have left since.
                    factor = self.trained.training.weight(pairs[client]) * (now[client][group] / sums.shares[group])
                    total[group] = total[group] + factor * summed.within(sums.longest[group])
        return Added((total[0], total[1]), added.filled)


def _two(values: Sequence[float]) -> tuple[float, float]:
    return values[0], values[1]


def _written(
    trained: Trained,
    sums: Sums,
    early: int,
    rounds: Iterable[int],
    replaying: Collection[int] = (),
    told: Mapping[int, Told] | None = None,
) -> Written:
    def single(params: Params) -> Params:
        return params.zip(lambda tensor, like: tensor.to(like.dtype), trained.start)

    did, would = sums
    (first, second), (first_rest, second_rest) = (
        (single(one - other) for one, other in zip(did.sums, would.sums, strict=True)),
        (single(each) for each in would.sums),
    )
    filled = did.filled | would.filled
    return Written(
        first,
        second,
        (first_rest, second_rest),
        early,
        tuple(rounds),
        len({*replaying, *filled.replayed}),
        told or {},
        len(tuple(rounds) if replaying else frozenset[int]().union(*filled.replayed.values())),
        filled,
    )


def _aggregated(trained: Trained, changes: Sequence[tuple[float, Params]]) -> Params:
    """As the training made one change of those of a round."""
    return aggregated(changes, trained.training.aggregation, trained.training.hostile)
