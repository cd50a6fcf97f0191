"""Adapters in PEFT's format, with PEFT itself as the oracle."""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from ease.errors import UserError
from ease.model.backbones import load_backbone
from ease.model.dual_encoder import DualEncoder, ModelConfig
from ease.model.hub import quiet_transformers
from ease.model.lora import LoraLinear
from ease.model.peft import Adapter, load_adapter, orthonormal, read_adapter, stock_name, write_adapter

transformers = pytest.importorskip("transformers")
peft: Any

QUERY_VALUE = r".*\.encoder\.layers\.[12]\.self_attn\.(q_proj|v_proj)"
SETTINGS = {"lora_rank": 3, "lora_blocks": 2, "hidden": 8, "embedding": 4}


@pytest.fixture(scope="module", autouse=True)
def peft_itself() -> None:
    """Imported before the first test here, for it takes seconds, and most who collect these tests run none of them."""
    global peft
    with warnings.catch_warnings(action="ignore"):
        peft = pytest.importorskip("peft")


def peft_model(folder: Path, **settings) -> torch.nn.Module:
    """A stock model with PEFT's own LoRA layers, neither factor zero."""
    with quiet_transformers():
        stock = transformers.AutoModel.from_pretrained(folder)
    settings = {"r": 3, "lora_alpha": 5, "target_modules": QUERY_VALUE, **settings}
    model = peft.get_peft_model(stock, peft.LoraConfig(**settings)).eval()
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "lora_" in name:
                tensor.copy_(0.3 * torch.randn(tensor.shape, generator=rng))
    return model


@pytest.fixture(scope="module")
def written(checkpoint, tmp_path_factory) -> Path:
    """An adapter for the CLIP checkpoint that PEFT wrote. Copy it before writing into it."""
    folder = tmp_path_factory.mktemp("written") / "adapter"
    peft_model(checkpoint("clip")).save_pretrained(folder)
    return folder


@pytest.fixture
def theirs(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "adapter"))


def import_(folder: Path, adapter: Path, **settings) -> DualEncoder:
    config = ModelConfig(backbone=f"hf:{folder}", adapter=adapter, **{**SETTINGS, **settings})
    return DualEncoder(load_backbone(config.backbone), config, seed=0)


