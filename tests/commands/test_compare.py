"""`ease compare`: both models on the same data, and what to train."""

import json
from pathlib import Path

import pytest
from tests.test_cli import pictures, settings

from ease.commands.compare import CompareSummary, Trial, closed_form, smaller, trained_by_fedavg
from ease.runs.config import RunConfig, load_config

PAIRS = ("partition.validation_share=0.3", "data.train=90")


def trial(recall: float, method: str) -> Trial:
    recalls = {f"test/recall@{k}": recall for k in (1, 5, 10)} | {"forget/recall@1": 60.0, "gallery": 20.0}
    cost = {"cost/bytes_up": 1e6, "cost/bytes_down": 2e6, "cost/seconds": 3.0}
    model = "closed form" if method == "exact" else "projectors"
    return Trial(model=model, method=method, trained=recalls | cost, forgotten=recalls | cost)


@pytest.mark.parametrize(
    ("exact", "other", "words"),
    [
        (30.0, 28.0, "2.0 points of test R@1 more than projectors. Train it"),
        (27.2, 28.0, "0.8 points of test R@1 less than projectors. Train it"),
        (20.0, 28.0, "8.0 points of test R@1 less than projectors. If these points matter, train projectors"),
    ],
)
def test_the_advice_follows_from_recall(exact: float, other: float, words: str) -> None:
    assert words in CompareSummary.of("client", trial(exact, "exact"), trial(other, "ease")).advice


def test_the_models_differ_in_their_head_only() -> None:
    config = load_config(None, ("seed=3", "data.train=90", "training.history=client", "model.lora_rank=4"))
    exact = closed_form(config)
    assert exact.model.projector == "closed_form" and exact.training.rounds == 1
    assert (exact.seed, exact.data, exact.partition) == (config.seed, config.data, config.partition)
    assert exact.training.history == "client"
    assert trained_by_fedavg(config) is config
    back = trained_by_fedavg(exact)
    assert back.model.projector == "mlp" and back.training == RunConfig(training={"history": "client"}).training


def test_no_more_pairs_are_used_than_asked_for(tmp_path: Path) -> None:
    assert smaller(load_config(None), 100).data.train == 100
    assert smaller(load_config(None), 5000) == load_config(None)
    pictures(tmp_path / "photos", 40)
    own = load_config(None, ("data.name=folder", f"data.path={tmp_path / 'photos'}"))
    assert smaller(own, 10).data.share == 0.25
    assert smaller(own, 100) == own


@pytest.mark.slow
def test_both_models_are_trained_and_forget_alike(ease, small, tmp_path: Path) -> None:
    found = ease("compare", "--json", "--out", tmp_path / "both", *settings(*small, *PAIRS))
    assert found.code == 0 and found.err == ""
    shown = json.loads(found.out)
    assert [(each["model"], each["method"]) for each in (shown["exact"], shown["trained"])] == [
        ("closed form", "exact"),
        ("projectors and adapters", "ease"),
    ]
    exact, trained = shown["exact"], shown["trained"]
    assert exact["identical"] is True and trained["identical"] is None
    assert shown["gap"] == round(exact["trained"]["test/recall@1"] - trained["trained"]["test/recall@1"], 4)
    assert exact["forgotten"]["cost/bytes_up"] == 0 < trained["forgotten"]["cost/bytes_up"]
    assert all((tmp_path / "both" / name / "run.json").is_file() for name in ("exact", "trained"))
    reported = ease("compare", "--out", tmp_path / "both", *settings(*small, *PAIRS))
    assert reported.code == 0 and shown["advice"] in " ".join(reported.out.split())
    assert "is the file that retraining gives" in reported.out
