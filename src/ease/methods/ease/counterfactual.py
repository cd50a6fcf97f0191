"""What the forget pairs really wrote into the model: what the rounds did less what they would have done without them.

For clients that leave it comes from the history, for classes and single pairs by replay.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ease.data.partition import MINIMUM_PAIRS
from ease.errors import UserError
from ease.federation.aggregation import aggregated
from ease.federation.protocol import Federation, Replay
from ease.methods.base import Trained
from ease.methods.ease.replay import REPLAY, read_sum
from ease.params import Params
from ease.requests.request import ClientRequest, Request, SampleRequest

EARLY = 0.2
"""Share of the rounds whose contribution is told apart: after so many, what later rounds made up for is still small."""
MOST_REPLAYED = 32
"""Rounds that `auto` replays at most where many clients are concerned; the others are stood for by their neighbours."""
LONGEST_REPLAY = 3.0
"""A replayed sum is believed up to so many times the length of what the client sent in the same rounds."""
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
) -> Written:
    """S of a request: D_t = (mean update of round t) - (what it would have been without the forget pairs).

    `forget_pairs` says how many of them each client holds; who did not tell is asked to replay all the same.
    """
    rounds = list(range(1, trained.training.rounds + 1))
    early = max(1, round(EARLY * len(rounds)))
    if isinstance(request, ClientRequest):
        parts, concerned, used = _from_history(trained, request, federation, rounds, early), 0, rounds
    else:
        held = {client: len(ids) for client, ids in federation.held.items()}
        kept = {c: max(0, held[c] - (count or 0)) for c, count in forget_pairs.items() if count != 0}
        used = replayed_rounds(rounds, len(kept) / len(federation.clients), replay)
        parts, concerned = _from_replay(trained, request, federation, kept, used, early), len(kept)
    (first, first_rest), (second, second_rest) = parts
    return Written(first, second, (first_rest, second_rest), early, tuple(used), concerned)


def replayed_rounds(rounds: Sequence[int], concerned: float, replay: float | str) -> list[int]:
    """Which rounds are replayed, spread evenly: a share of them, or by `auto` as many as are cheap."""
    if replay == "auto":
        count = len(rounds) if concerned <= FEW else min(len(rounds), MOST_REPLAYED)
    else:
        count = max(1, round(float(replay) * len(rounds)))
    if count >= len(rounds):
        return list(rounds)
    step = len(rounds) / count  # from the first round on: the early ones wrote most
    return sorted({rounds[int(n * step)] for n in range(count)})


def standing_for(rounds: Sequence[int], used: Sequence[int]) -> dict[int, int]:
    """How many rounds each replayed one stands for: itself and those it is nearest to."""
    nearest = [min(used, key=lambda each: abs(each - number)) for number in rounds]
    return {number: nearest.count(number) for number in used}


Parts = tuple[tuple[Params, Params], tuple[Params, Params]]
"""(written, the retained clients' movement) of the early rounds, and of the late ones."""


def _from_history(
    trained: Trained, request: ClientRequest, federation: Federation, rounds: Sequence[int], early: int
) -> Parts:
    """Without communication: the mean of a round's stored updates, with and without those of the leaving clients."""
    history, leaving, here = trained.history, set(request.clients), set(federation.clients) | set(request.clients)
    sums = _Sums(trained.start)
    took_part = False
    for number in rounds:
        there = [client for client in history.clients(number) if not trained.gone or client in here]
        updates = [history.update(number, client) for client in there]
        weighted = [(trained.training.weight(update.pairs), update.client, update.change) for update in updates]
        mean = _aggregated(trained, [(weight, change) for weight, _, change in weighted])
        rest = [(weight, change) for weight, client, change in weighted if client not in leaving]
        took_part = took_part or len(rest) < len(weighted)
        sums.add(number > early, did=mean, would=_aggregated(trained, rest) if rest else mean.zeros())
    if not took_part:
        names = ", ".join(map(str, request.clients))
        raise UserError(f"client {names} never took part in a training round: the history has nothing of it to excise")
    return sums.parts()


def _from_replay(
    trained: Trained,
    request: Request,
    federation: Federation,
    kept: Mapping[int, int],
    used: Sequence[int],
    early: int,
) -> Parts:
    """Holders of forget pairs, who keep so many, repeat the rounds; everybody else's stored updates only weigh more.

    Once earlier requests are closed, what the rounds did is not what is stored: holders repeat that too, without the
    pairs that are gone.
    """
    sums = _Sums(trained.start)
    now = {client: len(ids) for client, ids in federation.held.items()}
    nothing = SampleRequest(ids=())
    did = _moved(trained, nothing, federation, now, kept if trained.gone else (), used, early)
    would = _moved(trained, request, federation, {**now, **kept}, kept, used, early)
    for late in (False, True):
        sums.add(late, did[late], would[late])
    return sums.parts()


def _moved(
    trained: Trained,
    request: Request,
    federation: Federation,
    pairs: Mapping[int, int],
    holders: Collection[int],
    used: Sequence[int],
    early: int,
) -> tuple[Params, Params]:
    """What the rounds add up to, early and late ones, when holders repeat theirs without what a request names.

    `pairs` says how many each client trains on.
    """
    history = trained.history
    counts = standing_for(range(1, trained.training.rounds + 1), used)
    zeros = trained.start.map(lambda tensor: tensor.double() * 0)
    total, replays, lengths = [zeros, zeros], [], dict[tuple[int, int], float]()
    for number in used:
        updates = {client: history.update(number, client) for client in history.clients(number) if client in pairs}
        weights = {c: trained.training.weight(pairs[c]) for c in updates if pairs[c] >= MINIMUM_PAIRS}
        share = counts[number] / sum(weights.values()) if weights else 0.0
        for client, weight in weights.items():
            if client not in holders:
                change = updates[client].change.map(lambda tensor: tensor.double())
                total[number > early] = total[number > early] + (share * weight) * change
        history.verify_state(number - 1)
        took_part = tuple(client for client in weights if client in holders)
        for client in took_part:
            place = client, int(number > early)
            lengths[place] = lengths.get(place, 0.0) + share * updates[client].change.norm()
        if took_part:
            replays.append(Replay(number, history.start(number), share, int(number > early), took_part))
    if replays:
        job = trained.training_job(0, request=request, objective=REPLAY, replays=tuple(replays))
        answers = federation.run(trained.start, job, sorted(holders))
        for answer in sorted(answers, key=lambda update: update.client):
            for group in (0, 1):
                summed = read_sum(answer, group, trained.start)
                if summed is not None:
                    most = LONGEST_REPLAY * lengths.get((answer.client, group), 0.0)
                    weight = trained.training.weight(pairs[answer.client])
                    total[group] = total[group] + weight * summed.within(most)
    return total[0], total[1]


class _Sums:
    """Adds up, in double precision, what the rounds did and what they would have done, early and late ones apart."""

    def __init__(self, like: Params) -> None:
        zeros = like.map(lambda tensor: tensor.double() * 0)
        self.did, self.would, self.like = [zeros, zeros], [zeros, zeros], like

    def add(self, late: bool, did: Params, would: Params) -> None:
        self.did[late] = self.did[late] + did.map(lambda tensor: tensor.double())
        self.would[late] = self.would[late] + would.map(lambda tensor: tensor.double())

    def parts(self) -> Parts:
        def single(params: Params) -> Params:
            return params.zip(lambda tensor, like: tensor.to(like.dtype), self.like)

        (first, second) = (
            (single(did - would), single(would)) for did, would in zip(self.did, self.would, strict=True)
        )
        return first, second


def _aggregated(trained: Trained, changes: Sequence[tuple[float, Params]]) -> Params:
    """As the training made one change of those of a round."""
    return aggregated(changes, trained.training.aggregation, trained.training.hostile)