def adapters(model: DualEncoder) -> dict[str, LoraLinear]:
    return {stock_name(name): module for name, module in model.named_modules() if isinstance(module, LoraLinear)}


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("lora", ["ffa", "full"])
@pytest.mark.parametrize("family", ["clip", "siglip", "siglip2"])
def test_an_imported_adapter_has_peft_s_products(checkpoint, tmp_path, family: str, lora: str, rslora: bool) -> None:
    """scale · B·A of every layer, whatever the scale of the file and of the model, and so the tower's output."""
    folder = checkpoint(family)
    reference = peft_model(folder, use_rslora=rslora)
    reference.save_pretrained(tmp_path / "adapter")
    model = import_(folder, tmp_path / "adapter", lora=lora, lora_scale=0.7)
    modules = dict(reference.base_model.model.named_modules())
    assert len(adapters(model)) == 2 * 2 * 2
    for name, layer in adapters(model).items():
        product = layer.scale * layer.B @ layer.A
        torch.testing.assert_close(product, modules[name].get_delta_weight("default"), rtol=1e-4, atol=1e-6)
    tokens = load_backbone(f"hf:{folder}").tokenize(["a dog", "the beach"])
    tower = model.text.tower
    with torch.no_grad():
        expected = reference.get_text_features(input_ids=tokens).pooler_output
        torch.testing.assert_close(tower(*tower.prefix(tokens, 1), 1), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lora", ["ffa", "full"])
def test_the_start_state_is_the_imported_adapter(checkpoint, theirs: Path, lora: str) -> None:
    model = import_(checkpoint("clip"), theirs, lora=lora)
    start = model.initial()
    assert all(start[name].any() for block in start.blocks if block.kind == "lora" for name in block.tensors)
    given = read_adapter(theirs).factors
    for name, layer in adapters(model).items():
        if lora == "ffa":
            torch.testing.assert_close(layer.A @ layer.A.T, torch.eye(3), rtol=0, atol=1e-5)
        else:
            assert torch.equal(layer.A, given[name][0])


def test_orthonormal_keeps_the_product_and_an_orthonormal_a() -> None:
    """By hand: A = diag(2, -3) has the product B·diag(2, -3); its rows become unit vectors, B takes the lengths."""
    a, b = torch.tensor([[2.0, 0.0], [0.0, -3.0]]), torch.tensor([[1.0, 1.0]])
    q, scaled = orthonormal(a, b)
    assert q.tolist() == [[1, 0], [0, -1]] and scaled.tolist() == [[2, 3]]
    rows = torch.linalg.qr(torch.randn(6, 3, generator=torch.Generator().manual_seed(0))).Q.T
    same, unchanged = orthonormal(rows, torch.ones(2, 3))
    torch.testing.assert_close(same, rows)
    torch.testing.assert_close(unchanged, torch.ones(2, 3))


def test_peft_reads_what_we_write(checkpoint, tmp_path: Path) -> None:
    rng = torch.Generator().manual_seed(0)
    names = ["text_model.encoder.layers.2.self_attn.q_proj", "vision_model.encoder.layers.0.self_attn.out_proj"]
    factors = {
        name: (torch.randn(2, width, generator=rng), torch.randn(width, 2, generator=rng))
        for name, width in zip(names, (32, 40), strict=True)
    }
    write_adapter(tmp_path, Adapter(1.5, factors), str(checkpoint("clip")))
    with quiet_transformers():
        stock = transformers.AutoModel.from_pretrained(checkpoint("clip"))
    loaded = peft.PeftModel.from_pretrained(stock, tmp_path)
    adapted = {name: module for name, module in stock.named_modules() if hasattr(module, "lora_A")}
    assert sorted(adapted) == sorted(names) and loaded.active_adapter == "default"
    for name, (a, b) in factors.items():
        torch.testing.assert_close(adapted[name].get_delta_weight("default"), 1.5 * b @ a)
    again = read_adapter(tmp_path)
    assert again.scale == 1.5 and all(torch.equal(again.factors[n][0], factors[n][0]) for n in names)


# --- what is refused ---


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora_rank": 2}, r"set model\.lora_rank = 3"),
        ({"lora_targets": ("query",)}, r"it adapts \S+v_proj and the model does not; set model\.lora_targets"),
        ({"lora_targets": ("query", "key", "value")}, r"the model adapts \S+k_proj and it does not"),
        ({"lora_blocks": 1}, r"it adapts \S+layers\.1\S+ and the model does not"),
    ],
)
def test_other_layers_or_another_rank_are_refused(checkpoint, theirs: Path, settings: dict, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        import_(checkpoint("clip"), theirs, **settings)
    assert str(theirs) in str(caught.value) and "\n" not in str(caught.value)


def test_an_adapter_of_another_width_is_refused(checkpoint, tmp_path: Path) -> None:
    """SigLIP's layers have CLIP's names; here one has other columns."""
    peft_model(checkpoint("siglip")).save_pretrained(tmp_path)
    loaded = read_adapter(tmp_path)
    name = "text_model.encoder.layers.1.self_attn.q_proj"
    loaded.factors[name] = (torch.ones(3, 16), loaded.factors[name][1])
    write_adapter(tmp_path, loaded, "any")
    with pytest.raises(UserError, match=r"q_proj has A \(3, 16\) and B \(32, 3\), the model \(3, 32\)"):
        import_(checkpoint("clip"), tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; only plain LoRA"),
        ({"use_dora": True}, "use_dora is True"),
        ({"alpha_pattern": {"q_proj": 9}}, "alpha_pattern is"),
        ({"rank_pattern": {"q_proj": 9}}, "rank_pattern is"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is True"),
        ({"use_qalora": True}, "use_qalora is True"),
        ({"layer_replication": [[0, 2], [1, 3]]}, "layer_replication is"),
        ({"alora_invocation_tokens": [7]}, "alora_invocation_tokens is"),
        (
            {"init_lora_weights": "pissa_niter_16"},
            "init_lora_weights is 'pissa_niter_16', which changes the base model",
        ),
        ({"init_lora_weights": "OLoRA"}, "changes the base model"),
        ({"r": 0}, r"r must be a whole number of 1\.\.16384"),
        ({"r": -1}, r"r must be a whole number of 1\.\.16384"),
        ({"r": True}, r"r must be a whole number"),
        ({"r": 3.0}, r"r must be a whole number"),
        ({"r": 10**6}, r"r must be a whole number of 1\.\.16384"),
        ({"r": 4}, r"has A \(3, \d+\) and B \(\d+, 3\), and r is 4"),
        ({"lora_alpha": None}, "lora_alpha must be a number above 0"),
        ({"lora_alpha": -5}, "lora_alpha must be a number above 0"),
        ({"lora_alpha": 1e308}, "lora_alpha must be a number above 0, at most 1e"),
        ({"lora_alpha": float("nan")}, "lora_alpha must be a number above 0"),
    ],
)
def test_adapters_that_are_more_than_a_product_are_refused(theirs: Path, change: dict, message: str) -> None:
    file = theirs / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(UserError, match=message):
        read_adapter(theirs)


def test_tensors_next_to_the_factors_are_refused(theirs: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(theirs / "adapter_model.safetensors")
    save_file({**tensors, "base_model.model.logit_scale": torch.ones(1)}, theirs / "adapter_model.safetensors")
    with pytest.raises(UserError, match="more than the A and B of LoRA layers"):
        read_adapter(theirs)


@pytest.mark.parametrize("start", ["gaussian", "eva", "orthogonal", False])
def test_other_starts_are_plain_adapters(checkpoint, theirs: Path, start: object) -> None:
    file = theirs / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "init_lora_weights": start}))
    assert len(read_adapter(theirs).factors) == 8


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_missing_file_is_named(theirs: Path, name: str) -> None:
    (theirs / name).unlink()
    with pytest.raises(UserError, match=f"{name}: no such file; name the folder"):
        read_adapter(theirs)


def test_backbones_of_our_own_have_no_layers_for_it(theirs: Path) -> None:
    model = DualEncoder(load_backbone("tiny"), ModelConfig(**SETTINGS), seed=0)
    with pytest.raises(UserError, match=r"set model\.lora_targets and model\.lora_blocks"):
        load_adapter(model, theirs)


def test_pickled_factors_are_refused_by_name(theirs: Path) -> None:
    (theirs / "adapter_model.safetensors").rename(theirs / "adapter_model.bin")
    with pytest.raises(UserError, match=r"adapter_model\.bin: pickled weights can run code"):
        read_adapter(theirs)


def test_factors_that_are_not_numbers_are_refused(theirs: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(theirs / "adapter_model.safetensors")
    name = min(tensors)
    for value in (tensors[name] * torch.nan, tensors[name].int()):
        save_file({**tensors, name: value}, theirs / "adapter_model.safetensors")
        with pytest.raises(UserError, match="holds values that are not finite"):
            read_adapter(theirs)
