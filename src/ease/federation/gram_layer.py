"""First layers of projectors over fixed features, trained through inner products of the features.

Plain SGD changes such a layer W by sums of d x', where x are the features of a pair and d is the gradient at its hidden
layer. W x of any pair therefore follows from inner products of features, and W itself is computed once, at the end.
With fewer pairs than about twice the width of the features this is less work, and no step reads the largest weights.
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
    """Sides whose first layers are trained this way: jobs may round, steps are plain, few fixed features."""
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
    """Rows of features for each pair: one for each caption, or one."""
    features: Tensor
    """[lines, width], in the precision of products."""
    gram: Tensor
    """Their inner products plus 1, for the bias [lines, lines]."""
    start: Tensor
    """Output of the layer before the first step [trainings, lines, hidden]."""
    sums: Tensor
    """Sums of gradients at the hidden layer, by line."""
    rounded_sums: Tensor
    """The same in the precision of products."""

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
        start = torch.stack(given) + bias[:, None]
        sums = torch.zeros_like(start)
        gram = (exact @ exact.mT + 1).to(kind)
        return cls(side, each, features, gram, start, sums, sums if kind == sums.dtype else sums.to(kind))

    @property
    def names(self) -> tuple[str, str]:
        return f"{self.side}.projector.0.weight", f"{self.side}.projector.0.bias"

    def hidden(self, rows: np.ndarray, captions: np.ndarray, rate: float) -> Tensor:
        """Output of the layer for a batch of each training [trainings, pairs, hidden]."""
        lines = self._lines(rows, captions)
        near = self.gram.index_select(0, lines.flatten()).unflatten(0, lines.shape)
        moved = torch.bmm(near, self.rounded_sums[: len(lines)])
        start = self.start.flatten(0, 1).index_select(0, self._places(lines)).unflatten(0, lines.shape)
        return start.sub_(moved, alpha=rate)

    def learn(self, rows: np.ndarray, captions: np.ndarray, gradient: Tensor) -> None:
        """Make a step with the gradient at the output of `hidden` for the same batch."""
        places = self._places(self._lines(rows, captions))
        sums, rounded = self.sums.flatten(0, 1), self.rounded_sums.flatten(0, 1)
        sums.index_add_(0, places, gradient.flatten(0, 1))
        if self.rounded_sums is not self.sums:
            rounded.index_copy_(0, places, sums.index_select(0, places).to(rounded.dtype))

    def changes(self, rate: float) -> dict[str, Tensor]:
        """Changes of the weights and of the bias over all steps."""
        weight, bias = self.names
        kind = self.sums.dtype
        summed = torch.stack([each.mT @ self.features for each in self.rounded_sums])
        return {weight: summed.to(kind).mul_(-rate), bias: self.sums.sum(1).mul_(-rate)}

    def _lines(self, rows: np.ndarray, captions: np.ndarray) -> Tensor:
        lines = rows if self.each == 1 else rows * self.each + captions
        return torch.from_numpy(lines).to(self.sums.device)

    def _places(self, lines: Tensor) -> Tensor:
        """Positions of each training's lines in the stack of all."""
        return (lines + torch.arange(len(lines), device=lines.device)[:, None] * self.sums.shape[1]).flatten()
