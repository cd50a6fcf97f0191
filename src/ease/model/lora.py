"""Low-rank adapters (LoRA) for the attention layers of a frozen tower."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ease.errors import UserError


class LoraLinear(nn.Module):
    """y = W x + scale · B (A x), W frozen, A [rank, in] with orthonormal rows at the start, B [out, rank] zero.

    With A frozen and orthonormal the product B·A has the geometry of B itself: <B1 A, B2 A> = <B1, B2>.
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
        return self.base(x) + F.linear(F.linear(x, self.A), self.scale * self.B)


def check_rank(rank: int, layer: nn.Linear, name: str) -> None:
    """Refuse a rank that is no low-rank factor of the layer."""
    limit = min(layer.in_features, layer.out_features)
    if not 1 <= rank <= limit:
        raise UserError(
            f"model.lora_rank = {rank}: {name} is {layer.out_features} x {layer.in_features}, choose 1..{limit}"
        )
