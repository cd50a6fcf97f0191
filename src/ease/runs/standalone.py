"""Export of a model as a self-contained folder: weights, vocabulary, a script that loads them, and a README.

The script needs torch, Pillow for files of pictures, and what the backbone is made of; this package it does not need.
For encoders of our own it holds their very source, so that what is exported computes what was trained.
"""

import inspect
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ease.errors import UserError
from ease.model import lora, photos_vit, tiny
from ease.model.backbones import checkpoint_of
from ease.model.hub import HubBackbone, checkpoint_folder
from ease.model.lora import LoraLinear
from ease.model.peft import stock_name
from ease.model.photos import PhotosBackbone
from ease.model.photos_vit import PhotosVitBackbone
from ease.model.tiny import ASSETS, TinyBackbone
from ease.runs.using import Source, encode_image, encode_text
from ease.storage import read_tensors, write_atomic, write_json, write_tensors

HEADER = '''"""Load the model in this folder: `Model().encode_text([...])`, `Model().encode_image([...])`.

{needs} The file was written by EASE with the weights beside it.
"""

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn import functional as F

UserError = ValueError
'''
LORA_SOURCE = (lora.LoraLinear, lora.linear, lora.fold_query, lora.apply_by_head)
TINY_SOURCE = (
    *LORA_SOURCE,
    *(tiny.Attention, tiny.Block, tiny.TinyTower, tiny.ImageTower, tiny.TextTower, tiny.TinyBackbone),
)
VIT_SOURCE = (
    *LORA_SOURCE,
    tiny.Attention,
    *(photos_vit._mlp, photos_vit._through, photos_vit.VisionBlock, photos_vit.TextBlock),
    *(photos_vit.AdaptableTower, photos_vit.ImageTower, photos_vit.TextTower),
)
TINY_CONSTANTS = (
    *("WIDTH", "HEADS", "DEPTH", "IMAGE_SIZE", "PATCH", "CONTEXT"),
    *("PADDING", "CLASS", "UNKNOWN", "SPECIAL_TOKENS"),
)
VIT_CONSTANTS = (
    *("WIDTH", "MLP_WIDTH", "IMAGE_SIZE", "PATCH", "ACROSS", "IMAGE_BLOCKS", "IMAGE_HEADS", "FINE_BLOCKS", "GRID"),
    *("TEXT_BLOCKS", "TEXT_HEADS", "CONTEXT", "PADDING", "CPU_IMAGES_AT_ONCE", "CAPTIONS_AT_ONCE"),
)
TORCH = "It needs torch, and Pillow where pictures are given as files."
ONNX_PAGE = """# An image-text model as two ONNX graphs

This folder runs by itself, without EASE and without torch:

    pip install numpy onnxruntime pillow            # and tokenizers or transformers, if load.py asks for them
    python load.py "a dog in the snow" *.jpg        # how well each picture fits the words

`image.onnx` takes uint8 pixels [n, side, side, 3], `text.onnx` token ids [n, tokens]; both give unit-norm
embeddings, whose dot products say how well they fit. `load.py` makes pixels and tokens; `settings.json` has the sizes.
"""
CHECKED = ("a red car at night", "two dogs on the beach")
"""Texts whose embeddings travel with the model, to be compared after loading."""


