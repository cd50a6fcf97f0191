"""Membership attacks on one model from the statistics of shadows. Thresholds never come from the judged pairs."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ease.audit import before_after
from ease.audit.bavaria import bavaria
from ease.audit.distribution import ulira
from ease.audit.membership import (
    EXPECTED_FALSE_POSITIVES,
    Estimate,
    OperatingPoint,
    auc,
    lira,
    operating_point,
    refuse_copy,
    rmia,
    shadow_classifier,
    share_called_member,
    tpr_at_fpr,
    tune_offline_a,
    unscored,
)
from ease.audit.statistic import features
from ease.audit.subjects import Readings

if TYPE_CHECKING:
    from sklearn.pipeline import Pipeline

ATTACKED = ("log_odds", "cosine")
"""Statistics that likelihood ratios are made of."""
FEWEST_POPULATION = 30


@dataclass(frozen=True)
class AttackResult:
    """The result of one attack on one model."""

    auc: Estimate
    tpr: OperatingPoint | None
    """At the asked false positive rate; None when there are too few non-members to set a threshold by."""
    unscored: int
    scores: np.ndarray


@dataclass(frozen=True)
class Attacker:
    """The attacker's knowledge: shadows before and after unlearning, and who trained on what."""

    shadows: Readings
    """Readings of the candidates by trained shadows [candidates, shadows]."""
    unlearned: Readings
    """Readings by the same shadows after unlearning; empty when they were left as trained."""
    included: np.ndarray
    """bool [candidates, shadows]."""
    member: np.ndarray
    """bool [candidates]: members of the audited model."""
    population: Readings
    """Readings by trained shadows of further pairs that no model saw [pairs, shadows]."""
    fpr: float

    def attacks(self) -> list[str]:
        """Names of the likelihood-ratio attacks, and RMIA if there is a population."""
        names = [
            f"{family}-{mode}/{statistic}"
            for family in ("bavaria", "lira")
            for mode in ("online", "offline")
            for statistic in ATTACKED
        ]
        return names + (["rmia"] if len(self.population["log_odds"]) >= FEWEST_POPULATION else [])

    def informed_attacks(self) -> list[str]:
        """Names of the attacks whose shadows went through the same unlearning."""
        return [f"{family}/{statistic}" for family in ("u-bavaria", "u-lira") for statistic in ATTACKED]

    def score(self, attack: str, target: Readings, population: Readings, without: int | None = None) -> np.ndarray:
        """An attack's score of every candidate under a model; `without` leaves out the shadow that is the target."""
        kept = np.arange(self.included.shape[1]) != (-1 if without is None else without)
        included = self.included[:, kept]
        if attack == "rmia":
            return rmia(
                target["log_odds"],
                self.shadows["log_odds"][:, kept],
                included,
                population["log_odds"],
                self.population["log_odds"][:, kept],
                self._offline_a,
            )
        mode, _, statistic = attack.partition("/")
        if mode == "u-bavaria":
            return bavaria(target[statistic], self.unlearned[statistic][:, kept], included)
        if mode == "u-lira":
            values = self.unlearned[statistic][:, kept]
            refuse_copy(target[statistic], values)
            seen, unseen = (np.where(side, values, np.nan) for side in (included, ~included))
            return ulira(seen, unseen, target[statistic], variance="shared")
        family, _, knows = mode.partition("-")
        known = (target[statistic], self.shadows[statistic][:, kept], included, knows == "online")
        return bavaria(*known) if family == "bavaria" else lira(*known)

    def judge(self, attack: str, target: Readings, population: Readings) -> AttackResult:
        """AUC over the candidates, and the share of members found at a threshold set on the shadows' non-members.

        The result is cached by readings, because retrained models are compared with every result.
        """
        key = attack, id(target)
        if key not in self._judged:
            self._judged[key] = target, self._judge(attack, target, population)
        return self._judged[key][1]

    def _judge(self, attack: str, target: Readings, population: Readings) -> AttackResult:
        scores = self.score(attack, target, population)
        members, others = scores[self.member], scores[~self.member]
        tpr = None
        if len(self.nonmember_scores(attack)) * self.fpr >= EXPECTED_FALSE_POSITIVES:
            tpr = operating_point(members, others, self.threshold(attack))
        return AttackResult(auc(members, others), tpr, unscored(scores), scores)

    def threshold(self, attack: str) -> float:
        """The score that a share `fpr` of the shadows' non-members reaches."""
        outside = self.nonmember_scores(attack)
        return tpr_at_fpr(outside, outside, self.fpr).threshold

    def nonmember_scores(self, attack: str) -> np.ndarray:
        """Scores of pairs that a shadow left out, with each shadow in turn as the target."""
        if attack not in self._left_out:
            self._left_out[attack] = np.concatenate(list(self._left_out_scores(attack)))
        return self._left_out[attack]

    def strongest(self, target: Readings, population: Readings) -> str:
        """The likelihood-ratio attack with the best AUC before unlearning."""
        return max(self.attacks(), key=lambda attack: self.judge(attack, target, population).auc.value)

    def compare(self, before: Readings, after: Readings) -> dict[str, AttackResult]:
        """Attacks by the models before and after unlearning: by the change, and by both readings."""
        known = (self.shadows["log_odds"], self.unlearned["log_odds"], self.included)
        pair = (before["log_odds"], after["log_odds"])
        return {
            "before-after/change": self._without_threshold(before_after.change(*pair)),
            "before-after/both": self._without_threshold(before_after.both(*known, *pair)),
        }

    @cached_property
    def classifier(self) -> "Pipeline":
        """Shokri's attack: one classifier over all shadows."""
        return shadow_classifier(features(self.shadows), self.included)

    def called_member(self, target: Readings) -> Estimate:
        """Share of the forget pairs that the classifier calls members."""
        return share_called_member(self.classifier, features(target)[self.member])

    @cached_property
    def _offline_a(self) -> float:
        return tune_offline_a(self.shadows["log_odds"], self.included, self.population["log_odds"])

    @cached_property
    def _left_out(self) -> dict[str, np.ndarray]:
        """Cache: attack -> scores of non-members."""
        return {}

    @cached_property
    def _judged(self) -> dict[tuple[str, int], tuple[Readings, AttackResult]]:
        """Cache: attack and identity of readings -> readings (so that no others get this identity) and result."""
        return {}

    def _without_threshold(self, scores: np.ndarray) -> AttackResult:
        return AttackResult(auc(scores[self.member], scores[~self.member]), None, unscored(scores), scores)

    def _left_out_scores(self, attack: str) -> Iterator[np.ndarray]:
        source = self.unlearned if attack.startswith("u-") else self.shadows
        for shadow in range(self.included.shape[1]):
            target = {name: values[:, shadow] for name, values in source.items()}
            population = {name: values[:, shadow] for name, values in self.population.items()}
            scores = self.score(attack, target, population, without=shadow)[~self.included[:, shadow]]
            yield scores[~np.isnan(scores)]
