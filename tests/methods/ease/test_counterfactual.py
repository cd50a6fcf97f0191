"""What the forget pairs wrote: from the history by hand, and from a replay against one round that never saw them."""

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
from ease.federation.loop import Loop
from ease.federation.protocol import LocalJob, Update
from ease.methods.base import Trained
from ease.methods.ease.counterfactual import replay_count, standing_for, written_by
from ease.methods.ease.replay import ROUND
from ease.params import Params
from ease.requests.request import ClassRequest, ClientRequest, SampleRequest, forget_mask


class Nobody:
    """A federation in which no one may be asked anything."""

    clients: Sequence[int] = (0, 1, 2, 3)
    held: ClassVar[dict[int, frozenset[str]]] = {}

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
def test_a_leaving_client_wrote_the_mean_with_it_less_the_mean_without(past, toy_params, weighting, leaving) -> None:
    """Six rounds of which the first is the early group; not everyone takes part, once the leaving ones alone do."""
    drawn = [(0, 1, 2, 3), (0, 2), leaving, (1, 3), (0, 1, 2), (2, 3)]
    rounds = [{c: toy_params(seed=10 * n + c) for c in clients} for n, clients in enumerate(drawn)]
    trained = past(*rounds, weighting=weighting)
    written = written_by(trained, ClientRequest(clients=leaving), Nobody(), {}, "auto")
    expected = []
    for changes in rounds:
        did = mean(changes, set(changes), weighting)
        would = mean(changes, set(changes) - set(leaving), weighting)
        expected.append({name: (did[name] - would[name], would[name]) for name in did})
    for name in trained.final.tensors:
        np.testing.assert_allclose(written.early[name], expected[0][name][0], atol=1e-6)
        np.testing.assert_allclose(written.late[name], sum(each[name][0] for each in expected[1:]), atol=1e-6)
        np.testing.assert_allclose(written.total[name], sum(each[name][0] for each in expected), atol=1e-6)
        np.testing.assert_allclose(written.retained[0][name], expected[0][name][1], atol=1e-6)
        np.testing.assert_allclose(written.retained[1][name], sum(each[name][1] for each in expected[1:]), atol=1e-6)
    assert written.last_early == 1 and written.rounds == (1, 2, 3, 4, 5, 6) and written.clients == 0


def test_what_one_client_wrote_is_its_distance_from_the_mean_scaled_by_its_share(past, toy_params) -> None:
    """D = n_k / (N - n_k) (U_k - (w_t - w_(t-1))): the states and the client's own updates suffice to know it."""
    rounds = [{c: toy_params(seed=7 * n + c) for c in range(4)} for n in range(5)]
    trained = past(*rounds)
    written = written_by(trained, ClientRequest(clients=(2,)), Nobody(), {}, "auto")
    total, history = trained.initial.zeros(), trained.history
    for number, changes in enumerate(rounds, start=1):
        moved = history.state(number) - history.state(number - 1)
        total = total + 3 / (10 - 3) * (changes[2] - moved)
    close(written.total, total)


def test_the_early_group_is_a_fifth_of_the_rounds(past, toy_params) -> None:
    rounds = [{c: toy_params(seed=7 * n + c) for c in range(2)} for n in range(10)]
    written = written_by(past(*rounds), ClientRequest(clients=(0,)), Nobody(), {}, "auto")
    by_hand = toy_params(0.0)
    for changes in rounds[:2]:  # of weights 1 and 2: D = 1/3 (U_0 - U_1)
        by_hand = by_hand + 1 / 3 * (changes[0] - changes[1])
    assert written.last_early == 2
    close(written.early, by_hand)


def test_what_all_clients_together_wrote_is_all_that_was_learnt(learnt) -> None:
    written = written_by(learnt.trained, ClientRequest(clients=(0, 1, 2, 3)), Nobody(), {}, "auto")
    close(written.total, learnt.trained.final - learnt.trained.initial, 1e-5)


