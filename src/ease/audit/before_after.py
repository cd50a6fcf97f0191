"""Attacks of one who holds the model from before unlearning as well as the one from after it."""

from dataclasses import dataclass

import numpy as np

from ease.audit.membership import refuse_copy

LEAST_VARIANCE = 1e-9
"""Of the larger one, added to both: two readings that always agree leave one direction to tell by."""


@dataclass(frozen=True)
class Discriminant:
    """Fisher's linear discriminant of a pair's readings before and after, each less what its OUT shadows read."""

    weights: np.ndarray
    """[2]: of the reading before, and of the one after."""
    usual: np.ndarray
    """[n, 2]: mean readings of each pair by shadows that never trained on it; NaN where there is none."""

    @classmethod
    def of(cls, before: np.ndarray, after: np.ndarray, included: np.ndarray) -> "Discriminant":
        """From shadows' readings [n, m] before and after unlearning, and who trained on what, bool [n, m]."""
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
        """How much a pair's two readings [n] look like those of a pair that was trained on and then forgotten."""
        return (np.stack([before, after], axis=-1) - self.usual) @ self.weights


def change(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """How much less strongly each pair [n] is held than before; needs no shadows."""
    return before - after


def both(
    shadows_before: np.ndarray, shadows_after: np.ndarray, included: np.ndarray, before: np.ndarray, after: np.ndarray
) -> np.ndarray:
    """Scores [n] by the discriminant that tells the shadows' own forgotten pairs from those they never saw."""
    refuse_copy(before, shadows_before)
    return Discriminant.of(shadows_before, shadows_after, included).score(before, after)
