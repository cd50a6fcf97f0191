"""Prediction bands: where a further retrained model would fall, given a few that differ in data order only."""

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import stdtrit

from ease.audit.membership import CONFIDENCE
from ease.config import Config


class Band(Config):
    """A 95 % prediction interval for a further retrained model.

    It is not the range: a fifth retrained model falls outside the range of four in two of five cases.
    """

    low: float | None
    """None: open below."""
    high: float
    models: int
    """How many retrained models it comes from."""

    def contains(self, value: float) -> bool:
        return (self.low is None or self.low <= value) and value <= self.high


Limits = tuple[float, float]
"""The smallest and the largest value that a measure can have."""


def prediction_band(
    values: Sequence[float],
    at_most: bool = False,
    resolution: float = 0.0,
    limits: Limits = (-math.inf, math.inf),
) -> Band | None:
    """The band of retrained models' values, or None with fewer than two; `at_most` leaves it open below.

    A few models may agree by chance or because a measure is coarse, so the assumed spread is at least one pair
    more or less, the `resolution` of the measure. No band leaves what the measure can be.
    """
    found = np.asarray(values, dtype=float)
    if len(found) < 2:
        return None
    centre = float(found.mean())
    away = reach(len(found), at_most) * max(float(found.std(ddof=1)), resolution)
    least, most = limits
    low = None if at_most else max(centre - away, least)
    return Band(low=low, high=min(centre + away, most), models=len(found))


def reach(models: int, at_most: bool = False) -> float:
    """The half-width of a band in standard deviations, for this number of values."""
    tail = CONFIDENCE if at_most else (1 + CONFIDENCE) / 2
    return float(stdtrit(models - 1, tail)) * math.sqrt(1 + 1 / models)
