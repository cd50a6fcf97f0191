"""The forget contribution: from the history by hand, and from replay against rounds that never saw the pairs."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import ClassVar

import numpy as np
import pytest
import torch

from ease.errors import UserError
from ease.federation.client import ClientData
from ease.federation.fedavg import average, fedavg
from ease.federation.history import History
from ease.federation.protocol import LocalJob, Middleware, Update
from ease.federation.sequential import Sequential
from ease.methods.base import Trained
from ease.methods.ease.contribution import COUNT, contribution_of, evenly_chosen, forget_counts
from ease.methods.ease.missing_updates import LONGEST_REPLAY
from ease.methods.ease.replay import ROUND
from ease.params import Params
from ease.requests.request import ClassRequest, ClientRequest, SampleRequest, forget_mask
from ease.testing import Spy


class Nobody:
    """A federation in which no one may be asked anything."""

    clients: Sequence[int] = (0, 1, 2, 3)
    members: ClassVar[dict[int, frozenset[str]]] = {}

    def run(self, params: Params, job: LocalJob, clients: Sequence[int]) -> Iterator[Update]:
        raise AssertionError("no client may be asked")


def close(one: Params, two: Params, tolerance: float = 1e-6) -> None:
    for name, tensor in two.tensors.items():
        torch.testing.assert_close(one[name].double(), tensor.double(), rtol=0, atol=tolerance)


def mean(changes: dict[int, Params], clients: set[int], weighting: str) -> dict[str, np.ndarray]:
    """Client c counts c + 1 pairs, or one."""
    weights = {client: client + 1 if weighting == "pairs" else 1 for client in changes if client in clients}
    names = next(iter(changes.values())).tensors
    zero = {name: np.zeros(tuple(tensor.shape)) for name, tensor in names.items()}
    for client, weight in weights.items():
        for name, tensor in changes[client].tensors.items():
            zero[name] = zero[name] + weight / sum(weights.values()) * tensor.double().numpy()
    return zero


# --- from the history ---


@pytest.mark.parametrize("weighting", ["pairs", "uniform"])
@pytest.mark.parametrize("leaving", [(2,), (0, 3)], ids=["one", "two"])
def test_a_leaving_client_contributed_the_mean_with_it_minus_the_mean_without(
    past, toy_params, weighting, leaving
) -> None:
    """Not everyone takes part in each of six rounds; in one only the leaving clients do."""
    drawn = [(0, 1, 2, 3), (0, 2), leaving, (1, 3), (0, 1, 2), (2, 3)]
    rounds = [{c: toy_params(seed=10 * n + c) for c in clients} for n, clients in enumerate(drawn)]
    trained = past(*rounds, weighting=weighting)
    found = contribution_of(trained, ClientRequest(clients=leaving), Nobody())
    expected = {name: np.zeros(tuple(tensor.shape)) for name, tensor in trained.final.tensors.items()}
    for changes in rounds:
        did = mean(changes, set(changes), weighting)
        would = mean(changes, set(changes) - set(leaving), weighting)
        for name in expected:
            expected[name] += did[name] - would[name]
    for name in trained.final.tensors:
        np.testing.assert_allclose(found.total[name], expected[name], atol=1e-6)
    assert found.replaying_clients == 0 == found.replayed_rounds and found.reports == {}


def test_a_clients_contribution_is_its_distance_from_the_mean_scaled_by_its_weight(past, toy_params) -> None:
    """D = n_k / (N - n_k) (U_k - (w_t - w_(t-1))): the states and the client's own updates are enough."""
    rounds = [{c: toy_params(seed=7 * n + c) for c in range(4)} for n in range(5)]
    trained = past(*rounds)
    found = contribution_of(trained, ClientRequest(clients=(2,)), Nobody())
    total, history = trained.initial.zeros(), trained.history
    for number, changes in enumerate(rounds, start=1):
        moved = history.state(number) - history.state(number - 1)
        total = total + 3 / (10 - 3) * (changes[2] - moved)
    close(found.total, total)


