"""Results as `ease bench` writes them, small enough to check by hand."""

from typing import Any

import pytest


def row(role: str, label: str, seed: int, forget: float, retain: float, test: float, **extra: Any) -> dict[str, Any]:
    recalls = {"forget": forget, "retain": retain, "test": test}
    metrics = {f"{part}/recall@{k}": float(value) for part, value in recalls.items() for k in (1, 5, 10)}
    metrics |= {"rho": 0.5, "gallery": 50.0}
    if role != "trained":
        metrics |= {"cost/bytes_up": 2e6, "cost/bytes_down": 4e6, "cost/seconds": 3.0}
        metrics |= {"ratio/bytes_up": 0.2, "ratio/bytes_down": 0.4, "ratio/seconds": 0.3}
    fields = {"scenario": "client", "seed": seed, "role": role, "method": label.lower(), "label": label}
    return {**fields, "settings": {}, "tuned": False, "metrics": metrics, **extra}


@pytest.fixture
def results() -> dict[str, Any]:
    """Two seeds. Near: gaps to retrain +4, -2, +1 and -4, -2, +1. Far: +30, 0, 0 twice."""
    rows = [row("trained", "Trained", seed, 80, 90, 40) for seed in (0, 1)]
    rows += [row("method", "Near", 0, 24, 88, 31), row("method", "Near", 1, 26, 88, 31)]
    rows += [row("method", "Far", 0, 50, 90, 30, tuned=True), row("method", "Far", 1, 60, 90, 30, tuned=True)]
    rows += [row("band", "Retrain, order 1", 0, 22, 90, 30)]
    rows += [row("retrain", "Retrain", 0, 20, 90, 30), row("retrain", "Retrain", 1, 30, 90, 30)]
    header = {"title": "A & B", "kind": "table", "command": "ease bench x", "experiment": {"vary": {}, "seeds": [0, 1]}}
    bands = [{"scenario": "client", "seed": 0, "models": 2, "metrics": {"forget/recall@1": [18.0, 25.0]}}]
    return {"header": header, "bands": bands, "rows": rows}
