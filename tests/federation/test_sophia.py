"""Sophia-G against its formula, worked out by hand."""

import pytest
import torch

from ease.federation.local import _optimiser
from ease.federation.protocol import Optimiser
from ease.federation.sophia import SophiaG


def descend(gradients: list[list[float]], pairs: int, rate: float = 0.1) -> list[float]:
    tensor = torch.zeros(len(gradients[0]))
    optimiser = SophiaG([{"params": [tensor], "lr": rate}], pairs)
    for gradient in gradients:
        tensor.grad = torch.tensor(gradient)
        optimiser.step()
    return tensor.tolist()


def test_one_step_is_clipped_where_curvature_is_small() -> None:
    """m = 0.1 g and h = 0.05 g², so the ratio is 0.1 |g| / (0.04 · 10 · 0.05 g²) = 5 / |g|: 0.5 at g = 10, 1 below 5.

    Where there is no gradient there is no step, although 0 / 0 threatens.
    """
    assert descend([[10.0, -10.0, 4.0, -0.001, 0.0]], pairs=10) == pytest.approx([-0.05, 0.05, -0.1, 0.1, 0.0])


def test_two_steps_keep_the_running_means() -> None:
    """g = 10, then 20: m = 1, then 0.9 + 2 = 2.9; h = 5, then 4.75 + 20 = 24.75.

    With 10 pairs the ratios are 1 / (0.4 · 5) = 0.5 and 2.9 / (0.4 · 24.75) = 0.29292...
    """
    assert descend([[10.0], [20.0]], pairs=10) == pytest.approx([-0.1 * (0.5 + 2.9 / 9.9)])


def test_more_pairs_make_smaller_steps() -> None:
    """The published factor 5120 stands where the pairs of a batch stand here."""
    assert descend([[10.0]], pairs=20) == pytest.approx([-0.025])


def test_the_sign_is_that_of_the_mean_gradient() -> None:
    """g = 1, then -2: m = 0.1, then 0.09 - 0.2 < 0, so the second step goes up; both are clipped."""
    assert descend([[1.0], [-2.0]], pairs=1) == pytest.approx([-0.1 + 0.1])
    assert descend([[1.0], [-0.5]], pairs=1) == pytest.approx([-0.1 - 0.1])


def test_a_job_brings_its_batch_size_and_rates(toy_params, local_job) -> None:
    params = toy_params(0.0)
    job = local_job(batch_size=7, optimiser=Optimiser(kind="sophia", learning_rate=0.2, lora_learning_rate=0.3))
    optimiser = _optimiser(job, params, params.tensors)
    assert isinstance(optimiser, SophiaG)
    assert [(group["pairs"], group["lr"]) for group in optimiser.param_groups] == [(7, 0.2), (7, 0.3)]
