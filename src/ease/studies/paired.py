"""Paired differences between methods: both answered the same requests of the same trained models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ease.seeding import generator
from ease.studies.records import BenchRow

DRAWS = 10_000
CONFIDENCE = 0.95
FEWEST = 3
"""Requests or seeds to resample; of fewer no interval is given."""

Unit = tuple[int, str]
"""A seed, and a request of it with the run's varied setting."""


@dataclass(frozen=True)
class Difference:
    """How much more a method has of something than the reference, on average over what both answered."""

    method: str
    mean: float
    low: float | None
    """End of the bootstrap interval; None with too few pairs."""
    high: float | None
    units: int
    """Requests that both answered, over all seeds."""
    seeds: int

    @property
    def clear(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


def unit(row: BenchRow, run_setting: str | None = None) -> Unit:
    """The seed and the request that a row belongs to."""
    at = row.at if row.at is not None and row.at.name == run_setting else None
    return row.seed, row.scenario if at is None else f"{row.scenario}, {at.words}"


def differences(values: Mapping[str, Mapping[Unit, float]], reference: str) -> tuple[Difference, ...]:
    """Every method's mean paired difference to a reference, with bootstrap intervals over seeds and requests."""
    found = []
    for method, own in values.items():
        if method == reference:
            continue
        both = sorted(set(own) & set(values[reference]))
        if both:
            found.append(_difference(method, both, [own[each] - values[reference][each] for each in both]))
    return tuple(found)


def _difference(method: str, units: Sequence[Unit], gaps: Sequence[float]) -> Difference:
    seeds = sorted({seed for seed, _ in units})
    by_seed = [np.array([gap for (of, _), gap in zip(units, gaps, strict=True) if of == seed]) for seed in seeds]
    low, high = _interval(by_seed) if len(units) >= FEWEST else (None, None)
    return Difference(method, float(np.mean(gaps)), low, high, len(units), len(seeds))


def _interval(by_seed: Sequence[np.ndarray]) -> tuple[float, float]:
    """Percentiles of means over resampled seeds, and over resampled requests of each."""
    rng = generator(0, "paired differences")
    sums, counts = np.zeros(DRAWS), np.zeros(DRAWS)
    for place in rng.integers(len(by_seed), size=(len(by_seed), DRAWS)):
        for seed, gaps in enumerate(by_seed):
            drawn = place == seed
            sums[drawn] += gaps[rng.integers(len(gaps), size=(int(drawn.sum()), len(gaps)))].sum(axis=1)
            counts[drawn] += len(gaps)
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(sums / counts, [tail, 100 - tail])
    return float(low), float(high)
