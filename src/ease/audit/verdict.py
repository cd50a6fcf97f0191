"""The verdict of an audit: measures with bands, the joint test, and its words."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from enum import StrEnum
from statistics import fmean
from typing import Any

import numpy as np
from pydantic import computed_field, model_validator

from ease.audit.band import Band, Limits, prediction_band
from ease.audit.joint import LEAST_RETRAINED, LEVEL, WANTED_POWER, JointTest, joint_test
from ease.config import Config

EVIDENCE = "evidence of approximate erasure"
"""The most that measures can show."""
LARGEST_MISSED = 0.5
"""An audit that would overlook a model that keeps this share of the forget effect cannot let anything pass."""
LEAST_SPREAD = 1e-3
"""Smallest spread of measures that are not shares of pairs. Models that agree to more digits agree by chance."""
TITLES = {
    "rho": "alignment rho",
    "ks/distance": "KS distance to retrain",
    "mia/share": "called member",
    "bavaria/auc": "BaVarIA AUC",
    "bavaria/tpr": "found by BaVarIA",
    "u-bavaria/auc": "U-BaVarIA AUC",
    "u-bavaria/tpr": "found by U-BaVarIA",
    "before-after/auc": "before and after AUC",
    "retained/auc": "retained pairs AUC",
    "retained/rank": "rank of retained pairs, log2",
    "held-out/auc": "membership AUC, held-out pairs",
    "pair/rank": "rank in its gallery, log2",
    "pair/margin": "similarity margin",
    "pair/log_odds": "log-odds",
    "canaries/epsilon": "epsilon by canaries",
    "lira/auc": "strongest attack AUC",
    "lira/tpr": "found by the strongest",
    "u-lira/auc": "U-LiRA AUC",
    "u-lira/tpr": "found by U-LiRA",
    "rmia/auc": "RMIA AUC",
    "relearn/forget/share": "back by forget pairs",
    "relearn/retain/share": "back by retained pairs",
}
"""What measures are called in tables and sentences; recalls are called after their pairs."""


class WithComputedFields(Config):
    """A record that stores its computed fields for other readers and computes them again when it is read."""

    @model_validator(mode="before")
    @classmethod
    def _without_consequences(cls, table: Any) -> Any:
        if not isinstance(table, dict):
            return table
        return {name: value for name, value in table.items() if name not in cls.model_computed_fields}


class Measure(WithComputedFields):
    """One measured value of a result, and its values for other models."""

    name: str
    value: float
    retrain: float
    before: float | None
    """Value of the trained model; None if it is zero by definition."""
    band: Band | None
    """Range in which another retrained model would fall. It explains the verdict, which uses all measures together."""
    retrained: tuple[float, ...]
    """Values of all retrained models."""
    kept: tuple[tuple[float, float], ...]
    """(share, value) of models between the first retrained and the trained one: what a trace would do to it. If such
    models were made from several retrained ones: the first one's value plus their mean change."""
    resolution: float = 0.0
    note: str = ""

    @classmethod
    def of(
        cls,
        name: str,
        values: Mapping[str, float],
        resolution: float = 0.0,
        note: str = "",
        limits: Limits = (0.0, 1.0),
        at_most: bool = False,
    ) -> "Measure":
        """The measure from the values of all models: "unlearned", "trained", "retrain", "retrain-1", "kept-0.1", ...

        "kept-0.1" was planted into "retrain", "kept-0.1-of-retrain-2" into another one.
        """
        retrained = tuple(value for model, value in values.items() if model.startswith("retrain"))
        changes = defaultdict(list)
        for model in values:
            if model.startswith("kept-"):
                share, _, planted_into = model.removeprefix("kept-").partition("-of-")
                changes[float(share)].append(values[model] - values[planted_into or "retrain"])
        return cls(
            name=name,
            value=values["unlearned"],
            retrain=values["retrain"],
            before=values.get("trained"),
            band=prediction_band(retrained, at_most, resolution, limits),
            retrained=retrained,
            kept=tuple((share, values["retrain"] + fmean(found)) for share, found in sorted(changes.items())),
            resolution=resolution,
            note=note,
        )

    @computed_field  # type: ignore[prop-decorator]
    @property
    def inside(self) -> bool | None:
        """Whether a retrained model could have this value; None without a band."""
        return None if self.band is None else self.band.contains(self.value)

    @property
    def signed(self) -> bool:
        """Whether the sign of the difference to retraining has a meaning; a distance has none."""
        return self.band is not None and self.band.low is not None

    @property
    def title(self) -> str:
        return TITLES.get(self.name) or self.name.replace("/recall@", " R@")

    @property
    def digits(self) -> int:
        """Decimals to show; recalls are in percent, all others are shares and distances."""
        return 1 if "/recall@" in self.name else 3


def judged_together(measures: Sequence[Measure], rng: np.random.Generator, level: float = LEVEL) -> JointTest | None:
    """The joint test over all measures; None if there are too few retrained models."""
    if len(measures[0].retrained) < LEAST_RETRAINED:
        return None
    kept = [
        (share, np.array([dict(measure.kept)[share] for measure in measures]))
        for share in sorted(dict(measures[0].kept))
    ]
    return joint_test(
        np.array([measure.value for measure in measures]),
        np.array([measure.retrained for measure in measures]).T,
        np.array([max(measure.resolution, LEAST_SPREAD) for measure in measures]),
        [(0.0, np.array([measure.retrain for measure in measures])), *kept],
        rng,
        level,
        signed=np.array([measure.signed for measure in measures]),
    )


