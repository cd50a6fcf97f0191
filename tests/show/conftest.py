"""A small run as the report reads it: every part is there, and the numbers can be followed by hand."""

from collections.abc import Callable
from typing import Any

import pytest

from ease.audit.records import AuditRecord
from ease.config import validate
from ease.runs.records import AnswerRecord
from ease.show.answer import Pair, ReportedAnswer
from ease.show.page import Contents
from ease.studies.records import BenchResults

PIXEL = "data:image/gif;base64,R0lGODlhAQABAIAAAAAAAP///ywAAAAAAQABAAACAUwAOw=="


def make_record(method: str = "ease_paper", delta: float = 0.3, blocks: bool = True) -> dict[str, Any]:
    """An answer of three rounds; two blocks with two and three directions."""
    counts = {"forget_directions": 3, "retain_directions": 3, "excised": 2, "forget_energy": 0.7, "retain_damage": 0.2}
    spectrum = [
        {"block": "image.projector.0", "cosines": [0.6, 0.2], "energies": [0.3, 0.6], **counts},
        {"block": "text.projector.0", "cosines": [0.9, 0.5, 0.1], "energies": [0.2, 0.3, 0.5], **counts},
    ]
    recalls = [{"forget/recall@1": f, "retain/recall@1": 88.0, "test/recall@1": 27.0} for f in (18.0, 21.0, 23.0)]
    rounds: list[dict[str, Any]] = [
        {"round": n, "phase": "excision", "loss": None, "metrics": found} for n, found in enumerate(recalls)
    ]
    if blocks:
        rounds[0]["spectrum"] = {"reference": "trained", "delta": delta, "blocks": spectrum}
    costs = {"cost/bytes_down": 10.0, "cost/bytes_up": 10.0, "cost/seconds": 4.0}
    if method == "retrain":
        costs = {name: 4 * value for name, value in costs.items()}
    return {
        "format": 2,
        "request": {"scope": "client", "clients": [8]},
        "method": {"method": method},
        "trained_sha256": "0",
        "seed": 0,
        "resumed": False,
        "rounds": rounds,
        "metrics": {"forget/recall@1": 23.0, "forget/recall@10": 66.0, "retain/recall@1": 88.0, "test/recall@1": 27.0}
        | costs,
    }


def make_measure(
    name: str, value: float, retrain: float, band: tuple[float | None, float] | None, note: str = "", before: Any = None
) -> dict[str, Any]:
    ends = None if band is None else {"low": band[0], "high": band[1], "models": 4}
    models = {"retrained": [retrain] * 10, "kept": []}
    return {"name": name, "value": value, "retrain": retrain, "before": before, "band": ends, "note": note, **models}


def make_joint(p_value: float, kept: float) -> dict[str, Any]:
    """A joint test that would catch a tenth of the effect."""
    return {
        "p_value": p_value,
        "level": 0.05,
        "retrained": 10,
        "measures": 3,
        "trace": {"value": kept, "low": kept - 0.05, "high": kept + 0.05},
        "power": [[0.1, 0.95]],
        "smallest_caught": 0.1,
    }


def make_audit(
    measures: list[dict[str, Any]] | None = None, joint: dict[str, Any] | None = None, **changes: Any
) -> dict[str, Any]:
    """An audit whose measures are inside the band but for one, and which found a fifth of the effect."""
    measures = measures or [
        make_measure("forget/recall@1", 23.0, 24.0, (21.5, 28.0), "[18.8, 26.8]", before=86.7),
        make_measure("rho", 0.2, 0.17, (None, 0.3), "retrain: its seeds against each other"),
        make_measure("lira/auc", 0.57, 0.5, (0.47, 0.52), "lira-online/log_odds", before=1.0),
    ]
    states = ("trained", "unlearned", "retrain")
    roc = {"fpr": [0.0, 0.01, 0.1, 1.0], "tpr": [0.0, 0.02, 0.2, 1.0]}
    attack = {"auc": {"value": 0.6, "low": 0.5, "high": 0.7}, "leakage": 0.6, "tpr": None, "unscored": 0, "roc": roc}
    curve = {"steps": [0, 2, 8], "levels": [0.0, 0.1, 0.2], "lost": 3.0}
    found = {
        "format": 2,
        "request": {"scope": "client", "clients": [8]},
        "method": {"method": "ease"},
        "model_sha256": "1",
        "retrain_sha256": "2",
        "settings": {},
        "verdict": {"measures": measures, "joint": make_joint(0.001, 0.2) if joint is None else joint},
        "gallery": {"pairs": 50, "chance": {"recall@1": 2.0}},
        "attack": "rmia",
        "attacks": {"rmia": dict.fromkeys(states, attack)},
        "similarities": {state: [0.1, 0.2, 0.25, 0.5] for state in states},
        "relearning": {"forget": {"unlearned": curve, "retrain": curve, "retrain-1": curve}},
        "costs": {
            "totals": {"seconds": {"answer": 4.0, "retrain": 16.0, "ratio": 0.25}},
            "phases": {},
            "compute_matched_retrain": {"25%": {"forget": 20.0, "near": 60.0, "retain": 65.0, "test": 26.0}},
        },
        "warnings": ["193 members and 239 non-members"],
        "not_tested": ["other training seeds"],
    }
    return found | changes


