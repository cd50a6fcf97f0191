"""BaVarIA against closed forms: its limits, its prior, its tails, and what it gains with few shadows."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from scipy.stats import invgamma, norm
from scipy.stats import t as student

from ease.audit.bavaria import (
    Prior,
    Statistics,
    bavaria,
    evidence_slope,
    fit_prior,
    log_evidence,
    log_upper_tail,
    posterior,
    predict,
)
from ease.audit.membership import auc, lira
from ease.errors import UserError
from ease.seeding import generator

Simulated = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def simulate(
    rng: np.random.Generator, pairs: int, shadows: int, freedom: float = 4.0, effect: float = 2.0
) -> Simulated:
    """Target, shadows, who is in which, and members: hardness differs, and so does the noise of pairs."""
    hardness, spread = rng.normal(0, 2, pairs), np.sqrt(freedom / rng.chisquare(freedom, pairs))
    halves = [rng.permutation(pairs) < pairs // 2 for _ in range(shadows // 2)]
    included = np.stack([side for half in halves for side in (half, ~half)], axis=1)
    member = np.arange(pairs) < pairs // 2
    noise = spread[:, None] * rng.normal(size=(pairs, shadows + 1))
    values = hardness[:, None] + effect * np.column_stack([member, included]) + noise
    return values[:, 0], values[:, 1:], included, member


def area(scores: np.ndarray, member: np.ndarray) -> float:
    return auc(scores[member], scores[~member]).value


# --- the conjugate update ---


def test_the_posterior_of_two_shadows_by_hand() -> None:
    """Shadows 1 and 3, prior mean 0 worth 2 shadows and variance 1 worth 4.

    Mean 2, squares 2; mean of all (0 2 + 2 2) / 4 = 1; variance (4 1 + 2 + 2 2 / 4 2^2) / (4 + 2) = 10 / 6.
    """
    seen = Statistics.of(np.array([[1.0, 3.0, 99.0]]), np.array([[True, True, False]]))
    found = posterior(seen, Prior(0, 2, 1, 4))
    assert (found.mean[0], found.mean_strength[0], found.variance_strength[0]) == (1, 4, 6)
    assert found.variance[0] == pytest.approx(10 / 6)


def test_the_predictive_and_the_evidence_are_integrals_over_mean_and_variance() -> None:
    """Summed over a grid: in the logarithm of the variance, and in the mean."""
    values, prior = np.array([0.4, 1.9]), Prior(0.3, 1.5, 0.8, 5)
    logarithm, mean = np.linspace(-6, 8, 700)[:, None], np.linspace(-30, 30, 1500)
    variance, cell = np.exp(logarithm), 14 / 699 * 60 / 1499
    weight = invgamma.pdf(variance, prior.variance_strength / 2, scale=prior.variance_strength * prior.variance / 2)
    weight = weight * variance * norm.pdf(mean, prior.mean, np.sqrt(variance / prior.mean_strength)) * cell

    def integrated(data: Sequence[float]) -> float:
        return float((weight * math.prod(norm.pdf(each, mean, np.sqrt(variance)) for each in data)).sum())

    everything = np.ones((1, 2), dtype=bool)
    evidence = log_evidence(Statistics.of(values[None], everything), prior)
    assert evidence == pytest.approx(math.log(integrated(values)), abs=1e-4)
    freedom, centre, spread = predict(values[None], everything, prior=prior)
    expected = integrated([*values, 1.1]) / integrated(values)
    assert student.pdf(1.1, freedom[0], centre[0], spread[0]) == pytest.approx(expected, rel=1e-4)


def test_the_fitted_prior_is_the_one_that_drew_the_pairs() -> None:
    rng = generator(0, "prior")
    true = Prior(-1.5, 0.4, 2.5, 8)
    variance = true.variance_strength * true.variance / rng.chisquare(true.variance_strength, 20000)
    mean = rng.normal(true.mean, np.sqrt(variance / true.mean_strength))
    values = rng.normal(mean[:, None], np.sqrt(variance)[:, None], (20000, 6))
    present = rng.random(values.shape) < 0.7
    found = fit_prior(values, present)
    assert found.mean == pytest.approx(true.mean, abs=0.08)
    assert found.mean_strength == pytest.approx(true.mean_strength, rel=0.05)
    assert found.variance == pytest.approx(true.variance, rel=0.05)
    assert found.variance_strength == pytest.approx(true.variance_strength, rel=0.15)
    seen = Statistics.of(values[present.any(1)], present[present.any(1)])
    best = log_evidence(seen, found)
    for factor in (0.8, 1.25):
        for changed in (
            Prior(found.mean + factor - 1, found.mean_strength, found.variance, found.variance_strength),
            Prior(found.mean, found.mean_strength * factor, found.variance, found.variance_strength),
            Prior(found.mean, found.mean_strength, found.variance * factor, found.variance_strength),
            Prior(found.mean, found.mean_strength, found.variance, found.variance_strength * factor),
        ):
            assert log_evidence(seen, changed) < best


def test_the_slope_of_the_evidence_is_its_difference_quotient() -> None:
    values = generator(0, "slope").normal(1, 2, (30, 5))
    seen, fields = Statistics.of(values, values < 3), np.array([0.7, 0.4, 2.1, 6.0])
    found = evidence_slope(seen, Prior(*fields))
    for field, step in enumerate(1e-5 * np.eye(4)):
        rise = log_evidence(seen, Prior(*(fields + step))) - log_evidence(seen, Prior(*(fields - step)))
        assert found[field] == pytest.approx(rise / 2e-5, rel=1e-5)


def test_a_fit_follows_the_units_of_the_statistic() -> None:
    target, shadows, included, _ = simulate(generator(0, "units"), 200, 8)
    scores = bavaria(target, shadows, included)
    np.testing.assert_allclose(bavaria(1e-3 * target + 7, 1e-3 * shadows + 7, included), scores, rtol=1e-5, atol=1e-5)


# --- its limits ---


def test_with_many_shadows_the_score_is_the_analytic_log_likelihood_ratio() -> None:
    """The error is what n values leave open of a normal log density z spreads out: z^2 / n + (z^2 - 1)^2 / 2n."""
    rng = generator(0, "many")
    pairs = 60
    centres, spreads = rng.normal([[2.0], [0.0]], 1, (2, pairs)), rng.uniform(0.5, 2, (2, pairs))
    target = np.where(np.arange(pairs) % 2, *centres)
    away = ((target - centres) / spreads) ** 2
    exact = norm.logpdf(target, centres[0], spreads[0]) - norm.logpdf(target, centres[1], spreads[1])
    for shadows in (640, 5120, 40960):
        included = np.tile(np.arange(shadows) % 2 == 0, (pairs, 1))
        centre, spread = (np.where(included, *each[..., None]) for each in (centres, spreads))
        found = bavaria(target, centre + spread * rng.normal(size=included.shape), included)
        expected = ((away + (away - 1) ** 2 / 2).sum(0) / (shadows / 2)) ** 0.5
        assert 0.7 < np.sqrt((((found - exact) / expected) ** 2).mean()) < 1.4
    assert np.abs(found - exact).max() < 0.5


@pytest.mark.parametrize(("strength", "variance"), [(1e14, "shared"), (1e-14, "pair")])
def test_its_ends_are_lira_with_one_variance_and_with_one_for_each_pair(strength: float, variance) -> None:
    """Two shadows a side, so that LiRA's median is the mean."""
    target, shadows, included, _ = simulate(generator(0, "ends"), 300, 4)
    densities = []
    for side in (included, ~included):
        pooled = np.mean([np.var(row[chosen], ddof=1) for row, chosen in zip(shadows, side, strict=True)])
        _, centre, spread = predict(shadows, side, "normal", Prior(0.0, 1e-14, float(pooled), strength))
        densities.append(norm.logpdf(target, centre, spread))
    np.testing.assert_allclose(
        densities[0] - densities[1], lira(target, shadows, included, variance=variance), rtol=1e-6, atol=1e-9
    )


