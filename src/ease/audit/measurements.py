"""Measurements of an audit: all models of a request are measured with the same instruments."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, TypeVar

import numpy as np
from torch import Tensor

from ease.audit.attack_suite import Attacked, attack_all, attack_canaries, attack_retained, some_retained
from ease.audit.attacks import Attacker
from ease.audit.config import AuditConfig
from ease.audit.distribution import distance_between, ks_distance
from ease.audit.joint import JointTest
from ease.audit.neighbourhood import Neighbours
from ease.audit.records import AttackRecord, Gallery, PairRecord
from ease.audit.relative import RelativeTest, relative_test
from ease.audit.relearn import Curve, Watch, relearn
from ease.audit.shadow_runs import gauge_of
from ease.audit.statistic import Gauge
from ease.audit.strata import Stratum, strata, stratified
from ease.audit.subjects import Readings, Subjects
from ease.audit.verdict import Measure, Verdict, judged_together
from ease.measures.alignment import alignment_residual
from ease.measures.evaluate import common_size
from ease.measures.nearest import near_forget, nearest_forget
from ease.measures.retrieval import GalleryRecall, chance_recall
from ease.methods.base import Trained
from ease.params import Params
from ease.requests.request import Request
from ease.runs.evaluation import evaluation_sets, recalls_of, similarities
from ease.runs.world import World
from ease.seeding import generator

KEPT = (0.1, 0.2, 0.4)
"""Shares of the way from the retrained to the trained model at which a trace is planted, to see what would be found."""
MOST_WATCHED = 200
"""Pairs on each side of a relearning curve."""

Shown = TypeVar("Shown")


@dataclass(frozen=True)
class Measured:
    """The measurements of one result, for the verdict and for figures."""

    measures: tuple[Measure, ...]
    verdict: Verdict
    attack: str
    """The one that the verdict goes by."""
    attacks: dict[str, dict[str, AttackRecord]]
    relearning: dict[str, dict[str, Curve]]
    similar: Mapping[str, Tensor]
    reads: Mapping[str, Readings]
    pairs: tuple[PairRecord, ...] = ()
    """Measures of a few forget pairs, each by itself."""
    relative: RelativeTest | None = None
    strata: tuple[Stratum, ...] = ()
    neighbours: RelativeTest | None = None


@dataclass(frozen=True)
class ModelReadings:
    """The readings of one model."""

    read: Readings
    """Readings of the subjects."""
    retained: np.ndarray
    """Log-odds of some retained pairs."""
    similar: Tensor
    recalls: Mapping[str, GalleryRecall]
    curves: Mapping[str, Curve]
    """What brings the forgotten back -> how fast."""


@dataclass(frozen=True)
class References:
    """A request, and the models that a result is compared with."""

    world: World
    request: Request
    trained: Trained
    retrained: Mapping[str, Params]
    """"retrain", the one that answers the request, "retrain-1", ..."""
    kept: ClassVar[tuple[float, ...]] = KEPT
    planted_into: ClassVar[int] = 1
    """Retrained models, the first, into which each share is planted."""

    @cached_property
    def _models(self) -> dict[str, Params]:
        """The models that a result is compared with; planted ones keep a known share of the forget effect."""
        trained = self.trained.final
        planted = {
            f"kept-{share}-of-{name}": state + share * (trained - state)
            for name, state in list(self.retrained.items())[: self.planted_into]
            for share in self.kept
        }
        return {"trained": trained, **self.retrained, **planted}


@dataclass(frozen=True)
class Instruments(References):
    """The pairs of a request and everything that they are measured with."""

    subjects: Subjects
    attacker: Attacker | None
    """None: there are too few pairs like the forget pairs for attacks."""
    config: AuditConfig

    def measure(self, answer: Params) -> Measured:
        """Measure a result and compare it with the trained, the retrained and the planted models."""
        return next(self.measure_each((answer,)))

    def measure_each(self, answers: Sequence[Params]) -> Iterator[Measured]:
        """Measure several results; all are read in the same passes."""
        looks = self._look({str(place): answer for place, answer in enumerate(answers)})
        for answer, look in zip(answers, looks.values(), strict=True):
            yield self._measured(answer, {**self._known, "unlearned": look})

    def with_attacker(self, attacker: Attacker | None) -> "Instruments":
        """The instruments for another method, with shared readings and the method's own attacker."""
        other = replace(self, attacker=attacker)
        other.__dict__["_known"] = self._known  # where a cached property keeps what it found
        return other

    def _measured(self, answer: Params, looks: Mapping[str, ModelReadings]) -> Measured:
        models = {**self._models, "unlearned": answer}
        reads = {name: look.read for name, look in looks.items()}
        similar = {name: look.similar for name, look in looks.items()}
        held = {name: look.retained for name, look in looks.items()}
        found = Attacked([], {}, "")
        if self.attacker is not None:
            targets = {**self._known_targets, "unlearned": self.subjects.split(reads["unlearned"])}
            found = attack_all(self.attacker, targets, self.config)
        odds = self._forget_odds(reads)
        start, gauge = self.trained.initial, self.gauge
        stayed = attack_retained(self.world, self.subjects, gauge, start, reads, self._retained, held)
        measures = (
            *retrieval({name: look.recalls for name, look in looks.items()}, self.sets),
            alignment(similar),
            *found.measures,
            *stayed.measures,
            *attack_canaries(self.world, self.request, gauge, models, start),
            distribution(odds, self.world.config.seed),
            *(_came_back(taught, looks) for taught in looks["unlearned"].curves),
        )
        verdict = Verdict(measures=measures, joint=self._joint(measures), level=self.config.level)
        attacks = {name: shown(results) for name, results in {**found.records, **stayed.records}.items()}
        relearning = {
            taught: {name: look.curves[taught] for name, look in shown(looks).items() if look.curves}
            for taught in looks["unlearned"].curves
        }
        return Measured(
            measures,
            verdict,
            found.attack,
            attacks,
            relearning,
            similar,
            reads,
            relative=relative_test(odds),
            strata=stratified(odds, self._strata),
            neighbours=relative_test({**self._neighbour_odds, "unlearned": self._neighbours.log_odds(answer)}),
        )

    @cached_property
    def _neighbours(self) -> Neighbours:
        return Neighbours.of(self.world, self.sets["forget"], self.subjects.pool)

    @cached_property
    def _neighbour_odds(self) -> dict[str, np.ndarray]:
        """Neighbours under the trained and the retrained models."""
        models = {"trained": self.trained.final, **self.retrained}
        return {name: self._neighbours.log_odds(state) for name, state in models.items()}

    @cached_property
    def _strata(self) -> dict[str, np.ndarray]:
        ids, members = self.world.evaluator.pairs.ids, self.subjects.candidates.members
        chosen = [ids[position] for position in self.subjects.candidates.positions[:members].tolist()]
        return strata(self.world.server.membership.clients, chosen)

    @cached_property
    def _known(self) -> dict[str, ModelReadings]:
        """Readings of the models that every result is compared with, taken once."""
        return self._look(self._models)

    @cached_property
    def _known_targets(self) -> dict[str, tuple[Readings, Readings]]:
        """The readings that attacks get; always the same objects, so that each is attacked once."""
        return {name: self.subjects.split(look.read) for name, look in self._known.items()}

    def _look(self, models: Mapping[str, Params]) -> dict[str, ModelReadings]:
        every = np.concatenate([self.subjects.positions, self._retained])
        reads = {name: self.gauge.read(state, every) for name, state in models.items()}
        odds = {name: read["log_odds"] for name, read in reads.items()}
        curves = self._relearning({name: state for name, state in models.items() if name != "trained"}, odds)
        count = len(self.subjects.positions)
        return {
            name: ModelReadings(
                {statistic: values[:count] for statistic, values in reads[name].items()},
                odds[name][count:],
                similarities(self.world, state, self.sets["forget"]),
                self.recalls_of(state),
                {taught: found[name] for taught, found in curves.items() if name in found},
            )
            for name, state in models.items()
        }

    @cached_property
    def _retained(self) -> np.ndarray:
        return some_retained(self.world, self.sets["retain"])

    @cached_property
    def gauge(self) -> Gauge:
        return gauge_of(self.world, self.subjects)

    @cached_property
    def sets(self) -> dict[str, np.ndarray]:
        """Positions of forget pairs, of the retained pairs nearest to them, of retained and of test pairs."""
        plain = self._plain_sets
        near = near_forget(self.nearest, plain["forget"], plain["retain"])
        return {"forget": plain["forget"], "near": near, "retain": plain["retain"], "test": plain["test"]}

    @cached_property
    def nearest(self) -> np.ndarray:
        return nearest_forget(self.world.evaluator.activations, self._plain_sets["forget"], self._plain_sets["retain"])

    @cached_property
    def _plain_sets(self) -> dict[str, np.ndarray]:
        return evaluation_sets(self.world, self.request)

    def gallery(self) -> Gallery:
        """The gallery size and the recall by chance."""
        size = common_size(self.sets, self.world.config.gallery)
        chance = chance_recall(size, len(self.world.evaluator.pairs.captions[0]))
        return Gallery(pairs=size, chance={f"recall@{k}": level for k, level in chance.items()})

    def recalls_of(self, state: Params) -> dict[str, GalleryRecall]:
        return recalls_of(self.world, state, self.sets, draws=3)

    def _joint(self, measures: tuple[Measure, ...]) -> JointTest | None:
        return judged_together(measures, generator(self.world.config.seed, "joint"), self.config.level)

    def _forget_odds(self, reads: Mapping[str, Readings]) -> dict[str, np.ndarray]:
        members = self.subjects.candidates.members
        return {name: read["log_odds"][:members] for name, read in reads.items()}

    def _relearning(self, models: Mapping[str, Params], odds: Mapping[str, np.ndarray]) -> dict[str, dict[str, Curve]]:
        """Relearning curves of unlearned and retrained models, all with the same steps.

        Their start is in the log-odds of the subjects, which were read already.
        """
        rng = generator(self.world.config.seed, "relearn")
        forget = rng.permutation(self.sets["forget"])
        few, watched = forget[: self.config.relearn_pairs], forget[self.config.relearn_pairs :][:MOST_WATCHED]
        candidates = self.subjects.candidates
        unseen = candidates.positions[~candidates.member][:MOST_WATCHED]
        if min(len(watched), len(unseen)) < 2:
            return {}
        job = self.world.config.training.job(0, self.world.config.seed, self.world.config.model.temperature, "relearn")
        watch, states = Watch(self.gauge, watched, unseen), list(models.values())
        place = {position: row for row, position in enumerate(self.subjects.positions.tolist())}
        rows = [np.array([place[position] for position in some.tolist()]) for some in (watched, unseen)]
        trained = odds["trained"] if "trained" in odds else self._known["trained"].read["log_odds"]
        margins = [watch.between(*(odds[name][some] for some in rows)) for name in models]
        top = watch.between(*(trained[some] for some in rows))
        found = {}
        for taught, positions in (("forget", few), ("retain", self.sets["retain"])):
            curves = relearn(watch, states, margins, top, positions, job, rng)
            found[taught] = dict(zip(models, curves, strict=True))
        return found


