"""The yardstick: where one more retrained model would fall, given a few that differ only in the order of their data."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import t as student

from ease.audit.membership import CONFIDENCE


@dataclass(frozen=True)
class Band:
    """A 95 % prediction interval for a further retrained model.

    Not the range of those at hand: of four, a fifth retrained model falls outside the range in two cases of five.
    """

    low: float
    high: float
    models: int

    def contains(self, value: float) -> bool:
        return self.low <= value <= self.high


def prediction_band(values: Sequence[float], at_most: bool = False) -> Band | None:
    """The band of retrained models' values, or None with fewer than two; `at_most` leaves it open below."""
    found = np.asarray(values, dtype=float)
    if len(found) < 2:
        return None
    spread = found.std(ddof=1) * math.sqrt(1 + 1 / len(found))
    tail = CONFIDENCE if at_most else (1 + CONFIDENCE) / 2
    reach = float(student.ppf(tail, len(found) - 1) * spread)
    low = -math.inf if at_most else float(found.mean()) - reach
    return Band(low, float(found.mean()) + reach, len(found))