def test_a_client_that_never_took_part_is_refused(past, toy_params) -> None:
    rounds = [{c: toy_params(seed=n + c) for c in clients} for n, clients in enumerate([(0, 1), (1, 3)])]
    trained = past(*rounds)
    with pytest.raises(UserError, match="client 2 never took part in a training round"):
        written_by(trained, ClientRequest(clients=(2,)), Nobody(), {}, "auto")
    assert written_by(trained, ClientRequest(clients=(0, 2)), Nobody(), {}, "auto").total.norm() > 0


def test_a_damaged_update_is_refused(past, toy_params) -> None:
    trained = past({c: toy_params(seed=c) for c in range(3)})
    toy_params(seed=9).save(trained.history.update_path(1, 0))
    with pytest.raises(UserError, match="damaged"):
        written_by(trained, ClientRequest(clients=(1,)), Nobody(), {}, "auto")


# --- by replay ---


def held_of(request, federation) -> dict[int, int]:
    return {client: int(forget_mask(request, data.shard).sum()) for client, data in federation.data.items()}


def masked_round(learnt, request, state: Params, number: int, clients: Sequence[int]) -> list[Update]:
    """A round of the training on its own batches less the forget pairs; clients count the pairs they keep."""
    federation = learnt.world.federation
    job = learnt.trained.training_job(number, request=request, objective=ROUND)
    kept = {c: len(federation.held[c]) - count for c, count in held_of(request, federation).items()}
    return [Update(each.client, kept[each.client], each.delta) for each in federation.run(state, job, clients)]


@pytest.mark.parametrize("weighting", ["pairs", "uniform"])
def test_one_round_less_what_samples_wrote_is_the_round_without_them(learnt, few, tmp_path, weighting: str) -> None:
    """The first step then is exactly what retraining with the same random numbers would give."""
    training = learnt.trained.training.model_copy(update={"rounds": 1, "weighting": weighting})
    trained = Trained(History(tmp_path), training, learnt.trained.temperature, learnt.trained.seed)
    federation, initial = learnt.world.federation, learnt.trained.initial
    initial.save(trained.history.initial_path)
    (finished,) = fedavg(initial, federation, training, trained.seed, trained.temperature)
    trained.history.append(finished, {})
    written = written_by(trained, few, federation, held_of(few, federation), "auto")
    without = average(initial, masked_round(learnt, few, initial, 1, [0, 1, 2, 3]), training, 1)
    moved = max(float(tensor.abs().max()) for tensor in (without.state - initial).tensors.values())
    close(trained.final - written.total, without.state, moved / 1000)  # changes come back in half precision
    assert written.total.norm() > 0.05 * (trained.final - initial).norm()
    assert written.rounds == (1,) and written.clients == 3
    close(written.retained[0], without.state - initial, moved / 1000)
    assert written.late.norm() == 0


@pytest.mark.parametrize("replay", ["auto", 1.0])
def test_what_a_class_wrote_is_the_sum_over_rounds(learnt, replay) -> None:
    """Every round by hand, from the state that it began from; a round that was left out is stood for by another."""
    request, trained, federation = ClassRequest(classes=(2,)), learnt.trained, learnt.world.federation
    written = written_by(trained, request, federation, held_of(request, federation), replay)
    states = [trained.history.state(number) for number in range(7)]
    moved = [(after - before).norm() for before, after in pairwise(states)]
    counts = standing_for(moved, 1, {1.0: 6, "auto": 3}[replay])
    early, late = trained.initial.zeros(), trained.initial.zeros()
    for number, count in counts.items():
        state, after = trained.history.state(number - 1), trained.history.state(number)
        without = average(state, masked_round(learnt, request, state, number, [0, 1, 2, 3]), trained.training, number)
        if number == 1:
            early = early + count * (after - without.state)
        else:
            late = late + count * (after - without.state)
    scale = (trained.final - trained.initial).norm() / 1000
    assert (written.early - early).norm() < scale and (written.late - late).norm() < scale
    assert late.norm() > 50 * scale
    assert written.rounds == tuple(counts) and written.last_early == 1


