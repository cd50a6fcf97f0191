"""Deployed forms beside the float model: what is equal, what came back, and what is refused in one line."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from ease.audit.deployed import compare_forms, log_odds

N = 60


def cosines(lift: float, seed: int = 0) -> np.ndarray:
    """Cosines of pictures with captions, those of the first half raised on the diagonal."""
    draw = np.random.default_rng(seed).normal(0, 0.05, (2 * N, 2 * N))
    draw[np.arange(N), np.arange(N)] += lift
    return draw


def test_log_odds_are_those_of_a_loop() -> None:
    found = cosines(0.2)[:5, :5]
    for place, value in enumerate(log_odds(found, 0.07)):
        odds = np.exp(found[place] / 0.07)
        assert value == pytest.approx(np.log(odds[place] / (odds.sum() - odds[place])))


def test_a_form_that_scores_the_same_brings_nothing_back() -> None:
    float_form, onnx = compare_forms({"float": cosines(0.0), "onnx": cosines(0.0)}, N, 0.07)
    assert onnx.came_back.value == 0 and onnx.largest_change == 0 and float_form.auc == onnx.auc


def test_memories_of_a_form_are_found_and_a_lift_of_all_pairs_is_not() -> None:
    base = cosines(0.0)
    forgotten, everything = base.copy(), base.copy()
    forgotten[np.arange(N), np.arange(N)] += np.random.default_rng(1).normal(0.05, 0.02, N)
    everything[np.arange(2 * N), np.arange(2 * N)] += np.random.default_rng(2).normal(0.05, 0.02, 2 * N)
    _, back, lifted = compare_forms({"float": base, "onnx": forgotten, "int8": everything}, N, 0.07)
    assert back.came_back.low > 0 and back.auc.value > 0.6
    assert lifted.came_back.contains(0) and back.came_back.value == pytest.approx(0.05 / 0.07, abs=0.2)


def test_the_interval_is_wrong_as_rarely_as_it_says() -> None:
    rng, wrong = np.random.default_rng(3), 0
    base = cosines(0.0)
    for _ in range(200):
        noisy = base + np.diag(rng.normal(0, 0.02, 2 * N))
        wrong += compare_forms({"float": base, "int8": noisy}, N, 0.07)[1].came_back.low > 0
    assert wrong <= 8  # 1 % are expected; with 2 % more than 8 of 200 come in about 2 of 100 tries


@pytest.mark.slow
def test_an_answer_is_audited_in_every_form(ease, one_forgotten: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    run = shutil.copytree(one_forgotten, tmp_path / "run")
    result = ease("audit", run, "--request", "client-1/finetune", "--deployed", "--json")
    assert result.code == 0, result.err
    found = json.loads(result.out)
    forms = {each["form"]: each for each in found["forms"]}
    assert list(forms) == ["float", "onnx", "int8"] and found["found"] == []
    assert forms["onnx"]["largest_change"] < 1e-4 < forms["int8"]["largest_change"] < 0.2
    assert json.loads((run / "requests" / "client-1" / "finetune" / "deployed.json").read_text())["forget_pairs"] > 8
    shown = ease("audit", run, "--request", "client-1/finetune", "--deployed")
    assert shown.code == 0 and "memories return in no form" in shown.out.replace("\n", " ")
    assert ease("audit", run, "--request", "client-1/finetune", "--deployed", "--quick").code == 2
