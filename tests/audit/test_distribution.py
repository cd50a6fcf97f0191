"""Distances between distributions of statistics against scipy, closed forms and naive loops."""

import numpy as np
import pytest
from scipy.stats import ks_2samp, norm

from ease.audit.distribution import distance_between, ks_distance, ulira
from ease.audit.membership import auc, unscored
from ease.errors import UserError
from ease.seeding import generator


@pytest.mark.parametrize(("first", "second", "shift"), [(30, 30, 0.0), (200, 77, 0.4), (500, 500, 2.0)])
def test_ks_is_scipys(first, second, shift):
    rng = generator(0, "ks", first)
    a, b = rng.normal(shift, 1, first), rng.normal(0, 1, second)
    found, expected = ks_distance(a, b, rng, replicates=50), ks_2samp(a, b)
    assert found.distance.value == expected.statistic
    assert found.p_value == expected.pvalue
    assert found.counts == (first, second)


def test_ks_under_ties_is_scipys():
    rng = generator(0, "ks ties")
    a, b = rng.integers(0, 6, 80), rng.integers(1, 7, 50)
    assert ks_distance(a, b, rng, replicates=50).distance.value == pytest.approx(ks_2samp(a, b).statistic)


@pytest.mark.parametrize("shift", [0.0, 0.5, 1.5])
@pytest.mark.slow
def test_the_interval_of_ks_covers_the_closed_form(shift):
    truth = 2 * norm.cdf(shift / 2) - 1
    covered = 0
    for trial in range(60):
        rng = generator(trial, "ks coverage")
        interval = ks_distance(rng.normal(shift, 1, 150), rng.normal(0, 1, 150), rng, replicates=150).distance
        assert interval.low <= interval.value <= interval.high
        covered += interval.contains(truth)
    assert covered >= 53


def test_a_p_value_measures_the_sample_and_the_distance_does_not():
    """The same shift of a fifth of a standard deviation."""
    rng = generator(0, "power")
    few, many = (ks_distance(rng.normal(0.2, 1, n), rng.normal(0, 1, n), rng, 200) for n in (100, 3000))
    assert few.p_value > 0.01
    assert many.p_value < 1e-6
    assert few.distance.contains(2 * norm.cdf(0.1) - 1)
    assert many.distance.contains(2 * norm.cdf(0.1) - 1)


def test_a_single_distance_is_scipys():
    rng = generator(0, "distance")
    a, b = rng.normal(size=300), rng.normal(0.3, 1, 200)
    assert distance_between(a, b) == pytest.approx(ks_2samp(a, b).statistic)
    assert distance_between(a, b) == ks_distance(a, b, rng, 10).distance.value


def test_broken_samples_are_refused():
    rng = generator(0, "broken")
    with pytest.raises(UserError, match=r"the second sample must be finite numbers \[n\], not \[2\] with 1 broken"):
        ks_distance(np.ones(3), np.array([1.0, np.nan]), rng)
    with pytest.raises(UserError, match="first sample"):
        ks_distance(np.array([]), np.ones(3), rng)
    with pytest.raises(UserError, match="1 statistics are not finite"):
        ulira(np.array([[0.0, np.inf]]), np.zeros((1, 2)), np.zeros(1))
    with pytest.raises(UserError, match=r"not \[2, 3\], \[1, 3\], \[2\]"):
        ulira(np.zeros((2, 3)), np.zeros((1, 3)), np.zeros(2))


def test_ulira_is_the_naive_loop_and_counts_what_it_cannot_score():
    rng = generator(0, "ulira")
    inside, outside, target = rng.normal(1, 1, (40, 9)), rng.normal(0, 1, (40, 7)), rng.normal(1, 1, 40)
    inside[3, 1:] = np.nan  # one unlearned shadow: no variance of its own
    outside[5] = np.nan
    outside[6, :3] = np.nan
    scores = ulira(inside, outside, target)
    for i, score in enumerate(scores):
        first, second = (side[i][~np.isnan(side[i])] for side in (inside, outside))
        if i in (3, 5):
            assert np.isnan(score)
            continue
        ratio = norm.logpdf(target[i], np.median(first), first.std())
        assert score == pytest.approx(ratio - norm.logpdf(target[i], np.median(second), second.std()))
    assert unscored(scores) == 2
    assert unscored(ulira(inside, outside, target, variance="shared")) == 1


def test_ulira_sees_both_incomplete_and_excessive_forgetting_and_nothing_after_a_retrain():
    rng = generator(1, "ulira")
    hardness = rng.normal(0, 2, (1500, 1))

    def strength(left_over: float):
        unlearned, never, members, nonmembers = (
            hardness + left + rng.normal(size=(1500, count))
            for left, count in ((left_over, 24), (0, 24), (left_over, 1), (0, 1))
        )
        return auc(ulira(unlearned, never, members[:, 0]), ulira(unlearned, never, nonmembers[:, 0]))

    assert strength(0.0).contains(0.5)
    for left_over in (1.0, -1.0):
        found = strength(left_over)
        assert found.low > 0.65
        assert found.value == pytest.approx(norm.cdf(1 / np.sqrt(2)), abs=0.06)
