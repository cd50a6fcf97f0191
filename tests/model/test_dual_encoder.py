"""The model: adapters that start as nothing, blocks that say what is trained, and a module nobody changes."""

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch.nn import functional as F

from ease.data.scenes import pretraining_scenes
from ease.errors import UserError
from ease.model.dual_encoder import DualEncoder, ModelConfig, first_adapted
from ease.model.lora import LoraLinear, check_rank
from ease.model.losses import info_nce
from ease.model.tiny import load_tiny
from ease.params import Params
from ease.runs.config import load_config

SMALL = {"hidden": 16, "embedding": 8, "lora_rank": 4}


def model_of(seed: int = 0, **settings) -> DualEncoder:
    return DualEncoder(load_tiny(), ModelConfig(**{**SMALL, **settings}), seed)


@pytest.fixture(scope="module")
def inputs() -> dict[str, torch.Tensor]:
    captions, pixels = pretraining_scenes(9, 5)
    return {"image": torch.from_numpy(pixels), "text": load_tiny().tokenize([five[0] for five in captions])}


def states_of(model: DualEncoder, inputs: dict[str, torch.Tensor], modality: str):
    branch = getattr(model, modality)
    return branch.tower.prefix(inputs[modality], branch.first)


def embed(model: DualEncoder, params: Params, inputs: dict[str, torch.Tensor], modality: str) -> torch.Tensor:
    return model.embed(params.tensors, modality, *states_of(model, inputs, modality))


def shaken(params: Params, seed: int = 0) -> Params:
    """The same state with noise, so that no adapter is zero."""
    rng = torch.Generator().manual_seed(seed)
    return params.map(lambda tensor: tensor + 0.3 * torch.randn(tensor.shape, generator=rng))


@pytest.mark.parametrize("modality", ["image", "text"])
@pytest.mark.parametrize("lora", ["ffa", "full"])
@pytest.mark.parametrize("blocks", [1, 3])
def test_new_adapters_leave_the_tower_as_it_was(inputs, modality: str, lora: str, blocks: int) -> None:
    model, stock = model_of(lora=lora, lora_blocks=blocks), getattr(load_tiny(), modality)
    first = stock.depth - blocks
    expected = stock(*stock.prefix(inputs[modality], first), first)
    tower = getattr(model, modality).tower
    assert torch.equal(tower(*states_of(model, inputs, modality), first), expected)


def test_adapters_in_the_mlp_with_ranks_of_their_own(inputs) -> None:
    """They start as nothing, learn when they are moved, and have the ranks that were asked for."""
    settings = {"lora_targets": ("query", "up", "down"), "lora_ranks": {"up": 2, "down": 3}}
    model, plain = model_of(**settings), model_of(lora_targets=("query",))
    start = model.initial()
    ranks = {name.split(".")[-2]: tensor.shape[1] for name, tensor in start.tensors.items() if name.endswith(".B")}
    assert ranks == {"query": model.config.lora_rank, "0": 2, "2": 3}
    for modality in ("image", "text"):
        before = embed(model, start, inputs, modality)
        assert torch.allclose(before, embed(plain, plain.initial(), inputs, modality), atol=1e-6)
        up = {name: tensor + 0.5 for name, tensor in start.tensors.items() if name.endswith("mlp.0.B")}
        assert len(up) == 2
        assert not torch.allclose(before, embed(model, start.replace(start.tensors | up), inputs, modality), atol=1e-3)


def test_configurations_with_ranks_can_be_keys() -> None:
    """As `ease sweep` groups its searches."""
    one = load_config(None, ('model.lora_targets=["query", "up"]', "model.lora_ranks={up = 2, query = 3}"))
    two = load_config(None, ('model.lora_targets=["query", "up"]', "model.lora_ranks={query = 3, up = 2}"))
    assert one == two and hash(one) == hash(two) and len({one, two, load_config(None)}) == 2


def test_layers_that_are_not_there_and_ranks_of_no_target_are_refused() -> None:
    with pytest.raises(UserError, match=r"lora_ranks: up carries no adapter"):
        load_config(None, ("model.lora_ranks={up = 2}",))
    with pytest.raises(UserError, match=r"lora_rank = 1000: up of block"):
        model_of(lora_targets=("up",), lora_ranks={"up": 1000})