def write_standalone(source: Source, out: Path) -> list[Path]:
    """Write everything that the model needs into a folder and return the files."""
    backbone = source.backbone
    tensors, written = _projectors(source), list[Path]()
    settings: dict[str, Any] = {
        "backbone": source.config.model.backbone
        if checkpoint_of(source.config.model.backbone) is None
        else "checkpoint",
        "image_size": backbone.image_size,
        "crop": backbone.crop,
        "context": backbone.context,
        "temperature": source.config.model.temperature,
        "layers": len([block for block in source.state.blocks if block.modality == "image" and block.kind != "lora"]),
        "request": source.request,
    }
    if isinstance(backbone, TinyBackbone):
        tensors |= _towers(source)
        script = _script(TORCH, _source(tiny, TINY_CONSTANTS, TINY_SOURCE), "load_tiny.txt")
        written.append(out / "vocabulary.json")
        write_json(written[-1], list(backbone.vocabulary), sealed=False)
        needs = "torch"
    elif isinstance(backbone, PhotosVitBackbone):
        tensors |= _towers(source)
        needs = "torch tokenizers"
        script = _script(f"{TORCH} And tokenizers.", _source(photos_vit, VIT_CONSTANTS, VIT_SOURCE), "load_vit.txt")
        written.append(_copied(backbone.vocabulary, out / "tokenizer.json"))
    elif isinstance(backbone, PhotosBackbone):
        network = backbone.image.loaded(torch.device("cpu"))
        tensors |= {f"image.tower.{name}": tensor for name, tensor in network.state_dict().items()}
        needs = "torch transformers efficientnet-lite-pytorch==0.1.0"
        script = _script(f"{TORCH} And transformers and efficientnet-lite-pytorch.", "", "load_photos.txt")
        names = (
            "config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
            "special_tokens_map.json",
        )
        written += [_copied(backbone.vocabulary / name, out / "minilm" / name) for name in names]
    elif isinstance(backbone, HubBackbone):
        settings |= {"mean": backbone.image.mean.flatten().tolist(), "deviation": backbone.image.std.flatten().tolist()}
        needs = "torch transformers"
        script = _script(f"{TORCH} And transformers.", "", "load_hub.txt")
        written += _checkpoint(source, out / "checkpoint")
    else:
        raise UserError(f"--format safetensors: {backbone.name!r} does not say how it is loaded; use --format onnx")
    written += [out / name for name in ("weights.safetensors", "settings.json", "load.py", "README.md")]
    # A tensor of its own for each name: safetensors writes no two names for one storage.
    write_tensors(out / "weights.safetensors", {name: each.clone() for name, each in tensors.items()}, sealed=False)
    write_json(out / "settings.json", settings, sealed=False)
    write_atomic(out / "load.py", script.encode())
    write_atomic(out / "README.md", _page(source, needs).encode())
    return [*written, *_check(source, out)]


def write_beside_graphs(source: Source, out: Path) -> list[Path]:
    """Write the vocabulary, a script and a README beside the ONNX graphs and return the files."""
    backbone, written = source.backbone, list[Path]()
    settings: dict[str, Any] = {
        "image_size": backbone.image_size,
        "crop": backbone.crop,
        "context": backbone.context,
        "temperature": source.config.model.temperature,
        "request": source.request,
    }
    if isinstance(backbone, TinyBackbone):
        settings |= {"tokens": "words"}
        written.append(out / "vocabulary.json")
        write_json(written[-1], list(backbone.vocabulary), sealed=False)
    elif isinstance(backbone, PhotosVitBackbone):
        settings |= {"tokens": "pieces"}
        written.append(_copied(backbone.vocabulary, out / "tokenizer.json"))
    elif isinstance(backbone, HubBackbone):
        settings |= {"tokens": "checkpoint", "padding": backbone.padding}
        folder = checkpoint_folder(source.config.model.backbone)
        written += [_copied(path, out / "tokenizer" / path.name) for path in _beside_weights(folder)]
    else:
        return []
    script = "".join((ASSETS / name).read_text() for name in ("load_onnx.txt", "load_square.txt", "load_onnx_end.txt"))
    write_json(out / "settings.json", settings, sealed=False)
    write_atomic(out / "load.py", script.encode())
    write_atomic(out / "README.md", ONNX_PAGE.encode())
    return [*written, *(out / name for name in ("settings.json", "load.py", "README.md"))]


def _projectors(source: Source) -> dict[str, Tensor]:
    blocks = [block for block in source.state.blocks if block.kind != "lora"]
    return {name: source.state[name] for block in blocks for name in block.tensors}


def _towers(source: Source) -> dict[str, Tensor]:
    """Both towers with the adapters merged into their layers."""
    found: dict[str, Tensor] = {}
    for side in ("image", "text"):
        tower = getattr(source.model, side).tower
        found |= {f"{side}.tower.{name}": tensor for name, tensor in merged(tower).items()}
    return found


