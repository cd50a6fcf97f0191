"""How towers of transformers attend: by kernels for few tokens where they fit, else as torch does."""

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

NAME = "ease_few_tokens"
"""Under which transformers knows `attend`."""
KERNELS = find_spec("triton") is not None
"""Triton comes with torch for CUDA on Linux, and not elsewhere."""
WIDTH = 64
"""Features of a head, the same in all published CLIP and SigLIP base and large models."""
MOST_KEYS = 256
"""What a kernel takes into one tile; a picture's class token makes one more, which goes beside it."""


def registered() -> str:
    """Make `attend` known to transformers, and give the name that chooses it."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)
    return NAME


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attention as transformers asks for it: [batch, heads, tokens, width] in, [batch, tokens, heads, width] out."""
    causal = bool(options.get("is_causal"))
    if attention_mask is not None or options.get("dropout") or not fits(query, key, value, causal):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    q, k, v = (each.transpose(1, 2) for each in (query, key, value))
    return few_tokens(q, k, v, options["scaling"], causal)[0], None


def fits(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> bool:
    """Whether the kernels take these [batch, heads, tokens, width]: half precision on a GPU, and few enough tokens."""
    tokens = query.shape[2]
    return (
        KERNELS
        and query.is_cuda
        and query.dtype == key.dtype == value.dtype == torch.bfloat16
        and query.shape == key.shape == value.shape
        and query.shape[3] == WIDTH
        and tokens <= (MOST_KEYS if causal else MOST_KEYS + 1)
    )


# Operations of their own, for torch.compile and autograd: neither can look into a kernel.
@torch.library.custom_op("ease::few_tokens", mutates_args=())
def few_tokens(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention over [batch, tokens, heads, width], and the norms that its gradient needs."""
    from ease.model import kernels

    return kernels.forward(q, k, v, scale, causal)


@torch.library.custom_op("ease::few_tokens_backward", mutates_args=())
def few_tokens_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, norms: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    from ease.model import kernels

    return kernels.backward(grad, q, k, v, norms, scale, causal)


@few_tokens.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    batch, tokens, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((batch, heads, tokens), dtype=torch.float32)


@few_tokens_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, norms: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape), q.new_empty(q.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.scale, ctx.causal = inputs
    ctx.save_for_backward(q, k, v, output[1])


def _gradients(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return (*few_tokens_backward(grad, *ctx.saved_tensors, ctx.scale, ctx.causal), None, None)


few_tokens.register_autograd(_gradients, setup_context=_keep)