def shown(name: str, record: dict[str, Any], audit: dict[str, Any] | None = None, **changes: Any) -> ReportedAnswer:
    """An answer from the tables of its files."""
    read = None if audit is None else validate(AuditRecord, audit, "audit.json")
    return ReportedAnswer(name, validate(AnswerRecord, record, "record.json"), read, **changes)


@pytest.fixture
def measure() -> Callable[..., dict[str, Any]]:
    return make_measure


@pytest.fixture
def joint() -> Callable[..., dict[str, Any]]:
    return make_joint


@pytest.fixture
def alone() -> Callable[..., Contents]:
    """A page of one answer, from the tables of its record and audit."""

    def make(record: dict[str, Any], audit: dict[str, Any] | None = None, **changes: Any) -> Contents:
        return Contents("first", "runs/first", [shown("client-8/ease", record, audit, **changes)])

    return make


@pytest.fixture
def record() -> Callable[..., dict[str, Any]]:
    return make_record


@pytest.fixture
def audit() -> Callable[..., dict[str, Any]]:
    return make_audit


@pytest.fixture
def contents() -> Callable[..., Contents]:
    """The whole page's contents; `caption` is that of a forgotten pair, `delta` the threshold EASE used."""

    def make(caption: str = "A red ball on the beach.", delta: float = 0.5) -> Contents:
        ranks = {"trained": 1.0, "unlearned": 57.0, "retrain": 43.5}
        pairs = [Pair(PIXEL, caption, ranks, False), Pair(PIXEL, "A cup.", ranks, True)]
        answers = [
            shown("client-8/ease", make_record(delta=delta), make_audit(), pairs=pairs, gallery=386),
            shown("client-8/finetune", make_record("finetune", blocks=False)),
            shown("client-8/retrain", make_record("retrain", blocks=False)),
        ]
        return Contents("first", "runs/first", answers, bench_results(make_results()))

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
    band = {"low": 18.0, "high": 25.0, "models": 2}
    bands = [{"scenario": "client", "seed": 0, "metrics": {"forget/recall@1": band}}]
    return {"format": 2, "header": make_header(), "bands": bands, "rows": rows}


def make_header(kind: str = "table", **experiment: Any) -> dict[str, Any]:
    asked: dict[str, Any] = {"title": "A & B", "kind": kind, "run": {}, "scenarios": ["client"], "seeds": [0, 1]}
    asked |= {"methods": [], "vary": {}, "tuned": None, "band_retrains": 1, "shadows": 0} | experiment
    facts = {"date": "2026-01-02T03:04:05+00:00", "commit": None, "versions": {}, "machine": {}}
    return {"experiment": asked, "command": "ease bench x", **facts}


def bench_results(table: dict[str, Any]) -> BenchResults:
    return validate(BenchResults, table, "results.json")


@pytest.fixture
def results() -> dict[str, Any]:
    """As the file holds them, to be changed and then read by `bench`."""
    return make_results()


@pytest.fixture
def header() -> Callable[..., dict[str, Any]]:
    return make_header


@pytest.fixture
def bench() -> Callable[[dict[str, Any]], BenchResults]:
    return bench_results