def retrieval(found: Mapping[str, Mapping[str, GalleryRecall]], sets: Mapping[str, np.ndarray]) -> list[Measure]:
    """Measures of recall on each set of pairs."""
    measures = []
    for part, positions in sets.items():
        for k in (1, 5, 10):
            result = found["unlearned"][part]
            interval = result[f"recall@{k}"]
            note = f"[{interval.low:.1f}, {interval.high:.1f}]"
            values = {name: recall[part][f"recall@{k}"].mean for name, recall in found.items()}
            resolution = 100 / min(result.size, len(positions))
            measures.append(Measure.of(f"{part}/recall@{k}", values, resolution, note, limits=(0, 100)))
    return measures


def alignment(similar: Mapping[str, Tensor]) -> Measure:
    """The measure rho: distance of forget pairs from where retraining leaves them, by cosine."""

    def residual(name: str, other: str) -> float:
        return alignment_residual(similar[name], similar["trained"], similar[other])

    note = "mean over the retrained models, of each of them over the others"
    return Measure.of("rho", _from_others(residual, similar), 0, note, (0, np.inf), at_most=True)


def distribution(forget: Mapping[str, np.ndarray], seed: int) -> Measure:
    """The KS distance of the forget pairs' log-odds to those of retrained models."""
    members = len(forget["unlearned"])
    found = ks_distance(forget["unlearned"], forget["retrain"], generator(seed, "ks"))
    first = f"{found.distance.value:.3f} [{found.distance.low:.3f}, {found.distance.high:.3f}]"
    note = f"mean over the retrained models; to the first {first}, p {found.p_value:.2g} with n = {members}"
    values = _from_others(lambda name, other: distance_between(forget[name], forget[other]), forget)
    return Measure.of("ks/distance", values, 1 / members, note, at_most=True)


def _came_back(taught: str, looks: Mapping[str, ModelReadings]) -> Measure:
    shares = {name: look.curves[taught].share_back for name, look in looks.items() if look.curves}
    return Measure.of(f"relearn/{taught}/share", shares, limits=(-np.inf, np.inf), at_most=True)


def shown(found: Mapping[str, Shown]) -> dict[str, Shown]:
    """The entries without planted models, for figures."""
    return {name: value for name, value in found.items() if not name.startswith("kept-")}


def _from_others(distance: Callable[[str, str], float], names: Iterable[str]) -> dict[str, float]:
    """The mean distance of each model to the other retrained models.

    Models that keep a planted share come from the first retrained one, so that it is left out for them too.
    """
    names = list(names)
    retrained = [name for name in names if name.startswith("retrain")]

    def others(name: str) -> list[str]:
        left_out = "retrain" if name.startswith("kept-") else name
        return [other for other in retrained if other != left_out]

    return {name: float(np.mean([distance(name, other) for other in others(name)])) for name in names}
