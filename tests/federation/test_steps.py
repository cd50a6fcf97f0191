"""The rule of a local step: against torch.optim and formulas, for one training and for several in a stack."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from ease.federation.protocol import Optimiser
from ease.federation.steps import StepRule, clip, project_to_balls, sophia
from ease.params import Block, Params

BLOCKS = (Block("one", "image", "projector", ("a", "b")), Block("two", "text", "lora", ("c",)))
SHAPES = {"a": (3, 5), "b": (7,), "c": (2, 2)}


def tensors_of(seed: int) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=rng) for name, shape in SHAPES.items()}


def stacked(several: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([each[name] for each in several]) for name in several[0]}


def rule_for(job, start: Mapping[str, Tensor]) -> StepRule:
    params = Params({name: tensor[0] for name, tensor in start.items()}, BLOCKS)
    return StepRule(job, params, {name: tensor.clone() for name, tensor in start.items()})


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_single_and_stacked_steps_are_those_of_torch_to_the_bit(local_job, kind: str) -> None:
    """Three steps at two step sizes; the second training leaves the stack after the first step."""
    job = local_job(optimiser=Optimiser(kind=kind, learning_rate=0.3, lora_learning_rate=0.07))
    starts = [tensors_of(seed) for seed in (0, 1)]
    theirs = [{name: tensor.clone().requires_grad_() for name, tensor in each.items()} for each in starts]
    torch_rule = torch.optim.SGD if kind == "sgd" else torch.optim.Adam
    optimisers = [
        torch_rule([{"params": [each["a"], each["b"]], "lr": 0.3}, {"params": [each["c"]], "lr": 0.07}])
        for each in theirs
    ]
    stack, alone = stacked(starts), stacked(starts[:1])
    rule, rule_alone = rule_for(job, stack), rule_for(job, alone)
    for number, active in ((1, 2), (2, 1), (3, 1)):
        gradients = [tensors_of(10 * number + training) for training in range(active)]
        for training in range(active):
            for name, gradient in gradients[training].items():
                theirs[training][name].grad = gradient
            optimisers[training].step()
        rule.apply({name: tensor[:active] for name, tensor in stack.items()}, stacked(gradients), number)
        rule_alone.apply(alone, stacked(gradients[:1]), number)
    for name in SHAPES:
        assert torch.equal(alone[name][0], theirs[0][name])
        assert all(torch.equal(stack[name][training], theirs[training][name]) for training in (0, 1))


def test_clipping_is_that_of_torch_for_each_training() -> None:
    """The first gradient is longer than the limit and the second is shorter."""
    long, short = tensors_of(0), {name: 1e-3 * tensor for name, tensor in tensors_of(1).items()}
    found = clip(stacked([long, short]), 0.5)
    for training, gradients in enumerate((long, short)):
        leaves = [torch.zeros_like(tensor, requires_grad=True) for tensor in gradients.values()]
        for leaf, gradient in zip(leaves, gradients.values(), strict=True):
            leaf.grad = gradient.clone()
        torch.nn.utils.clip_grad_norm_(leaves, 0.5)
        for leaf, name in zip(leaves, gradients, strict=True):
            torch.testing.assert_close(found[name][training], leaf.grad)


def test_projection_to_a_ball_is_the_nearest_point(toy_params) -> None:
    """Six values all 3 away from the centre are 3 sqrt(6) away; in a ball of radius sqrt(6) they end 1 away.

    The second training is inside of its ball and keeps its bits.
    """
    centre, outside, inside = (toy_params(value).tensors for value in (2.0, 5.0, 2.5))
    stack = stacked([dict(outside), dict(inside)])
    project_to_balls(stack, stacked([dict(centre)] * 2), 6**0.5)
    assert all(torch.allclose(tensor[0], torch.tensor(3.0)) for tensor in stack.values())
    assert all(torch.equal(tensor[1], torch.full_like(tensor[1], 2.5)) for tensor in stack.values())


# --- Sophia-G against its formula, worked out by hand ---


def descend(gradients: list[list[float]], pairs: int, rate: float = 0.1) -> list[float]:
    tensor, first, second = (torch.zeros(1, len(gradients[0])) for _ in range(3))
    for gradient in gradients:
        sophia(tensor, first, second, torch.tensor([gradient]), rate, pairs)
    return tensor[0].tolist()


def test_sophia_clips_where_curvature_is_small() -> None:
    """m = 0.1 g and h = 0.05 g², so the ratio is 0.1 |g| / (0.04 · 10 · 0.05 g²) = 5 / |g|: 0.5 at g = 10, 1 below 5.

    Where there is no gradient there is no step, although 0 / 0 threatens.
    """
    assert descend([[10.0, -10.0, 4.0, -0.001, 0.0]], pairs=10) == pytest.approx([-0.05, 0.05, -0.1, 0.1, 0.0])


def test_two_steps_of_sophia_keep_the_running_means() -> None:
    """g = 10, then 20: m = 1, then 0.9 + 2 = 2.9; h = 5, then 4.75 + 20 = 24.75.

    With 10 pairs the ratios are 1 / (0.4 · 5) = 0.5 and 2.9 / (0.4 · 24.75) = 0.29292...
    """
    assert descend([[10.0], [20.0]], pairs=10) == pytest.approx([-0.1 * (0.5 + 2.9 / 9.9)])


def test_more_pairs_make_smaller_steps_of_sophia() -> None:
    """Pairs of a batch replace the published factor 5120."""
    assert descend([[10.0]], pairs=20) == pytest.approx([-0.025])


def test_sophia_follows_the_sign_of_the_mean_gradient() -> None:
    """g = 1, then -2: m = 0.1, then 0.09 - 0.2 < 0, so the second step goes up; both are clipped."""
    assert descend([[1.0], [-2.0]], pairs=1) == pytest.approx([-0.1 + 0.1])
    assert descend([[1.0], [-0.5]], pairs=1) == pytest.approx([-0.1 - 0.1])


def test_a_job_brings_the_batch_size_and_rates_of_sophia(local_job) -> None:
    """All values of a first step with |g| = 10 and 20 pairs move by a quarter of their step size."""
    job = local_job(batch_size=20, optimiser=Optimiser(kind="sophia", learning_rate=0.2, lora_learning_rate=0.3))
    stack = {name: torch.zeros(1, *shape) for name, shape in SHAPES.items()}
    rule_for(job, stack).apply(stack, {name: torch.full_like(tensor, -10.0) for name, tensor in stack.items()}, 1)
    for name, rate in {"a": 0.2, "b": 0.2, "c": 0.3}.items():
        torch.testing.assert_close(stack[name], torch.full_like(stack[name], 0.25 * rate))
