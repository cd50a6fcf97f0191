"""Projectors over features that never change: embeddings and gradients of many trainings, written out.

Autograd would record a graph of every step and hand out each gradient as a tensor as large as its weight, for the step
to read once more. The gradient through two layers and a norm takes a few lines. That of a weight is a product of two
factors, which a step adds in place."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ease.model.dual_encoder import LEAST_NORM, DualEncoder
from ease.params import Modality

gelu_backward = torch.ops.aten.gelu_backward.default


def projects_alone(model: DualEncoder) -> bool:
    """Whether a model trains projectors and nothing below them, so that what they are given never changes."""
    return isinstance(model, DualEncoder) and model.config.lora == "off"


@dataclass(frozen=True)
class Factors:
    """The gradient of a weight, left' · right for each training: [trainings, pairs, outputs] and [.., inputs]."""

    left: Tensor
    right: Tensor

    def product(self) -> Tensor:
        return torch.bmm(self.left.mT, self.right)

    def descend(self, weight: Tensor, rate: float) -> None:
        """Move weights [trainings, outputs, inputs] against the gradient, in place."""
        if self.left.dtype == weight.dtype:
            weight.baddbmm_(self.left.mT, self.right, alpha=-rate)
        else:
            weight.sub_(self.product(), alpha=rate)


@dataclass(frozen=True)
class Projected:
    """One side of a step: the embeddings of a batch of each training, and what their gradient needs."""

    side: Modality
    features: Tensor | None
    """[trainings, pairs, width]; None where the first layer is someone else's."""
    hidden: Tensor
    """Output of the first layer."""
    bent: Tensor
    """The same after the GELU."""
    lengths: Tensor
    """Lengths of the outputs of the second layer."""
    embeddings: Tensor

    @classmethod
    def of(
        cls, side: Modality, tensors: Mapping[str, Tensor], features: Tensor | None, hidden: Tensor | None = None
    ) -> "Projected":
        """From features, or from what a first layer gave for them."""
        if hidden is None:
            assert features is not None
            hidden = _given(tensors, f"{side}.projector.0", features)
        bent = F.gelu(hidden)
        last = _given(tensors, f"{side}.projector.1", bent)
        lengths = torch.linalg.vector_norm(last, dim=-1, keepdim=True).clamp_min_(LEAST_NORM)
        return cls(side, features, hidden, bent, lengths, last.div_(lengths))

    def gradients(self, tensors: Mapping[str, Tensor], slope: Tensor) -> tuple[dict[str, Tensor | Factors], Tensor]:
        """Gradients of this side's layers and of `hidden`, from that of the embeddings [trainings, pairs, width]."""
        # A unit vector moves only orthogonally to itself; outputs below the least norm are not normalised.
        along = (self.embeddings * slope).sum(-1, keepdim=True).mul_(self.lengths > LEAST_NORM)
        last = torch.addcmul(slope, self.embeddings, along, value=-1).div_(self.lengths)
        first, second = f"{self.side}.projector.0", f"{self.side}.projector.1"
        weight = tensors[f"{second}.weight"]
        rounded = _as(last, weight.dtype)
        hidden = gelu_backward(_as(torch.bmm(rounded, weight), last.dtype), self.hidden)
        found: dict[str, Tensor | Factors] = {
            f"{second}.weight": Factors(rounded, _as(self.bent, weight.dtype)),
            f"{second}.bias": last.sum(1),
        }
        if self.features is not None:
            kind = tensors[f"{first}.weight"].dtype
            found[f"{first}.weight"] = Factors(_as(hidden, kind), _as(self.features, kind))
            found[f"{first}.bias"] = hidden.sum(1)
        return found, hidden


def _given(tensors: Mapping[str, Tensor], layer: str, inputs: Tensor) -> Tensor:
    """x W' + b of each training; weights of another precision than x say in which one to multiply."""
    weight, bias = tensors[f"{layer}.weight"], tensors[f"{layer}.bias"]
    return _as(torch.baddbmm(bias[:, None], _as(inputs, weight.dtype), weight.mT), inputs.dtype)


def _as(tensor: Tensor, kind: torch.dtype) -> Tensor:
    """`to` takes longer to find out that there is nothing to do."""
    return tensor if tensor.dtype is kind else tensor.to(kind)