@pytest.mark.parametrize("modality", ["image", "text"])
def test_the_split_point_does_not_show(inputs, modality: str) -> None:
    """Adapters in the last block: states cached before it, or everything from the first block on."""
    model = model_of()
    params = shaken(model.initial())
    cached = embed(model, params, inputs, modality)
    branch = getattr(model, modality)
    states, mask = branch.tower.prefix(inputs[modality], 0)
    branch.first = 0
    torch.testing.assert_close(model.embed(params.tensors, modality, states, mask), cached, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("modality", ["image", "text"])
def test_embeddings_have_unit_norm_and_follow_the_formula(inputs, modality: str) -> None:
    model = model_of(lora="off")
    params = shaken(model.initial())
    stock = getattr(load_tiny(), modality)
    pooled = stock(*stock.prefix(inputs[modality], stock.depth), stock.depth)
    layers = [(params[f"{modality}.projector.{n}.weight"], params[f"{modality}.projector.{n}.bias"]) for n in (0, 1)]
    hidden = F.gelu(F.layer_norm(pooled, pooled.shape[-1:]) @ layers[0][0].T + layers[0][1])
    expected = F.normalize(hidden @ layers[1][0].T + layers[1][1], dim=-1)
    result = embed(model, params, inputs, modality)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(result.norm(dim=-1), torch.ones(5))


def test_blocks_with_a_shared_a() -> None:
    model = model_of(lora="ffa", lora_blocks=2, lora_targets=("query", "value"))
    lora = [block for block in model.blocks if block.kind == "lora"]
    assert len(lora) == 2 * 2 * 2 and not any(block.factored for block in lora)
    assert all(block.tensors == (f"{block.name}.B",) for block in lora)
    assert len(model.frozen_adapters()) == len(lora)
    for a in model.frozen_adapters().values():
        torch.testing.assert_close(a @ a.T, torch.eye(4), rtol=0, atol=1e-5)


def test_blocks_with_both_factors() -> None:
    model = model_of(lora="full", lora_targets=("key",))
    lora = [block for block in model.blocks if block.kind == "lora"]
    assert len(lora) == 2 and all(block.factored for block in lora)
    assert all(block.tensors == (f"{block.name}.A", f"{block.name}.B") for block in lora)
    assert not model.frozen_adapters()


def test_blocks_without_adapters() -> None:
    model = model_of(lora="off")
    assert [(block.name, block.modality, block.kind) for block in model.blocks] == [
        (f"{modality}.projector.{layer}", modality, "projector") for modality in ("image", "text") for layer in (0, 1)
    ]


def test_images_come_before_texts_and_adapters_before_projectors() -> None:
    blocks = model_of().blocks
    assert [(block.modality, block.kind) for block in blocks] == [
        *([("image", "lora")] * 2 + [("image", "projector")] * 2),
        *([("text", "lora")] * 2 + [("text", "projector")] * 2),
    ]
    assert all(block.name.startswith(block.modality) for block in blocks)


@pytest.mark.parametrize("lora", ["ffa", "full", "off"])
def test_the_start_is_decided_by_the_seed(lora: str) -> None:
    one, same, other = (model_of(seed, lora=lora).initial() for seed in (1, 1, 2))
    assert one.blocks == same.blocks == other.blocks
    assert all(torch.equal(one[name], same[name]) for name in one.tensors)
    drawn = [name for name in one.tensors if not name.endswith((".B", ".bias"))]
    assert drawn and not any(torch.equal(one[name], other[name]) for name in drawn)
    assert not any(one[name].any() for name in one.tensors if name not in drawn)
    assert all(
        torch.equal(a, model_of(1, lora=lora).frozen_adapters()[n])
        for n, a in model_of(1, lora=lora).frozen_adapters().items()
    )


def test_the_start_is_a_copy() -> None:
    model = model_of()
    for tensor in model.initial().tensors.values():
        tensor.add_(1)
    assert all(torch.equal(value, model_of().initial()[name]) for name, value in model.initial().tensors.items())


def test_embedding_does_not_change_the_module(inputs) -> None:
    model = model_of()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tensors = {name: tensor.requires_grad_() for name, tensor in shaken(model.initial()).tensors.items()}
    states = {modality: states_of(model, inputs, modality) for modality in ("image", "text")}
    image, text = (model.embed(tensors, modality, *states[modality]) for modality in ("image", "text"))
    info_nce(image, text, 0.07).backward()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(tensor.grad is not None and tensor.grad.any() for tensor in tensors.values())


def test_only_blocks_are_trainable() -> None:
    model = model_of(lora="full")
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trainable == {name for block in model.blocks for name in block.tensors}


def test_an_adapter_is_its_formula() -> None:
    rng = torch.Generator().manual_seed(0)
    layer = LoraLinear(torch.nn.Linear(6, 5), rank=2, scale=3.0, train_a=True, rng=rng)
    x = torch.randn(4, 6)
    torch.testing.assert_close(layer(x), layer.base(x))
    with torch.no_grad():
        layer.B.normal_()
    torch.testing.assert_close(layer(x), layer.base(x) + 3 * x @ (layer.B @ layer.A).T)


@pytest.mark.parametrize("rank", [0, -1, 6])
def test_a_rank_that_does_not_fit_is_refused(rank: int) -> None:
    check_rank(5, torch.nn.Linear(6, 5), "query")
    with pytest.raises(UserError, match=rf"model.lora_rank = {rank}: query is 5 x 6, choose 1..5"):
        check_rank(rank, torch.nn.Linear(6, 5), "query")


def test_settings_that_do_not_fit_the_tower_are_refused() -> None:
    tower = load_tiny().image
    with pytest.raises(UserError, match=r"model.lora_rank = 129: query of block 3 is 128 x 128, choose 1..128"):
        first_adapted(tower, ModelConfig(lora_rank=129))
    with pytest.raises(UserError, match=r"model.lora_blocks = 5: the tower has 4 blocks"):
        first_adapted(tower, ModelConfig(lora_blocks=5))
    assert first_adapted(tower, ModelConfig(lora_rank=128, lora_blocks=4)) == 0
    assert first_adapted(tower, ModelConfig(lora="off", lora_rank=999)) == 4


@pytest.mark.parametrize("wrong", [{"lora_rank": 0}, {"lora_targets": ["query", "query"]}, {"lora_targets": []}])
def test_settings_that_fit_no_tower_are_refused(wrong: dict) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        ModelConfig(**wrong)


def test_info_nce_is_the_mean_of_both_directions() -> None:
    rng = np.random.default_rng(0)
    image, text = (torch.from_numpy(rng.normal(size=(4, 3))) for _ in range(2))
    logits = (image @ text.T / 0.5).numpy()
    rows = [np.log(np.exp(logits[n]).sum()) - logits[n, n] for n in range(4)]
    columns = [np.log(np.exp(logits[:, n]).sum()) - logits[n, n] for n in range(4)]
    assert info_nce(image, text, 0.5).item() == pytest.approx((np.mean(rows) + np.mean(columns)) / 2)
