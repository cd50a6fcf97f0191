"""BaVarIA: membership by Bayesian inference of each pair's own mean and variance, steady with few shadows.

The statistic of a pair under models that trained on it (IN), or did not (OUT), is taken as normal with unknown mean and
variance. Both get a conjugate prior, normal-inverse-gamma, which is fitted to all pairs at once; the shadows of a pair
then turn it into a Student-t predictive for one more model, and the score compares the two sides' predictives at the
audited model's statistic (arXiv 2603.11799).

The family has the older attacks at its ends. A prior variance of infinite strength is LiRA with one variance for all
pairs; its score is linear in the statistic less a reference of the pair, as RMIA's ratio is. A prior of no strength is
LiRA with a variance for each pair.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.special import digamma, gammaln

from ease.audit.membership import attack_inputs, shared_spread

Predictive = Literal["student", "normal"]
LEAST_WEIGHT = 1e-3
"""Bounds the weight of one shadow against a fitted prior. Beyond it scores hardly change and rounding would decide."""
CONVERGED = {"ftol": 1e-13, "gtol": 1e-7, "maxiter": 500}
FAR_TAIL = 30.0
"""Spreads from which a closed form of the upper tail errs by less than 1 in 900, before probabilities underflow."""


@dataclass(frozen=True)
class Prior:
    """The prior of one side's pairs: variances around `variance`, means around `mean`."""

    mean: float
    mean_strength: float
    """How many shadows the prior mean is worth; its variance is the pair's own, over this."""
    variance: float
    variance_strength: float
    """How many shadows the prior variance is worth: the degrees of freedom of the inverse gamma."""


@dataclass(frozen=True)
class Statistics:
    """Sufficient statistics of the present shadows of each pair: arrays [n]."""

    count: np.ndarray
    mean: np.ndarray
    """0 where a pair has no shadow."""
    squares: np.ndarray
    """Sum of squares around the pair's mean."""

    @classmethod
    def of(cls, values: np.ndarray, present: np.ndarray) -> "Statistics":
        """The statistics of values [n, m], of which only the present ones count."""
        count = present.sum(1)
        mean = np.where(present, values, 0).sum(1) / np.maximum(count, 1)
        return cls(count, mean, (np.where(present, values - mean[:, None], 0) ** 2).sum(1))


@dataclass(frozen=True)
class Posterior:
    """The normal-inverse-gamma posterior of each pair: arrays [n]."""

    mean: np.ndarray
    mean_strength: np.ndarray
    variance: np.ndarray
    variance_strength: np.ndarray


def bavaria(
    target: np.ndarray,
    shadows: np.ndarray,
    members: np.ndarray,
    online: bool = True,
    predictive: Predictive = "student",
) -> np.ndarray:
    """Scores [n] of a target's statistics [n], from shadows' [n, m] that trained on `members`; higher means member.

    Online is the log ratio of the predictive densities of both sides. Offline knows OUT only, and scores minus the log
    probability that a model without the pair would have a statistic this high. A pair without a shadow on a side that
    is needed gets NaN: the prior alone would say something of all pairs, and nothing of this one.
    """
    target, shadows, members = attack_inputs(target, shadows, members)
    outside = predict(shadows, ~members, predictive)
    if not online:
        return -log_upper_tail(target, *outside)
    return _log_density(target, *predict(shadows, members, predictive)) - _log_density(target, *outside)


