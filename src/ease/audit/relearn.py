"""Relearning: how fast forgotten pairs return when a model is trained on a few of them or on retained pairs only."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ease.audit.statistic import Gauge
from ease.data.examples import examples_at
from ease.federation.objectives import Draw
from ease.federation.protocol import LocalJob
from ease.federation.stacked import LocalTraining, train_stacked
from ease.params import Params

CHECKPOINTS = (8, 64)
"""Steps after which the margin is measured."""


@dataclass(frozen=True)
class Curve:
    """Margin of forget pairs over unseen pairs, in log-odds, after some training steps.

    Training on a few pairs lowers everything else; the difference to unseen pairs cancels that.
    """

    steps: tuple[int, ...]
    """0 and the checkpoints."""
    levels: tuple[float, ...]
    lost: float
    """How much below the trained model it starts."""

    @property
    def share_back(self) -> float:
        """Share of the lost margin that returned."""
        return (self.levels[-1] - self.levels[0]) / self.lost if self.lost > 0 else 1.0


@dataclass(frozen=True)
class Watch:
    """Watched forget pairs and pairs that no model saw."""

    gauge: Gauge
    watched: np.ndarray
    unseen: np.ndarray

    def margin(self, state: Params) -> float:
        """The margin of the watched pairs under a state."""
        odds = self.gauge.read(state, np.concatenate([self.watched, self.unseen]))["log_odds"]
        return self.between(odds[: len(self.watched)], odds[len(self.watched) :])

    @staticmethod
    def between(watched: np.ndarray, unseen: np.ndarray) -> float:
        """The margin from log-odds."""
        return float(watched.mean() - unseen.mean())


def relearn(
    watch: Watch,
    states: Sequence[Params],
    margins: Sequence[float],
    top: float,
    taught: np.ndarray,
    job: LocalJob,
    rng: np.random.Generator,
) -> list[Curve]:
    """Train all states on the same batches of `taught` pairs and measure how quickly other forget pairs are relearned.

    `margins` are where the states start from, and `top` is the trained model's.
    """
    gauge = watch.gauge
    examples = examples_at(gauge.activations, taught, gauge.device)

    def draw() -> Draw:
        chosen = rng.permutation(len(taught))[: job.batch_size]
        return Draw(chosen, rng.integers(examples.captions, size=len(chosen)))

    levels = [[margin] for margin in margins]
    now, done = list(states), 0
    for checkpoint in CHECKPOINTS:
        draws = tuple(draw() for _ in range(checkpoint - done))
        results = train_stacked(gauge.model, examples, [LocalTraining(state, draws) for state in now], job)
        now = [state + result.delta for state, result in zip(now, results, strict=True)]
        done = checkpoint
        for curve, state in zip(levels, now, strict=True):
            curve.append(watch.margin(state))
    return [Curve((0, *CHECKPOINTS), tuple(curve), top - curve[0]) for curve in levels]