@pytest.mark.parametrize("leaving", [(2,), (0, 3)], ids=["one", "two"])
def test_own_updates_are_the_leaving_clients_part_of_the_means(past, toy_params, leaving) -> None:
    """If everyone takes part, their part of the mean is the sum of n_k / N U_k, to the rounding of the states."""
    rounds = [{c: toy_params(seed=7 * n + c) for c in range(4)} for n in range(5)]
    found = contribution_of(past(*rounds), ClientRequest(clients=leaving), Nobody())
    expected = toy_params(0.0)
    for changes in rounds:
        for client in leaving:
            expected = expected + (client + 1) / 10 * changes[client]
    close(found.own_updates, expected, 3e-6)
    assert (found.own_updates - found.total).norm() > 0.1


@pytest.mark.parametrize("aggregation", ["median", "trimmed"])
def test_with_robust_aggregation_the_rest_of_a_round_is_aggregated_as_in_training(
    past, toy_params, aggregation
) -> None:
    rounds = [{c: toy_params(seed=7 * n + c) for c in range(5)} for n in range(3)]
    trained = past(*rounds, aggregation=aggregation)
    found = contribution_of(trained, ClientRequest(clients=(2,)), Nobody())
    for name in trained.final.tensors:
        expected = 0.0
        for changes in rounds:
            for clients, sign in ((range(5), 1), ((0, 1, 3, 4), -1)):
                stacked = np.sort(np.stack([changes[c][name].double().numpy() for c in clients]), axis=0)
                expected = expected + sign * (
                    np.median(stacked, axis=0) if aggregation == "median" else stacked[1:-1].mean(axis=0)
                )
        np.testing.assert_allclose(found.total[name], expected, atol=1e-6)


def test_all_clients_together_contributed_all_that_was_learnt(learnt) -> None:
    found = contribution_of(learnt.trained, ClientRequest(clients=(0, 1, 2, 3)), Nobody())
    close(found.total, learnt.trained.final - learnt.trained.initial, 1e-5)


def test_a_client_that_never_took_part_is_refused(past, toy_params) -> None:
    rounds = [{c: toy_params(seed=n + c) for c in clients} for n, clients in enumerate([(0, 1), (1, 3)])]
    trained = past(*rounds)
    with pytest.raises(UserError, match="client 2: it never took part in a training round"):
        contribution_of(trained, ClientRequest(clients=(2,)), Nobody())
    assert contribution_of(trained, ClientRequest(clients=(0, 2)), Nobody()).total.norm() > 0


def test_a_damaged_update_is_refused(past, toy_params) -> None:
    trained = past({c: toy_params(seed=c) for c in range(3)})
    toy_params(seed=9).save(trained.history.update_path(1, 0))
    with pytest.raises(UserError, match="damaged"):
        contribution_of(trained, ClientRequest(clients=(1,)), Nobody())


# --- by replay ---


def held_of(request, federation) -> dict[int, int]:
    return {client: int(forget_mask(request, data.shard).sum()) for client, data in federation.data.items()}


def masked_round(learnt, request, state: Params, number: int, clients: Sequence[int]) -> list[Update]:
    """A round of the training on its own batches less the forget pairs; clients count the pairs they keep."""
    federation = learnt.world.federation
    job = learnt.trained.training_job(number, request=request, objective=ROUND)
    kept = {c: len(federation.members[c]) - count for c, count in held_of(request, federation).items()}
    return [Update(each.client, kept[each.client], each.delta) for each in federation.run(state, job, clients)]


