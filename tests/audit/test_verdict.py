"""The verdict as a value: what follows from the measures, in every case, and in words that nobody has to parse."""

import json

import pytest

from ease.audit.band import Band, prediction_band
from ease.audit.membership import Estimate
from ease.audit.verdict import EVIDENCE, Measure, Reason, Verdict

STRONG, WEAK, INVERTED = Estimate(0.9, 0.8, 0.95), Estimate(0.52, 0.45, 0.58), Estimate(0.1, 0.05, 0.15)


def measure(name: str, value: float, band: Band | None = Band(low=0.4, high=0.6, models=3)) -> Measure:  # noqa: B008
    return Measure(name=name, value=value, retrain=0.5, before=0.9, band=band)


INSIDE, OUTSIDE, UNJUDGED = measure("rho", 0.5), measure("lira/auc", 0.7), measure("ks/distance", 9.0, None)


@pytest.mark.parametrize(
    ("measures", "before", "passed", "reasons"),
    [
        ([INSIDE], STRONG, True, [Reason.ALL_INSIDE]),
        ([INSIDE, UNJUDGED], STRONG, True, [Reason.ALL_INSIDE]),
        ([INSIDE, OUTSIDE], STRONG, False, [Reason.SOME_OUTSIDE]),
        ([INSIDE], WEAK, None, [Reason.NO_SIGNAL]),
        ([OUTSIDE], WEAK, None, [Reason.NO_SIGNAL]),
        ([INSIDE], INVERTED, None, [Reason.INVERTED_SIGNAL]),
        ([UNJUDGED], STRONG, None, [Reason.NO_BAND]),
        ([UNJUDGED], WEAK, None, [Reason.NO_SIGNAL, Reason.NO_BAND]),
    ],
)
def test_what_follows_from_the_measures(
    measures: list[Measure], before: Estimate, passed: bool | None, reasons: list[Reason]
) -> None:
    verdict = Verdict(measures=tuple(measures), before=before)
    assert verdict.passed is passed and list(verdict.reasons) == reasons


def test_a_band_includes_its_ends_and_may_be_open_below() -> None:
    assert [measure("rho", value).inside for value in (0.39, 0.4, 0.6, 0.61)] == [False, True, True, False]
    assert measure("rho", -1e9, Band(low=None, high=0.6, models=3)).inside is True
    assert measure("rho", 0.5, None).inside is None


def test_a_measure_from_the_values_of_all_models() -> None:
    """The band is that of the retrained models alone: of 0.4 and 0.6."""
    values = {"trained": 0.9, "unlearned": 0.7, "retrain": 0.4, "retrain-1": 0.6}
    found = Measure.of("lira/auc", values, resolution=0.0, note="n")
    assert (found.value, found.retrain, found.before, found.note) == (0.7, 0.4, 0.9, "n")
    assert found.band == prediction_band([0.4, 0.6])


def test_words_by_hand() -> None:
    """Of 20 judged measures one falls outside by chance."""
    many = tuple(measure(f"m{n}", 0.5) for n in range(18))
    verdict = Verdict(measures=(*many, OUTSIDE, measure("forget/recall@1", 0.0), UNJUDGED), before=STRONG)
    assert verdict.words == (
        f"Not enough {EVIDENCE}: 2 of 20 measures lie outside the retrain band (by chance alone about 1 would): "
        "strongest attack AUC, forget R@1"
    )
    assert Verdict(measures=(INSIDE,), before=STRONG).words.startswith(f"{EVIDENCE.capitalize()}: every judged")
    assert Verdict(measures=(INSIDE,), before=WEAK).words.startswith("No verdict: no signal: AUC 0.520 [0.450, 0.580]")
    assert Verdict(measures=(INSIDE,), before=INVERTED).words.startswith("No verdict: inverted signal: AUC 0.100")
    assert "raise --retrains" in Verdict(measures=(UNJUDGED,), before=STRONG).words


def test_what_follows_is_written_for_others_and_worked_out_anew_when_read() -> None:
    """A file that claims to have passed is not believed."""
    verdict = Verdict(measures=(INSIDE, OUTSIDE), before=STRONG)
    stored = json.loads(json.dumps(verdict.model_dump(mode="json"), allow_nan=False))
    assert stored["passed"] is False and stored["reasons"] == ["measures outside"] and stored["words"] == verdict.words
    assert [entry["inside"] for entry in stored["measures"]] == [True, False]
    assert Verdict.model_validate(stored) == verdict
    assert Verdict.model_validate({**stored, "passed": True}).passed is False
