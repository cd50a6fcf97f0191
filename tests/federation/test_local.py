"""The local loop: one stream per (seed, round, client), one caption per image, and a change that can be averaged."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from ease.data.examples import examples_at
from ease.federation.client import ClientData
from ease.federation.local import batches, train, work
from ease.federation.lock import rounded
from ease.federation.protocol import Optimiser
from ease.params import Params
from ease.requests.request import ClientRequest, SampleRequest


@pytest.fixture(scope="module")
def client(world) -> ClientData:
    return ClientData.of(world.shards[1], world.evaluator.activations, "cpu")


def equal(one: Params | None, two: Params | None) -> bool:
    assert one is not None and two is not None
    return all(torch.equal(one[name], two[name]) for name in one.tensors)


def test_the_same_job_gives_the_same_bytes(world, client, local_job) -> None:
    one, two = (train(world.server.model, world.server.initial(), client, local_job()) for _ in range(2))
    assert equal(one.delta, two.delta) and torch.equal(one.values["loss"], two.values["loss"])
    assert one.pairs == len(client.train) == len(world.shards[1].train)
    assert one.client == 1 and one.delta is not None and one.delta.norm() > 0


@pytest.mark.parametrize("change", [{"seed": 1}, {"round": 2}, {"stream": "probe"}])
def test_another_stream_gives_another_update(world, client, local_job, change) -> None:
    one = train(world.server.model, world.server.initial(), client, local_job())
    other = train(world.server.model, world.server.initial(), client, local_job(**change))
    assert not equal(one.delta, other.delta)


def test_clients_with_equal_data_draw_from_streams_of_their_own(world, client, local_job) -> None:
    twin = replace(client, shard=replace(client.shard, client=7))
    one, other = (train(world.server.model, world.server.initial(), each, local_job()) for each in (client, twin))
    assert not equal(one.delta, other.delta)


def test_training_changes_neither_the_state_nor_the_model(world, client, local_job) -> None:
    state, before = (
        world.server.initial(),
        {name: tensor.clone() for name, tensor in world.server.model.state_dict().items()},
    )
    train(world.server.model, state, client, local_job())
    assert equal(state, world.server.initial())
    assert not any(tensor.requires_grad for tensor in state.tensors.values())
    assert all(torch.equal(tensor, before[name]) for name, tensor in world.server.model.state_dict().items())


def test_one_step_of_sgd_is_the_gradient(world, client, local_job) -> None:
    """With one batch of all pairs the update is minus the rate times the gradient, by finite differences."""
    job = local_job(batch_size=10_000, optimiser=Optimiser(learning_rate=1e-3, lora_learning_rate=0.1))
    state = world.server.initial()
    first = train(world.server.model, state, client, job)
    assert first.delta is not None
    name = "image.projector.1.bias"
    gradient = first.delta[name] / -1e-3
    direction = gradient / gradient.norm()
    losses = []
    for sign in (1, -1):
        moved = state.replace({name: state[name] + sign * 1e-2 * direction})
        losses.append(float(train(world.server.model, moved, client, job).values["loss"]))
    assert (losses[0] - losses[1]) / 2e-2 == pytest.approx(float(gradient.norm()), rel=0.02)


def test_adapters_may_have_a_rate_of_their_own(world, client, local_job) -> None:
    job = local_job(batch_size=10_000)
    plain = train(world.server.model, world.server.initial(), client, job).delta
    scaled = train(
        world.server.model,
        world.server.initial(),
        client,
        local_job(batch_size=10_000, optimiser=Optimiser(learning_rate=0.5, lora_learning_rate=1.0)),
    ).delta
    assert plain is not None and scaled is not None
    for block in plain.blocks:
        for name in block.tensors:
            torch.testing.assert_close(scaled[name], plain[name] * (2 if block.kind == "lora" else 1))


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_training_lowers_the_loss(world, client, local_job, kind) -> None:
    rate = 0.5 if kind == "sgd" else 0.01
    job = local_job(epochs=10, optimiser=Optimiser(kind=kind, learning_rate=rate))
    update = train(world.server.model, world.server.initial(), client, job)
    assert update.delta is not None
    before = train(world.server.model, world.server.initial(), client, local_job()).values["loss"]
    after = train(world.server.model, world.server.initial() + update.delta, client, local_job()).values["loss"]
    assert after < 0.7 * before


def test_each_batch_has_one_caption_per_image(world, client, local_job, monkeypatch) -> None:
    seen: list[tuple[str, int]] = []
    embed = type(world.server.model).embed

    def spy(self, tensors, modality, states, mask=None):
        seen.append((modality, len(states)))
        return embed(self, tensors, modality, states, mask)

    monkeypatch.setattr(type(world.server.model), "embed", spy)
    train(world.server.model, world.server.initial(), client, local_job(epochs=2))
    sizes = [size for modality, size in seen if modality == "image"]
    assert sizes == [size for modality, size in seen if modality == "text"]
    assert sum(sizes) == 2 * len(client.train)


@pytest.mark.parametrize("pairs", [2, 3, 5, 7, 18, 31])
@pytest.mark.parametrize("batch_size", [2, 4, 8, 100])
def test_an_epoch_sees_every_pair_once_in_batches_of_nearly_equal_size(local_job, pairs: int, batch_size: int) -> None:
    drawn = list(batches(np.arange(pairs), local_job(batch_size=batch_size), np.random.default_rng(0)))
    np.testing.assert_array_equal(np.sort(np.concatenate(drawn)), np.arange(pairs))
    sizes = [len(batch) for batch in drawn]
    assert max(sizes) - min(sizes) <= 1 and min(sizes) >= 2 and max(sizes) < 2 * batch_size


def test_jobs_speak_of_all_or_retained_or_forget_pairs(world, client, local_job) -> None:
    request = SampleRequest(ids=client.shard.train_ids[:4])
    picked = {
        data: client.select(local_job(request=request, data=data)).tolist() for data in ("all", "retain", "forget")
    }
    everything = list(range(len(client.train)))
    assert picked == {"all": everything, "retain": everything[4:], "forget": everything[:4]}
    assert (
        train(world.server.model, world.server.initial(), client, local_job(request=request, data="forget")).pairs == 4
    )


@pytest.mark.parametrize("kept", [0, 1])
def test_a_client_with_too_few_pairs_abstains(world, client, local_job, kept: int) -> None:
    request = SampleRequest(ids=client.shard.train_ids[kept:]) if kept else ClientRequest(clients=(1,))
    update = work(world.server.model, world.server.initial(), client, local_job(request=request, data="retain"))
    assert (update.pairs, update.delta) == (0, None)


def test_a_state_in_half_precision_is_trained_in_single(world, client, local_job) -> None:
    half = world.server.initial().map(torch.Tensor.half)
    update = work(world.server.model, half, client, local_job())
    assert update.delta is not None and all(tensor.dtype == torch.float32 for tensor in update.delta.tensors.values())


@pytest.mark.parametrize("scale", [1e-12, 1e-3, 1.0, 1e6])
def test_eight_bits_lose_at_most_half_a_step(scale: float) -> None:
    for whole in (scale * torch.randn(7, 5), scale * torch.ones(3), torch.tensor([-scale])):
        values, step = rounded(whole)
        received = values.float() * step
        assert values.dtype == torch.int8
        assert float((received - whole).abs().max()) <= float(whole.abs().max()) / 127 / 2 * 1.001
        again, same_step = rounded(received)
        assert torch.equal(again, values) and torch.allclose(same_step, step, rtol=1e-6, atol=0)


def test_zeros_survive_packing() -> None:
    values, step = rounded(torch.zeros(3))
    assert not (values * step).any()


def test_examples_are_copies_of_the_cache(world, client) -> None:
    """The cache is mapped read-only; a tensor over it could not be trusted to stay so."""
    examples = examples_at(world.evaluator.activations, world.shards[1].train, "cpu")
    np.testing.assert_array_equal(examples.image, world.evaluator.activations.image[world.shards[1].train])
    np.testing.assert_array_equal(examples.text, world.evaluator.activations.text[world.shards[1].train])
    examples.image.zero_()
    assert world.evaluator.activations.image[world.shards[1].train].any()


# --- clipping and the ball ---


def test_a_clipped_step_is_no_longer_than_rate_times_clip(world, client, local_job) -> None:
    free = train(world.server.model, world.server.initial(), client, local_job(batch_size=10_000)).delta
    clipped = train(world.server.model, world.server.initial(), client, local_job(batch_size=10_000, clip=0.01)).delta
    assert free is not None and clipped is not None
    assert free.norm() > 0.5 * 0.02 and clipped.norm() == pytest.approx(0.5 * 0.01, rel=1e-3)
    assert clipped.dot(free) == pytest.approx(clipped.norm() * free.norm(), rel=1e-4)


def test_training_stays_in_its_ball_at_every_step(world, client, local_job) -> None:
    """Projected once at the end it would end elsewhere: later gradients are taken inside the ball."""
    job = local_job(epochs=2, optimiser=Optimiser(learning_rate=1.0))
    free = train(world.server.model, world.server.initial(), client, job).delta
    assert free is not None
    radius = free.norm() / 3
    bound = train(world.server.model, world.server.initial(), client, replace(job, radius=radius)).delta
    assert bound is not None
    assert bound.norm() <= radius * (1 + 1e-4)
    assert not equal(bound, free * (radius / free.norm()))
    wide = train(world.server.model, world.server.initial(), client, replace(job, radius=10 * free.norm())).delta
    assert equal(wide, free)
