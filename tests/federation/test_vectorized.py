"""Training together equals training alone, whatever the shard sizes, the optimiser and the job."""

import copy
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from ease.data import examples as examples_module
from ease.data.examples import Streamed, examples_at
from ease.errors import UserError
from ease.federation import microbatching as groups_module
from ease.federation import vectorized as cohort_module
from ease.federation.local import train
from ease.federation.lock import LockMessage, pack_directions
from ease.federation.microbatching import GroupSize, train_all, train_in_groups
from ease.federation.protocol import LocalJob, Optimiser, Replay
from ease.federation.sequential import Sequential
from ease.federation.stacked import train_stacked, training_of
from ease.federation.vectorized import Vectorized
from ease.requests.request import SampleRequest
from ease.seeding import generator
from ease.subspace import Basis


@pytest.mark.parametrize("optimiser", [Optimiser(learning_rate=0.5), Optimiser(kind="adam", learning_rate=0.01)])
@pytest.mark.parametrize("lengths", [(20, 20, 18), (20, 7, 2)], ids=["even", "uneven"])
def test_vectorized_equals_sequential(world, local_job, optimiser: Optimiser, lengths: tuple[int, ...]) -> None:
    job = local_job(optimiser=optimiser, epochs=2)
    start = world.server.initial()
    alone, trainings, offset = [], [], 0
    shards = world.shards
    pool = examples_at(world.evaluator.activations, np.concatenate([shard.train for shard in shards]), "cpu")
    for shard, length in zip(shards, lengths, strict=True):
        data = world.federation.data[shard.client]
        kept = type(data)(shard, data.train.take(np.arange(min(length, len(data.train)))), data.validation)
        alone.append(train(world.server.model, start, kept, job))
        rng = generator(job.seed, job.stream, job.round, shard.client)
        trainings.append(training_of(start, offset + np.arange(len(kept.train)), 5, job, rng))
        offset += len(shard.train)
    together = train_stacked(world.server.model, pool, trainings, job)
    for one, other in zip(alone, together, strict=True):
        assert one.delta.norm() > 0.01
        for name, tensor in one.delta.tensors.items():
            # Adam divides by the size of tiny gradients, which enlarges rounding.
            tolerance = 1e-4 if optimiser.kind == "sgd" else 2e-3
            torch.testing.assert_close(other.delta[name], tensor, rtol=tolerance, atol=tolerance)
        assert float(other.loss) == pytest.approx(float(one.values["loss"]), rel=1e-4)


def test_pupils_do_not_touch_each_other(world, local_job) -> None:
    """A training's result is the same beside a training with other data and another start.

    In double precision: more rows are multiplied in another order, which in single precision moves values by 1e-5.
    """
    job, model = local_job(), copy.deepcopy(world.server.model).double()
    pool, start = world.federation.data[0].train, model.initial()
    pool = replace(pool, image=pool.image.double(), text=pool.text.double())
    other = start.map(lambda tensor: tensor + 0.1)

    def drawn(seed: int, begin) -> object:
        return training_of(begin, np.arange(len(pool)), 5, job, generator(seed, "draw"))

    alone = train_stacked(model, pool, [drawn(0, start)], job)[0]
    beside = train_stacked(model, pool, [drawn(1, other), drawn(0, start)], job)[1]
    for name, tensor in alone.delta.tensors.items():
        torch.testing.assert_close(beside.delta[name], tensor, rtol=0, atol=1e-12)


