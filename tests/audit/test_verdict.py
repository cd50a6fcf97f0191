"""The verdict as a value: what follows from the joint test, in every case, and in words that nobody has to parse."""

import json

import numpy as np
import pytest

from ease.audit.band import Band, prediction_band
from ease.audit.joint import JointTest
from ease.audit.membership import Estimate
from ease.audit.verdict import EVIDENCE, Measure, Reason, Verdict


def measure(name: str, value: float, band: Band | None = Band(low=0.4, high=0.6, models=3)) -> Measure:  # noqa: B008
    return Measure(name=name, value=value, retrain=0.5, before=0.9, band=band, retrained=(0.5, 0.45, 0.55), kept=())


INSIDE, OUTSIDE = measure("rho", 0.5), measure("bavaria/auc", 0.7)
NOTHING, TRACE, OVERDONE = Estimate(0.01, -0.04, 0.06), Estimate(0.2, 0.1, 0.3), Estimate(-0.2, -0.3, -0.1)


FEW_TRIED = ((0.4, 0.3), (1.0, 0.55))


def joint(
    p_value: float,
    trace: Estimate = NOTHING,
    smallest: float | None = 0.1,
    power: tuple[tuple[float, float], ...] = ((0.1, 0.9), (0.2, 1.0)),
) -> JointTest:
    return JointTest(
        p_value=p_value, level=0.05, retrained=10, measures=20, trace=trace, power=power, smallest_caught=smallest
    )


@pytest.mark.parametrize(
    ("found", "passed", "reason"),
    [
        (joint(0.4), True, Reason.LIKE_RETRAINING),
        (joint(0.051), True, Reason.LIKE_RETRAINING),
        (joint(0.05), False, Reason.OTHERWISE),
        (joint(0.001, TRACE), False, Reason.KEPT),
        (joint(0.001, OVERDONE), False, Reason.OVERDONE),
        (joint(0.4, smallest=None), None, Reason.NO_SIGNAL),
        (joint(0.4, smallest=0.6), None, Reason.NO_SIGNAL),
        (joint(0.001, TRACE, None), False, Reason.KEPT),
        (joint(0.4, smallest=0.9, power=FEW_TRIED), True, Reason.LIKE_RETRAINING),
        (joint(0.4, smallest=None, power=FEW_TRIED), None, Reason.NO_SIGNAL),
        (joint(0.01, TRACE, smallest=None, power=FEW_TRIED), False, Reason.KEPT),
        (None, None, Reason.TOO_FEW),
    ],
)
def test_consequences_of_the_joint_test(found: JointTest | None, passed: bool | None, reason: Reason) -> None:
    """Single measures explain: one outside its band changes nothing."""
    for measures in ((INSIDE,), (INSIDE, OUTSIDE)):
        verdict = Verdict(measures=measures, joint=found)
        assert verdict.passed is passed and verdict.reason is reason


def test_a_band_includes_its_ends_and_may_be_open_below() -> None:
    assert [measure("rho", value).inside for value in (0.39, 0.4, 0.6, 0.61)] == [False, True, True, False]
    assert measure("rho", -1e9, Band(low=None, high=0.6, models=3)).inside is True
    assert measure("rho", 0.5, None).inside is None


def test_a_band_never_leaves_what_a_measure_can_be() -> None:
    values = {"unlearned": 2.0, "trained": 90.0, "retrain": 1.0, "retrain-1": 99.0}
    found = Measure.of("forget/recall@1", values, limits=(0, 100))
    assert found.band == Band(low=0.0, high=100.0, models=2)
    assert prediction_band([0.1, 0.9], limits=(0, 1)) == Band(low=0.0, high=1.0, models=2)