def test_only_holders_replay_and_only_rounds_they_took_part_in(learnt, few, tmp_path) -> None:
    """Clients 0, 1 and 2 hold forget pairs; of two rounds client 1 was in the second alone."""
    training = learnt.trained.training.model_copy(update={"rounds": 2})
    trained = Trained(History(tmp_path), training, learnt.trained.temperature, learnt.trained.seed)
    federation, state = learnt.world.federation, learnt.trained.initial
    state.save(trained.history.initial_path)
    for number, clients in enumerate([(0, 2, 3), (0, 1, 3)], start=1):
        answers = federation.run(state, trained.training_job(number), clients)
        finished = average(state, answers, training, number)
        trained.history.append(finished, {})
        state = finished.state

    class Spy(Loop):
        given: ClassVar[dict[int, LocalJob]] = {}

        def perform(self, state, jobs):
            self.given |= jobs
            return super().perform(state, jobs)

    spy = Spy(federation.model, federation.data)
    written = written_by(trained, few, spy, held_of(few, federation), 1.0)
    assert {client: [each.round for each in job.replays] for client, job in spy.given.items()} == {
        0: [1, 2], 1: [2], 2: [1],
    }  # fmt: skip
    expected = trained.initial.zeros()
    for number, clients in enumerate([(0, 2, 3), (0, 1, 3)], start=1):
        before, after = trained.history.state(number - 1), trained.history.state(number)
        expected = expected + (
            after - average(before, masked_round(learnt, few, before, number, clients), training, number).state
        )
    assert (written.total - expected).norm() < 0.01 * expected.norm()


def test_a_request_that_names_nothing_wrote_nothing(learnt) -> None:
    request, federation = SampleRequest(ids=("elsewhere",)), learnt.world.federation
    written = written_by(learnt.trained, request, federation, held_of(request, federation), "auto")
    assert written.total.norm() == pytest.approx(0, abs=1e-5) and written.clients == 0


def test_a_client_left_with_one_pair_counts_no_more(learnt) -> None:
    """It could not train on one pair, so its round would have been the others' mean."""
    federation, trained = learnt.world.federation, learnt.trained
    request = SampleRequest(ids=federation.data[0].shard.train_ids[1:])
    written = written_by(trained, request, federation, held_of(request, federation), "auto")
    expected = written_by(trained, ClientRequest(clients=(0,)), Nobody(), {}, "auto")
    close(written.total, expected.total, 1e-5)


def test_a_second_request_does_not_subtract_the_first_again(learnt) -> None:
    """What both wrote together is what the first wrote and then the second."""
    federation, trained = learnt.world.federation, learnt.trained
    data = federation.data[0]
    first, second = (SampleRequest(ids=data.shard.train_ids[part]) for part in (slice(20), slice(20, 21)))
    together = SampleRequest(ids=first.ids + second.ids)
    one, both = (written_by(trained, each, federation, held_of(each, federation), "auto") for each in (first, together))
    kept = ~forget_mask(first, data.shard)
    left = ClientData(data.shard.keep(kept), data.train.take(np.flatnonzero(kept)), data.validation)
    later = Loop(federation.model, {**federation.data, 0: left})
    found = written_by(replace(trained, gone=(first,)), second, later, held_of(second, later), "auto")
    assert (found.total - (both.total - one.total)).norm() < 0.05 * (both.total - one.total).norm()


# --- which rounds ---


