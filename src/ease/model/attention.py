"""How towers of transformers attend: on a GPU by one product for all three inputs, and by kernels for few tokens."""

import os
from importlib.util import find_spec
from shutil import which
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ease.model.lora import LoraLinear, linear

COMPILERS = (os.environ.get("CC", "gcc"), "gcc", "clang")
KERNELS = find_spec("triton") is not None and any(map(which, COMPILERS))
"""Triton comes with torch for CUDA on Linux, and not elsewhere. It starts kernels by code that the machine's own C
compiler makes, which many containers lack."""
WIDTH = 64
"""Features of a head, the same in all published CLIP and SigLIP base and large models."""
MOST_KEYS = 256
"""Most keys in one tile of a kernel; a picture's class token is one more, next to the tile."""


class TowerAttention(nn.Module):
    """The stock layers of an attention block, under their names; adapters may take the place of any."""

    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    out_proj: nn.Module

    def __init__(self, stock: Any) -> None:
        super().__init__()
        self.heads, self.scale = stock.num_heads, stock.scale
        for name, layer in stock.named_children():  # in their order, which is that of the blocks of a state
            setattr(self, name, layer)

    def forward(
        self, hidden_states: Tensor, attention_mask: None = None, is_causal: bool = False, **_: Any
    ) -> tuple[Tensor, None]:
        """[batch, tokens, features]; towers of these families mask nothing, or what comes later."""
        batch, tokens = hidden_states.shape[:2]
        layers = (self.q_proj, self.k_proj, self.v_proj)
        if hidden_states.is_cuda and _base(self.q_proj).weight.dtype == torch.bfloat16:
            joint = projected(hidden_states.to(torch.bfloat16), layers).view(batch, tokens, 3, self.heads, -1)
            if fits(tokens, joint.shape[-1], is_causal):
                return self.out_proj(few_tokens(joint, self.scale, is_causal)[0].flatten(2)), None
            parts = joint.unbind(2)
        else:
            parts = tuple(layer(hidden_states).view(batch, tokens, self.heads, -1) for layer in layers)
        q, k, v = (part.transpose(1, 2) for part in parts)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=self.scale)
        return self.out_proj(out.transpose(1, 2).reshape(hidden_states.shape)), None


def fits(tokens: int, width: int, causal: bool) -> bool:
    """Whether the kernels take heads of this width over so many tokens."""
    return KERNELS and width == WIDTH and tokens <= (MOST_KEYS if causal else MOST_KEYS + 1)


def projected(x: Tensor, layers: tuple[nn.Module, ...]) -> Tensor:
    """What layers over the same x give, side by side [rows, sum of outputs], in one product of the frozen weights."""
    bases = [_base(layer) for layer in layers]
    weight, bias = torch.cat([base.weight for base in bases]), torch.cat([base.bias for base in bases])
    adapted = [(place, layer) for place, layer in enumerate(layers) if isinstance(layer, LoraLinear)]
    if not adapted:
        return F.linear(x, weight, bias).flatten(0, 1)
    downs = torch.cat([layer.A for _, layer in adapted], -2)
    ups = torch.stack([layer.scale * (layer.B if layer.B.dim() == 3 else layer.B[None]) for _, layer in adapted])
    low = linear(x, downs).flatten(0, 1).to(x.dtype)
    return adapted_layers(x.flatten(0, 1), weight, bias, low, ups.to(x.dtype), [place for place, _ in adapted])


def _base(layer: nn.Module) -> nn.Linear:
    base = layer.base if isinstance(layer, LoraLinear) else layer
    assert isinstance(base, nn.Linear)
    return base


# Operations of their own, for torch.compile and autograd: neither can look into a kernel, and torch.compile would copy
# what is to be added to in place.
@torch.library.custom_op("ease::adapted_layers", mutates_args=())
def adapted_layers(x: Tensor, weight: Tensor, bias: Tensor, low: Tensor, ups: Tensor, places: list[int]) -> Tensor:
    """x W' + b, and to some layers' parts of it each model's low-rank product.

    x [rows, in], weight [layers · out, in], low [rows, adapted · rank], ups [adapted, models, out, rank]; `places` says
    which layers are adapted. Rows belong to the models in equal parts.
    """
    out = torch.addmm(bias, x, weight.T)
    for up, own, part in _adapted(out, low, ups, places):
        part.baddbmm_(own, up.mT)
    return out


@adapted_layers.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, low: Tensor, ups: Tensor, places: list[int]) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _adapted(out: Tensor, low: Tensor, ups: Tensor, places: list[int]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """For each adapted layer, by model: the upward factor, its low-rank input and its part of the output."""
    _, models, width, rank = ups.shape
    by_model, lows = out.view(models, -1, out.shape[1]), low.view(models, -1, low.shape[1])
    return [
        (up, lows[..., number * rank : (number + 1) * rank], by_model[..., place * width : (place + 1) * width])
        for number, (up, place) in enumerate(zip(ups, places, strict=True))
    ]


def _keep_layers(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, weight, _, low, ups, ctx.places = inputs
    ctx.save_for_backward(weight, low, ups)


def _layers_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The frozen weights get no gradient."""
    weight, low, ups = ctx.saved_tensors
    adapted = _adapted(grad.contiguous(), low, ups, ctx.places)
    to_low = torch.cat([torch.bmm(part, up) for up, _, part in adapted], -1).view(low.shape)
    to_ups = torch.stack([torch.bmm(part.mT, own) for _, own, part in adapted])
    return (grad @ weight if ctx.needs_input_grad[0] else None, None, None, to_low, to_ups, None)


adapted_layers.register_autograd(_layers_backward, setup_context=_keep_layers)


@torch.library.custom_op("ease::few_tokens", mutates_args=())
def few_tokens(joint: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention over queries, keys and values [batch, tokens, 3, heads, width], and norms that its gradient needs."""
    from ease.model import kernels

    q, k, v = joint.unbind(2)
    with torch.cuda.device_of(joint):
        return kernels.forward(q, k, v, scale, causal)


@torch.library.custom_op("ease::few_tokens_backward", mutates_args=())
def few_tokens_backward(grad: Tensor, joint: Tensor, norms: Tensor, scale: float, causal: bool) -> Tensor:
    from ease.model import kernels

    found = torch.empty(joint.shape, dtype=joint.dtype, device=joint.device)
    (q, k, v), (dq, dk, dv) = joint.unbind(2), found.unbind(2)
    with torch.cuda.device_of(joint):
        kernels.backward(grad, q, k, v, norms, dq, dk, dv, scale, causal)
    return found


@few_tokens.register_fake
def _(joint: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    batch, tokens, _, heads, width = joint.shape
    return joint.new_empty(batch, tokens, heads, width), joint.new_empty(batch, heads, tokens, dtype=torch.float32)


@few_tokens_backward.register_fake
def _(grad: Tensor, joint: Tensor, norms: Tensor, scale: float, causal: bool) -> Tensor:
    return joint.new_empty(joint.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    joint, ctx.scale, ctx.causal = inputs
    ctx.save_for_backward(joint, output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return few_tokens_backward(grad, *ctx.saved_tensors, ctx.scale, ctx.causal), None, None


few_tokens.register_autograd(_backward, setup_context=_keep)