def merged(tower: nn.Module) -> dict[str, Tensor]:
    """A tower's state with W + scale · B·A in place of W."""
    adapted = {name: module for name, module in tower.named_modules() if isinstance(module, LoraLinear)}
    state = {
        name: tensor
        for name, tensor in tower.state_dict().items()
        if not any(name.startswith(f"{layer}.") for layer in adapted)
    }
    for layer, module in adapted.items():
        state[f"{layer}.weight"] = _product(module)
        state[f"{layer}.bias"] = module.base.bias
    return {name: tensor.detach() for name, tensor in state.items()}


def _product(layer: LoraLinear) -> Tensor:
    return (layer.base.weight.double() + layer.scale * layer.B.double() @ layer.A.double()).float()


def _checkpoint(source: Source, out: Path) -> list[Path]:
    """Write the stock checkpoint with merged adapters; it can be used as a backbone."""
    name = source.config.model.backbone
    folder = checkpoint_folder(name)
    weights: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        weights |= read_tensors(path, sealed=False)
    for layer, module in source.model.named_modules():
        if isinstance(module, LoraLinear):
            weights[f"{stock_name(layer)}.weight"] = _product(module)
    write_tensors(out / "model.safetensors", weights, sealed=False)
    return [out / "model.safetensors", *(_copied(path, out / path.name) for path in _beside_weights(folder))]


def _beside_weights(folder: Path) -> list[Path]:
    """Copy the settings and the vocabulary of a checkpoint."""
    return [
        path
        for path in sorted(folder.iterdir())
        if path.suffix in (".json", ".txt", ".model") and not path.name.endswith(".index.json")
    ]


def _copied(path: Path, target: Path) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    shutil.copyfile(path, target)
    return target


def _source(module: Any, constants: tuple[str, ...], parts: tuple[Callable[..., Any], ...]) -> str:
    """The source of a module's constants and definitions."""
    values = "".join(f"{name} = {getattr(module, name)!r}\n" for name in constants)
    return "\n" + values + "".join(f"\n\n{inspect.getsource(part)}" for part in parts).replace("Sequence[str]", "list")


def _script(needs: str, definitions: str, towers: str) -> str:
    rest = "".join((ASSETS / name).read_text() for name in (towers, "load_square.txt", "load_common.txt"))
    return HEADER.format(needs=needs) + definitions + rest


def _check(source: Source, out: Path) -> list[Path]:
    """Two pictures, two texts and their embeddings, to check the export with."""
    size, rng = source.backbone.image_size, torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (2, size, size, 3), dtype=torch.uint8, generator=rng)
    found = {
        "pixels": pixels,
        "image": encode_image(source, list(pixels.numpy())),
        "text": encode_text(source, list(CHECKED)),
    }
    write_tensors(out / "check.safetensors", found, sealed=False)
    write_json(out / "check.json", {"texts": list(CHECKED)}, sealed=False)
    return [out / "check.safetensors", out / "check.json"]


def _page(source: Source, needs: str) -> str:
    what = f"after the request `{source.request}`" if source.request else "as trained"
    return f"""# An image-text model, {what}

This folder runs by itself, without EASE:

    pip install {needs} pillow
    python load.py                                  # does this machine compute what the other one did?
    python load.py "a dog in the snow" *.jpg        # how well each picture fits the words

In Python, from this folder:

    from load import Model

    model = Model()
    model.encode_text(["a dog in the snow"])        # [n, width], unit norm
    model.encode_image(["picture.jpg"])             # the same for pictures; dot products say how well they fit
    model.classify(["picture.jpg"], ["a photo of a dog", "a photo of a cat"])

| file | what it is |
|---|---|
| `load.py` | the code of both encoders and of `Model` |
| `weights.safetensors`, `settings.json` | all weights that `load.py` reads, adapters merged; sizes and temperature |
| `check.safetensors`, `check.json` | two pictures of noise, two texts, and their embeddings at export |
| `model.safetensors` | only the trained part, as a run stores it |

Next to them are the files that the backbone needs: a vocabulary, a tokenizer or a checkpoint. The backbone keeps its
own licence.
"""
