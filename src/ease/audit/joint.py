"""Joint test over all measures: whether a result is indistinguishable from retraining.

Retrained models that differ in the order of their data alone say how measures spread and go together. An answer is
compared with them in two ways: along the line to the trained model, which shows what was kept, and in every direction.
The value of either for another retraining is simulated with all that is estimated from so few models, and the smaller
p-value is compared with the smaller p-values of the simulation."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from ease.audit.membership import Estimate
from ease.config import Config

LEVEL = 0.05
"""How often another retraining would be refused."""
LEAST_RETRAINED = 6
"""With fewer retrained models their spread is hardly known, and nothing is judged."""
WANTED_POWER = 0.9
DRAWS = 4000
TAILS = 4
"""Degrees of freedom of the simulated models."""


class JointTest(Config):
    """The result of the joint test."""

    p_value: float
    """How often another retraining would be as far from the others."""
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

    @property
    def trained_tried(self) -> bool:
        """Whether it was asked if even the trained model would be refused, as of few pairs, where less is seen."""
        return bool(self.power) and self.power[-1][0] >= 1


@dataclass(frozen=True)
class Null:
    """The distribution of retrained models: centre, spread and residuals."""

    centre: np.ndarray  # [m]
    spread: np.ndarray  # [m]
    correlation: np.ndarray  # [m, m]
    residuals: np.ndarray
    """Differences of the models from their mean [models, m]."""

    @classmethod
    def of(cls, retrained: np.ndarray, least: np.ndarray) -> "Null":
        """From values [models, measures]; no measure is taken to spread less than its resolution `least` [measures]."""
        centre, spread, correlation = (part[0] for part in _estimated(retrained[None], least))
        return cls(centre, spread, correlation, retrained - centre)

    @property
    def models(self) -> int:
        return len(self.residuals)

    def like(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Models [*shape, m] that differ as the retrained ones do, about 0.

        Mixtures of their residuals, so that measures go together as they did: correlations drawn towards none would
        make what all measures share look rarer than it is. Tails are heavier than normal ones, because so few models do
        not determine them."""
        mixed = rng.standard_normal((*shape, self.models)) @ self.residuals / np.sqrt(self.models - 1)
        missing = np.sqrt(np.maximum(self.spread**2 - self.residuals.var(axis=0, ddof=1), 0))
        tails = np.sqrt((TAILS - 2) / rng.chisquare(TAILS, (*shape, 1)))
        return tails * (mixed + missing * rng.standard_normal((*shape, len(missing))))


def joint_test(
    answer: np.ndarray,
    retrained: np.ndarray,
    least: np.ndarray,
    kept: Sequence[tuple[float, np.ndarray]],
    rng: np.random.Generator,
    level: float = LEVEL,
    draws: int = DRAWS,
    signed: np.ndarray | None = None,
) -> JointTest:
    """Judge an answer's measures [m] by those of retrained models [models, m].

    `kept` are (share, measures) of models between a retrained and the trained one, the first of them with share 0: the
    way from there to the smallest other share is the direction in which traces are looked for, and what the others
    measure says how well they would have been found. If the trained model itself is among them (for few pairs, whose
    small traces cannot be seen), it is the difference to that model. The share kept is estimated by the `signed`
    measures [m] , if they are named. Distances grow on both sides of retraining and cannot distinguish too little from
    too much."""
    null = Null.of(retrained, least)
    (_, origin), (share, near) = kept[0], kept[-1] if kept[-1][0] >= 1 else kept[1]
    effect = (near - origin) / share
    simulated = _Simulated.of(null, effect, least, rng, draws)
    (statistics,) = _statistics(answer[None], _estimated(retrained[None], least), effect)
    tested = np.ones(len(answer), bool) if signed is None else signed
    power = tuple((share, simulated.refused(measures - origin, level)) for share, measures in kept[1:])
    return JointTest(
        p_value=simulated.p_value(statistics),
        level=level,
        retrained=null.models,
        measures=len(answer),
        trace=_trace(answer[tested], retrained[:, tested], least[tested], effect[tested]),
        power=power,
        smallest_caught=_smallest_caught(power),
    )


