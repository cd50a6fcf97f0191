"""What `ease bench` does: run an experiment's grid, with progress, and write its results, tables and figures."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from ease.console import rounds_bar, table
from ease.errors import UserError
from ease.runs.records import read_record, write_record
from ease.runs.workers import default_processes
from ease.show.figures import draw, encode
from ease.show.paper_tables import paper_latex
from ease.show.tables import FORGET, RETAIN, Figure, columns_of, figures, latex, markdown, sheets
from ease.storage import write_atomic
from ease.studies.bench import bench, results
from ease.studies.experiment import Experiment, plan
from ease.studies.records import BenchResults

SHOWN = {"F-R@1": "forget", "R-R@1": "retain", "T-R@1": "test"}
"""Columns of the tables that fit a narrow screen, under shorter names; of cost, the shares alone."""
VALUES = {"MIA %": "MIA", "LiRA AUC": "LiRA"}
SHARES = {"up MB": "bytes", "time s": "time"}
CAPTION = (
    "R@1 in percent with the gap to retrain, ° inside the retrain band; bytes sent by clients and time as shares of "
    "retrain's; sum: of the absolute gaps, less is better. The files have all."
)


@dataclass(frozen=True)
class BenchSummary:
    """A finished experiment and the files it left."""

    folder: Path
    results: BenchResults
    files: tuple[Path, ...]

    def as_json(self) -> dict[str, Any]:
        return {**self.results.model_dump(mode="json"), "files": [str(path) for path in self.files]}

    def render(self) -> Iterator[RenderableType]:
        for sheet in sheets(self.results):
            columns = {column.title: column for column in columns_of(sheet, (*FORGET, *RETAIN))}
            shown: dict[str, Sequence[str | Text]] = {"": [line.label for line in sheet.lines]}
            for title, name in SHOWN.items():
                if title in columns:
                    shown[name] = [_with_gap(figure) for figure in figures(sheet, columns[title])]
            for title, name in VALUES.items():
                if title in columns:
                    shown[name] = [_bold(f.value, f) for f in figures(sheet, columns[title]) if f]
            for title, name in SHARES.items():
                shown[name] = [figure.note if figure else "" for figure in figures(sheet, columns[title])]
            shown["sum"] = [_bold(f.value, f) for f in figures(sheet, columns["sum of gaps"]) if f]
            yield table(sheet.name, shown, zip(*shown.values(), strict=True), caption=CAPTION)
        yield f"written to {self.folder}: {', '.join(path.name for path in self.files)}"


def _with_gap(figure: Figure | None) -> str | Text:
    if figure is None:
        return ""
    return _bold(f"{figure.value} {figure.note}{'°' if figure.inside else ''}".strip(), figure)


def _bold(text: str, figure: Figure) -> Text:
    return Text(text, "bold" if figure.best else "")


def bench_run(experiment: Experiment, name: str, out: Path, processes: int | None, quiet: bool) -> BenchSummary:
    """Run what is missing of an experiment, then write everything anew."""
    missing = sum(job.notes for job in plan(experiment, out))
    with rounds_bar(name, missing, quiet=quiet, first="training") as bar:
        for note in bench(experiment, out, processes or default_processes(experiment.run.device)):
            bar.step(done=note)
    folder = out / name
    write_record(folder / "results.json", results(experiment, out))
    return write_tables(folder)


def write_tables(folder: Path) -> BenchSummary:
    """Tables and figures from `results.json` alone: the same results give the same bytes."""
    path = folder / "results.json"
    if not path.is_file():
        raise UserError(f"{path}: no such file; name a folder that `ease bench` wrote, such as results/main")
    found = read_record(BenchResults, path)
    written = {"tables.md": markdown(found).encode()}
    if found.rows:
        written |= {"tables.tex": latex(found).encode(), "paper.tex": paper_latex(found).encode()}
    for name, figure in draw(found).items():
        written |= {f"{name}.{form}": encode(figure, form) for form in ("svg", "pdf")}
    for name, content in written.items():
        write_atomic(folder / name, content)
    return BenchSummary(folder, found, (path, *(folder / name for name in written)))
