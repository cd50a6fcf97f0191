"""Pretrained dual encoders: what every backbone offers, and the one place that knows their names."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ease import plug_ins
from ease.errors import UserError


class Tower(Protocol):
    """One frozen encoder. `depth` attention blocks may carry adapters; 0 means fixed features only.

    A tower is split at block `first`: `prefix` runs once per input and is cached, `forward` runs in every step.
    """

    width: int
    """Size of the pooled output."""
    depth: int

    def prefix(self, inputs: Any, first: int) -> tuple[Tensor, Tensor | None]:
        """Frozen part before block `first`: states [n, ...] and, for text, the token mask [n, tokens] (True = real)."""
        ...

    def __call__(self, states: Tensor, mask: Tensor | None, first: int) -> Tensor:
        """Blocks from `first` on and pooling: [n, width]."""
        ...

    def requires_grad_(self, requires_grad: bool) -> Any: ...

    def linears(self, block: int) -> dict[str, tuple[nn.Module, str]]:
        """Adaptable linear layers of a block: role -> (parent module, attribute).

        Roles are `query`, `key`, `value` and `out`, and `up` and `down` of its MLP.
        """
        ...


class Backbone(Protocol):
    name: str
    fingerprint: str
    """Hash of the weights; caches of activations are keyed by it."""
    image_size: int
    """Side in pixels of the square RGB input."""
    crop: bool
    """Whether that is the middle of a picture; else it is all of it, squashed."""
    context: int
    """Most tokens of a caption, start and end included; what is longer is cut."""

    @property
    def image(self) -> Tower:
        """Its inputs are uint8 tensors [n, height, width, 3]."""
        ...

    @property
    def text(self) -> Tower:
        """Its inputs are integer tensors [n, tokens]."""
        ...

    def tokenize(self, captions: Sequence[str]) -> Tensor: ...


CHECKPOINTS = {
    "clip-b32": "openai/clip-vit-base-patch32",
    "clip-l14": "openai/clip-vit-large-patch14",
    "siglip": "google/siglip-base-patch16-224",
}
CHECKPOINT = "hf:"
"""Before the folder or the id of any other checkpoint."""


def checkpoint_of(name: str) -> str | None:
    """The folder or id of the transformers checkpoint behind a backbone's name; None for our own backbones."""
    return name.removeprefix(CHECKPOINT) if name.startswith(CHECKPOINT) else CHECKPOINTS.get(name)


def anchor_checkpoint(name: str, folder: Path) -> str:
    """A name whose checkpoint is a folder, with that folder made absolute; ids and other names stay as they are."""
    path = folder / name.removeprefix(CHECKPOINT)
    return f"{CHECKPOINT}{path.resolve()}" if name.startswith(CHECKPOINT) and path.is_dir() else name


def placed(backbone: Any, name: str, device: torch.device | str) -> Backbone:
    """A backbone of another package on its device, frozen and in evaluation mode."""
    if not isinstance(backbone, nn.Module):
        raise UserError(f"model.backbone: {name} gives a {type(backbone).__name__}, not a torch.nn.Module")
    found: Any = backbone.to(device).eval().requires_grad_(False)
    backbone_of: Backbone = found
    return backbone_of


def load_backbone(name: str, device: torch.device | str = "cpu") -> Backbone:
    """Load a backbone by name onto a device, frozen and in evaluation mode."""
    if name == "tiny":
        from ease.model.tiny import load_tiny

        return load_tiny().to(device)
    if name == "photos":
        from ease.model.photos import load_photos

        return load_photos().to(device)
    if name == "photos-vit":
        from ease.model.photos_vit import load_photos_vit

        return load_photos_vit().to(device)
    checkpoint = checkpoint_of(name)
    if not checkpoint and name in plug_ins.names(plug_ins.BACKBONES):
        return placed(plug_ins.load(plug_ins.BACKBONES, name, "model.backbone")(), name, device)
    if not checkpoint:
        known = ", ".join(("tiny", "photos", "photos-vit", *CHECKPOINTS, *plug_ins.names(plug_ins.BACKBONES)))
        raise UserError(f"model.backbone: unknown backbone {name!r}; choose one of: {known}, hf:FOLDER or hf:ID")
    from ease.model.hub import load_hub

    return load_hub(checkpoint, name, device)