def test_the_students_t_of_a_certain_variance_and_a_known_mean_is_the_normal() -> None:
    values, present = np.array([[1.0, 2.0]]), np.ones((1, 2), dtype=bool)
    freedom, centre, spread = predict(values, present, prior=Prior(5.0, 1e12, 4.0, 1e12))
    assert student.logpdf(3.0, freedom, centre, spread)[0] == pytest.approx(norm.logpdf(3.0, 5.0, 2.0), abs=1e-6)


# --- what it gains ---


@pytest.mark.parametrize("online", [True, False])
@pytest.mark.slow
def test_with_four_shadows_it_beats_a_variance_for_each_pair(online: bool) -> None:
    """Mean gain in AUC of 40 seeded repetitions, less three standard errors."""
    gains = []
    for repetition in range(40):
        target, shadows, included, member = simulate(generator(repetition, "four"), 200, 4)
        ours = area(bavaria(target, shadows, included, online=online), member)
        gains.append(ours - area(lira(target, shadows, included, online=online, variance="pair"), member))
    assert np.mean(gains) - 3 * np.std(gains, ddof=1) / math.sqrt(len(gains)) > (0.1 if online else 0.02)


@pytest.mark.parametrize("shadows", [4, 16, 64])
@pytest.mark.parametrize("freedom", [4.0, 1000.0])
@pytest.mark.slow
def test_no_number_of_shadows_makes_it_worse_than_the_better_lira(shadows: int, freedom: float) -> None:
    """Whether pairs differ in their noise or not, without being told."""
    found = {"bavaria": [], "pair": [], "shared": []}
    for repetition in range(20):
        target, values, included, member = simulate(generator(repetition, "all"), 200, shadows, freedom)
        found["bavaria"].append(area(bavaria(target, values, included), member))
        for variance in ("pair", "shared"):
            found[variance].append(area(lira(target, values, included, variance=variance), member))
    gain = np.array(found["bavaria"]) - np.maximum(np.mean(found["pair"]), np.mean(found["shared"]))
    assert gain.mean() > -0.005


