"""The relative test says whether a model is closer to retrained models or to the trained one.

A question that needs fewer retrained models than whether it could be one of them (after Ribero, Schrab and Gretton,
2026). Differs from the paper: the same pairs are read under every model and compared one by one, and the spread comes
from retrained models, so that what chance does to a retraining is not taken for a failure.
"""

from collections.abc import Mapping
from typing import Literal

import numpy as np
from pydantic import computed_field
from scipy.special import stdtrit

from ease.audit.membership import Estimate
from ease.audit.verdict import WithComputedFields

HALFWAY = 0.5
FEWEST_RETRAINED = 3
"""With fewer retrained models their spread is not estimated."""
FEWEST_PAIRS = 8
"""Smallest stratum that is judged by itself."""
Closer = Literal["retrained", "trained", "undecided"]


class RelativeTest(WithComputedFields):
    """Position of a model between retrained models (0) and the trained one (1), by the log-odds of the forget pairs."""

    pairs: int
    retrained: int
    share: Estimate
    """Share of the way, with the interval in which 95 % of retrained models would leave it."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def closer(self) -> Closer:
        """Which side of halfway the whole interval is on."""
        if self.share.high < HALFWAY:
            return "retrained"
        return "trained" if self.share.low > HALFWAY else "undecided"

    @computed_field  # type: ignore[prop-decorator]
    @property
    def words(self) -> str:
        """The result in one line."""
        span = (
            f"{self.share.value:+.0%} [{self.share.low:+.0%}, {self.share.high:+.0%}] of the way to the trained model"
        )
        said = {
            "retrained": "closer to retrained models than to the trained one",
            "trained": "closer to the trained model than to retrained ones",
            "undecided": "undecided between retrained and trained models",
        }[self.closer]
        return f"{said}: {span}; {self.pairs} pairs, {self.retrained} retrained models"


def relative_test(odds: Mapping[str, np.ndarray], some: np.ndarray | None = None) -> RelativeTest | None:
    """Judge "unlearned" by the forget pairs' log-odds under it, "trained", "retrain", "retrain-1", ...

    `some` are the pairs to judge by, bool [pairs]. None with too few retrained models or pairs, or if the trained model
    holds the pairs as retrained ones do.
    """
    retrained = np.stack([values for name, values in odds.items() if name.startswith("retrain")])
    answer, trained = odds["unlearned"], odds["trained"]
    if some is not None:
        answer, trained, retrained = answer[some], trained[some], retrained[:, some]
    models, pairs = retrained.shape
    if models < FEWEST_RETRAINED or pairs < 1:
        return None
    share = _share(answer, trained, retrained)
    others = [_share(retrained[n], trained, np.delete(retrained, n, axis=0)) for n in range(models)]
    if share is None or any(each is None for each in others):
        return None
    spread = float(np.sqrt(np.mean(np.square(np.array(others, dtype=float)))))
    reach = float(stdtrit(models - 1, 0.975)) * spread * np.sqrt(1 + 1 / models)
    return RelativeTest(pairs=pairs, retrained=models, share=Estimate(share, share - reach, share + reach))


def _share(answer: np.ndarray, trained: np.ndarray, retrained: np.ndarray) -> float | None:
    """Projection of an answer [pairs] on the way from retrained models [models, pairs] to the trained one.

    The two factors use different retrained models, so that their noise does not correlate with itself.
    """
    away, way = answer - retrained, trained - retrained
    models = len(retrained)

    def across(one: np.ndarray) -> float:
        return float((one.sum(0) @ way.sum(0) - (one * way).sum()) / (models * (models - 1)))

    length = across(way)
    noise = float(((retrained - retrained.mean(0)) ** 2).sum() / (models - 1))
    return across(away) / length if length > noise / models else None
