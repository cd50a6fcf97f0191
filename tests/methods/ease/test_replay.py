"""A replay repeats training batch for batch: with nothing to forget to the byte, else as a naive loop does."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from ease.federation.client import ClientData
from ease.federation.local import draws_of
from ease.federation.objectives import embed_states
from ease.federation.protocol import Replay, Update
from ease.federation.sequential import Sequential
from ease.federation.vectorized import Vectorized
from ease.methods.ease.replay import REPLAY, ROUND, read_sum
from ease.model.losses import info_nce
from ease.params import Params
from ease.requests.request import ClassRequest, SampleRequest
from ease.seeding import generator

NOTHING = SampleRequest(ids=())


@pytest.fixture(scope="module")
def cohort(learnt) -> Vectorized:
    world = learnt.world
    return Vectorized.of(world.server.model, world.shards, world.evaluator.activations, torch.device("cpu"))


def replayed(learnt, client: int, number: int, request, data: ClientData | None = None) -> Update:
    """One round of training again, from the state that it began from."""
    job = learnt.trained.training_job(number, request=request, objective=ROUND)
    state = learnt.trained.history.start(number)
    alone = Sequential(learnt.world.server.model, {client: data or learnt.world.federation.data[client]})
    (update,) = alone.run(state, job, [client])
    return update


def naive(learnt, client: int, number: int, forgotten: set[str]) -> Params:
    """Plain SGD, one batch at a time: shuffle, split, draw captions, leave out who is forgotten, and step.

    If those who are left make fewer batches, they fill these in the same order.
    """
    training, data = learnt.trained.training, learnt.world.federation.data[client]
    rng = generator(learnt.trained.seed, "train", number, client)
    start = learnt.trained.history.start(number)
    tensors = {name: tensor.clone() for name, tensor in start.tensors.items()}
    pairs, ids = len(data.train), data.shard.train_ids
    left = sum(pair_id not in forgotten for pair_id in ids)
    count, fewer = (max(1, min(round(each / training.batch_size), each // 2)) for each in (pairs, left))
    for _ in range(training.local_epochs):
        drawn = []
        for batch in np.array_split(rng.permutation(np.arange(pairs)), count):
            captions = rng.integers(data.train.captions, size=len(batch))
            drawn.append([(p, c) for p, c in zip(batch, captions, strict=True) if ids[p] not in forgotten])
        if fewer < count:
            order = [each for batch in drawn for each in batch]
            sizes = [left // fewer + (number < left % fewer) for number in range(fewer)]
            drawn = [[order.pop(0) for _ in range(size)] for size in sizes]
        for batch in drawn:
            if len(batch) < 2:
                continue
            rows, chosen = (np.array(each) for each in zip(*batch, strict=True))
            leaves = {name: tensor.requires_grad_() for name, tensor in tensors.items()}
            image, text = embed_states(learnt.world.server.model, leaves, data.train.batch(rows, chosen))
            info_nce(image, text, learnt.trained.temperature).backward()
            tensors = {name: (t - training.learning_rate * t.grad).detach() for name, t in leaves.items()}
    return Params(tensors, start.blocks) - start


def close(one: Params, two: Params) -> None:
    """In single precision, by gradients that are written out here and left to autograd there."""
    assert (one - two).norm() < 40 * torch.finfo(torch.float32).eps * two.norm()


@pytest.mark.parametrize("number", [1, 6])
def test_without_forget_pairs_a_replay_is_the_training_to_the_byte(learnt, number: int) -> None:
    for client in learnt.world.federation.clients:
        assert replayed(learnt, client, number, NOTHING).delta == learnt.trained.history.update(number, client).delta


def test_without_forget_pairs_a_replay_in_a_cohort_is_the_training(learnt, cohort) -> None:
    history = learnt.trained.history
    job = learnt.trained.training_job(4, request=NOTHING, objective=ROUND)
    for update in cohort.run(history.start(4), job, [0, 1, 2, 3]):
        change = history.update(4, update.client).change
        # In single precision, whose sums each processor takes in another order; test_engines compares in double.
        assert (update.change - change).norm() < 40 * torch.finfo(torch.float32).eps * change.norm()


@pytest.mark.parametrize("forget", [1, 10, 30, -3])
def test_a_replay_is_training_on_the_same_batches_without_the_forget_pairs(learnt, forget: int) -> None:
    ids = learnt.world.shards[1].train_ids
    gone = ids[:forget]
    update = replayed(learnt, 1, 3, SampleRequest(ids=gone))
    expected = naive(learnt, 1, 3, set(gone))
    close(update.change, expected)
    assert (update.change - learnt.trained.history.update(3, 1).change).norm() > 1e-3


def test_a_replay_takes_as_many_steps_as_retraining_would(learnt) -> None:
    """Every step moves by the mean over its batch, so a step too many trains the pairs that are left too much."""
    data, training = learnt.world.federation.data[1], learnt.trained.training
    for forget in (1, 10, 30, len(data.train) - 3):
        request = SampleRequest(ids=data.shard.train_ids[:forget])
        again, retrained = (
            draws_of(data, learnt.trained.training_job(2, request=request, objective=objective, data="retain"))
            for objective in (ROUND, "align")
        )
        assert len(again.draws) == len(retrained.draws)
        seen = np.concatenate([draw.rows for draw in again.draws])
        assert sorted(seen) == sorted([*range(forget, len(data.train))] * training.local_epochs)


def test_a_client_that_keeps_one_pair_abstains(learnt) -> None:
    for kept in (0, 1):
        update = replayed(learnt, 1, 2, SampleRequest(ids=learnt.world.shards[1].train_ids[kept:]))
        assert update.delta is None and update.pairs == 0


def test_a_class_is_left_out_by_its_label(learnt) -> None:
    shard = learnt.world.shards[1]
    ids = {pair_id for pair_id, label in zip(shard.train_ids, shard.train_classes, strict=True) if label == 2}
    assert len(ids) > 3
    close(replayed(learnt, 1, 1, ClassRequest(classes=(2,))).change, naive(learnt, 1, 1, ids))


def test_a_shard_that_remembers_places_replays_the_same_batches(learnt) -> None:
    """Pairs that went with an earlier request leave gaps, and nobody moves up."""
    data = learnt.world.federation.data[1]
    ids = data.shard.train_ids
    kept = np.array([n not in (0, 5, 6, 17) for n in range(len(ids))])
    smaller = replace(data, shard=data.shard.keep(kept), train=data.train.take(np.flatnonzero(kept)))
    gone = {ids[n] for n in (0, 5, 6, 17)}
    close(replayed(learnt, 1, 2, NOTHING, smaller).change, naive(learnt, 1, 2, gone))
    later = SampleRequest(ids=(ids[1], ids[20]))
    close(replayed(learnt, 1, 2, later, smaller).change, naive(learnt, 1, 2, gone | set(later.ids)))
    twice = np.array([pair_id not in later.ids for pair_id in smaller.shard.train_ids])
    rest = replace(smaller, shard=smaller.shard.keep(twice), train=smaller.train.take(np.flatnonzero(twice)))
    assert rest.shard.dealt == len(ids) and list(rest.shard.places[:2]) == [2, 3]
    close(replayed(learnt, 1, 2, NOTHING, rest).change, naive(learnt, 1, 2, gone | set(later.ids)))


# --- several rounds as one job ---


def job_of(learnt, request, *rounds: tuple[int, float, int]):
    replays = tuple(Replay(n, learnt.trained.history.start(n), weight, group) for n, weight, group in rounds)
    return learnt.trained.training_job(0, request=request, objective=REPLAY, replays=replays)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_the_answer_is_the_weighted_sum_of_each_group(learnt, cohort, engine: str) -> None:
    federation = cohort if engine == "vectorized" else learnt.world.federation
    ids = {client: learnt.world.shards[client].train_ids[:8] for client in (0, 1)}
    request = SampleRequest(ids=ids[0] + ids[1])
    job = job_of(learnt, request, (1, 0.5, 0), (3, 0.25, 1), (5, 2.0, 1))
    start = learnt.trained.final
    for update in federation.run(start, job, [0, 1]):
        assert update.delta is None and update.pairs == len(federation.members[update.client]) - 8
        changes = {n: naive(learnt, update.client, n, set(ids[update.client])) for n in (1, 3, 5)}
        for group, expected in ((0, 0.5 * changes[1]), (1, 0.25 * changes[3] + 2.0 * changes[5])):
            found = read_sum(update.values, group, start)
            assert found is not None
            for name, tensor in expected.tensors.items():  # half precision of the largest value in the tensor
                allowed = float(tensor.abs().max()) / 1024 + 1e-6
                torch.testing.assert_close(found[name].float(), tensor, rtol=0, atol=allowed)


def test_a_sum_of_tiny_changes_survives_half_precision(learnt) -> None:
    """A learning rate of 1e-6 moves less than half precision can tell from 0; scaled it can."""
    training = learnt.trained.training.model_copy(update={"learning_rate": 1e-6, "lora_learning_rate": 1e-6})
    small = replace(learnt.trained, training=training)
    replays = (Replay(1, small.initial, 1.0, 0),)
    job = small.training_job(0, request=NOTHING, objective=REPLAY, replays=replays)
    (update,) = learnt.world.federation.run(small.final, job, [0])
    plain = small.training_job(1, request=NOTHING, objective=ROUND)
    (expected,) = learnt.world.federation.run(small.initial, plain, [0])
    found = read_sum(update.values, 0, small.final)
    assert found is not None and 0 < expected.change.norm() < 1e-3
    assert (found - expected.change.map(torch.Tensor.double)).norm() < 1e-3 * expected.change.norm()


def test_one_that_cannot_train_answers_with_nothing(learnt) -> None:
    request = SampleRequest(ids=learnt.world.shards[0].train_ids[1:])
    (update,) = learnt.world.federation.run(learnt.trained.final, job_of(learnt, request, (1, 1.0, 0)), [0])
    assert update.delta is None and update.values == {} and update.pairs == 1
    assert read_sum(update.values, 0, learnt.trained.final) is None


def test_no_forgotten_pair_is_read(learnt, poison, few) -> None:
    poisoned = poison(learnt.world, few)
    job = job_of(learnt, few, (1, 1.0, 0), (4, 1.0, 1))
    for spoilt, whole in zip(
        poisoned.run(learnt.trained.final, job, [0, 1, 2]),
        learnt.world.federation.run(learnt.trained.final, job, [0, 1, 2]),
        strict=True,
    ):
        assert spoilt == whole and all(bool(torch.isfinite(value).all()) for value in spoilt.values.values())
