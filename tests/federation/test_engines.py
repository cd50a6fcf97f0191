"""Train, forget and audit with all clients in one pass: on a GPU, and on a CPU with the same figures as one by one."""

import json
from pathlib import Path

import pytest
import torch

SETTINGS = (
    "data.train=240",
    "data.validation=40",
    "data.test=120",
    "partition.clients=4",
    "training.rounds=4",
    "gallery=40",
)
NEAR = 8.0
"""Points of recall: one pass adds in another order, and training enlarges rounding."""


def whole_path(ease, folder: Path, *settings: str) -> dict[str, float]:
    """R@10 after each step, and the audited membership AUC."""

    def answer(*arguments: object) -> dict:
        result = ease(*arguments, "--quiet", "--json")
        assert result.code == 0, result.err
        return json.loads(result.out)

    run = folder / "run"
    words = [word for setting in (*SETTINGS, *settings) for word in ("--set", setting)]
    found = {"trained": answer("train", *words, "--out", run)["metrics"]["seen/recall@10"]}
    for name, request in {"client-1": ("--client", 1), "class-2": ("--class", 2)}.items():
        for method in ("ease", "retrain"):
            metrics = answer("forget", run, *request, "--method", method)["metrics"]
            found |= {f"{name} {method} {part}": metrics[f"{part}/recall@10"] for part in ("forget", "retain")}
    options = ("--shadows", 4, "--retrains", 1, "--pool", 32, "--fpr", 0.1)
    verdict = answer("audit", run, "--request", "client-1", *options)
    measures = {entry["name"]: entry for entry in verdict["measures"]}
    assert measures["lira/auc"]["before"] > 0.6
    return found


@pytest.fixture
def one_by_one(ease, tmp_path: Path) -> dict[str, float]:
    return whole_path(ease, tmp_path / "loop", 'engine="loop"')


@pytest.mark.slow
def test_a_cohort_gives_the_figures_of_single_clients(ease, one_by_one, tmp_path: Path) -> None:
    found = whole_path(ease, tmp_path / "cohort", 'engine="cohort"')
    assert found == pytest.approx(one_by_one, abs=NEAR)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_gives_the_figures_of_a_cpu(ease, one_by_one, tmp_path: Path) -> None:
    found = whole_path(ease, tmp_path / "gpu", 'device="cuda"')
    assert found == pytest.approx(one_by_one, abs=NEAR)
