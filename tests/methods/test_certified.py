"""Certified methods: the mechanism by hand and by sampling, and that what is printed is what was done."""

from math import exp, log, sqrt

import numpy as np
import pytest
import torch
from scipy.stats import norm

from ease.methods.certified import clipped, gaussian_delta, largest_ratio, noisy
from ease.methods.noisy_finetune import NoisyFinetune
from ease.methods.sifu import Sifu, sensitivities
from ease.requests.request import ClientRequest, SampleRequest


@pytest.mark.parametrize(("ratio", "epsilon"), [(0.5, 0.1), (1.0, 1.0), (3.0, 2.0), (0.2, 0.0)])
def test_delta_is_the_hockey_stick_divergence(ratio: float, epsilon: float) -> None:
    """The integral of max(0, p - e^epsilon q) of two normal densities, on a fine grid."""
    x = np.linspace(-20, 20, 400_001)
    excess = np.maximum(0, norm.pdf(x, ratio) - exp(epsilon) * norm.pdf(x)).sum() * (x[1] - x[0])
    assert gaussian_delta(ratio, epsilon) == pytest.approx(excess, rel=1e-4)


def test_the_ratio_undoes_the_delta_and_the_classical_bound_is_looser() -> None:
    for epsilon, delta in ((0.5, 1e-5), (1.0, 1e-3), (8.0, 1e-5), (1.0, 0.5)):
        ratio = largest_ratio(epsilon, delta)
        assert gaussian_delta(ratio, epsilon) == pytest.approx(delta, rel=1e-6)
    assert largest_ratio(0.5, 1e-5) > 0.5 / sqrt(2 * log(1.25 / 1e-5)), "Dwork and Roth, for epsilon below 1"


def test_more_noisy_rounds_need_less_noise() -> None:
    method = NoisyFinetune(epsilon=1.0, delta=1e-5, radius=2.0)
    sigmas = [method.sigma(rounds) for rounds in (1, 5, 25)]
    assert sigmas == sorted(sigmas, reverse=True)
    assert gaussian_delta(4.0 / sigmas[1], 1.0) ** 5 == pytest.approx(1e-5, rel=1e-5)


def test_two_chains_are_as_close_as_promised() -> None:
    """In one dimension the worst case is two chains at both ends of the ball: the last noise decides nothing alone."""
    rng, sigma, radius, draws = np.random.default_rng(0), 1.0, 1.0, 200_000
    chains = [np.full(draws, -5.0), np.full(draws, 5.0)]
    for _ in range(3):
        chains = [np.clip(chain, -radius, radius) + sigma * rng.normal(size=draws) for chain in chains]
    bins = np.linspace(-8, 8, 81)
    low, high = (np.histogram(chain, bins)[0] / draws for chain in chains)
    epsilon = 0.5
    excess = np.maximum(0, high - exp(epsilon) * low).sum()
    assert excess <= gaussian_delta(2 * radius / sigma, epsilon) ** 3 + 0.01


def test_sensitivities_by_hand() -> None:
    """Parts 1, 2 and 3: without expansion they add up; with 2 they are 1, 2 + 2 and 8 + 3."""
    assert sensitivities([1, 2, 3], 1.0) == [0, 1, 3, 6]
    assert sensitivities([1, 2, 3], 2.0) == [0, 1, 4, 11]


def test_noise_and_clipping(toy_params) -> None:
    start = toy_params(0.0)
    moved = noisy(start, 2.0, 7, "x")
    assert moved == noisy(start, 2.0, 7, "x") != noisy(start, 2.0, 8, "x")
    short = clipped(moved, start, 0.5)
    assert short.norm() == pytest.approx(0.5, rel=1e-6) and clipped(short, start, 1.0) == short
    values = torch.cat([tensor.flatten() for tensor in moved.tensors.values()])
    assert 0.3 < float(values.std()) < 6


def steps(method, learnt, request):
    return list(method.unlearn(learnt.trained, request, learnt.world.federation))


def test_sifu_keeps_what_the_noise_hides_and_reports_it(learnt) -> None:
    request = ClientRequest(clients=(1,))
    rounds = learnt.trained.training.rounds
    loud, quiet = steps(Sifu(sigma=1e6), learnt, request), steps(Sifu(sigma=1e-9), learnt, request)
    assert [step.phase for step in loud] == ["kept"] * (rounds - 1) + ["retraining"]
    reported = loud[rounds - 2].notes["certificate"]
    assert (reported["epsilon"], reported["delta"], reported["kept_rounds"]) == (8.0, 1e-5, rounds - 1)
    assert reported["sensitivity"] <= 1e6 * largest_ratio(8.0, 1e-5) and "expansion" in reported["assumptions"]
    assert {step.phase for step in quiet} == {"retraining"} and quiet[0].notes["certificate"]["epsilon"] == 0
    pairs = SampleRequest(ids=learnt.world.shards[0].train_ids[:3])
    exact = steps(Sifu(sigma=1e6), learnt, pairs)
    assert exact[0].notes["certificate"]["epsilon"] == 0 and {step.phase for step in exact} == {"retraining"}


def test_noisy_fine_tuning_stays_in_its_ball_and_says_what_it_proves(learnt) -> None:
    method = NoisyFinetune(epsilon=2.0, radius=0.1)
    found = steps(method, learnt, ClientRequest(clients=(1,)))
    noisy_rounds = [step for step in found if step.phase == "noisy rounds"]
    reported = noisy_rounds[-1].notes["certificate"]
    assert reported["sigma"] == method.sigma(len(noisy_rounds)) and reported["rounds"] == len(noisy_rounds)
    away = (noisy_rounds[-1].state - learnt.trained.initial).norm()
    size = learnt.trained.initial.size
    assert away <= 0.1 + 1.2 * reported["sigma"] * sqrt(size)
