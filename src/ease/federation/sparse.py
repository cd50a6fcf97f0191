"""A sparse adapter over a frozen base: only values that a shared seed keeps are trained, and only they travel."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ease.params import Block, Params
from ease.seeding import torch_generator

LEAST_KEPT = 16
"""Values kept of a tensor at least, if it has as many: fewer could learn nothing."""


@dataclass(frozen=True)
class Sparse:
    """What server and clients agree on, so that the kept values alone need to be sent."""

    base: Params
    """The state under the adapter; it is never changed."""
    blocks: tuple[Block, ...]
    """Layers that have an adapter."""
    density: float
    """Share of the values of these layers that is kept."""
    seed: int
    """Both sides draw the same positions from it."""

    @cached_property
    def positions(self) -> dict[str, Tensor]:
        """Tensor name -> flat positions of its kept values, ascending."""
        return {name: self._draw(name) for block in self.blocks for name in block.tensors}

    def _draw(self, name: str) -> Tensor:
        size = self.base[name].numel()
        kept = min(size, max(LEAST_KEPT, math.ceil(self.density * size)))
        order = torch.randperm(size, generator=torch_generator(self.seed, "sparse", name))
        return order[:kept].sort().values.to(self.base[name].device)

    def zeros(self) -> Params:
        """The adapter that changes nothing: a flat tensor of kept values for each tensor of the layers."""
        kept = {name: torch.zeros(len(places), dtype=self.base[name].dtype) for name, places in self.positions.items()}
        return Params(kept, self.blocks)

    def expand(self, adapter: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The base with an adapter added; gradients reach the kept values and nothing else."""
        added = {
            name: self.base[name].flatten().index_add(0, self.positions[name], values).view_as(self.base[name])
            for name, values in adapter.items()
        }
        return {**self.base.tensors, **added}

    def to(self, device: torch.device) -> "Sparse":
        return replace(self, base=self.base.to(device))