def test_threads_do_not_mix_the_tensors_of_their_passes(adapted, local_job) -> None:
    """Adapters are given to layers for a pass; each of many trainings by threads is what it is alone, to the bit."""
    world, job = adapted.world, local_job(epochs=2)
    pool, start = world.federation.data[0].train, adapted.trained.final
    trainings = [
        training_of(
            start.map(lambda t, n=n: t * (1 + n)), np.arange(len(pool)), pool.captions, job, generator(n, "draw")
        )
        for n in range(6)
    ]
    before, pause = torch.get_num_threads(), sys.getswitchinterval()
    torch.set_num_threads(1)
    alone = [train_stacked(world.server.model, pool, [one], job)[0] for one in trainings]
    try:
        torch.set_num_threads(3)
        sys.setswitchinterval(1e-6)
        beside = train_all(world.server.model, pool, trainings, job, GroupSize(1))
    finally:
        sys.setswitchinterval(pause)
        torch.set_num_threads(before)
    for one, other in zip(alone, beside, strict=True):
        assert one.delta.norm() > 0.01
        assert all(torch.equal(other.delta[name], tensor) for name, tensor in one.delta.tensors.items())


def test_blocks_that_are_computed_again_on_the_way_back_go_in_one_thread(adapted, local_job, monkeypatch) -> None:
    """They are given their tensors then, where nothing keeps threads apart; nor do large steps go in threads."""
    model, pool, job = adapted.world.server.model, adapted.world.federation.data[0].train, local_job()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert groups_module._small_steps(model, pool, job)
    assert not groups_module._small_steps(model, pool, replace(job, batch_size=10_000))
    monkeypatch.setattr(model, "config", model.config.model_copy(update={"checkpointing": True}))
    assert not groups_module._small_steps(model, pool, job)


# --- every job that shares a pass gives what the clients alone give ---


def jobs(adapted, local_job) -> dict[str, LocalJob]:
    shards = adapted.world.shards
    request = SampleRequest(ids=tuple(pair_id for shard in shards for pair_id in shard.train_ids[:5]))
    final = adapted.trained.final
    rng = torch.Generator().manual_seed(0)
    bases = {}
    for block in final.blocks:
        size = sum(final[name].numel() for name in block.tensors)
        bases[block.name] = Basis(
            torch.linalg.qr(torch.randn(size, 2, generator=rng)).Q, torch.eye(2), torch.tensor([1.0, 0.5])
        )
    reference = final.map(lambda tensor: tensor + 0.1)
    lock = LockMessage(0.2, reference, pack_directions(bases))
    common = {"request": request, "data": "retain"}
    return {
        "difference": local_job(
            objective="difference", request=request, data="forget", settings={"retain": 0.5, "forget": 0.5}, clip=0.1
        ),
        "unlearning": local_job(objective="unlearning cross-entropy", request=request, data="forget", radius=0.05),
        "lock": local_job(lock=lock, **common),
        "replay": local_job(
            objective="replay",
            request=request,
            replays=(Replay(1, final, 0.5, 0), Replay(2, reference, 0.5, 0, (0, 1)), Replay(3, final, 1.0, 1)),
        ),
        "ternary": local_job(objective="ternary", settings={"threshold": 0.5, "noise": 0.3}, **common),
        "streamed": local_job(**common),
        "scores": local_job(objective="membership scores", request=request),
    }


NAMES = ("difference", "unlearning", "lock", "replay", "ternary", "streamed", "scores")


@pytest.mark.parametrize("name", NAMES)
def test_a_cohort_answers_as_its_clients_would(adapted, local_job, monkeypatch, name: str) -> None:
    """Federated for real: shards of unequal size, and clients that replay different rounds."""
    world, job = adapted.world, replace(jobs(adapted, local_job)[name], epochs=2)
    if name == "streamed":
        monkeypatch.setattr(examples_module, "_fits", lambda *_: False)
    if name == "scores":  # as on a GPU, where each would leave it idle
        monkeypatch.setattr(cohort_module, "can_measure_vectorized", lambda job, device: True)
    cohort = Vectorized.of(world.server.model, world.shards, world.evaluator.activations, world.server.device)
    assert isinstance(cohort.pool.examples.image, Streamed) is (name == "streamed")
    alone = Sequential(world.server.model, world.federation.data)
    clients = alone.clients
    together, apart = (list(each.run(adapted.trained.final, job, clients)) for each in (cohort, alone))
    assert [update.client for update in together] == list(clients)
    for one, other in zip(together, apart, strict=True):
        mine, theirs = (
            {**({} if update.delta is None else update.delta.tensors), **update.values} for update in (one, other)
        )
        assert one.pairs == other.pairs and mine.keys() == theirs.keys()
        for key, value in theirs.items():
            if value.dtype in (torch.int8, torch.uint8):  # rounding may fall to either side
                assert float((mine[key] == value).float().mean()) > 0.98
            else:
                torch.testing.assert_close(mine[key], value, rtol=2e-3, atol=2e-4)
    assert any(update.delta is not None and update.delta.norm() > 0.01 for update in apart) or name in (
        "replay",
        "ternary",
        "scores",
    )


