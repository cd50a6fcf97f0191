"""Projectors' gradients written out are those of autograd, in every job, for one client and for many at once."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.federation.test_gram_layer import CAPTIONS, IMAGE, TEXT, Backbone

from ease.data.features import Activations
from ease.data.partition import Shard
from ease.federation import stacked
from ease.federation.client import ClientData
from ease.federation.local import train
from ease.federation.lock import LockMessage, pack_directions
from ease.federation.objectives import align_slopes, align_stack
from ease.federation.projectors import Factors, Projected
from ease.federation.protocol import Optimiser
from ease.federation.sequential import Sequential
from ease.federation.vectorized import Vectorized
from ease.model.dual_encoder import LEAST_NORM, DualEncoder, ModelConfig
from ease.requests.request import SampleRequest
from ease.subspace import Basis

CPU = torch.device("cpu")
SIZES = (9, 14, 6, 20, 11)
"""Pairs of the clients: batches of unequal size and number."""


@pytest.fixture(scope="module")
def model() -> DualEncoder:
    return DualEncoder(Backbone(), ModelConfig(lora="off", hidden=12, embedding=8), 0).double()  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def activations() -> Activations:
    rng = np.random.default_rng(0)
    image, text = rng.standard_normal((sum(SIZES), IMAGE)), rng.standard_normal((sum(SIZES), CAPTIONS, TEXT))
    return Activations(image, text, None, image, text)


@pytest.fixture(scope="module")
def shards() -> list[Shard]:
    found, start, nobody = [], 0, np.zeros(0, dtype=int)
    for client, size in enumerate(SIZES):
        own = np.arange(start, start + size)
        found.append(Shard(client, own, nobody, tuple(map(str, own)), np.zeros(size, dtype=int), nobody))
        start += size
    return found


@pytest.mark.parametrize("short", [False, True])
def test_gradients_of_one_side_are_those_of_autograd(model, short: bool) -> None:
    """Those of the features' layers too, and where embeddings are too short to be made unit vectors."""
    rng = torch.Generator().manual_seed(0)
    start = {name: t for name, t in model.initial().tensors.items() if name.startswith("image.")}
    stack = {name: t + 0.1 * torch.randn(3, *t.shape, generator=rng, dtype=t.dtype) for name, t in start.items()}
    if short:
        for part in ("weight", "bias"):
            stack[f"image.projector.1.{part}"] *= 1e-8
    pictures = torch.randn(3, 5, IMAGE, generator=rng, dtype=torch.double)
    slope = torch.randn(3, 5, 8, generator=rng, dtype=torch.double)

    projected = Projected.of("image", stack, model.image.features(pictures, None))
    found, hidden = projected.gradients(stack, slope)
    assert bool((projected.lengths == LEAST_NORM).all()) is short

    for number in range(3):
        leaves = {name: tensor[number].clone().requires_grad_() for name, tensor in stack.items()}
        own = model.embed({**model.initial().tensors, **leaves}, "image", pictures[number])
        torch.testing.assert_close(projected.embeddings[number], own.detach(), rtol=1e-12, atol=1e-14)
        (own * slope[number]).sum().backward()
        for name, leaf in leaves.items():
            each = found[name]
            whole = each.product() if isinstance(each, Factors) else each
            torch.testing.assert_close(whole[number], leaf.grad, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(hidden.sum(1), found["image.projector.0.bias"])


@pytest.mark.parametrize("padded", [False, True])
def test_slopes_of_the_contrastive_loss_are_those_of_autograd(local_job, padded: bool) -> None:
    rng = torch.Generator().manual_seed(1)
    image, text = (
        torch.nn.functional.normalize(torch.randn(3, 6, 4, generator=rng, dtype=torch.double), dim=-1).requires_grad_()
        for _ in range(2)
    )
    valid = torch.arange(6) < torch.tensor([6, 4, 2])[:, None] if padded else None
    losses = align_stack(image, text, valid, local_job())
    slopes = torch.autograd.grad(losses.sum(), [image, text])
    with torch.no_grad():
        reported = align_slopes(image, text, valid, local_job())
    for one, other in zip(reported, (losses.detach(), *slopes), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def jobs(model, local_job) -> dict:
    start = model.initial()
    reference = start.map(lambda tensor: tensor + 0.1)
    bases = {}
    for block in start.blocks:
        ramp = torch.linspace(0.1, 1, sum(start[name].numel() for name in block.tensors))[:, None]
        bases[block.name] = Basis(ramp / ramp.norm(), torch.eye(1), torch.ones(1).double())
    request = SampleRequest(ids=tuple(map(str, range(0, sum(SIZES), 4))))
    unlearning = {"request": request, "data": "forget", "settings": {"retain": 0.5, "forget": 0.5}}
    return {
        "plain": local_job(epochs=2),
        "clip": local_job(clip=0.1),
        "radius": local_job(radius=0.05),
        "lock": local_job(lock=LockMessage(0.2, reference, pack_directions(bases))),
        "adam": local_job(optimiser=Optimiser(kind="adam", learning_rate=0.01)),
        "another loss": local_job(objective="difference", **unlearning),
    }


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", ["plain", "clip", "radius", "lock", "adam", "another loss"])
def test_engines_learn_what_autograd_teaches(model, activations, shards, local_job, name: str, threads: int) -> None:
    """In double precision, where rounding is far below what a wrong term would do."""
    job, start = jobs(model, local_job)[name], model.initial()
    data = {shard.client: ClientData.of(shard, activations, CPU) for shard in shards}
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        loop = Sequential(model, data)
        cohort = Vectorized.of(model, shards, activations, CPU)
        answers = {kind: list(engine.run(start, job, loop.clients)) for kind, engine in (("l", loop), ("c", cohort))}
        own = {client: job.own(client, data[client].shard.train_ids) for client in data}
        graph = [train(model, start, data[client], own[client]) for client in loop.clients]
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert any(update.change.norm() > 0.01 for update in graph)
    # Adam divides by the size of tiny gradients; directions are sent in 8 bit and computed with in single precision.
    tolerance, loss = {"adam": 1e-6, "lock": 1e-7}.get(name, 1e-11), 1e-7 if name == "lock" else 1e-11
    for found in answers.values():
        for one, other in zip(found, graph, strict=True):
            assert (one.client, one.pairs) == (other.client, other.pairs)
            torch.testing.assert_close(one.values["loss"], other.values["loss"], rtol=loss, atol=loss)
            for key, tensor in other.change.tensors.items():
                torch.testing.assert_close(one.change[key], tensor, rtol=0, atol=tolerance)


def test_a_single_client_is_trained_without_a_graph(model, activations, shards, local_job, monkeypatch) -> None:
    """The oracle above would not tell if both were one."""
    monkeypatch.setattr(stacked, "_by_graph", None)
    data = {0: ClientData.of(shards[0], activations, CPU)}
    monkeypatch.setattr("ease.federation.sequential.work", None)
    (update,) = Sequential(model, data).run(model.initial(), local_job(), [0])
    assert update.change.norm() > 0


def test_an_error_in_one_thread_is_raised_and_leaves_the_number_of_threads(
    model, activations, shards, local_job, monkeypatch
) -> None:
    def fails(*_):
        raise ArithmeticError("no")

    monkeypatch.setattr("ease.federation.microbatching.train_stacked", fails)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(ArithmeticError):
            list(Vectorized.of(model, shards, activations, CPU).run(model.initial(), local_job(), [0, 1, 2, 3, 4]))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_the_same_job_gives_the_same_bytes_in_threads(model, activations, shards, local_job) -> None:
    """Which thread takes which group does not show."""
    single = DualEncoder(Backbone(), ModelConfig(lora="off", hidden=12, embedding=8), 0)  # type: ignore[arg-type]
    floats = replace(activations, image=np.float32(activations.image), text=np.float32(activations.text))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        cohort = Vectorized.of(single, shards, floats, CPU)
        one, two = (list(cohort.run(single.initial(), local_job(epochs=2), cohort.clients)) for _ in range(2))
    finally:
        torch.set_num_threads(before)
    assert one == two
