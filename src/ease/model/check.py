"""What every backbone keeps to, as a check that its author can run."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ease.model.backbones import Tower

CAPTIONS = ("a dog in the snow", "two boats", "", "one word " * 200)
"""An ordinary one, a short one, none, and one longer than any context."""
PICTURES = 3
ROLES = ("query", "key", "value", "out")
TOLERANCE = 1e-4
"""Largest difference of features of unit size that other batches or splits may make."""


def check_backbone(backbone: Any) -> None:
    """Raise an AssertionError that names the failed check; nothing is raised if a backbone keeps to everything."""
    _require("module", isinstance(backbone, nn.Module), "a backbone is a torch.nn.Module")
    for name, kind in (("name", str), ("fingerprint", str), ("image_size", int), ("crop", bool), ("context", int)):
        _require("attributes", isinstance(getattr(backbone, name, None), kind), f"it has no {name} ({kind.__name__})")
    _require("attributes", backbone.fingerprint.strip(), "its fingerprint is empty; use a hash of its weights")
    backbone = backbone.eval().requires_grad_(False)
    tokens = backbone.tokenize(CAPTIONS)
    _require("tokens", isinstance(tokens, Tensor) and not tokens.is_floating_point(), "tokens are integers")
    _require("tokens", tokens.dim() == 2 and len(tokens) == len(CAPTIONS), "there is one row of tokens a caption")
    _require("tokens", tokens.shape[1] <= backbone.context, "a long caption is cut to `context` tokens")
    side, rng = backbone.image_size, np.random.default_rng(0)
    pictures = torch.from_numpy(rng.integers(0, 256, (PICTURES, side, side, 3), dtype=np.uint8))
    for side_name, inputs in (("image", pictures), ("text", tokens)):
        _check_tower(side_name, getattr(backbone, side_name, None), inputs)


@torch.no_grad()
def _check_tower(side: str, tower: Any, inputs: Tensor) -> None:
    _require(f"{side} tower", tower is not None, "it is missing")
    for name in ("width", "depth"):
        _require(f"{side} tower", isinstance(getattr(tower, name, None), int), f"it has no {name}")
    whole = _features(tower, inputs, tower.depth)
    shape = tuple(whole.shape)
    _require(f"{side} width", shape == (len(inputs), tower.width), f"features are {shape}, not [n, {tower.width}]")
    _require(f"{side} finite", bool(whole.isfinite().all()), "features are not finite")
    _require(f"{side} features", not torch.allclose(whole[:1], whole[1:2]), "different inputs have equal features")
    _require(f"{side} repeatable", torch.equal(whole, _features(tower, inputs, tower.depth)), "a second pass differs")
    scale = float(whole.abs().max().clamp_min(1e-12))
    for first in range(tower.depth):
        apart = float((_features(tower, inputs, first) - whole).abs().max()) / scale
        _require(f"{side} split", apart < TOLERANCE, f"split at block {first}, features differ by {apart:.1e}")
    alone = torch.cat([_features(tower, inputs[n : n + 1], tower.depth) for n in range(len(inputs))])
    apart = float((alone - whole).abs().max()) / scale
    _require(f"{side} batches", apart < TOLERANCE, f"features depend on the other inputs of a batch (by {apart:.1e})")
    trained = [name for name, each in tower.named_parameters() if each.requires_grad]
    _require(f"{side} frozen", not trained, f"{trained[:1]} would be trained")
    for block in range(tower.depth):
        _check_layers(side, tower, block)


def _check_layers(side: str, tower: Tower, block: int) -> None:
    """Adaptable layers are linear and where they are said to be."""
    layers = tower.linears(block)
    _require(f"{side} layers", set(ROLES) <= set(layers), f"block {block} lacks one of {', '.join(ROLES)}")
    for role, (parent, attribute) in layers.items():
        layer = getattr(parent, attribute, None)
        _require(f"{side} layers", isinstance(layer, nn.Linear), f"block {block}: {role} is not a torch.nn.Linear")


def _features(tower: Any, inputs: Tensor, first: int) -> Tensor:
    states, mask = tower.prefix(inputs, first)
    found: Tensor = tower(states, mask, first)
    return found


def _require(check: str, condition: object, sentence: str) -> None:
    if not condition:
        raise AssertionError(f"{check}: {sentence}")
