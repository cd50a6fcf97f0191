"""What `ease audit` does: make the shadows, take every measure, and show one page."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.panel import Panel
from rich.text import Text

from ease.audit.config import AuditConfig
from ease.audit.verdict import EVIDENCE, Measure
from ease.commands.forget import answer
from ease.commands.train import tell_threads
from ease.console import labelled, megabytes, status, table, ticks_bar
from ease.methods.retrain import Retrain
from ease.runs.answers import find_answer, open_world
from ease.runs.attackers import Subjects
from ease.runs.audit import Audit
from ease.runs.records import AuditRecord, Price
from ease.runs.run import Run

PARTS = ("forget", "near", "retain", "test")


@dataclass(frozen=True)
class AuditSummary:
    """An audit as one page."""

    record: AuditRecord
    name: str
    folder: Path

    def as_json(self) -> dict[str, Any]:
        return {**self.record.model_dump(mode="json"), "id": self.name, "folder": str(self.folder)}

    def render(self) -> Iterator[RenderableType]:
        found, verdict = self.record, self.record.verdict
        shown = [each for each in verdict.measures if each.inside is False or "recall@5" not in each.name]
        yield Panel(
            Text(verdict.words),
            title=Text(f"Audit of {self.name} ({found.method_name})"),
            title_align="left",
            border_style="green" if verdict.passed else "yellow",
        )
        yield table(
            "Each measure beside retraining",
            ["", "before", "answer", "retrain", "band", ""],
            [_row(measure) for measure in shown],
            caption="band: where one more retrained model would fall (95 %)",
        )
        chance = ", ".join(
            f"R@{key.removeprefix('recall@')} {level:.1f}" for key, level in found.gallery.chance.items()
        )
        yield labelled(
            "recall", f"in percent, both ways, in galleries of {found.gallery.pairs} pairs; by chance {chance}"
        )
        yield from (labelled(each.title, each.note) for each in shown if each.note and "recall" not in each.name)
        costs = [_cost(name, price) for name, price in found.costs.totals.items()]
        yield table("Cost", ["", "answer", "retrain", "ratio"], costs)
        yield table(
            "Retraining stopped early, R@1",
            ["share of rounds", *PARTS],
            [
                [share, *(f"{row[part]:.1f}" for part in PARTS)]
                for share, row in found.costs.compute_matched_retrain.items()
            ],
        )
        yield from (labelled("note", warning, "yellow") for warning in found.warnings)
        yield from (labelled("not tested", gap) for gap in found.not_tested)
        yield f"{EVIDENCE.capitalize()} is the most such measures can show. Kept in {self.folder / 'audit.json'}"


def _row(measure: Measure) -> list[str | Text]:
    numbers = [_number(value, measure.digits) for value in (measure.before, measure.value, measure.retrain)]
    band = measure.band
    ends = f"{_number(band.low, measure.digits)}..{_number(band.high, measure.digits)}" if band else ""
    mark = {True: ("inside", "green"), False: ("outside", "red"), None: ("no band", "dim")}[measure.inside]
    return [measure.title, *numbers, ends, Text(*mark)]


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _cost(name: str, price: Price) -> list[str]:
    sides = (price.answer, price.retrain)
    if "bytes" in name:
        shown = [megabytes(side) for side in sides]
    elif name == "flops":
        shown = [f"{side / 1e12:.2f} TFLOP" for side in sides]
    elif "seconds" in name:
        shown = [f"{side:.1f} s" for side in sides]
    else:
        shown = [f"{side:,.0f}" for side in sides]
    return [name.replace("_", " "), *shown, f"{price.ratio:.0%}"]


def audit_run(folder: Path, name: str, config: AuditConfig, retrain: bool, quiet: bool) -> AuditSummary:
    """Audit a finished answer of a run."""
    run = Run.load(folder)
    _, request, _ = find_answer(run, name)
    tell_threads(run)
    with status("preparing data and backbone", quiet):
        world = open_world(run, request)
    Subjects.of(world, request, config.pool)  # refuses too large a pool before the long work begins
    if retrain:
        answer(run, world, request, Retrain(), quiet)
    audit = Audit.of(run, world, name, config)
    with run.locked():
        total = audit.ticks_left()
        with ticks_bar("shadow models", total, quiet or not total) as advance:
            for ticks in audit.shadows():
                advance(ticks)
        with status("attacks, distances and relearning", quiet):
            record = audit.judge()
    return AuditSummary(record, name, audit.stored.folder)
