"""Adapters in the file format of PEFT: how they come from other tools and go back to them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ease.errors import UserError
from ease.model.lora import LoraLinear
from ease.storage import SMALL_JSON, digest, read_json, read_tensors, sha256, write_json, write_tensors

LARGEST_RANK = 1 << 14
"""Above the width of any layer."""
LARGEST_SCALE = 1e6
"""Beyond this, adapters of fp32 lose what they adapt."""
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX, A, B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
STOCK_NAMES = {
    "image.tower.blocks.": "vision_model.encoder.layers.",
    "text.tower.blocks.": "text_model.encoder.layers.",
}
PLAIN = {
    "peft_type": "LORA",
    "bias": "none",
    "use_dora": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "fan_in_fan_out": False,
    "use_qalora": False,
    "layer_replication": None,
    "alora_invocation_tokens": None,
    "kasa_config": None,
    "monteclora_config": None,
    "velora_config": None,
}
"""Settings of a plain LoRA adapter; with any other a layer is more than W + scale · B·A."""
CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""How the names of starts begin that take something out of W: the file alone does not give the layer."""


@dataclass(frozen=True)
class Adapter:
    """LoRA factors by layer, under the names the layers have in the stock model."""

    scale: float
    """Factor before the product B·A."""
    factors: dict[str, tuple[Tensor, Tensor]]
    """A [rank, in] and B [out, rank]."""


def stock_name(layer: str) -> str:
    """A layer of our model under its name in the stock transformers model."""
    for ours, theirs in STOCK_NAMES.items():
        if layer.startswith(ours):
            return theirs + layer.removeprefix(ours)
    return layer


def write_adapter(folder: Path, adapter: Adapter, checkpoint: str) -> list[Path]:
    """Write what `PeftModel.from_pretrained` reads; `checkpoint` is the stock model it belongs on."""
    tensors: dict[str, Tensor] = {}
    for layer, (a, b) in adapter.factors.items():
        tensors |= {f"{PREFIX}{layer}{A}": a, f"{PREFIX}{layer}{B}": b}
    ranks = {layer: len(a) for layer, (a, _) in adapter.factors.items()}
    rank = max(ranks.values())
    settings = {
        **PLAIN,
        "rank_pattern": {layer: own for layer, own in ranks.items() if own != rank},
        "alpha_pattern": {layer: adapter.scale * own for layer, own in ranks.items() if own != rank},
        "base_model_name_or_path": checkpoint,
        "inference_mode": True,
        "lora_alpha": adapter.scale * rank,
        "lora_dropout": 0.0,
        "r": rank,
        "target_modules": sorted(adapter.factors),
        "task_type": None,
        "use_rslora": False,
    }
    write_tensors(folder / WEIGHTS, tensors, sealed=False)
    write_json(folder / CONFIG, settings, sealed=False)
    return [folder / CONFIG, folder / WEIGHTS]


def read_adapter(folder: Path) -> Adapter:
    """Read a plain LoRA adapter; kinds whose product is more than scale · B·A are refused."""
    pickled = folder / "adapter_model.bin"
    if pickled.is_file() and not (folder / WEIGHTS).is_file():
        raise UserError(f"{pickled}: pickled weights can run code when they are read; save it again as safetensors")
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise UserError(f"{folder / name}: no such file; name the folder that PEFT's save_pretrained wrote")
    settings = read_json(folder / CONFIG, sealed=False, most=SMALL_JSON)
    if not isinstance(settings, dict):
        raise UserError(f"{folder / CONFIG}: a JSON object is expected; save it again with PEFT")
    for key, plain in PLAIN.items():
        value = settings.get(key, plain)
        if value != plain and (value or plain):
            raise UserError(f"{folder / CONFIG}: {key} is {value!r}; only plain LoRA adapters can be imported")
    start = settings.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(CHANGED_BASE):
        raise UserError(
            f"{folder / CONFIG}: init_lora_weights is {start!r}, which changes the base model; save it again with "
            "PEFT's path_initial_model_for_weight_conversion"
        )
    tensors = read_tensors(folder / WEIGHTS, sealed=False)
    layers = {name.removeprefix(PREFIX).removesuffix(A) for name in tensors if name.endswith(A)}
    if {f"{PREFIX}{layer}{part}" for layer in layers for part in (A, B)} != set(tensors) or not layers:
        raise UserError(f"{folder / WEIGHTS}: it holds more than the A and B of LoRA layers; save it again with PEFT")
    rank, scale = _rank_and_scale(settings, folder / CONFIG)
    factors = {layer: (tensors[f"{PREFIX}{layer}{A}"], tensors[f"{PREFIX}{layer}{B}"]) for layer in layers}
    for layer, (a, b) in factors.items():
        if a.dim() != 2 or b.dim() != 2 or not len(a) == b.shape[1] == rank:
            raise UserError(
                f"{folder / WEIGHTS}: {layer} has A {tuple(a.shape)} and B {tuple(b.shape)}, and r is {rank}; "
                "save it again with PEFT"
            )
        if not all(part.is_floating_point() and part.float().isfinite().all() for part in (a, b)):
            raise UserError(f"{folder / WEIGHTS}: {layer} holds values that are not finite; save it again with PEFT")
    return Adapter(scale, {layer: (a.float(), b.float()) for layer, (a, b) in factors.items()})


def adapter_fingerprint(folder: Path) -> str:
    """Hash of what an adapter is made of."""
    return digest("adapter", *(sha256(folder / name) for name in (CONFIG, WEIGHTS)))


def _rank_and_scale(settings: dict[str, Any], path: Path) -> tuple[int, float]:
    """The rank, and the factor before B·A."""
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= LARGEST_RANK:
        raise UserError(f"{path}: r must be a whole number of 1..{LARGEST_RANK}; save it again with PEFT")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha <= LARGEST_SCALE:
        raise UserError(
            f"{path}: lora_alpha must be a number above 0, at most {LARGEST_SCALE:g}; save it again with PEFT"
        )
    return rank, alpha / (rank**0.5 if settings.get("use_rslora") else rank)


def load_adapter(model: nn.Module, folder: Path) -> None:
    """Start a model's own adapters at the product of an imported one."""
    adapter = read_adapter(folder)
    layers = {stock_name(name): module for name, module in model.named_modules() if isinstance(module, LoraLinear)}
    strange = sorted(layers.keys() ^ adapter.factors.keys())
    if strange:
        holder, other = ("it", "the model") if strange[0] in adapter.factors else ("the model", "it")
        raise UserError(
            f"model.adapter = {folder}: {holder} adapts {strange[0]} and {other} does not; "
            "set model.lora_targets and model.lora_blocks to the layers of the adapter"
        )
    for name, layer in layers.items():
        a, b = adapter.factors[name]
        if a.shape != layer.A.shape or b.shape != layer.B.shape:
            raise UserError(
                f"model.adapter = {folder}: {name} has A {tuple(a.shape)} and B {tuple(b.shape)}, the model "
                f"{tuple(layer.A.shape)} and {tuple(layer.B.shape)}; set model.lora_rank = {len(a)} on its own backbone"
            )
        if not isinstance(layer.A, nn.Parameter):
            a, b = orthonormal(a, b)
        with torch.no_grad():
            layer.A.copy_(a)
            layer.B.copy_(b * (adapter.scale / layer.scale))


def orthonormal(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The same product B·A with orthonormal rows in A, so that B determines the product."""
    q, r = torch.linalg.qr(a.double().T)
    signs = torch.where(r.diagonal() < 0, -1.0, 1.0)  # an A that is orthonormal already stays as it is
    return (q * signs).T.float(), (b.double() @ r.T * signs).float()
