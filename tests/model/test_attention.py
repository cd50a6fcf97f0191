"""Attention over few tokens against plain float32 arithmetic: compiled on a GPU, or interpreted without one by

TRITON_INTERPRET=1 pytest tests/model/test_attention.py
"""

import copy
import os

import pytest
import torch
from torch import Tensor

from ease.model import attention
from ease.model.lora import LoraLinear

transformers = pytest.importorskip("transformers")

ON_GPU = torch.cuda.is_available()
interpreted = pytest.mark.skipif(
    ON_GPU or not attention.KERNELS or os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs triton, TRITON_INTERPRET=1 from the start, and no GPU",
)

CHECKS = ("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_static")
SHAPES = [(1, False), (2, True), (7, True), (17, False), (50, False), (64, False), (65, True), (77, True)]
LONG = [(129, False), (130, False), (150, True), (196, False), (256, True), (257, False)]


def drawn(tokens: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Queries, keys and values side by side, and a gradient that lies otherwise than they do."""
    rng = torch.Generator().manual_seed(tokens)
    joint = torch.randn(2, tokens, 3, 2, attention.WIDTH, generator=rng) * 1.5
    grad = torch.randn(2, 2, tokens, attention.WIDTH, generator=rng)
    return joint.to(device, dtype).requires_grad_(), grad.to(device, dtype).transpose(1, 2)


def by_hand(joint: Tensor, scale: float, causal: bool) -> Tensor:
    q, k, v = (part.transpose(1, 2) for part in joint.unbind(2))
    scores = q @ k.mT * scale
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def check(tokens: int, causal: bool, dtype: torch.dtype, device: str, tolerance: float) -> None:
    joint, grad = drawn(tokens, dtype, device)
    out, _ = attention.few_tokens(joint, 0.2, causal)
    assert out.dtype == dtype and out.is_contiguous()
    exact = joint.detach().float().requires_grad_()
    expected = by_hand(exact, 0.2, causal)
    found = (out, *torch.autograd.grad(out, joint, grad)[0].unbind(2))
    wanted = (expected, *torch.autograd.grad(expected, exact, grad.float())[0].unbind(2))
    largest = max(other.detach().abs().max().item() for other in wanted)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.float(), other, rtol=0, atol=tolerance * largest)


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
    joint, grad = drawn(20, torch.float32, "cpu")
    with torch.no_grad():
        queries, keys, _ = joint.unbind(2)
        queries.abs_().add_(5), keys.abs_().add_(5).neg_()
    out, _ = attention.few_tokens(joint, 1.0, False)
    assert out.isfinite().all() and torch.autograd.grad(out, joint, grad)[0].isfinite().all()


@interpreted
@pytest.mark.slow
def test_torch_may_compile_and_differentiate_it() -> None:
    """What torch.compile is told of shapes, strides and gradients is what the kernels give."""
    joint, _ = drawn(20, torch.float32, "cpu")
    torch.library.opcheck(attention.few_tokens, (joint, 0.2, True), test_utils=CHECKS)


@pytest.mark.parametrize("models", [1, 3])
def test_one_product_for_three_layers_gives_what_each_gives(models: int) -> None:
    """Values, and gradients of the input and of every adapter; the frozen weights get none."""
    rng = torch.Generator().manual_seed(0)
    layers: list[torch.nn.Module] = [torch.nn.Linear(16, 16).requires_grad_(False) for _ in range(3)]
    for place in (0, 2):
        layers[place] = adapter = LoraLinear(layers[place], 4, 2.0, False, rng)
        adapter.B = torch.nn.Parameter(torch.randn(*(() if models == 1 else (models,)), 16, 4, generator=rng))
    x = torch.randn(6, 5, 16, generator=rng).requires_grad_()
    trained = (x, layers[0].B, layers[2].B)
    grad = torch.randn(30, 48, generator=rng)
    found, expected = attention.projected(x, tuple(layers)), torch.cat([layer(x) for layer in layers], -1).flatten(0, 1)
    torch.testing.assert_close(found, expected)
    for one, other in zip(*(torch.autograd.grad(each, trained, grad) for each in (found, expected)), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.slow
def test_torch_may_compile_and_differentiate_the_product() -> None:
    x, weight, bias, low = torch.randn(6, 8), torch.randn(12, 8), torch.randn(12), torch.randn(6, 4)
    ups = torch.randn(2, 3, 4, 2)
    given = (x.requires_grad_(), weight, bias, low.requires_grad_(), ups.requires_grad_(), [0, 2])
    torch.library.opcheck(attention.adapted_layers, given, test_utils=CHECKS)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize(("tokens", "causal"), [(50, False), (77, True), (300, False)])
def test_a_block_attends_as_the_stock_layers_do(tokens: int, causal: bool) -> None:
    """In half precision, compiled and not; so many tokens that the kernels do not take them go to torch."""
    stock = transformers.CLIPModel(transformers.CLIPConfig()).text_model.encoder.layers[0].self_attn.float()
    halved = copy.deepcopy(stock).cuda().bfloat16()
    x = torch.randn(3, tokens, 512, generator=torch.Generator().manual_seed(0))
    plain = attention.TowerAttention(stock)
    with torch.no_grad():
        expected, _ = plain(x, is_causal=causal)
        ours = attention.TowerAttention(halved)
        for call in (ours, torch.compile(ours)):
            found, _ = call(x.cuda().bfloat16(), is_causal=causal)
            assert (found.float().cpu() - expected).norm() < 0.02 * expected.norm()
