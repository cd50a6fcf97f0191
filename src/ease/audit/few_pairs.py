"""Measures for requests of few pairs: the rank of each pair, compared with retrained models."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
from torch import Tensor

from ease.audit.attacks import Attacker
from ease.audit.measurements import Instruments, Measured, retrieval, shown
from ease.audit.records import PairRecord
from ease.audit.relative import relative_test
from ease.audit.verdict import Measure, Verdict
from ease.measures.ranks import Standing, standing
from ease.measures.retrieval import GalleryRecall
from ease.params import Params
from ease.runs.evaluation import embed_galleries, galleries, similarities

RECALLS = (*(f"forget/recall@{k}" for k in (1, 5, 10)), "retain/recall@1", "test/recall@1")
"""What few pairs are judged by beside their places. In all else that could be measured the trained model differs from
retrained ones as those differ among themselves, and that would look like a trace which could have been found."""


@dataclass(frozen=True)
class Place:
    """The readings of one model."""

    log_odds: np.ndarray
    """Log-odds of the forget pairs, against the pool."""
    standing: Standing
    similar: Tensor
    recalls: Mapping[str, GalleryRecall]


@dataclass(frozen=True)
class OneByOne(Instruments):
    """Instruments for a few forget pairs, one by one, without attacks and shadows.

    Planted traces go up to the trained model itself, which shows whether anything can be seen at all. They are planted
    into several retrained models, because the noise of one is as large as the trace."""

    kept: ClassVar[tuple[float, ...]] = (0.1, 0.2, 0.4, 0.7, 1.0)
    planted_into: ClassVar[int] = 3

    def measure_each(self, answers: Sequence[Params]) -> Iterator[Measured]:
        yield from map(self._placed, answers)

    def with_attacker(self, attacker: Attacker | None) -> "OneByOne":
        return self

    def _placed(self, answer: Params) -> Measured:
        places = {**self._places, "unlearned": self._place(answer)}
        measures = (
            *(
                each
                for each in retrieval({name: place.recalls for name, place in places.items()}, self.sets)
                if each.name in RECALLS
            ),
            *standing_measures(
                {name: place.standing for name, place in places.items()},
                {name: place.log_odds for name, place in places.items()},
                self._galleries.shape[1],
                len(self.gauge.pool),
                self.gauge.temperature,
            ),
        )
        verdict = Verdict(measures=measures, joint=self._joint(measures), level=self.config.level)
        similar = {name: place.similar for name, place in places.items()}
        reads = {name: {"log_odds": place.log_odds} for name, place in places.items()}
        relative = relative_test({name: place.log_odds for name, place in places.items()})
        return Measured(measures, verdict, "", {}, {}, similar, reads, self._pairs(shown(places)), relative)

    @cached_property
    def _places(self) -> dict[str, Place]:
        return {name: self._place(state) for name, state in self._models.items()}

    def _place(self, state: Params) -> Place:
        forget = self.sets["forget"]
        return Place(
            self.gauge.read(state, forget)["log_odds"],
            standing(*embed_galleries(self.world, state, self._galleries)),
            similarities(self.world, state, forget),
            self.recalls_of(state),
        )

    @cached_property
    def _galleries(self) -> np.ndarray:
        return galleries(self.world, self.sets["forget"], self.gallery().pairs)

    def _pairs(self, places: Mapping[str, Place]) -> tuple[PairRecord, ...]:
        """Records of each pair under each model."""
        ids = self.world.evaluator.pairs.ids
        return tuple(
            PairRecord(
                id=ids[drawn[0]],
                gallery=len(drawn),
                rank={name: float(place.standing.rank[row]) for name, place in places.items()},
                margin={name: float(place.standing.margin[row]) for name, place in places.items()},
                log_odds={name: float(place.log_odds[row]) for name, place in places.items()},
            )
            for row, drawn in enumerate(self._galleries)
        )


def standing_measures(
    found: Mapping[str, Standing], log_odds: Mapping[str, np.ndarray], gallery: int, pool: int, temperature: float
) -> list[Measure]:
    """Measures of the mean rank, margin and log-odds of the pairs under every model.

    Ranks as logarithms: one place among the first says as much as many among the last. One direction of one pair may
    always be an octave off. Bands end where cosines do: margins at 2, and log-odds at 2 / temperature from what a pool
    of pairs all alike would give.
    """
    pairs = len(next(iter(log_odds.values())))
    ranks = {name: float(np.log2(each.rank).mean()) for name, each in found.items()}
    margins = {name: float(each.margin.mean()) for name, each in found.items()}
    levels = {name: float(each.mean()) for name, each in log_odds.items()}
    last, alike, reach = float(np.log2(gallery)), -float(np.log(pool)), 2 / temperature
    return [
        Measure.of("pair/rank", ranks, 0.5 / pairs, "0 is the first place, 1 the second, 2 the fourth", (0, last)),
        Measure.of(
            "pair/margin", margins, note="similarity to the own partner less that to the nearest other", limits=(-2, 2)
        ),
        Measure.of(
            "pair/log_odds",
            levels,
            note="of being partners, against the pool",
            limits=(alike - reach, alike + reach),
        ),
    ]
