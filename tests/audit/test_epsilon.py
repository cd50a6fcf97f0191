"""The bound on epsilon: never above the truth but for one time in twenty, and sharp with many canaries."""

import math

import numpy as np
import pytest
from scipy.stats import binom

from ease.audit.epsilon import Guesses, guess, lower_bound
from ease.seeding import generator


def test_the_quarters_at_both_ends_are_guessed() -> None:
    """Eight canaries: the two highest are called in, the two lowest out."""
    scores = np.array([0.0, 1, 2, 3, 4, 5, 6, 7])
    inside = np.array([True, False, True, False, True, False, True, True])
    assert guess(scores, inside) == Guesses(right=3, made=4)
    assert guess(-scores, inside) == Guesses(right=1, made=4)


def test_the_bound_is_where_so_many_right_guesses_would_be_one_in_twenty() -> None:
    for right, made in ((30, 40), (99, 100), (21, 40)):
        epsilon = lower_bound(right, made)
        assert binom.sf(right - 1, made, 1 / (1 + math.exp(-epsilon))) == pytest.approx(0.05)


def test_all_right_gives_the_closed_form_and_none_gives_nothing() -> None:
    """With n of n right the limit p has p^n = 0.05."""
    assert Guesses(100, 100).epsilon == pytest.approx(math.log(0.05**0.01 / (1 - 0.05**0.01)))
    assert Guesses(0, 100).epsilon == Guesses(50, 100).epsilon == 0


@pytest.mark.parametrize("epsilon", [0.0, 1.0, 3.0])
def test_randomised_response_is_bounded_by_its_own_epsilon(epsilon: float) -> None:
    """It tells each coin truly with e^epsilon / (1 + e^epsilon), as leaky as its epsilon allows."""
    rng, runs = generator(0, "response"), 400
    share = 1 / (1 + math.exp(-epsilon))
    bounds = []
    for _ in range(runs):
        inside = rng.random(1000) < 0.5
        reported = inside ^ (rng.random(1000) > share)
        bounds.append(guess(reported + 1e-6 * rng.random(1000), inside).epsilon)
    above = sum(bound > epsilon for bound in bounds)
    assert above <= binom.ppf(0.999, runs, 0.05)
    assert np.median(bounds) >= epsilon - 0.45