@pytest.mark.parametrize("rounds", [1, 5, 20, 33, 100])
@pytest.mark.parametrize("replay", ["auto", 0.01, 0.25, 0.9, 1.0])
@pytest.mark.parametrize("concerned", [0.1, 1.0])
def test_replayed_rounds_stand_for_the_whole_way(rounds: int, replay, concerned: float) -> None:
    count = replay_count(rounds, concerned, replay)
    if replay == "auto":
        assert count == (rounds if concerned < 1 / 3 else min(max(1, round(rounds / 2)), 32))
    else:
        assert count == max(1, round(replay * rounds))
    moved, early = [1 / number for number in range(1, rounds + 1)], max(1, round(0.2 * rounds))
    used = standing_for(moved, early, count)
    assert list(used) == sorted(used) and set(used) <= set(range(1, rounds + 1)) and 1 <= len(used) <= count
    stood_for = sum(weight * moved[number - 1] for number, weight in used.items())
    assert stood_for == pytest.approx(sum(moved))
    if 2 * early <= count:
        assert [used.get(number) for number in range(1, early + 1)] == [1.0] * early
    if count == rounds:
        assert used == dict.fromkeys(range(1, rounds + 1), 1.0)


def test_later_rounds_are_parted_by_how_far_the_model_moved() -> None:
    # Of the way 4 + 2 + 1 + 1 after two early rounds, the first half is round 3, the second rounds 4 to 6.
    assert standing_for([9, 9, 4, 2, 1, 1], 2, 4) == {1: 1, 2: 1, 3: 1, 5: 4}
    assert standing_for([1, 1, 1, 1], 2, 1) == {2: 4}  # too few to tell early ones apart
    assert standing_for([0, 0, 0, 0], 1, 2) == {1: 1, 3: 3}  # a model that never moved


# --- what closed requests leave in stored updates ---


@pytest.mark.parametrize("leaving", [1, 0], ids=["another", "its holder"])
def test_after_pairs_are_gone_a_leaving_client_wrote_what_rounds_without_them_say(learnt, leaving: int) -> None:
    """By hand: in every round the holder's update is what it would have sent without the pairs."""
    gone = SampleRequest(ids=learnt.world.shards[0].train_ids[:12])
    here, request = learnt.world.without(gone), ClientRequest(clients=(leaving,))
    trained = replace(learnt.trained, gone=(gone,), answered=learnt.trained.final)
    written = written_by(trained, request, here.federation, {}, 1.0)
    history, pairs = trained.history, {shard.client: len(shard.train) for shard in here.shards}
    expected = {name: np.zeros(tuple(tensor.shape)) for name, tensor in trained.final.tensors.items()}
    stored = {name: np.zeros(tuple(tensor.shape)) for name, tensor in trained.final.tensors.items()}
    for number in range(1, trained.training.rounds + 1):
        job = trained.training_job(number, request=SampleRequest(ids=()), objective=ROUND)
        (again,) = here.federation.run(history.start(number), job, [0])
        for client in pairs:
            did = pairs[client] / sum(pairs.values())
            would = 0 if client == leaving else pairs[client] / (sum(pairs.values()) - pairs[leaving])
            told = history.update(number, client).change
            change = again.change if client == 0 else told
            for name in expected:
                expected[name] += (did - would) * change[name].double().numpy()
                stored[name] += (did - would) * told[name].double().numpy()
    off = sum(float(((written.total[name].double().numpy() - expected[name]) ** 2).sum()) for name in expected) ** 0.5
    stale = sum(float(((stored[name] - expected[name]) ** 2).sum()) for name in expected) ** 0.5
    assert stale > 0.01 and off < 0.01 * stale  # what replays send is rounded to half precision


def test_clients_that_hold_what_they_held_repeat_nothing(learnt) -> None:
    gone = ClientRequest(clients=(3,))
    trained = replace(learnt.trained, gone=(gone,), answered=learnt.trained.final)
    here = learnt.world.without(gone)

    class Silent(Loop):
        def run(self, params, job, clients):
            raise AssertionError("no client may be asked")

    federation = Silent(here.server.model, here.federation.data)
    assert written_by(trained, ClientRequest(clients=(1,)), federation, {}, "auto").clients == 0
