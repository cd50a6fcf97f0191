"""Low-rank adapters (LoRA) for the attention layers of a frozen tower."""

from typing import Any

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
        low = linear(x, self.A)
        if self.B.dim() == 2:
            return self.base(x) + self.scale * F.linear(low, self.B)
        # One pass over the output instead of two: with many models it is the memory that is busy.
        models = len(self.B)
        base = self.base(x).view(models, -1, self.B.shape[1])
        total = torch.baddbmm(base, low.reshape(models, -1, low.shape[-1]), (self.scale * self.B.mT).to(base.dtype))
        return total.view(*x.shape[:-1], -1)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W' + b, for one model or for a stack of models that share a batch.

    With weights [models, out, in] the rows of x belong to the models in equal parts, one model after the other. Weights
    of another precision than x say in which one to multiply.
    """
    if weight.dtype != x.dtype and weight.dtype == torch.bfloat16:
        return linear(x.to(weight.dtype), weight, bias).to(x.dtype)
    if weight.dim() == 2:
        return F.linear(x, weight, bias)
    rows = x.reshape(len(weight), -1, x.shape[-1])
    if torch.is_autocast_enabled(x.device.type):
        product = torch.bmm(rows, weight.mT) if bias is None else torch.baddbmm(bias[:, None], rows, weight.mT)
    else:
        product = _StackedLinear.apply(rows, weight, bias)
    return product.view(*x.shape[:-1], -1)


class _StackedLinear(torch.autograd.Function):
    """x W' + b of each model: rows [models, n, in], weight [models, out, in], bias [models, out] -> [models, n, out].

    The products are those of autograd. Each is written so that few rows and a large weight are read in memory order,
    and the gradient of W has the layout of W. On a CPU this is two to three times as fast."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return torch.bmm(rows, weight.mT) if bias is None else torch.baddbmm(bias[:, None], rows, weight.mT)

    @staticmethod
    def backward(ctx: Any, *grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        (out,), wanted = grad, ctx.needs_input_grad
        return (
            torch.bmm(out, weight) if wanted[0] else None,
            torch.bmm(out.mT, rows) if wanted[1] else None,
            out.sum(1) if wanted[2] else None,
        )


def fold_query(query: Tensor, layer: nn.Module) -> Tensor:
    """W'q of each head for keys W x: query [n, heads, size] -> [n, heads, in], to be multiplied with x itself."""
    if isinstance(layer, LoraLinear):
        own = torch.diag_embed(query.transpose(1, 2)).permute(0, 2, 3, 1).flatten(2)  # the other heads' parts zero
        return fold_query(query, layer.base) + layer.scale * linear(linear(own, layer.B.mT), layer.A.mT)
    assert isinstance(layer, nn.Linear)
    weight = layer.weight.unflatten(0, query.shape[1:])
    return torch.einsum("nhs,hsi->nhi", query, weight)


def apply_by_head(x: Tensor, layer: nn.Module) -> Tensor:
    """Each head's own part of W x + b: x [n, heads, in] -> [n, heads, size]."""
    heads = x.shape[1]
    if isinstance(layer, LoraLinear):
        update = linear(linear(x, layer.A), layer.B).unflatten(-1, (heads, -1))
        return apply_by_head(x, layer.base) + layer.scale * update.diagonal(dim1=1, dim2=2).transpose(1, 2)
    assert isinstance(layer, nn.Linear)
    weight = layer.weight.unflatten(0, (heads, -1))
    return torch.einsum("nhi,hsi->nhs", x, weight) + layer.bias.unflatten(0, (heads, -1))


def check_rank(rank: int, layer: nn.Linear, name: str) -> None:
    """Refuse a rank that is too large for a low-rank factor of the layer."""
    limit = min(layer.in_features, layer.out_features)
    if not 1 <= rank <= limit:
        raise UserError(
            f"model.lora_rank = {rank}: {name} is {layer.out_features} x {layer.in_features}, choose 1..{limit}"
        )