# --- tails, and what cannot be scored ---


def test_far_tails_agree_with_the_integral_and_never_tie() -> None:
    for freedom in (1.0, 7.0, 1e3):
        for value in (-2.0, 0.5, 29.0, 31.0, 60.0):
            exact = student.logsf(value, freedom)
            if np.isfinite(exact):
                found = log_upper_tail(*np.array([[value], [freedom], [0.0], [1.0]]))
                assert found[0] == pytest.approx(exact, abs=1.2e-3)
    away = np.linspace(1, 500, 2000)
    for freedom in (3.0, 1e6, np.inf):
        found = log_upper_tail(away, np.full_like(away, freedom), np.zeros_like(away), np.ones_like(away))
        assert np.isfinite(found).all() and (np.diff(found) < 0).all()


def test_a_pair_without_shadows_on_a_side_has_no_score() -> None:
    target, shadows, included, _ = simulate(generator(0, "gaps"), 20, 8)
    included = included.copy()
    included[0], included[1] = True, False
    online, offline = (bavaria(target, shadows, included, online=each) for each in (True, False))
    assert np.isnan(online[:2]).all() and np.isfinite(online[2:]).all()
    assert np.isnan(offline[0]) and np.isfinite(offline[1:]).all()


def test_shadows_that_say_nothing_of_spread_are_refused() -> None:
    target, shadows, included, _ = simulate(generator(0, "thin"), 20, 2)
    with pytest.raises(UserError, match="no spread can be measured"):
        bavaria(target, shadows, included)
    with pytest.raises(UserError, match="collapsed or are copies"):
        bavaria(target, np.ones((20, 8)), np.tile(np.arange(8) < 4, (20, 1)))
    with pytest.raises(UserError, match="shadow 0 is the target model itself"):
        bavaria(shadows[:, 0], shadows, included)
