"""One question over all measures at once: could this answer be one more retraining?

Retrained models that differ in the order of their data alone say how measures spread and go together. An answer is
compared with them in two ways: along the line to the trained model, on which what was kept lies, and in every
direction. What either would be for one more retraining is simulated with all that is estimated from so few models, and
the smaller of both p-values is judged by what smaller ones come to.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ease.audit.membership import Estimate
from ease.config import Config

LEVEL = 0.05
"""How often one more retraining would be refused."""
LEAST_RETRAINED = 6
"""With fewer retrained models their spread is hardly known, and nothing is judged."""
WANTED_POWER = 0.9
DRAWS = 4000


class JointTest(Config):
    """What all measures say together."""

    p_value: float
    """How often one more retraining would lie as far from the others."""
    level: float
    retrained: int
    measures: int
    trace: Estimate
    """Share of what the forget pairs had brought that is still there; below 0: more was taken than they had brought."""
    power: tuple[tuple[float, float], ...]
    """(share kept, how often such a model is refused)."""
    smallest_caught: float | None
    """The smallest share that is caught in nine of ten audits; None: not even the largest that was tried."""

    @property
    def passed(self) -> bool:
        return self.p_value > self.level


@dataclass(frozen=True)
class Null:
    """Retrained models: where they lie, how far they spread, and what their measures share."""

    centre: np.ndarray  # [m]
    spread: np.ndarray  # [m]
    correlation: np.ndarray  # [m, m]
    models: int

    @classmethod
    def of(cls, retrained: np.ndarray, least: np.ndarray) -> "Null":
        """From values [models, measures]; no measure is taken to spread less than its resolution `least` [measures]."""
        centre, spread, correlation = (part[0] for part in _estimated(retrained[None], least))
        return cls(centre, spread, correlation, len(retrained))


def joint_test(
    answer: np.ndarray,
    retrained: np.ndarray,
    least: np.ndarray,
    kept: Sequence[tuple[float, np.ndarray]],
    rng: np.random.Generator,
    level: float = LEVEL,
    draws: int = DRAWS,
) -> JointTest:
    """Judge an answer's measures [m] by those of retrained models [models, m].

    `kept` are (share, measures) of models between a retrained and the trained one, the first of them with share 0: the
    way from there to the smallest other share is the direction in which traces are looked for, and what the others
    measure says how well they would have been found.
    """
    null = Null.of(retrained, least)
    (_, origin), (first, near) = kept[0], kept[1]
    effect = (near - origin) / first
    simulated = _Simulated.of(null, effect, least, rng, draws)
    observed = simulated.p_value(_statistics(answer, retrained, least, effect))
    power = tuple((share, simulated.refused(measures - origin, level)) for share, measures in kept[1:])
    return JointTest(
        p_value=observed,
        level=level,
        retrained=null.models,
        measures=len(answer),
        trace=simulated.trace(answer, null),
        power=power,
        smallest_caught=_smallest_caught(power),
    )


@dataclass(frozen=True)
class _Simulated:
    """Federations of retrained models drawn like the real ones, and one more model each."""

    null: Null
    effect: np.ndarray
    least: np.ndarray
    further: np.ndarray  # [draws, m]
    retrained: np.ndarray  # [draws, models, m]
    statistics: np.ndarray  # [draws, 2]
    least_p: np.ndarray
    """The smaller p-value of each draw, sorted."""

    @classmethod
    def of(
        cls, null: Null, effect: np.ndarray, least: np.ndarray, rng: np.random.Generator, draws: int
    ) -> "_Simulated":
        root = np.linalg.cholesky(null.correlation)
        noise = rng.standard_normal((draws, null.models + 1, len(effect))) @ root.T * null.spread
        retrained, further = noise[:, :-1], noise[:, -1]
        statistics = _statistics(further, retrained, least, effect)
        smaller = _tails(statistics, statistics).min(axis=1)
        return cls(null, effect, least, further, retrained, statistics, np.sort(smaller))

    def p_value(self, statistics: np.ndarray) -> float:
        """Of one pair of statistics [2], the smaller tail judged by the smaller tails of the draws."""
        smaller = _tails(statistics[None], self.statistics).min()
        return float((1 + np.searchsorted(self.least_p, smaller, "right")) / (1 + len(self.least_p)))

    def refused(self, shift: np.ndarray, level: float) -> float:
        """How often a model is refused whose measures are shifted by so much."""
        shifted = _statistics(self.further + shift, self.retrained, self.least, self.effect)
        smaller = _tails(shifted, self.statistics).min(axis=1)
        places = np.searchsorted(self.least_p, smaller, "right")
        return float(((1 + places) / (1 + len(self.least_p)) <= level).mean())

    def trace(self, answer: np.ndarray, null: Null) -> Estimate:
        """The share kept, by generalised least squares along the effect, and its error by the draws."""
        along = np.linalg.solve(null.correlation, self.effect / null.spread) / null.spread
        whole = along @ self.effect
        if whole <= 0:
            return Estimate(0.0, -np.inf, np.inf)
        found = float(along @ (answer - null.centre) / whole)
        errors = (self.further - self.retrained.mean(axis=1)) @ along / whole
        low, high = np.quantile(errors, (0.025, 0.975))
        return Estimate(found, found - float(high), found - float(low))


def _statistics(answer: np.ndarray, retrained: np.ndarray, least: np.ndarray, effect: np.ndarray) -> np.ndarray:
    """How far an answer [.., m] lies from retrained models [.., models, m]: along the effect, and in all directions."""
    batched = retrained if retrained.ndim == 3 else retrained[None]
    centre, spread, correlation = _estimated(batched, least)
    away, line = (np.atleast_2d(answer) - centre) / spread, effect / spread
    weighted = np.linalg.solve(correlation, np.stack([away, line], axis=-1))
    along = (line * weighted[..., 0]).sum(-1) / np.sqrt((line * weighted[..., 1]).sum(-1).clip(1e-12))
    found = np.stack([np.abs(along), (away * weighted[..., 0]).sum(-1)], axis=-1)
    return found if retrained.ndim == 3 else found[0]


def _tails(statistics: np.ndarray, drawn: np.ndarray) -> np.ndarray:
    """Share of the draws that are at least as far out, for each statistic [n, 2]."""
    columns = []
    for column in range(drawn.shape[1]):
        ordered = np.sort(drawn[:, column])
        above = len(ordered) - np.searchsorted(ordered, statistics[:, column], "left")
        columns.append((1 + above) / (1 + len(ordered)))
    return np.stack(columns, axis=1)


def _estimated(retrained: np.ndarray, least: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Centre [b, m], spread [b, m] and shrunk correlation [b, m, m] of values [b, models, m].

    Correlations of so few models are mostly noise: they are drawn towards none by as much as their own variance asks
    for (Schaefer and Strimmer, 2005).
    """
    models = retrained.shape[1]
    centre = retrained.mean(axis=1)
    spread = np.maximum(retrained.std(axis=1, ddof=1), least)
    scaled = (retrained - centre[:, None]) / spread[:, None]
    products = np.einsum("bki,bkj->bij", scaled, scaled) / (models - 1)
    squares = np.einsum("bki,bkj->bij", scaled**2, scaled**2)
    # The variance of a correlation, from how much the products of single models vary.
    mean = products * (models - 1) / models
    variance = models / (models - 1) ** 3 * (squares - models * mean**2)
    apart = ~np.eye(retrained.shape[2], dtype=bool)
    noise, signal = variance[:, apart].sum(axis=1), (products[:, apart] ** 2).sum(axis=1)
    shrink = np.clip(noise / np.maximum(signal, 1e-12), 0.05, 1.0)
    correlation = np.where(apart, (1 - shrink)[:, None, None] * products, 1.0)
    return centre, spread, correlation


def _smallest_caught(power: Sequence[tuple[float, float]]) -> float | None:
    """Where the power reaches what is wanted, between the shares that were tried."""
    before = (0.0, 0.0)
    for share, caught in power:
        if caught >= WANTED_POWER:
            (low_share, low), part = before, 1.0
            if caught > low:
                part = (WANTED_POWER - low) / (caught - low)
            return low_share + max(part, 0.0) * (share - low_share)
        before = (share, caught)
    return None