class Identity(Config):
    """Hashes of an exact answer beside those of retraining."""

    sums: str
    """Hash of the sums from which the result was solved."""
    retrain_sums: str
    model: str
    retrain_model: str

    @property
    def holds(self) -> bool:
        """Whether the answer is the retrained model, bit for bit."""
        return bool(self.sums) and (self.sums, self.model) == (self.retrain_sums, self.retrain_model)


class Reason(StrEnum):
    """Why a verdict is what it is."""

    IDENTICAL = "identical to retraining"
    DIFFERENT = "different from retraining"
    LIKE_RETRAINING = "indistinguishable from retraining"
    KEPT = "forget effect kept"
    OVERDONE = "forgotten too much"
    OTHERWISE = "unlike retraining otherwise"
    TOO_FEW = "too few retrainings"
    NO_SIGNAL = "no signal"


class Verdict(WithComputedFields):
    """The conclusion of an audit."""

    measures: tuple[Measure, ...]
    joint: JointTest | None
    """None with too few retrained models."""
    level: float = LEVEL
    identity: Identity | None = None
    """Hashes that decide instead of measures, for an exact result."""

    @property
    def retrained(self) -> int:
        return max((len(measure.retrained) for measure in self.measures), default=0)

    @property
    def outside(self) -> tuple[Measure, ...]:
        """Measures outside their own bands; they are diagnostic and do not decide."""
        return tuple(measure for measure in self.measures if measure.inside is False)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def reason(self) -> Reason:
        if self.identity is not None:
            return Reason.IDENTICAL if self.identity.holds else Reason.DIFFERENT
        if self.joint is None:
            return Reason.TOO_FEW
        if self.joint.passed:
            caught, most = self.joint.smallest_caught, 1.0 if self.joint.trained_tried else LARGEST_MISSED
            return Reason.NO_SIGNAL if caught is None or caught > most else Reason.LIKE_RETRAINING
        if self.joint.trace.low > 0:
            return Reason.KEPT
        return Reason.OVERDONE if self.joint.trace.high < 0 else Reason.OTHERWISE

    @computed_field  # type: ignore[prop-decorator]
    @property
    def passed(self) -> bool | None:
        """Whether the result is indistinguishable from retraining; None if it cannot be decided."""
        if self.reason in (Reason.TOO_FEW, Reason.NO_SIGNAL):
            return None
        return self.reason in (Reason.IDENTICAL, Reason.LIKE_RETRAINING)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def words(self) -> str:
        """The verdict in one sentence."""
        return f"{self.headline}: {self.explanation}"

    @property
    def weak(self) -> bool:
        """Whether it passed though a model that keeps half of the effect might have; that happens with few pairs."""
        caught = self.joint.smallest_caught if self.joint else None
        return self.passed is True and caught is not None and caught > LARGEST_MISSED

    @property
    def headline(self) -> str:
        if self.identity is not None:
            return self.reason.capitalize()
        if self.weak:
            return f"Weak {EVIDENCE}"
        return {True: EVIDENCE.capitalize(), False: f"Not enough {EVIDENCE}", None: "Undecided"}[self.passed]

    @property
    def explanation(self) -> str:
        joint = self.joint
        if self.identity is not None:
            return _compared(self.identity)
        if joint is None:
            return (
                f"{self.retrained} retrained models are too few to know their spread; add --retrains "
                f"{LEAST_RETRAINED - 1} or more"
            )
        odds = f"p = {joint.p_value:.2g} over {joint.measures} measures and {joint.retrained} retrained models"
        match self.reason:
            case Reason.LIKE_RETRAINING:
                return (
                    f"the result is indistinguishable from retraining ({odds}); a model that keeps "
                    f"{joint.smallest_caught:.0%} of the forget effect would have been refused in {WANTED_POWER:.0%} "
                    "of such audits"
                )
            case Reason.NO_SIGNAL if joint.trained_tried:
                return (
                    f"the result is indistinguishable from retraining ({odds}), but so is the trained model, "
                    f"which would have been refused in {joint.power[-1][1]:.0%} of such audits; audit more forget "
                    "pairs together or add --retrains"
                )
            case Reason.NO_SIGNAL:
                missed = LARGEST_MISSED if joint.smallest_caught is None else joint.smallest_caught
                return (
                    f"the result is indistinguishable from retraining ({odds}), but so is a model that keeps "
                    f"{missed:.0%} of the forget effect; audit more forget pairs together or add --retrains"
                )
            case Reason.KEPT:
                away = f"it keeps about {joint.trace.value:.0%} of the forget effect"
            case Reason.OVERDONE:
                away = f"it forgot {-joint.trace.value:.0%} too much, which is detectable as well"
            case _:
                away = "the difference is not along the forget effect"
        span = f"[{joint.trace.low:.0%}, {joint.trace.high:.0%}]"
        names = ", ".join(measure.title for measure in self.outside)
        return f"the result differs from retraining ({odds}): {away} {span}" + (f"; see {names}" if names else "")


def _compared(found: Identity) -> str:
    """The reason for the verdict on an exact result."""
    if found.holds:
        return (
            f"the sums of the retained pairs ({found.sums[:12]}) and the model solved from them "
            f"({found.model[:12]}) are those of training on the retained pairs only, bit for bit, so no measure "
            "can distinguish them"
        )
    sides = (("sums", found.sums, found.retrain_sums), ("model", found.model, found.retrain_model))
    other = [f"{name} {ours[:12] or 'missing'} and not {theirs[:12]}" for name, ours, theirs in sides if ours != theirs]
    return (
        f"training on the retained pairs gives another result ({'; '.join(other) or 'no sums'}); delete the answer and "
        "run `ease forget` again"
    )
