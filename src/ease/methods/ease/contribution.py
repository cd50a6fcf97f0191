"""The forget contribution S: what the rounds did, less what they would have done without the forget pairs.

For leaving clients it comes from the stored history, or from their reports if clients keep the history. For classes and
single pairs it comes from replay.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ease.data.partition import MINIMUM_PAIRS
from ease.federation.aggregation import aggregated
from ease.federation.expected import Expected, Value
from ease.federation.objectives import Measurement, register
from ease.federation.protocol import Federation, LocalJob, Precision, Replay
from ease.methods.base import Trained
from ease.methods.ease.missing_updates import LONGEST_REPLAY, sent_length, stale_clients, zeros
from ease.methods.ease.replay import REPLAY, forget_count, read_sum
from ease.methods.ease.stored_sums import (
    RoundWeights,
    Source,
    UpdateSum,
    never_took_part,
    round_weights,
    start_of,
    sum_updates,
    with_and_without,
)
from ease.methods.unlearning_base import ClientReport
from ease.params import Params
from ease.requests.request import ClientRequest, Request, SampleRequest

COUNT = "number of forget pairs"


@dataclass(frozen=True)
class ForgetContribution:
    """The contribution of the forget pairs to the global state over all rounds."""

    total: Params
    """S: what the rounds did, less what they would have done without the forget pairs."""
    own_updates: Params
    """Sum of the parts of the updates that are due to the forget pairs, each times its weight in the mean."""
    reports: Mapping[int, ClientReport]
    """Client -> its sum without anything forgotten so far, for clients whose stored updates differ."""
    replayed_rounds: int = 0
    replaying_clients: int = 0


def contribution_of(
    trained: Trained,
    request: Request,
    federation: Federation,
    replay: float = 1.0,
    source: Source = "leaving",
    precision: Precision = "float32",
) -> ForgetContribution:
    """S = sum over rounds t of (mean update of round t) - (that mean without the forget pairs)."""
    rounds = range(1, trained.training.rounds + 1)
    stale = stale_clients(trained, federation, rounds)
    if isinstance(request, ClientRequest):
        if trained.training.aggregation != "mean":
            return _contribution(trained, _robust_sums(trained, request, federation, rounds), _share(trained, request))
        if not stale:
            sums = with_and_without(trained, request, federation, rounds, source)
            return _contribution(trained, sums, _share(trained, request))
    return _by_replay(trained, request, federation, stale, _chosen(trained, rounds, replay), source, precision)


def _by_replay(
    trained: Trained,
    request: Request,
    federation: Federation,
    stale: Collection[int],
    rounds: Mapping[int, float],
    source: Source,
    precision: Precision,
) -> ForgetContribution:
    """Replay the rounds of every client that holds forget pairs, or whose stored updates are stale."""
    now = {client: len(ids) for client, ids in federation.members.items()}
    if isinstance(request, ClientRequest):
        leaving, kept = set(request.clients), dict[int, int]()
    else:
        counts = forget_counts(trained, request, federation)
        leaving, kept = set(), {client: now[client] - count for client, count in counts.items() if count}
    replays, nothing = Replays(trained, rounds, precision), SampleRequest(ids=())
    # V_k is what a client would have sent without the pairs of closed requests. The model no longer contains the
    # difference to the stored U_k, so what the rounds did is a mean of V_k.
    reports = {client: report for client, report in trained.reports.items() if client in stale}
    unreported = set(stale) - reports.keys()
    reports |= replays.ask(nothing, federation, now, unreported)
    did = replays.sum(nothing, federation, now, reports)
    fresh = replays.ask(request, federation, {**now, **kept}, kept)
    # A client that does not answer counts as if it had left: nobody knows what it would have sent.
    absent = leaving | {client for client, left in kept.items() if left >= MINIMUM_PAIRS} - fresh.keys()
    rest = {client: pairs for client, pairs in {**now, **kept}.items() if client not in absent}
    reports = {client: each for client, each in {**reports, **fresh}.items() if client in rest}
    would = replays.sum(request, federation, rest, reports, source)
    share = 1 - sum(map(trained.training.weight, rest.values())) / sum(map(trained.training.weight, now.values()))
    return _contribution(trained, (did, would), share, kept.keys() | unreported, len(rounds), reports)


def forget_counts(trained: Trained, request: Request, federation: Federation) -> dict[int, int]:
    """Client -> how many forget pairs it holds. Only class requests ask the clients; one without a sound answer
    counts as holding one, so that it is asked to replay."""
    held = federation.members
    if isinstance(request, SampleRequest):
        named = set(request.ids)
        return {client: len(named & set(held[client])) for client in federation.clients}
    job = trained.training_job(0, request=request, data="forget", objective=COUNT)
    answers = {
        each.client: int(each.values["count"]) for each in federation.run(trained.start, job, federation.clients)
    }
    return {client: answers.get(client, 1) for client in federation.clients}


def expected_count(state: Params, job: LocalJob, client: int, held: int) -> Expected:
    return Expected(values={"count": Value((), torch.float32, 0.0, float(held))}, abstains=False)


register(COUNT, Measurement(measure=forget_count, expects=expected_count, passes=0.0))


def _chosen(trained: Trained, rounds: Sequence[int], replay: float) -> dict[int, float]:
    """The rounds that are replayed, and how many rounds each represents."""
    count = max(1, round(replay * len(rounds)))
    return evenly_chosen([trained.history.moved_length(number) for number in rounds], count)


def evenly_chosen(moved: Sequence[float], count: int) -> dict[int, float]:
    """Choose `count` rounds, each the middle of a stretch over which the model `moved` equally far."""
    if count >= len(moved):
        return dict.fromkeys(range(1, len(moved) + 1), 1.0)
    way, stretches, length = 0.0, dict[int, list[int]](), sum(moved)
    for number, step in enumerate(moved, start=1):
        place = int(count * way / length + 1e-9) if length else 0
        stretches.setdefault(place, []).append(number)
        way += step
    weights = {}
    for stretch in stretches.values():
        middle = stretch[(len(stretch) - 1) // 2]
        far = sum(moved[number - 1] for number in stretch)
        weights[middle] = far / moved[middle - 1] if far else float(len(stretch))
    return weights


def _share(trained: Trained, request: ClientRequest) -> float:
    """Weight of the leaving clients in the training, as a share of all weights."""
    rounds = [round_weights(trained, number) for number in range(1, trained.training.rounds + 1)]
    leaving = sum(weights.get(client, 0.0) for weights in rounds for client in request.clients)
    return leaving / sum(sum(weights.values()) for weights in rounds)


def _robust_sums(
    trained: Trained, request: ClientRequest, federation: Federation, rounds: Sequence[int]
) -> tuple[UpdateSum, UpdateSum]:
    """Sums with and without the forget pairs, if the aggregate of a round is not a mean."""
    history, leaving, here = trained.history, set(request.clients), set(federation.clients) | set(request.clients)
    did, would, took_part = zeros(trained), zeros(trained), False
    training = trained.training
    for number in rounds:
        present = [client for client in history.clients(number) if not trained.gone or client in here]
        updates = [history.update(number, client) for client in present]
        weighted = [(training.weight(update.pairs), update.client, update.change) for update in updates]
        rest = [(weight, change) for weight, client, change in weighted if client not in leaving]
        took_part = took_part or len(rest) < len(weighted)
        everyone = aggregated([(w, change) for w, _, change in weighted], training.aggregation, training.hostile)
        did = did + everyone.map(torch.Tensor.double)
        if rest:
            others = aggregated(rest, training.aggregation, training.hostile)
            would = would + others.map(torch.Tensor.double)
    if not took_part:
        raise never_took_part(request)
    return UpdateSum(did), UpdateSum(would)


@dataclass(frozen=True)
class Replays:
    """Replays of training rounds, and sums in which they take the place of stored updates."""

    trained: Trained
    rounds: Mapping[int, float]
    """Round -> how many rounds it represents."""
    precision: Precision

    def factors(self, pairs: Mapping[int, int]) -> Iterator[tuple[int, float, dict[int, float]]]:
        """For each round: the factor of the sum of its updates, and client -> weight, for these numbers of pairs."""
        for number, stands_for in self.rounds.items():
            present = [client for client in self.trained.history.clients(number) if client in pairs]
            weights = {c: self.trained.training.weight(pairs[c]) for c in present if pairs[c] >= MINIMUM_PAIRS}
            yield number, stands_for / sum(weights.values()) if weights else 0.0, weights

    def ask(
        self, request: Request, federation: Federation, pairs: Mapping[int, int], clients: Collection[int]
    ) -> dict[int, ClientReport]:
        """Each client's sum of replayed updates without what a request names; clients may be missing."""
        replays = []
        shares, longest = dict.fromkeys(clients, 0.0), dict.fromkeys(clients, 0.0)
        for number, factor, weights in self.factors(pairs):
            took_part = tuple(client for client in weights if client in shares)
            for client in took_part:
                shares[client] += factor
                longest[client] += LONGEST_REPLAY * factor * sent_length(self.trained, number, client)
            if took_part:
                replays.append(Replay(number, start_of(self.trained, number), factor, 0, took_part))
        if not replays:
            return {}
        job = self.trained.training_job(
            0, request=request, objective=REPLAY, replays=tuple(replays), precision=self.precision
        )
        answers = federation.run(self.trained.start, job, sorted(clients))
        return {
            answer.client: ClientReport(answer.values, shares[answer.client], longest[answer.client])
            for answer in sorted(answers, key=lambda answer: answer.client)
        }

    def sum(
        self,
        request: Request,
        federation: Federation,
        pairs: Mapping[int, int],
        reports: Mapping[int, ClientReport],
        source: Source = "leaving",
    ) -> UpdateSum:
        """Sum over the rounds: from the reports of clients that have one, otherwise from their stored updates."""
        rounds, now = [], dict.fromkeys(reports, 0.0)
        for number, factor, weights in self.factors(pairs):
            rounds.append(RoundWeights(number, factor, {c: w for c, w in weights.items() if c not in reports}))
            for client in weights.keys() & reports.keys():
                now[client] += factor
        stored = sum_updates(self.trained, request, federation, rounds, source)
        total = stored.total
        for client, report in sorted(reports.items()):
            summed = read_sum(report.values, 0, self.trained.start)
            if summed is not None and now[client]:
                # Factors differ from those of the report if clients have left since.
                weight = self.trained.training.weight(pairs[client]) * (now[client] / report.share)
                total = total + weight * summed.within(report.longest)
        return UpdateSum(total, stored.repeated)


def _contribution(
    trained: Trained,
    sums: tuple[UpdateSum, UpdateSum],
    share: float,
    replaying: Collection[int] = (),
    replayed: int = 0,
    reports: Mapping[int, ClientReport] | None = None,
) -> ForgetContribution:
    """S = did - would. A mean is M = f U + (1 - f) R, with f the forget pairs' share of the weight and R the mean
    without them; so their own updates add up to sum of f U = S + f sum of R."""
    did, would = sums

    def single(params: Params) -> Params:
        return params.zip(lambda tensor, like: tensor.to(like.dtype), trained.start)

    repeated = [each.repeated for each in sums]
    total = did.total - would.total
    return ForgetContribution(
        single(total),
        single(total + share * would.total),
        reports or {},
        replayed if replaying else len(frozenset[int]().union(*(r for each in repeated for r in each.values()))),
        len({*replaying, *(client for each in repeated for client in each)}),
    )