def predict(
    values: np.ndarray, present: np.ndarray, predictive: Predictive = "student", prior: Prior | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Degrees of freedom, centre and spread, each [n], of one more value of each pair; NaN centre without any value.

    The Student-t also allows for the uncertainty of the mean and of the variance. "normal" takes both as they are
    inferred, which is LiRA with a steadier variance. The prior is fitted to these values unless one is given.
    """
    seen = Statistics.of(values, present)
    after = posterior(seen, prior or fit_prior(values, present))
    centre = np.where(seen.count > 0, after.mean, np.nan)
    if predictive == "normal":
        return np.full(len(values), np.inf), centre, np.sqrt(after.variance)
    return after.variance_strength, centre, np.sqrt(after.variance * (1 + 1 / after.mean_strength))


def posterior(seen: Statistics, prior: Prior) -> Posterior:
    """The conjugate update: strengths add up, means and variances are averages weighted by strength."""
    mean_strength = prior.mean_strength + seen.count
    variance_strength = prior.variance_strength + seen.count
    with np.errstate(invalid="ignore", divide="ignore"):  # no prior and no shadow: nothing is known
        mean = (prior.mean_strength * prior.mean + seen.count * seen.mean) / mean_strength
        apart = prior.mean_strength * seen.count / mean_strength * (seen.mean - prior.mean) ** 2
        variance = (prior.variance_strength * prior.variance + seen.squares + apart) / variance_strength
    return Posterior(mean, mean_strength, variance, variance_strength)


def fit_prior(values: np.ndarray, present: np.ndarray) -> Prior:
    """Empirical Bayes: the prior under which the present values [n, m] of all pairs together are most probable."""
    from scipy.optimize import minimize

    scale = shared_spread(values, present)
    seen = Statistics.of(values, present)
    known = seen.count > 0
    centre = float(seen.mean[known].mean())
    unit = Statistics(seen.count[known], (seen.mean[known] - centre) / scale, seen.squares[known] / scale**2)

    def cost(point: np.ndarray) -> tuple[float, np.ndarray]:
        prior, stretch = _prior_at(point)
        pairs = len(unit.count)
        return -log_evidence(unit, prior) / pairs, -evidence_slope(unit, prior) * stretch / pairs

    weight = (LEAST_WEIGHT, 1 - LEAST_WEIGHT)
    bounds = [(float(unit.mean.min()), float(unit.mean.max())), weight, (-20, 20), weight]
    found = minimize(cost, [0.0, 0.5, 0.0, 0.2], jac=True, method="L-BFGS-B", bounds=bounds, options=CONVERGED)
    prior, _ = _prior_at(found.x)
    return Prior(centre + scale * prior.mean, prior.mean_strength, scale**2 * prior.variance, prior.variance_strength)


def log_evidence(seen: Statistics, prior: Prior) -> float:
    """Log probability of all pairs' values, every mean and variance integrated out."""
    after = posterior(seen, prior)
    shape, shape_after = prior.variance_strength / 2, after.variance_strength / 2
    rate, rate_after = shape * prior.variance, shape_after * after.variance
    terms = (
        gammaln(shape_after)
        - gammaln(shape)
        + shape * np.log(rate)
        - shape_after * np.log(rate_after)
        + np.log(prior.mean_strength / after.mean_strength) / 2
        - seen.count / 2 * np.log(2 * np.pi)
    )
    return float(terms.sum())


def evidence_slope(seen: Statistics, prior: Prior) -> np.ndarray:
    """Derivatives [4] of the log evidence by the prior's fields, in their order."""
    after = posterior(seen, prior)
    shape, shape_after = prior.variance_strength / 2, after.variance_strength / 2
    apart, share = seen.mean - prior.mean, seen.count / after.mean_strength
    mean = prior.mean_strength * share * apart / after.variance
    mean_strength = (1 / prior.mean_strength - 1 / after.mean_strength - (share * apart) ** 2 / after.variance) / 2
    variance = shape * (1 / prior.variance - 1 / after.variance)
    variance_strength = digamma(shape_after) - digamma(shape) + np.log(shape * prior.variance)
    variance_strength += 1 - np.log(shape_after * after.variance) - prior.variance / after.variance
    return np.array([mean.sum(), mean_strength.sum(), variance.sum(), variance_strength.sum() / 2])


def log_upper_tail(value: np.ndarray, freedom: np.ndarray, centre: np.ndarray, spread: np.ndarray) -> np.ndarray:
    """Log probability of at least this value under a Student-t, or a normal where the freedom is infinite.

    Far out, H(z) = density(z) (1 + z^2 / freedom) / z has the derivative -density(z) (1 + 1 / z^2), so that H over
    1 + 1 / z^2 is the tail to within that factor; the tail itself would round to 0, and the surest members would tie.
    """
    from scipy.stats import norm
    from scipy.stats import t as student

    away = (value - centre) / spread
    far = np.maximum(away, FAR_TAIL)
    beyond = student.logpdf(far, freedom) + np.log1p(far**2 / freedom) - np.log(far) - np.log1p(far**-2.0)
    near = student.logsf(np.minimum(away, FAR_TAIL), freedom)
    student_tail = np.where(away > FAR_TAIL, beyond, near)
    return np.where(np.isinf(freedom), norm.logsf(away), student_tail)


def _log_density(value: np.ndarray, freedom: np.ndarray, centre: np.ndarray, spread: np.ndarray) -> np.ndarray:
    from scipy.stats import t as student

    return student.logpdf(value, freedom, centre, spread)  # of infinite freedom it is the normal's


def _prior_at(point: np.ndarray) -> tuple[Prior, np.ndarray]:
    """A prior by its mean, log variance and the weights of one shadow against it, and how its fields change with them.

    Weights, since a strength may well be infinite, as where all pairs vary alike.
    """
    mean, mean_weight, log_variance, variance_weight = point.tolist()
    variance = float(np.exp(log_variance))
    prior = Prior(mean, 1 / mean_weight - 1, variance, 1 / variance_weight - 1)
    return prior, np.array([1, -(mean_weight**-2), variance, -(variance_weight**-2)])
