"""The embedded backbone: its shortcuts change nothing, its weights are the recorded ones, and it has learnt to see."""

import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.func import functional_call

from ease.data.render import draw
from ease.data.scenes import caption_scene, lexicon, scene_at
from ease.errors import UserError
from ease.model.lora import LoraLinear
from ease.model.tiny import ASSETS, CLASS, UNKNOWN, Attention, TinyBackbone, TinyTower, load_tiny

HALVES = (slice(0, 4), slice(4, 8))


@pytest.fixture(scope="module")
def backbone() -> TinyBackbone:
    return load_tiny()


@pytest.fixture(scope="module")
def scenes() -> tuple[torch.Tensor, list[str]]:
    drawn = [scene_at(11, "unseen", index) for index in range(200)]
    captions = [caption_scene(scene, rng)[0] for scene, rng in drawn]
    return torch.from_numpy(np.stack([draw(scene, rng) for scene, rng in drawn])), captions


def some_inputs(backbone: TinyBackbone, scenes: tuple[torch.Tensor, list[str]], tower: str) -> torch.Tensor:
    return scenes[0][:6] if tower == "image" else backbone.tokenize([*scenes[1][:5], ""])


@pytest.mark.parametrize("name", ["image", "text"])
def test_last_block_for_the_class_token_alone_equals_the_full_block(backbone, scenes, name: str) -> None:
    tower: TinyTower = getattr(backbone, name)
    inputs = some_inputs(backbone, scenes, name)
    states, mask = tower.prefix(inputs, tower.depth - 2)
    states = tower.blocks[-2](states, mask)
    class_token = tower.projection(tower.norm(tower.blocks[-1](states, mask)[:, 0]))
    torch.testing.assert_close(tower.aligned(inputs), class_token, rtol=1e-5, atol=1e-5)
    parts = [class_token, *tower.summarise(states, mask)]
    assert len(parts) == 1 + tower.statistics
    joined = torch.cat(
        [(part - part.mean(-1, keepdim=True)) / part.std(-1, keepdim=True, correction=0) for part in parts], -1
    )
    expected = (joined - tower.centre) @ tower.whitening
    pooled = tower(*tower.prefix(inputs, tower.depth - 1), tower.depth - 1)
    torch.testing.assert_close(pooled, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("models", [1, 3])
def test_a_single_query_gives_what_full_attention_gives_with_adapters_on_every_layer(models: int) -> None:
    """For one model, and for a stack of three that each own a third of the batch."""
    torch.manual_seed(0)
    attention = Attention(32, 4)
    states, mask = torch.randn(6, 9, 32), torch.arange(9) < torch.tensor([[9], [3], [1], [5], [9], [2]])
    factors = {}
    for role in ("query", "key", "value", "out"):
        wrapped = LoraLinear(getattr(attention, role), 4, 2.0, True, torch.Generator().manual_seed(1))
        setattr(attention, role, wrapped)
        factors |= {f"{role}.A": torch.randn(models, 4, 32) / 6, f"{role}.B": torch.randn(models, 32, 4) / 6}
    stacked = factors if models > 1 else {name: tensor[0] for name, tensor in factors.items()}
    pooled = functional_call(attention, stacked, (states[:, :1], states, mask))
    for model in range(models):
        own = slice(model * 6 // models, (model + 1) * 6 // models)
        one = {name: tensor[model] for name, tensor in factors.items()}
        full = functional_call(attention, one, (states[own], states[own], mask[own]))
        torch.testing.assert_close(pooled[own], full[:, :1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["image", "text"])
def test_a_split_at_any_block_gives_the_same_output(backbone, scenes, name: str) -> None:
    tower: TinyTower = getattr(backbone, name)
    inputs = some_inputs(backbone, scenes, name)
    whole = tower(*tower.prefix(inputs, 0), 0)
    assert whole.shape == (6, tower.width) and torch.isfinite(whole).all()
    for first in range(1, tower.depth + 1):
        torch.testing.assert_close(tower(*tower.prefix(inputs, first), first), whole, rtol=1e-5, atol=1e-5)


def test_padding_does_not_matter(backbone) -> None:
    tokens = backbone.tokenize(["a small red ball"])
    padded = backbone.text(*backbone.text.prefix(tokens, 0), 0)
    cut = backbone.text(*backbone.text.prefix(tokens[:, :5], 0), 0)
    torch.testing.assert_close(padded, cut, rtol=1e-5, atol=1e-5)


def test_tokens(backbone) -> None:
    empty, unknown, long = backbone.tokenize(["", "A zyzzyva!", "red " * 90])
    assert empty.tolist() == [CLASS] + [0] * 31
    assert unknown[2] == UNKNOWN and unknown[1] > UNKNOWN and not unknown[3:].any()
    assert long.all()
    assert set(lexicon()) == set(backbone.vocabulary)


def test_attention_names_the_layers_to_adapt(backbone) -> None:
    roles = backbone.text.linears(2)
    assert list(roles) == ["query", "key", "value", "out", "up", "down"]
    for parent, attribute in roles.values():
        assert isinstance(getattr(parent, attribute), torch.nn.Linear)


def test_loads_frozen_and_fast() -> None:
    started = time.process_time()  # a busy machine may take longer by the clock
    backbone = load_tiny()
    assert time.process_time() - started < 1
    assert len(backbone.fingerprint) >= 16
    assert not backbone.training and not any(weight.requires_grad for weight in backbone.parameters())
    assert 1e6 < sum(weight.numel() for weight in backbone.parameters()) < 3e6


@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing"])
def test_damaged_weights_are_refused(tmp_path: Path, damage: str) -> None:
    shutil.copy(ASSETS / "tiny.json", tmp_path)
    content = bytearray((ASSETS / "tiny.safetensors").read_bytes())
    content[-1] ^= 1
    if damage != "missing":
        (tmp_path / "tiny.safetensors").write_bytes(content if damage == "flipped" else content[: len(content) // 2])
    with pytest.raises(UserError, match=r"tiny\.safetensors"):
        load_tiny(tmp_path)


def test_wrong_picture_size_is_named(backbone) -> None:
    with pytest.raises(UserError, match="64"):
        backbone.image.prefix(torch.zeros(1, 32, 32, 3, dtype=torch.uint8), 0)


def test_image_statistics_are_the_means_of_the_four_quarters(backbone, scenes) -> None:
    states, _ = backbone.image.prefix(scenes[0][:2], 2)
    grid = states[:, 1:].reshape(2, 8, 8, -1)
    quarters = [grid[:, rows, columns].mean((1, 2)) for rows in HALVES for columns in HALVES]
    torch.testing.assert_close(backbone.image.summarise(states, None), quarters)


def test_text_statistics_look_at_real_words_only(backbone) -> None:
    states, mask = backbone.text.prefix(backbone.tokenize(["a red ball"]), 2)
    words = states[0, :4]  # with the class token
    mean, largest = backbone.text.summarise(states, mask)
    torch.testing.assert_close(mean[0], words.mean(0))
    torch.testing.assert_close(largest[0], words.max(0).values)


def test_pooled_outputs_of_new_scenes_are_nearly_white(backbone, scenes) -> None:
    """Without whitening a few directions would hold nearly all variance, and pairs could hardly be told apart."""
    for tower, inputs in ((backbone.image, scenes[0]), (backbone.text, backbone.tokenize(scenes[1]))):
        pooled = tower(*tower.prefix(inputs, 0), 0)
        variances = torch.linalg.svdvals(pooled - pooled.mean(0)).square()
        effective = variances.sum().square() / variances.square().sum()
        assert effective > 50


def test_zero_shot_retrieval_is_far_above_chance(backbone, scenes) -> None:
    pixels, captions = scenes
    images = backbone.image.aligned(pixels)
    texts = backbone.text.aligned(backbone.tokenize(captions))
    similarity = torch.nn.functional.normalize(images) @ torch.nn.functional.normalize(texts).T
    target = torch.arange(len(captions))
    for axis in (0, 1):
        recall = (similarity.argmax(axis) == target).double().mean().item()
        assert 20 / len(captions) <= recall < 0.8  # there must be something left to learn
