"""FedAdam: the server takes the mean update for a gradient and makes a step of Adam (Reddi et al., 2021)."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from ease.federation.strategies.base import Strategy
from ease.params import Params

DECAY = (0.9, 0.99)
"""Decay rates of the means of updates and of squared updates."""
ADAPTIVITY = 1e-3
"""Added to the root of the mean square; it bounds the step of values that hardly move."""


@dataclass
class FedAdam(Strategy):
    """Adam at the server: m and v are running means of the updates and their squares."""

    rate: float
    """Step size of the server."""
    first: Params | None = None
    second: Params | None = None
    averages: ClassVar[bool] = False

    def step(self, mean: Params) -> Params:
        """The step `rate * m / (sqrt(v) + ADAPTIVITY)`, after the update entered both means."""
        first = self.first or mean.map(torch.zeros_like)
        second = self.second or mean.map(lambda tensor: torch.full_like(tensor, ADAPTIVITY**2))
        self.first = first.zip(lambda m, new: DECAY[0] * m + (1 - DECAY[0]) * new, mean)
        self.second = second.zip(lambda v, new: DECAY[1] * v + (1 - DECAY[1]) * new.square(), mean)
        return self.first.zip(lambda m, v: self.rate * m / (v.sqrt() + ADAPTIVITY), self.second)
