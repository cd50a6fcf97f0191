"""What `ease audit` does: make the shadows, take every measure, and show one page."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.panel import Panel
from rich.text import Text

from ease.commands.forget import answer
from ease.console import labelled, megabytes, status, table, ticks_bar
from ease.methods.retrain import Retrain
from ease.runs.answers import find_answer
from ease.runs.attackers import Subjects
from ease.runs.audit import Audit, AuditConfig
from ease.runs.run import Run
from ease.runs.world import World

LABELS = {
    "mia/share": "called member",
    "lira/auc": "LiRA, AUC",
    "u-lira/auc": "U-LiRA, AUC",
    "rmia/auc": "RMIA, AUC",
    "lira/tpr": "LiRA, members found",
    "u-lira/tpr": "U-LiRA, members found",
    "ks/distance": "KS distance to retrain",
    "rho": "alignment rho",
    "relearn/forget/share": "back by forget pairs",
    "relearn/retain/share": "back by retained",
}


@dataclass(frozen=True)
class AuditSummary:
    """A verdict as one page."""

    verdict: dict[str, Any]
    name: str
    folder: Path

    def as_json(self) -> dict[str, Any]:
        return {**self.verdict, "id": self.name, "folder": str(self.folder)}

    def render(self) -> Iterator[RenderableType]:
        found = self.verdict
        gallery = found["gallery"]
        shown = [entry for entry in found["measures"] if entry["inside"] is False or "recall@5" not in entry["name"]]
        noted = [entry for entry in shown if entry["note"] and "recall" not in entry["name"]]
        good = found["verdict"].startswith(found["words"])
        yield Panel(
            Text(found["verdict"][0].upper() + found["verdict"][1:]),
            title=Text(f"Audit of {self.name} ({found['method']['method']})"),
            title_align="left",
            border_style="green" if good else "yellow",
        )
        yield table(
            "Each measure beside retraining",
            ["", "before", "answer", "retrain", "band", ""],
            [_row(measure) for measure in shown],
            caption="band: where one more retrained model would fall (95 %)",
        )
        chance = ", ".join(f"R@{key.removeprefix('recall@')} {level:.1f}" for key, level in gallery["chance"].items())
        yield labelled("recall", f"in percent, both ways, in galleries of {gallery['pairs']} pairs; by chance {chance}")
        yield from (labelled(_label(measure), measure["note"]) for measure in noted)
        yield table(
            "Cost", ["", "answer", "retrain", "ratio"], [_cost(*entry) for entry in found["costs"]["totals"].items()]
        )
        matched = found["costs"]["compute_matched_retrain"]
        yield table(
            "Retraining stopped early, R@1",
            ["share of rounds", "forget", "near", "retain", "test"],
            [
                [share, *(f"{row[part]:.1f}" for part in ("forget", "near", "retain", "test"))]
                for share, row in matched.items()
            ],
        )
        yield from (labelled("note", warning, "yellow") for warning in found["warnings"])
        yield from (labelled("not tested", gap) for gap in found["not_tested"])
        yield f"{found['words'].capitalize()} is the most such measures can show. Kept in {self.folder / 'audit.json'}"


def _label(measure: dict[str, Any]) -> str:
    return LABELS.get(measure["name"]) or measure["name"].replace("/recall@", " R@")


def _row(measure: dict[str, Any]) -> list[str | Text]:
    digits = 1 if "recall" in measure["name"] else 3
    before, answer, retrain, low, high = (
        "" if measure[key] is None else f"{measure[key]:.{digits}f}"
        for key in ("before", "value", "retrain", "low", "high")
    )
    mark = {True: ("inside", "green"), False: ("outside", "red"), None: ("no band", "dim")}[measure["inside"]]
    return [_label(measure), before, answer, retrain, f"{low}..{high}" if high else "", Text(*mark)]


def _cost(name: str, entry: dict[str, float]) -> list[str]:
    if "bytes" in name:
        shown = [megabytes(entry[side]) for side in ("answer", "retrain")]
    elif name == "flops":
        shown = [f"{entry[side] / 1e12:.2f} TFLOP" for side in ("answer", "retrain")]
    elif "seconds" in name:
        shown = [f"{entry[side]:.1f} s" for side in ("answer", "retrain")]
    else:
        shown = [f"{entry[side]:,.0f}" for side in ("answer", "retrain")]
    return [name.replace("_", " "), *shown, f"{entry['ratio']:.0%}"]


def audit_run(folder: Path, name: str, config: AuditConfig, retrain: bool, quiet: bool) -> AuditSummary:
    """Audit a finished answer of a run."""
    run = Run.load(folder)
    _, request, _ = find_answer(run, name)
    with status("preparing data and backbone", quiet):
        world = World.open(run.config)
    Subjects.of(world, request, config.pool)  # refuses too large a pool before the long work begins
    if retrain:
        answer(run, world, request, Retrain(), quiet)
    audit = Audit.of(run, world, name, config)
    with run.locked():
        total = audit.work()
        with ticks_bar("shadow models", total, quiet or not total) as advance:
            for ticks in audit.shadows():
                advance(ticks)
        with status("attacks, distances and relearning", quiet):
            verdict = audit.verdict()
    return AuditSummary(verdict, name, audit.stored.folder)