@dataclass(frozen=True)
class _Simulated:
    """Simulated sets of retrained models, each with one further model."""

    effect: np.ndarray
    further: np.ndarray  # [draws, m]
    estimated: "Estimated"
    """The statistics of models drawn as retrained ones."""
    statistics: np.ndarray  # [draws, 2]
    least_p: np.ndarray
    """The smaller p-value of each draw, sorted."""

    @classmethod
    def of(
        cls, null: Null, effect: np.ndarray, least: np.ndarray, rng: np.random.Generator, draws: int
    ) -> "_Simulated":
        noise = null.like(rng, (draws, null.models + 1))
        further, estimated = noise[:, -1], _estimated(noise[:, :-1], least)
        statistics = _statistics(further, estimated, effect)
        smaller = _tails(statistics, statistics).min(axis=1)
        return cls(effect, further, estimated, statistics, np.sort(smaller))

    def p_value(self, statistics: np.ndarray) -> float:
        """The p-value of one pair of statistics [2]: its smaller tail compared with the smaller tails of the draws."""
        smaller = _tails(statistics[None], self.statistics).min()
        return float((1 + np.searchsorted(self.least_p, smaller, "right")) / (1 + len(self.least_p)))

    def refused(self, shift: np.ndarray, level: float) -> float:
        """The share of models that are refused if their measures are shifted."""
        shifted = _statistics(self.further + shift, self.estimated, self.effect)
        smaller = _tails(shifted, self.statistics).min(axis=1)
        places = np.searchsorted(self.least_p, smaller, "right")
        return float(((1 + places) / (1 + len(self.least_p)) <= level).mean())


def _trace(answer: np.ndarray, retrained: np.ndarray, least: np.ndarray, effect: np.ndarray) -> Estimate:
    """The share of the effect that an answer keeps, with the error that retrained models show when others judge them.

    By least squares over measures in units of their spread. Weights by their correlations would be sharper, and turn
    the share around where a large effect is not straight.
    """

    def shares(values: np.ndarray, others: np.ndarray) -> np.ndarray:
        spread = np.maximum(others.std(axis=1, ddof=1), least)
        away, line = (values - others.mean(axis=1)) / spread, effect / spread
        return (away * line).sum(-1) / (line**2).sum(-1).clip(1e-12)

    models = len(retrained)
    others = np.stack([np.delete(retrained, model, axis=0) for model in range(models)])
    away = float(stdtrit(models, 0.975) * np.sqrt((shares(retrained, others) ** 2).mean()))
    (share,) = shares(answer[None], retrained[None])
    return Estimate(float(share), float(share) - away, float(share) + away)


Estimated = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Centre [b, m], spread [b, m] and correlation [b, m, m] of retrained models."""


def _statistics(answer: np.ndarray, estimated: Estimated, effect: np.ndarray) -> np.ndarray:
    """Distances of results [b, m] from retrained models: along the effect, in all directions [b, 2]."""
    centre, spread, correlation = estimated
    away, line = (answer - centre) / spread, effect / spread
    weighted = np.linalg.solve(correlation, np.stack([away, line], axis=-1))
    along, whole = (line * weighted[..., 0]).sum(-1), (line * weighted[..., 1]).sum(-1).clip(1e-12)
    return np.stack([np.abs(along) / np.sqrt(whole), (away * weighted[..., 0]).sum(-1)], axis=-1)


def _tails(statistics: np.ndarray, drawn: np.ndarray) -> np.ndarray:
    """Share of the draws that are at least as extreme, for each statistic [n, 2]."""
    columns = []
    for column in range(drawn.shape[1]):
        ordered = np.sort(drawn[:, column])
        above = len(ordered) - np.searchsorted(ordered, statistics[:, column], "left")
        columns.append((1 + above) / (1 + len(ordered)))
    return np.stack(columns, axis=1)


def _estimated(retrained: np.ndarray, least: np.ndarray) -> Estimated:
    """Centre [b, m], spread [b, m] and shrunk correlation [b, m, m] of values [b, models, m].

    Correlations of so few models are mostly noise: they are drawn towards none by as much as their own variance asks
    for (Schaefer and Strimmer, 2005).
    """
    models = retrained.shape[1]
    centre = retrained.mean(axis=1)
    spread = np.maximum(retrained.std(axis=1, ddof=1), least)
    scaled = (retrained - centre[:, None]) / spread[:, None]
    products = scaled.swapaxes(1, 2) @ scaled / (models - 1)
    squares = (scaled**2).swapaxes(1, 2) @ scaled**2
    # The variance of a correlation, from how much the products of single models vary.
    mean = products * (models - 1) / models
    variance = models / (models - 1) ** 3 * (squares - models * mean**2)
    apart = ~np.eye(retrained.shape[2], dtype=bool)
    noise, signal = variance[:, apart].sum(axis=1), (products[:, apart] ** 2).sum(axis=1)
    shrink = np.clip(noise / np.maximum(signal, 1e-12), 0.05, 1.0)
    correlation = np.where(apart, (1 - shrink)[:, None, None] * products, 1.0)
    return centre, spread, correlation


def _smallest_caught(power: Sequence[tuple[float, float]]) -> float | None:
    """The smallest share from which on the power is high enough, interpolated between the tried shares.

    A model halfway between two others is now and then unlike either, and is caught although larger shares are not.
    """
    missed = [place for place, (_, caught) in enumerate(power) if caught < WANTED_POWER]
    last = missed[-1] if missed else -1
    if last == len(power) - 1:
        return None
    (low_share, low), (share, caught) = power[last] if missed else (0.0, 0.0), power[last + 1]
    return low_share + (WANTED_POWER - low) / (caught - low) * (share - low_share)