@pytest.mark.parametrize("weighting", ["pairs", "uniform"])
def test_one_round_minus_the_contribution_of_samples_is_the_round_without_them(
    learnt, few, tmp_path, weighting: str
) -> None:
    """The first step then is exactly what retraining with the same random numbers would give."""
    training = learnt.trained.training.model_copy(update={"rounds": 1, "weighting": weighting})
    trained = Trained(History(tmp_path), training, learnt.trained.temperature, learnt.trained.seed)
    federation, initial = learnt.world.federation, learnt.trained.initial
    initial.save(trained.history.initial_path)
    (finished,) = fedavg(initial, federation, training, trained.seed, trained.temperature)
    trained.history.append(finished)
    found = contribution_of(trained, few, federation)
    without = average(initial, masked_round(learnt, few, initial, 1, [0, 1, 2, 3]), training, 1)
    moved = max(float(tensor.abs().max()) for tensor in (without.state - initial).tensors.values())
    close(trained.final - found.total, without.state, moved / 1000)  # changes come back in half precision
    assert found.total.norm() > 0.05 * (trained.final - initial).norm()
    assert (found.replayed_rounds, found.replaying_clients) == (1, 3)
    assert found.reports.keys() == {0, 1, 2}  # the holders, for later requests


@pytest.mark.parametrize(("replay", "count"), [(1.0, 6), (0.5, 3)])
def test_the_contribution_of_a_class_is_the_sum_over_rounds(learnt, replay: float, count: int) -> None:
    """Every round by hand, from the state that it began from; chosen rounds stand for those that are left out."""
    request, trained, federation = ClassRequest(classes=(2,)), learnt.trained, learnt.world.federation
    found = contribution_of(trained, request, federation, replay)
    states = [trained.history.state(number) for number in range(7)]
    weights = evenly_chosen([(after - before).norm() for before, after in pairwise(states)], count)
    expected = trained.initial.zeros()
    for number, weight in weights.items():
        state, after = trained.history.state(number - 1), trained.history.state(number)
        without = average(state, masked_round(learnt, request, state, number, [0, 1, 2, 3]), trained.training, number)
        expected = expected + weight * (after - without.state)
    scale = (trained.final - trained.initial).norm() / 1000
    assert (found.total - expected).norm() < 1.5 * scale and expected.norm() > 50 * scale
    assert (found.replayed_rounds, found.replaying_clients) == (count, 4)


@pytest.mark.parametrize("kind", ["class", "sample"])
def test_only_class_requests_ask_clients_how_many_pairs_they_hold(learnt, few, kind: str) -> None:
    """The server knows the clients' ids. A class only they know; one that does not answer counts as a holder."""
    request = ClassRequest(classes=(2,)) if kind == "class" else few
    spy = Spy(learnt.world.federation)
    assert forget_counts(learnt.trained, request, spy) == held_of(request, learnt.world.federation)
    assert [(client, job.objective) for client, job in spy.asked] == (
        [(client, COUNT) for client in range(4)] if kind == "class" else []
    )

    class Silent(Middleware):
        def run(self, params, job, clients):
            return super().run(params, job, [client for client in clients if client != 2])

    counts = forget_counts(learnt.trained, request, Silent(learnt.world.federation))
    assert counts == {**held_of(request, learnt.world.federation), **({2: 1} if kind == "class" else {})}


def test_only_holders_replay_and_only_rounds_they_took_part_in(learnt, few, tmp_path) -> None:
    """Clients 0, 1 and 2 hold forget pairs; of two rounds client 1 was in the second alone."""
    training = learnt.trained.training.model_copy(update={"rounds": 2})
    trained = Trained(History(tmp_path), training, learnt.trained.temperature, learnt.trained.seed)
    federation, state = learnt.world.federation, learnt.trained.initial
    state.save(trained.history.initial_path)
    for number, clients in enumerate([(0, 2, 3), (0, 1, 3)], start=1):
        answers = federation.run(state, trained.training_job(number), clients)
        finished = average(state, answers, training, number)
        trained.history.append(finished)
        state = finished.state

    class Given(Sequential):
        given: ClassVar[dict[int, LocalJob]] = {}

        def perform(self, state, jobs):
            self.given |= jobs
            return super().perform(state, jobs)

    spy = Given(federation.model, federation.data)
    found = contribution_of(trained, few, spy)
    assert {client: [each.round for each in job.replays] for client, job in spy.given.items()} == {
        0: [1, 2], 1: [2], 2: [1],
    }  # fmt: skip
    expected = trained.initial.zeros()
    for number, clients in enumerate([(0, 2, 3), (0, 1, 3)], start=1):
        before, after = trained.history.state(number - 1), trained.history.state(number)
        expected = expected + (
            after - average(before, masked_round(learnt, few, before, number, clients), training, number).state
        )
    assert (found.total - expected).norm() < 0.01 * expected.norm()


