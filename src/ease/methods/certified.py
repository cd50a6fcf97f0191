"""Guarantee of Gaussian noise: the delta of two models whose distance is so many standard deviations, for an
epsilon."""

from math import exp, inf

import torch
from scipy.special import log_ndtr, ndtr
from torch import Tensor

from ease.params import Params
from ease.seeding import torch_generator

STEPS = 200
"""Steps of a bisection: more than double precision resolves."""


def gaussian_delta(ratio: float, epsilon: float) -> float:
    """The exact delta of noise on two points `ratio` standard deviations apart (Balle and Wang, 2018)."""
    if ratio <= 0:
        return 0.0
    high, low = ratio / 2 - epsilon / ratio, -ratio / 2 - epsilon / ratio
    return float(max(0.0, ndtr(high) - exp(min(700.0, epsilon + float(log_ndtr(low))))))


def largest_ratio(epsilon: float, delta: float) -> float:
    """How many standard deviations two points may be apart for that (epsilon, delta)."""
    if delta >= 1:
        return inf
    low, high = 0.0, 1.0
    while gaussian_delta(high, epsilon) < delta:
        high *= 2
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if gaussian_delta(middle, epsilon) < delta else (low, middle)
    return low


def noisy(state: Params, sigma: float, seed: int, *names: str | int) -> Params:
    """A state with Gaussian noise of that standard deviation on every value."""
    rng = torch_generator(seed, *names)

    def with_noise(tensor: Tensor, _: Tensor) -> Tensor:
        return tensor + sigma * torch.randn(tensor.shape, generator=rng, dtype=torch.float64).to(tensor)

    return state.zip(with_noise, state)


def clipped(state: Params, centre: Params, radius: float) -> Params:
    """The nearest state within that distance of a centre."""
    away = state - centre
    length = away.norm()
    return state if length <= radius else centre + (radius / length) * away


def certificate(epsilon: float, delta: float, sigma: float, assumptions: str, **found: float) -> dict[str, object]:
    """The guarantee of a result as a note of its round."""
    return {"certificate": {"epsilon": epsilon, "delta": delta, "sigma": sigma, **found, "assumptions": assumptions}}
