"""First layers that no step touches learn what plain steps teach them, and rounded products change little."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ease.data.examples import Examples
from ease.federation import stacked
from ease.federation.gram_layer import gram_sides
from ease.federation.protocol import LocalJob, Optimiser
from ease.federation.stacked import LocalTraining, halves_are_faster, train_stacked, training_of
from ease.model.dual_encoder import DualEncoder, ModelConfig
from ease.params import Params
from ease.seeding import generator, torch_generator

PAIRS, CAPTIONS, IMAGE, TEXT = 30, 2, 96, 40


class Features(nn.Module):
    """A tower whose output is its input."""

    depth = 0

    def __init__(self, width: int):
        super().__init__()
        self.width = width

    def forward(self, states: Tensor, mask: Tensor | None, first: int) -> Tensor:
        return states


class Backbone(nn.Module):
    name = "features"

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = Features(IMAGE), Features(TEXT)


@pytest.fixture(scope="module")
def model() -> DualEncoder:
    return DualEncoder(Backbone(), ModelConfig(lora="off", hidden=48, embedding=16), 0).double()  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def examples() -> Examples:
    rng = torch_generator(0, "features")
    pictures = torch.randn(PAIRS, IMAGE, generator=rng, dtype=torch.double)
    captions = torch.randn(PAIRS, CAPTIONS, TEXT, generator=rng, dtype=torch.double)
    return Examples(pictures, captions, None)


@pytest.fixture
def job(local_job) -> LocalJob:
    return local_job(optimiser=Optimiser(learning_rate=0.7), epochs=2, precision="auto")


def trainings(model: DualEncoder, job: LocalJob) -> list[LocalTraining]:
    """From two starts, one with fewer pairs, so that its batches are filled up and it ends early."""
    start = model.initial()
    moved = start.map(lambda tensor: tensor + 0.05)
    return [
        training_of(begin, np.arange(pairs), CAPTIONS, job, generator(pairs, "draw"))
        for begin, pairs in ((start, PAIRS), (moved, 13), (moved, PAIRS))
    ]


@pytest.mark.parametrize("widest", ["image", "both"])
def test_steps_of_the_features_are_the_steps_of_the_weights(model, examples, job, monkeypatch, widest: str) -> None:
    """In double precision both ways agree to rounding, of 1e-16 a product and some hundred of them in a row."""
    sides = ("image",) if widest == "image" else ("image", "text")
    monkeypatch.setattr(stacked, "gram_sides", lambda *_: sides)
    spanned = train_stacked(model, examples, trainings(model, job), job)
    monkeypatch.undo()
    plain = train_stacked(model, examples, trainings(model, job), replace(job, precision="float32"))
    for one, other in zip(spanned, plain, strict=True):
        assert one.delta.tensors.keys() == other.delta.tensors.keys() and one.delta.blocks == other.delta.blocks
        assert other.delta.norm() > 0.1
        for name, tensor in other.delta.tensors.items():
            torch.testing.assert_close(one.delta[name], tensor, rtol=0, atol=1e-12)
        torch.testing.assert_close(one.loss, other.loss, rtol=0, atol=1e-12)


def test_only_fixed_features_that_are_few_for_their_width_and_plain_steps_are_spanned(
    model, world, examples, job
) -> None:
    assert gram_sides(model, examples, job) == ("image",)  # 30 + 96 / 2 < 192, and 60 + 40 / 2 = 80 is not below 80
    assert gram_sides(model, examples.take(np.arange(29)), job) == ("image", "text")
    assert gram_sides(world.server.model, world.federation.data[0].train, job) == ()  # adapters change its features
    for change in (
        {"precision": "float32"},
        {"clip": 1.0},
        {"radius": 1.0},
        {"optimiser": Optimiser(kind="adam", learning_rate=0.1)},
    ):
        assert gram_sides(model, examples, replace(job, **change)) == ()


@pytest.mark.parametrize("spanned", [True, False])
def test_rounded_products_change_an_update_by_a_few_per_cent_at_most(
    model, examples, job, monkeypatch, spanned
) -> None:
    """bfloat16 keeps 8 bits: a factor is off by 2^-9 of itself, and a step sums many errors of either sign."""
    if not spanned:
        monkeypatch.setattr(stacked, "gram_sides", lambda *_: ())
    single = DualEncoder(Backbone(), ModelConfig(lora="off", hidden=48, embedding=16), 0)  # type: ignore[arg-type]
    floats = Examples(*(states.float() for states in (examples.image, examples.text)), None)
    asked = trainings(single, job)
    exact = train_stacked(single, floats, asked, replace(job, precision="float32"))
    rounded = train_stacked(single, floats, asked, replace(job, precision="bfloat16"))
    for one, other in zip(rounded, exact, strict=True):
        assert all(tensor.dtype == torch.float32 for tensor in one.delta.tensors.values())
        distance = (one.delta - other.delta).norm() / other.delta.norm()
        assert 1e-5 < distance < 0.03


def test_auto_rounds_only_where_the_processor_does_so_by_itself(model, job, monkeypatch) -> None:
    start = Params({n: t.float() for n, t in model.initial().tensors.items()}, model.blocks)
    able = {"avx512_bf16": False, "amx_bf16": False}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: able)
    for has in (False, True):
        able["avx512_bf16"] = has
        halves_are_faster.cache_clear()
        assert bool(stacked._halved(job, start, torch.device("cpu"))) is has
        assert stacked._halved(replace(job, precision="bfloat16"), start, torch.device("cpu")) == set(start.tensors)
        assert not stacked._halved(replace(job, precision="float32"), start, torch.device("cpu"))
    halves_are_faster.cache_clear()