def test_a_measure_from_the_values_of_all_models() -> None:
    """The band is that of the retrained models alone: of 0.4 and 0.6; planted models are ordered by their shares."""
    values = {"trained": 0.9, "unlearned": 0.7, "retrain": 0.4, "retrain-1": 0.6, "kept-0.4": 0.8, "kept-0.1": 0.5}
    found = Measure.of("bavaria/auc", values, note="n", limits=(-np.inf, np.inf))
    assert (found.value, found.retrain, found.before, found.note) == (0.7, 0.4, 0.9, "n")
    assert found.band == prediction_band([0.4, 0.6])
    assert found.retrained == (0.4, 0.6) and found.kept == ((0.1, 0.5), (0.4, 0.8))


def test_effects_of_planted_models_are_averaged_over_their_hosts() -> None:
    """0.4 -> 0.5 and 0.6 -> 0.9: +0.2 on average, told from the first retrained model's 0.4."""
    values = {"unlearned": 0.7, "retrain": 0.4, "retrain-1": 0.6, "kept-0.1-of-retrain": 0.5}
    assert Measure.of("rho", values).kept == ((0.1, pytest.approx(0.5)),)
    found = Measure.of("rho", {**values, "kept-0.1-of-retrain-1": 0.9})
    assert found.kept == ((0.1, pytest.approx(0.6)),) and found.retrained == (0.4, 0.6)


def test_words_for_few_pairs_by_hand() -> None:
    counted = "over 20 measures and 10 retrained models"
    weak = Verdict(measures=(INSIDE,), joint=joint(0.4, smallest=0.9, power=FEW_TRIED))
    assert weak.weak and weak.words == (
        f"Weak {EVIDENCE}: the result is indistinguishable from retraining (p = 0.4 {counted}); a model that keeps 90% "
        "of the forget effect would have been refused in 90% of such audits"
    )
    assert not Verdict(measures=(INSIDE,), joint=joint(0.4, smallest=0.4, power=FEW_TRIED)).weak
    assert Verdict(measures=(INSIDE,), joint=joint(0.4, smallest=None, power=FEW_TRIED)).words == (
        f"Undecided: the result is indistinguishable from retraining (p = 0.4 {counted}), but so is the "
        "trained model, which would have been refused in 55% of such audits; audit more forget pairs together or add "
        "--retrains"
    )


def test_words_by_hand() -> None:
    counted = "over 20 measures and 10 retrained models"
    assert Verdict(measures=(INSIDE,), joint=joint(0.4)).words == (
        f"{EVIDENCE.capitalize()}: the result is indistinguishable from retraining (p = 0.4 {counted}); a model "
        "that keeps 10% of the forget effect would have been refused in 90% of such audits"
    )
    kept = Verdict(measures=(INSIDE, OUTSIDE), joint=joint(0.001, TRACE)).words
    assert kept == (
        f"Not enough {EVIDENCE}: the result differs from retraining (p = 0.001 {counted}): it keeps about 20% of the "
        "forget effect [10%, 30%]; see BaVarIA AUC"
    )
    assert "it forgot 20% too much" in Verdict(measures=(INSIDE,), joint=joint(0.001, OVERDONE)).words
    assert "not along the forget effect" in Verdict(measures=(INSIDE,), joint=joint(0.001)).words
    few = Verdict(measures=(INSIDE,), joint=None).words
    assert few.startswith("Undecided: 3 retrained models") and "--retrains 5" in few
    assert "but so is a model that keeps 60%" in Verdict(measures=(INSIDE,), joint=joint(0.4, smallest=0.6)).words


def test_derived_fields_are_written_and_computed_again_when_read() -> None:
    """A file that claims to have passed is not believed."""
    verdict = Verdict(measures=(INSIDE, OUTSIDE), joint=joint(0.001, TRACE))
    stored = json.loads(json.dumps(verdict.model_dump(mode="json"), allow_nan=False))
    assert stored["passed"] is False and stored["reason"] == "forget effect kept" and stored["words"] == verdict.words
    assert [entry["inside"] for entry in stored["measures"]] == [True, False]
    assert Verdict.model_validate(stored) == verdict
    assert Verdict.model_validate({**stored, "passed": True}).passed is False
