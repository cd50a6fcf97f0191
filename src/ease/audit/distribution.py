"""Distances between the statistics of an unlearned model and of models that never saw the pairs."""

import warnings
from dataclasses import dataclass

import numpy as np

from ease.audit.membership import CONFIDENCE, Estimate, Variance, gaussians
from ease.errors import UserError

REPLICATES = 1000


@dataclass(frozen=True)
class KsDistance:
    """Kolmogorov-Smirnov distance, 0 to 1. Its p-value mostly measures the sample size: read the distance first."""

    distance: Estimate
    p_value: float
    counts: tuple[int, int]


def ks_distance(a: np.ndarray, b: np.ndarray, rng: np.random.Generator, replicates: int = REPLICATES) -> KsDistance:
    """KS distance of two samples with scipy's p-value and a bootstrap interval.

    The interval is distance +- c, c being the 95 % quantile of the sup of the resampled curves' error. A percentile
    interval of the resampled distances would be wrong here: they exceed the distance itself where the samples agree.
    """
    a, b = _sample("first", a), _sample("second", b)
    distance, p_value = _ks(a, b)
    grid = np.unique(np.concatenate([a, b]))
    places = [np.searchsorted(grid, values) for values in (a, b)]
    curves = [_cumulative(place, len(grid)) for place in places]
    errors = np.empty(replicates)
    for replicate in range(replicates):
        first, second = (
            _cumulative(rng.choice(place, len(place)), len(grid)) - curve
            for place, curve in zip(places, curves, strict=True)
        )
        errors[replicate] = np.abs(first - second).max()
    reach = float(np.quantile(errors, CONFIDENCE))
    interval = Estimate(distance, max(0.0, distance - reach), min(1.0, distance + reach))
    return KsDistance(interval, p_value, (len(a), len(b)))


def distance_between(a: np.ndarray, b: np.ndarray) -> float:
    """The KS distance without a p-value."""
    return _ks(_sample("first", a), _sample("second", b))[0]


def ulira(
    unlearned_in: np.ndarray, never_out: np.ndarray, target: np.ndarray, variance: Variance = "pair"
) -> np.ndarray:
    """U-LiRA: log likelihood ratio [n] that each pair was trained on and then unlearned, rather than never seen.

    `unlearned_in` [n, a] are statistics of shadows that trained on the pair and unlearned it, `never_out` [n, b] of
    shadows that never trained on it, and `target` [n] of the unlearned model. NaN marks a shadow that does not apply
    to the pair; a pair with too few on either side gets NaN. Higher means the pair was a member.
    """
    from scipy.stats import norm

    sides = [np.asarray(side, dtype=float) for side in (unlearned_in, never_out)]
    target = np.asarray(target, dtype=float)
    if target.ndim != 1 or any(side.ndim != 2 or len(side) != len(target) for side in sides):
        shapes = ", ".join(str(list(values.shape)) for values in (*sides, target))
        raise UserError(
            f"U-LiRA needs unlearned shadows [n, a], untouched shadows [n, b] and a target [n], not {shapes}"
        )
    infinite = sum(int(np.isinf(values).sum()) for values in (*sides, target)) + int(np.isnan(target).sum())
    if infinite:
        raise UserError(f"{infinite} statistics are not finite: a model diverged, no attack")
    (in_centre, in_spread), (out_centre, out_spread) = (gaussians(side, ~np.isnan(side), variance) for side in sides)
    return norm.logpdf(target, in_centre, in_spread) - norm.logpdf(target, out_centre, out_spread)


def _sample(name: str, values: np.ndarray) -> np.ndarray:
    values = np.asarray(values, dtype=float)
    if values.ndim != 1 or not len(values) or not np.isfinite(values).all():
        broken = int((~np.isfinite(values)).sum())
        raise UserError(f"the {name} sample must be finite numbers [n], not {list(values.shape)} with {broken} broken")
    return values


def _ks(a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    """Distance and p-value."""
    from scipy.stats import ks_2samp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the exact p-value did not work out: scipy takes the limit
        test = ks_2samp(a, b)
    return float(test.statistic), float(test.pvalue)


def _cumulative(places: np.ndarray, size: int) -> np.ndarray:
    return np.bincount(places, minlength=size).cumsum() / len(places)
