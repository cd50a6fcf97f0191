"""Attention over few tokens against plain float32 arithmetic: compiled on a GPU, or interpreted without one by

TRITON_INTERPRET=1 pytest tests/model/test_attention.py
"""

import os

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ease.model import attention

ON_GPU = torch.cuda.is_available()
interpreted = pytest.mark.skipif(
    ON_GPU or os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1, from the start, and no GPU"
)
pytest.importorskip("triton")

SHAPES = [(1, False), (2, True), (7, True), (17, False), (50, False), (64, False), (65, True), (77, True)]
LONG = [(196, False), (256, True), (257, False)]


def drawn(tokens: int, dtype: torch.dtype, device: str) -> tuple[list[Tensor], Tensor]:
    """Queries, keys and values side by side in memory, and a gradient that lies otherwise than they do."""
    rng = torch.Generator().manual_seed(tokens)
    beside = torch.randn(2, tokens, 3, 2, attention.WIDTH, generator=rng) * 1.5
    grad = torch.randn(2, 2, tokens, attention.WIDTH, generator=rng)
    parts = [beside.to(device, dtype)[:, :, part].detach().requires_grad_() for part in range(3)]
    return parts, grad.to(device, dtype).transpose(1, 2)


def by_hand(parts: list[Tensor], scale: float, causal: bool) -> Tensor:
    q, k, v = (part.float().transpose(1, 2) for part in parts)
    scores = q @ k.mT * scale
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def check(tokens: int, causal: bool, dtype: torch.dtype, device: str, tolerance: float) -> None:
    parts, grad = drawn(tokens, dtype, device)
    out, _ = attention.few_tokens(*parts, 0.2, causal)
    assert out.dtype == dtype and out.is_contiguous()
    exact = [part.detach().float().requires_grad_() for part in parts]
    expected = by_hand(exact, 0.2, causal)
    found = (out, *torch.autograd.grad(out, parts, grad))
    wanted = (expected, *torch.autograd.grad(expected, exact, grad.float()))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(
            one.float(), other, rtol=0, atol=tolerance * (other.detach().abs().max().item() + 0.1)
        )


@interpreted
@pytest.mark.parametrize(("tokens", "causal"), SHAPES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.float16, 2e-3)])
def test_outputs_and_gradients(tokens: int, causal: bool, dtype: torch.dtype, tolerance: float) -> None:
    check(tokens, causal, dtype, "cpu", tolerance)


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize(("tokens", "causal"), LONG)
def test_outputs_and_gradients_of_more_tokens(tokens: int, causal: bool) -> None:
    check(tokens, causal, torch.float32, "cpu", 2e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize(("tokens", "causal"), [*SHAPES, *LONG])
def test_outputs_and_gradients_on_a_gpu(tokens: int, causal: bool) -> None:
    check(tokens, causal, torch.bfloat16, "cuda", 2e-2)


@interpreted
def test_scores_far_below_zero_do_not_overflow_in_the_padding() -> None:
    """Padding has score zero; beside scores of -1,000 its share would be infinite, and that times zero no number."""
    parts, grad = drawn(20, torch.float32, "cpu")
    q, k, v = parts
    with torch.no_grad():
        q.copy_(q.abs() + 5), k.copy_(-k.abs() - 5)
    out, _ = attention.few_tokens(q, k, v, 1.0, False)
    assert all(part.isfinite().all() for part in (out, *torch.autograd.grad(out, parts, grad)))


@interpreted
def test_torch_may_compile_and_differentiate_it() -> None:
    """What torch.compile is told of shapes, strides and gradients is what the kernels give."""
    parts, _ = drawn(20, torch.float32, "cpu")
    checks = ("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_static")
    torch.library.opcheck(attention.few_tokens, (*parts, 0.2, True), test_utils=checks)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("causal", [False, True])
def test_the_kernels_stand_in_for_sdpa(causal: bool) -> None:
    """As transformers calls it, compiled and not; what does not fit goes to SDPA."""
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, 77, 4, 64, generator=rng).cuda().bfloat16().transpose(1, 2) for _ in range(3))
    options = {"scaling": 0.125, "is_causal": causal, "dropout": 0.0}
    assert attention.fits(q, k, v, causal) and not attention.fits(q.float(), k.float(), v.float(), causal)
    expected = F.scaled_dot_product_attention(q, k, v, scale=0.125, is_causal=causal).transpose(1, 2)
    for call in (attention.attend, torch.compile(attention.attend)):
        found, _ = call(torch.nn.Module(), q, k, v, None, **options)
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
