"""First layers of projectors that no training step reads or writes, where their features never change.

Plain SGD moves such a layer W by sums of d x' alone: x are the features of a pair, d is how its hidden layer is asked
to change. What W x is for any pair therefore follows from inner products of features, and W itself is added up once,
at the end. With fewer pairs than about twice their width this is less work, and the largest weights stay out of every
step.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ease.data.examples import Examples
from ease.federation.protocol import LocalJob
from ease.model.dual_encoder import Branch, DualEncoder
from ease.params import Modality


def gram_sides(model: DualEncoder, examples: Examples, job: LocalJob) -> tuple[Modality, ...]:
    """Whose first layers are better left alone: jobs that may round, plain steps, fixed features and few of them."""
    if job.precision == "float32" or not job.plain:
        return ()
    found: list[Modality] = []
    lines: dict[Modality, int] = {"image": len(examples), "text": len(examples) * examples.captions}
    for side, count in lines.items():
        branch, states = getattr(model, side), getattr(examples, side)
        fixed = isinstance(branch, Branch) and branch.first == branch.tower.depth and isinstance(states, Tensor)
        if fixed and count + branch.tower.width / job.epochs < 2 * branch.tower.width:
            found.append(side)
    return tuple(found)


@dataclass
class GramLayer:
    """The first layer of one side, for several trainings over the same features."""

    side: Modality
    each: int
    """Lines of features for each pair: its captions, or one."""
    features: Tensor
    """[lines, width], as they are multiplied."""
    alike: Tensor
    """Their inner products, and one more for the bias [lines, lines]."""
    began: Tensor
    """What the layer gave at the start [trainings, lines, hidden]."""
    asked: Tensor
    """Sums of d, by the lines they came from."""
    used: Tensor
    """The same as they are multiplied."""

    @classmethod
    @torch.no_grad()
    def of(
        cls, model: DualEncoder, side: Modality, examples: Examples, stack: Mapping[str, Tensor], kind: torch.dtype
    ) -> "GramLayer":
        branch, states = getattr(model, side), getattr(examples, side)
        each = 1 if side == "image" else examples.captions
        lines = states.flatten(0, 1) if side == "text" else states
        exact = branch.features(lines, None)
        features = exact.to(kind)
        weight, bias = stack[f"{side}.projector.0.weight"], stack[f"{side}.projector.0.bias"]
        # One training after the other: no more than one rounded copy of a layer is in memory.
        given = [F.linear(features, layer.to(kind)).to(layer.dtype) for layer in weight]
        began = torch.stack(given) + bias[:, None]
        asked = torch.zeros_like(began)
        alike = (exact @ exact.mT + 1).to(kind)
        return cls(side, each, features, alike, began, asked, asked if kind == asked.dtype else asked.to(kind))

    @property
    def names(self) -> tuple[str, str]:
        return f"{self.side}.projector.0.weight", f"{self.side}.projector.0.bias"

    def hidden(self, rows: np.ndarray, captions: np.ndarray, rate: float) -> Tensor:
        """What the layer gives for a batch of each training now [trainings, pairs, hidden]."""
        lines = self._lines(rows, captions)
        near = self.alike.index_select(0, lines.flatten()).unflatten(0, lines.shape)
        moved = torch.bmm(near, self.used[: len(lines)])
        began = self.began.flatten(0, 1).index_select(0, self._places(lines)).unflatten(0, lines.shape)
        return began.sub_(moved, alpha=rate)

    def learn(self, rows: np.ndarray, captions: np.ndarray, wanted: Tensor) -> None:
        """Take the gradient of what `hidden` gave for the same batch."""
        places = self._places(self._lines(rows, captions))
        asked = self.asked.flatten(0, 1)
        asked.index_add_(0, places, wanted.flatten(0, 1))
        if self.used is not self.asked:
            self.used.flatten(0, 1).index_copy_(0, places, asked.index_select(0, places).to(self.used.dtype))

    def changes(self, rate: float) -> dict[str, Tensor]:
        """What all steps together did to the weights and to the bias."""
        weight, bias = self.names
        kind = self.asked.dtype
        summed = torch.stack([each.mT @ self.features for each in self.used])
        return {weight: summed.to(kind).mul_(-rate), bias: self.asked.sum(1).mul_(-rate)}

    def _lines(self, rows: np.ndarray, captions: np.ndarray) -> Tensor:
        lines = rows if self.each == 1 else rows * self.each + captions
        return torch.from_numpy(lines).to(self.asked.device)

    def _places(self, lines: Tensor) -> Tensor:
        """Where lines of each training lie in the stack of all."""
        return (lines + torch.arange(len(lines), device=lines.device)[:, None] * self.asked.shape[1]).flatten()
