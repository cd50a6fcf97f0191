"""Low-rank adapters (LoRA) for the attention layers of a frozen tower."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ease.errors import UserError


class LoraLinear(nn.Module):
    """y = W x + scale · B (A x), W frozen, A [rank, in] with orthonormal rows at the start, B [out, rank] zero.

    With A frozen and orthonormal the product B·A has the geometry of B itself: <B1 A, B2 A> = <B1, B2>. The factors may
    come stacked, one for each of several models, see `linear`.
    """

    def __init__(self, base: nn.Linear, rank: int, scale: float, train_a: bool, rng: torch.Generator):
        super().__init__()
        self.base = base
        self.scale = scale
        a = torch.linalg.qr(torch.randn(base.in_features, rank, generator=rng)).Q.T.contiguous()
        if train_a:
            self.A = nn.Parameter(a)
        else:
            self.register_buffer("A", a)
        self.B = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scale * linear(linear(x, self.A), self.B)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W' + b, for one model or for a stack of models that share a batch.

    With weights [models, out, in] the rows of x belong to the models in equal parts, one model after the other.
    """
    if weight.dim() == 2:
        return F.linear(x, weight, bias)
    rows = x.reshape(len(weight), -1, x.shape[-1])
    product = torch.bmm(rows, weight.mT) if bias is None else torch.baddbmm(bias[:, None], rows, weight.mT)
    return product.view(*x.shape[:-1], -1)


def times_weight(x: Tensor, layer: nn.Module) -> Tensor:
    """x W for the effective weight W [out, in] of a layer with or without an adapter: x [..., out] -> [..., in]."""
    if isinstance(layer, LoraLinear):
        return times_weight(x, layer.base) + layer.scale * linear(linear(x, layer.B.mT), layer.A.mT)
    assert isinstance(layer, nn.Linear)
    return x @ layer.weight


def check_rank(rank: int, layer: nn.Linear, name: str) -> None:
    """Refuse a rank that is no low-rank factor of the layer."""
    limit = min(layer.in_features, layer.out_features)
    if not 1 <= rank <= limit:
        raise UserError(
            f"model.lora_rank = {rank}: {name} is {layer.out_features} x {layer.in_features}, choose 1..{limit}"
        )
