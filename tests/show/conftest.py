"""A small run as the report reads it: every part is there, and the numbers can be followed by hand."""

from collections.abc import Callable
from typing import Any

import pytest

from ease.show.answer import Answer, Pair
from ease.show.page import Contents

PIXEL = "data:image/gif;base64,R0lGODlhAQABAIAAAAAAAP///ywAAAAAAQABAAACAUwAOw=="


def make_record(method: str = "ease", delta: float | str = "auto", blocks: bool = True) -> dict[str, Any]:
    """An answer of three rounds; two blocks with two and three directions."""
    spectrum = [
        {"block": "image.projector.0", "cosines": [0.6, 0.2], "energies": [0.3, 0.6], "forget_energy": 0.7},
        {"block": "text.projector.0", "cosines": [0.9, 0.5, 0.1], "energies": [0.2, 0.3, 0.5], "forget_energy": 0.7},
    ]
    recalls = [{"forget/recall@1": f, "retain/recall@1": 88.0, "test/recall@1": 27.0} for f in (18.0, 21.0, 23.0)]
    rounds = [{"round": n, "phase": "excision", "metrics": found, "notes": {}} for n, found in enumerate(recalls)]
    if blocks:
        rounds[0]["notes"] = {"delta": delta, "depth": 0.9, "blocks": spectrum}
    costs = {"cost/bytes_down": 10.0, "cost/bytes_up": 10.0, "cost/seconds": 4.0}
    if method == "retrain":
        costs = {name: 4 * value for name, value in costs.items()}
    return {
        "request": {"scope": "client", "clients": [8]},
        "method": {"method": method},
        "scenario": "client",
        "seed": 0,
        "rounds": rounds,
        "metrics": {"forget/recall@1": 23.0, "forget/recall@10": 66.0, "retain/recall@1": 88.0, "test/recall@1": 27.0}
        | costs,
    }


def make_audit(**changes: Any) -> dict[str, Any]:
    """An audit whose measures are inside the band but for one."""

    def measure(
        name: str, value: float, retrain: float, low: float | None, high: float, note: str, before: float | None = None
    ) -> dict[str, Any]:
        inside = (low is None or low <= value) and value <= high
        fields = {"name": name, "value": value, "retrain": retrain, "low": low, "high": high, "note": note}
        return fields | {"inside": inside, "before": before}

    measures = [
        measure("forget/recall@1", 23.0, 24.0, 21.5, 28.0, "[18.8, 26.8]", before=86.7),
        measure("rho", 0.2, 0.17, None, 0.3, "retrain: its seeds against each other"),
        measure("lira/auc", 0.57, 0.5, 0.47, 0.52, "lira-online/log_odds", before=1.0),
    ]
    roc = {"fpr": [0.0, 0.01, 0.1, 1.0], "tpr": [0.0, 0.02, 0.2, 1.0]}
    curve = {"steps": [0, 2, 8], "levels": [0.0, 0.1, 0.2], "lost": 3.0, "steps_back": None}
    found = {
        "verdict": "not enough evidence of approximate erasure: outside the retrain band on lira/auc",
        "words": "evidence of approximate erasure",
        "outside": ["lira/auc"],
        "measures": measures,
        "attack": "rmia",
        "attacks": {"rmia": {m: {"auc": {"value": 0.6}, "roc": roc} for m in ("trained", "unlearned", "retrain")}},
        "similarities": {m: [0.1, 0.2, 0.25, 0.5] for m in ("trained", "unlearned", "retrain")},
        "relearning": {"forget": {"unlearned": curve, "retrain": curve, "retrain-1": curve}},
        "costs": {
            "totals": {"seconds": {"answer": 4.0, "retrain": 16.0, "ratio": 0.25}},
            "compute_matched_retrain": {"25%": {"forget": 20.0, "near": 60.0, "retain": 65.0, "test": 26.0}},
        },
        "warnings": ["193 members and 239 non-members"],
        "not_tested": ["other training seeds"],
    }
    return found | changes


@pytest.fixture
def record() -> Callable[..., dict[str, Any]]:
    return make_record


@pytest.fixture
def audit() -> Callable[..., dict[str, Any]]:
    return make_audit


@pytest.fixture
def contents() -> Callable[..., Contents]:
    """The whole page's contents; `caption` is that of a forgotten pair, `delta` the threshold EASE used."""

    def make(caption: str = "A red ball on the beach.", delta: float | str = "auto") -> Contents:
        ranks = {"trained": 1.0, "unlearned": 57.0, "retrain": 43.5}
        pairs = [Pair(PIXEL, caption, ranks, False), Pair(PIXEL, "A cup.", ranks, True)]
        answers = [
            Answer("client-8/ease", "r/ease", make_record(delta=delta), make_audit(), pairs=pairs, gallery=386),
            Answer("client-8/finetune", "r/finetune", make_record("finetune", blocks=False)),
            Answer("client-8/retrain", "r/retrain", make_record("retrain", blocks=False)),
        ]
        return Contents("first", "runs/first", answers, make_results())

    return make


# Results as `ease bench` writes them, small enough to check by hand.


def row(role: str, label: str, seed: int, forget: float, retain: float, test: float, **extra: Any) -> dict[str, Any]:
    recalls = {"forget": forget, "retain": retain, "test": test}
    metrics = {f"{part}/recall@{k}": float(value) for part, value in recalls.items() for k in (1, 5, 10)}
    metrics |= {"rho": 0.5, "gallery": 50.0}
    if role != "trained":
        metrics |= {"cost/bytes_up": 2e6, "cost/bytes_down": 4e6, "cost/seconds": 3.0}
        metrics |= {"ratio/bytes_up": 0.2, "ratio/bytes_down": 0.4, "ratio/seconds": 0.3}
    fields = {"scenario": "client", "seed": seed, "role": role, "method": label.lower(), "label": label}
    return {**fields, "settings": {}, "tuned": False, "metrics": metrics, **extra}


def make_results() -> dict[str, Any]:
    """Two seeds. Near: gaps to retrain +4, -2, +1 and -4, -2, +1. Far: +30, 0, 0 twice."""
    rows = [row("trained", "Trained", seed, 80, 90, 40) for seed in (0, 1)]
    rows += [row("method", "Near", 0, 24, 88, 31), row("method", "Near", 1, 26, 88, 31)]
    rows += [row("method", "Far", 0, 50, 90, 30, tuned=True), row("method", "Far", 1, 60, 90, 30, tuned=True)]
    rows += [row("band", "Retrain, order 1", 0, 22, 90, 30)]
    rows += [row("retrain", "Retrain", 0, 20, 90, 30), row("retrain", "Retrain", 1, 30, 90, 30)]
    header = {"title": "A & B", "kind": "table", "command": "ease bench x", "experiment": {"vary": {}, "seeds": [0, 1]}}
    bands = [{"scenario": "client", "seed": 0, "models": 2, "metrics": {"forget/recall@1": [18.0, 25.0]}}]
    return {"header": header, "bands": bands, "rows": rows}


@pytest.fixture
def results() -> dict[str, Any]:
    return make_results()
