"""The verdict of an audit as a value: measures beside their bands, what follows from them, and the words for it."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from pydantic import computed_field, model_validator

from ease.audit.band import Band, prediction_band
from ease.audit.membership import CONFIDENCE, Estimate, signal_of
from ease.config import Config

EVIDENCE = "evidence of approximate erasure"
"""The most that measures can show."""
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


class Judged(Config):
    """A value whose consequences are stored with it, for readers in any language; ours draws them anew."""

    @model_validator(mode="before")
    @classmethod
    def _without_consequences(cls, table: Any) -> Any:
        if not isinstance(table, dict):
            return table
        return {name: value for name, value in table.items() if name not in cls.model_computed_fields}


class Measure(Judged):
    """One number of an answer, beside those of retrained models."""

    name: str
    value: float
    retrain: float
    before: float | None
    """Of the trained model; None where it is the measure's own zero."""
    band: Band | None
    note: str = ""

    @classmethod
    def of(cls, name: str, values: Mapping[str, float], resolution: float, note: str = "") -> "Measure":
        """From the values of every model: those of the retrained ones, whose names begin so, make the band."""
        retrained = [value for model, value in values.items() if model.startswith("retrain")]
        return cls(
            name=name,
            value=values["unlearned"],
            retrain=values["retrain"],
            before=values["trained"],
            band=prediction_band(retrained, resolution=resolution),
            note=note,
        )

    @computed_field  # type: ignore[prop-decorator]
    @property
    def inside(self) -> bool | None:
        """Whether a retrained model could have this value; None without a band."""
        return None if self.band is None else self.band.contains(self.value)

    @property
    def title(self) -> str:
        return TITLES.get(self.name) or self.name.replace("/recall@", " R@")

    @property
    def digits(self) -> int:
        """Decimals to show: recalls are in percent, all else are shares and distances."""
        return 1 if "/recall@" in self.name else 3


class Reason(StrEnum):
    """Why a verdict is what it is."""

    ALL_INSIDE = "all measures inside"
    SOME_OUTSIDE = "measures outside"
    NO_SIGNAL = "no signal"
    INVERTED_SIGNAL = "inverted signal"
    NO_BAND = "no band"


class Verdict(Judged):
    """What an audit concludes. It lets nothing pass: how much chance would explain is said, not forgiven."""

    measures: tuple[Measure, ...]
    before: Estimate
    """AUC, before unlearning, of the attack that was strongest then: what it could not find cannot be seen to go."""

    @property
    def judged(self) -> int:
        """How many measures have a band."""
        return sum(measure.inside is not None for measure in self.measures)

    @property
    def outside(self) -> tuple[Measure, ...]:
        return tuple(measure for measure in self.measures if measure.inside is False)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def reasons(self) -> tuple[Reason, ...]:
        """All that stand against a verdict, or else the one that decides it."""
        signal = {"none": Reason.NO_SIGNAL, "inverted": Reason.INVERTED_SIGNAL}.get(signal_of(self.before))
        against = [*([signal] if signal else []), *([] if self.judged else [Reason.NO_BAND])]
        return tuple(against) or (Reason.SOME_OUTSIDE if self.outside else Reason.ALL_INSIDE,)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def passed(self) -> bool | None:
        """Whether every judged measure lies where a retrained model's would; None: it cannot be told."""
        return {Reason.ALL_INSIDE: True, Reason.SOME_OUTSIDE: False}.get(self.reasons[0])

    @computed_field  # type: ignore[prop-decorator]
    @property
    def words(self) -> str:
        """The verdict in one sentence."""
        return f"{self.headline}: {self.explanation}"

    @property
    def headline(self) -> str:
        return {True: EVIDENCE.capitalize(), False: f"Not enough {EVIDENCE}", None: "No verdict"}[self.passed]

    @property
    def explanation(self) -> str:
        return "; ".join(self._explained(reason) for reason in self.reasons)

    def _explained(self, reason: Reason) -> str:
        match reason:
            case Reason.ALL_INSIDE:
                return "every judged measure lies where a retrained model's would"
            case Reason.SOME_OUTSIDE:
                names = [measure.title for measure in self.outside]
                return (
                    f"{len(names)} of {self.judged} measures {'lies' if len(names) == 1 else 'lie'} outside the "
                    f"retrain band (by chance alone about {(1 - CONFIDENCE) * self.judged:.0f} would): "
                    f"{', '.join(names)}"
                )
            case Reason.NO_SIGNAL:
                return (
                    f"no signal: AUC {self.before} before unlearning cannot be told from a guess, so the attack says "
                    "nothing about what unlearning did"
                )
            case Reason.INVERTED_SIGNAL:
                return (
                    f"inverted signal: AUC {self.before} before unlearning, members score BELOW non-members; check "
                    "the statistic"
                )
            case Reason.NO_BAND:
                return "no measure has a band of retrained models; raise --retrains"
