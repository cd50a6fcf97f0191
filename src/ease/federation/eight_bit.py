"""Tensors in 8 bit: a quarter of the bytes where only directions matter."""

from collections.abc import Mapping

import torch
from torch import Tensor


def to_8bit(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """8-bit values with one scale for each tensor."""
    packed = {}
    for name, tensor in tensors.items():
        packed[name], packed[f"{name}:scale"] = rounded(tensor)
    return packed


def from_8bit(packed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What the receiver of packed tensors works with."""
    names = [name for name in packed if not name.endswith(":scale")]
    return {name: packed[name].float() * packed[f"{name}:scale"] for name in names}


def rounded(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The values in 8 bit, and the number they are multiplied with."""
    scale = tensor.abs().max().float() / 127
    return torch.round(tensor / scale.clamp_min(1e-30)).to(torch.int8), scale
