"""Training together equals training alone, whatever the shard sizes and the optimiser."""

import numpy as np
import pytest
import torch

from ease.federation.cohort import pupil, train_together
from ease.federation.local import examples_at, train
from ease.federation.protocol import Optimiser
from ease.seeding import generator


@pytest.mark.parametrize("optimiser", [Optimiser(learning_rate=0.5), Optimiser(kind="adam", learning_rate=0.01)])
@pytest.mark.parametrize("lengths", [(20, 20, 18), (20, 7, 2)], ids=["even", "uneven"])
def test_together_equals_one_after_the_other(world, local_job, optimiser: Optimiser, lengths: tuple[int, ...]) -> None:
    job = local_job(optimiser=optimiser, epochs=2)
    start = world.initial()
    alone, pupils, offset = [], [], 0
    shards = world.shards
    pool = examples_at(world.activations, np.concatenate([shard.train for shard in shards]), "cpu")
    for shard, length in zip(shards, lengths, strict=True):
        data = world.federation.data[shard.client]
        kept = type(data)(shard, data.train.take(np.arange(min(length, len(data.train)))), data.validation)
        alone.append(train(world.model, start, kept, job))
        rng = generator(job.seed, job.stream, job.round, shard.client)
        pupils.append(pupil(start, offset + np.arange(len(kept.train)), 5, job, rng))
        offset += len(shard.train)
    together = train_together(world.model, pool, pupils, job)
    for one, other in zip(alone, together, strict=True):
        assert one.delta.norm() > 0.01
        for name, tensor in one.delta.tensors.items():
            # Adam divides by the size of tiny gradients, which enlarges rounding.
            tolerance = 1e-4 if optimiser.kind == "sgd" else 2e-3
            torch.testing.assert_close(other.delta[name], tensor, rtol=tolerance, atol=tolerance)
        assert float(other.loss) == pytest.approx(float(one.values["loss"]), rel=1e-4)


def test_pupils_do_not_touch_each_other(world, local_job) -> None:
    """A pupil's lesson is the same beside a pupil with other data and another start."""
    job, start = local_job(), world.initial()
    pool = world.federation.data[0].train
    other = start.map(lambda tensor: tensor + 0.1)

    def drawn(seed: int, begin) -> object:
        return pupil(begin, np.arange(len(pool)), 5, job, generator(seed, "draw"))

    alone = train_together(world.model, pool, [drawn(0, start)], job)[0]
    beside = train_together(world.model, pool, [drawn(1, other), drawn(0, start)], job)[1]
    for name, tensor in alone.delta.tensors.items():
        torch.testing.assert_close(beside.delta[name], tensor, rtol=1e-4, atol=1e-6)
