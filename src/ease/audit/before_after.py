"""Attacks by someone who has the models before and after unlearning."""

from dataclasses import dataclass

import numpy as np

from ease.audit.membership import refuse_copy

LEAST_VARIANCE = 1e-9
"""Share of the larger variance, added to both. Two readings that always agree leave only one direction."""


@dataclass(frozen=True)
class Discriminant:
    """Fisher's linear discriminant of a pair's readings before and after, each less what its OUT shadows read."""

    weights: np.ndarray
    """[2]: of the reading before, and of the one after."""
    usual: np.ndarray
    """[n, 2]: mean readings of each pair by shadows that never trained on it; NaN where there is none."""

    @classmethod
    def of(cls, before: np.ndarray, after: np.ndarray, included: np.ndarray) -> "Discriminant":
        """Fit to shadows' readings [n, m] before and after unlearning, with membership bool [n, m]."""
        readings = np.stack([before, after], axis=-1)
        out = ~included
        count = out.sum(1)[:, None, None]
        total = np.where(out[..., None], readings, 0).sum(1)[:, None]
        # A shadow's own reading must not be part of what it is compared with, or OUT would look steadier than it is.
        others = count - out[..., None]
        with np.errstate(invalid="ignore", divide="ignore"):
            apart = readings - (total - np.where(out[..., None], readings, 0)) / others
            usual = (total / count)[:, 0]
        known = others[..., 0] > 0
        sides = [apart[side & known] for side in (included, out)]
        spread = sum(np.cov(side, rowvar=False) * (len(side) - 1) for side in sides) / sum(map(len, sides))
        ridge = LEAST_VARIANCE * np.trace(spread) * np.eye(2)
        return cls(np.linalg.solve(spread + ridge, sides[0].mean(0) - sides[1].mean(0)), usual)

    def score(self, before: np.ndarray, after: np.ndarray) -> np.ndarray:
        """Scores [n]: how much two readings look like those of a pair that was trained on and then forgotten."""
        return (np.stack([before, after], axis=-1) - self.usual) @ self.weights


def change(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """The drop of each pair's statistic [n]; needs no shadows."""
    return before - after


def both(
    shadows_before: np.ndarray, shadows_after: np.ndarray, included: np.ndarray, before: np.ndarray, after: np.ndarray
) -> np.ndarray:
    """Scores [n] of the discriminant between the shadows' forgotten pairs and pairs they never saw."""
    refuse_copy(before, shadows_before)
    return Discriminant.of(shadows_before, shadows_after, included).score(before, after)