def test_jobs_that_cannot_share_a_pass_run_by_themselves(adapted, local_job) -> None:
    world = adapted.world
    request = SampleRequest(ids=world.shards[0].train_ids[:4])
    job = local_job(objective="decouple", request=request, settings={"forget": 1.0}, reference=adapted.trained.final)
    cohort = Vectorized.of(world.server.model, world.shards, world.evaluator.activations, world.server.device)
    alone = Sequential(world.server.model, world.federation.data)
    for one, other in zip(*(each.run(adapted.trained.final, job, [0, 1]) for each in (cohort, alone)), strict=True):
        assert one.delta is not None and other.delta is not None
        assert all(torch.equal(one.delta[name], tensor) for name, tensor in other.delta.tensors.items())


def test_a_job_without_clients_has_no_answer(world, local_job) -> None:
    """As where all who answer a round are leaving, or every answer is estimated."""
    cohort = Vectorized.of(world.server.model, world.shards, world.evaluator.activations, world.server.device)
    for engine in (cohort, world.federation):
        assert list(engine.run(world.server.initial(), local_job(), [])) == []


def test_a_group_that_does_not_fit_is_halved_and_stays_so(monkeypatch) -> None:
    """Space for four, ten trainings: 10 and 5 fail, then 3 at a time; the next round begins with 3 at once."""
    tried: list[int] = []

    def train(model, examples, group, job):
        tried.append(len(group))
        if len(group) > 4:
            raise torch.OutOfMemoryError
        return list(group)

    monkeypatch.setattr(groups_module, "train_stacked", train)
    room = GroupSize(512)
    for _ in range(2):
        assert list(train_in_groups(None, None, list(range(10)), None, room)) == list(range(10))  # type: ignore[arg-type]
    assert tried == [10, 5, 3, 3, 3, 1, 3, 3, 3, 1]


def test_a_single_batch_that_does_not_fit_is_one_clear_line(world, local_job, monkeypatch) -> None:
    def train(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(groups_module, "train_stacked", train)
    pool, job = world.federation.data[0].train, local_job(batch_size=77)
    one = training_of(world.server.initial(), np.arange(8), 5, job, generator(0, "draw"))
    with pytest.raises(UserError, match=r"training\.batch_size = 77.*choose a smaller one"):
        list(train_in_groups(world.server.model, pool, [one, one], job, GroupSize(512)))


def test_a_batch_that_fits_with_checkpointing_is_trained_with_it(monkeypatch) -> None:
    """One that does not fit alone is tried again once memory is saved; the next one needs no second try."""
    model = type("Model", (), {"saving": False})()
    tried = []

    def save_memory() -> bool:
        already, model.saving = model.saving, True
        return not already

    def train(model, examples, group, job):
        tried.append((len(group), model.saving))
        if not model.saving:
            raise torch.OutOfMemoryError
        return list(group)

    model.save_memory = save_memory
    monkeypatch.setattr(groups_module, "train_stacked", train)
    assert list(train_in_groups(model, None, [0, 1], None, GroupSize(2))) == [0, 1]  # type: ignore[arg-type]
    assert tried == [(2, False), (1, False), (1, True), (1, True)]