def test_a_request_that_names_nothing_contributed_nothing(learnt) -> None:
    found = contribution_of(learnt.trained, SampleRequest(ids=("elsewhere",)), learnt.world.federation)
    assert found.total.norm() == pytest.approx(0, abs=1e-5) and found.replaying_clients == 0


def test_a_client_left_with_one_pair_does_not_count(learnt) -> None:
    """It could not train on one pair, so its round would have been the others' mean."""
    trained, request = learnt.trained, SampleRequest(ids=learnt.world.shards[0].train_ids[1:])
    found = contribution_of(trained, request, learnt.world.federation)
    expected = contribution_of(trained, ClientRequest(clients=(0,)), Nobody())
    close(found.total, expected.total, 1e-5)


def test_a_client_that_does_not_replay_counts_as_if_it_had_left(learnt, few) -> None:
    """Nobody knows what it would have sent without its pairs, so all of its updates go."""

    class Silent(Middleware):
        def run(self, params, job, clients):
            return super().run(params, job, [client for client in clients if client != 1])

    federation = learnt.world.federation
    found = contribution_of(learnt.trained, few, Silent(federation))
    every = SampleRequest(ids=(*(i for i in few.ids if i not in federation.members[1]), *federation.members[1]))
    expected = contribution_of(learnt.trained, every, federation)
    assert (found.total - expected.total).norm() < 0.005 * expected.total.norm()
    whole = contribution_of(learnt.trained, few, federation)
    assert (found.total - whole.total).norm() > 0.05 * expected.total.norm()


def test_a_report_is_shortened_to_what_its_client_can_have_sent(learnt, few) -> None:
    """A client that reports a sum of any size moves the model by at most three times its updates."""

    class Loud(Middleware):
        def run(self, params, job, clients):
            for update in super().run(params, job, clients):
                if update.client == 1 and job.objective == "replay":
                    values = {n: v * 1e4 if n.endswith("scale") else v for n, v in update.values.items()}
                    update = replace(update, values=values)
                yield update

    trained, federation = learnt.trained, learnt.world.federation
    honest, loud = (contribution_of(trained, few, each) for each in (federation, Loud(federation)))
    lengths = sum(trained.history.update_length(number, 1) for number in range(1, 7))
    held = {client: len(ids) for client, ids in federation.members.items()}
    rest = sum(held.values()) - len(few.ids)
    most = (held[1] - 6) / rest * (LONGEST_REPLAY + 1) * lengths
    assert 0.1 * most < (loud.total - honest.total).norm() <= most


def test_a_second_request_does_not_subtract_the_first_again(learnt) -> None:
    """What both contributed together is what the first contributed and then the second."""
    federation, trained = learnt.world.federation, learnt.trained
    data = federation.data[0]
    first, second = (SampleRequest(ids=data.shard.train_ids[part]) for part in (slice(20), slice(20, 21)))
    together = SampleRequest(ids=first.ids + second.ids)
    one, both = (contribution_of(trained, each, federation) for each in (first, together))
    kept = ~forget_mask(first, data.shard)
    left = ClientData(data.shard.keep(kept), data.train.take(np.flatnonzero(kept)), data.validation)
    later = Sequential(federation.model, {**federation.data, 0: left})
    found = contribution_of(replace(trained, gone=(first,)), second, later)
    assert (found.total - (both.total - one.total)).norm() < 0.05 * (both.total - one.total).norm()


# --- which rounds ---


@pytest.mark.parametrize("rounds", [1, 5, 20, 33, 100])
@pytest.mark.parametrize("share", [0.01, 0.25, 0.9, 1.0])
def test_replayed_rounds_represent_all_rounds(rounds: int, share: float) -> None:
    count = max(1, round(share * rounds))
    moved = [1 / number for number in range(1, rounds + 1)]
    used = evenly_chosen(moved, count)
    assert list(used) == sorted(used) and set(used) <= set(range(1, rounds + 1)) and 1 <= len(used) <= count
    assert sum(weight * moved[number - 1] for number, weight in used.items()) == pytest.approx(sum(moved))
    if count == rounds:
        assert used == dict.fromkeys(range(1, rounds + 1), 1.0)


def test_stretches_are_equally_long() -> None:
    # Half of the way 4 + 2 + 1 + 1 is round 1; the other half is rounds 2 to 4, and round 3 is its middle.
    assert evenly_chosen([4, 2, 1, 1], 2) == {1: 1, 3: 4}
    assert evenly_chosen([1, 1, 1, 1], 1) == {2: 4}
    assert evenly_chosen([0, 0, 0, 0], 2) == {2: 4}  # a model that never moved


# --- what closed requests leave in stored updates ---


@pytest.mark.parametrize("leaving", [1, 0], ids=["another", "its holder"])
def test_a_contribution_after_forgotten_pairs_is_that_of_rounds_without_them(learnt, leaving: int) -> None:
    """By hand: in every round the holder's update is what it would have sent without the pairs."""
    gone = SampleRequest(ids=learnt.world.shards[0].train_ids[:12])
    here, request = learnt.world.without(gone), ClientRequest(clients=(leaving,))
    trained = replace(learnt.trained, gone=(gone,), answered=learnt.trained.final)
    found = contribution_of(trained, request, here.federation)
    history, pairs = trained.history, {shard.client: len(shard.train) for shard in here.shards}
    expected = {name: np.zeros(tuple(tensor.shape)) for name, tensor in trained.final.tensors.items()}
    stored = {name: np.zeros(tuple(tensor.shape)) for name, tensor in trained.final.tensors.items()}
    for number in range(1, trained.training.rounds + 1):
        job = trained.training_job(number, request=SampleRequest(ids=()), objective=ROUND)
        (again,) = here.federation.run(history.start(number), job, [0])
        for client in pairs:
            did = pairs[client] / sum(pairs.values())
            would = 0 if client == leaving else pairs[client] / (sum(pairs.values()) - pairs[leaving])
            sent = history.update(number, client).change
            change = again.change if client == 0 else sent
            for name in expected:
                expected[name] += (did - would) * change[name].double().numpy()
                stored[name] += (did - would) * sent[name].double().numpy()
    off = sum(float(((found.total[name].double().numpy() - expected[name]) ** 2).sum()) for name in expected) ** 0.5
    stale = sum(float(((stored[name] - expected[name]) ** 2).sum()) for name in expected) ** 0.5
    assert stale > 0.01 and off < 0.01 * stale  # what replays send is rounded to half precision


def test_clients_that_hold_what_they_held_repeat_nothing(learnt) -> None:
    gone = ClientRequest(clients=(3,))
    trained = replace(learnt.trained, gone=(gone,), answered=learnt.trained.final)
    here = learnt.world.without(gone)

    class Silent(Sequential):
        def run(self, params, job, clients):
            raise AssertionError("no client may be asked")

    federation = Silent(here.server.model, here.federation.data)
    assert contribution_of(trained, ClientRequest(clients=(1,)), federation).replaying_clients == 0
