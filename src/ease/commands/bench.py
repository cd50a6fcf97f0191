"""What `ease bench` does: run an experiment's grid, with progress, and write its results, tables and figures."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from ease.bench import Experiment, bench, plan, results
from ease.console import rounds_bar, table
from ease.errors import UserError
from ease.report.figures import draw, encode
from ease.report.tables import FORGET, RETAIN, columns_of, figures, latex, markdown, sheets, write_cell
from ease.storage import read_json, write_atomic, write_json
from ease.workers import default_processes

SHOWN = [c for c in (*FORGET, *RETAIN) if not c.title.endswith(("@5", "@10")) and c.title != "down MB"]
"""What fits a narrow screen; the files have all."""


@dataclass(frozen=True)
class BenchSummary:
    """A finished experiment and the files it left."""

    folder: Path
    results: dict[str, Any]
    files: tuple[Path, ...]

    def as_json(self) -> dict[str, Any]:
        return {**self.results, "files": [str(path) for path in self.files]}

    def render(self) -> Iterator[RenderableType]:
        for sheet in sheets(self.results):
            columns = columns_of(sheet, SHOWN)
            cells = [[write_cell(figure) for figure in figures(sheet, column)] for column in columns]
            rows = [[line.label, *(column[n] for column in cells)] for n, line in enumerate(sheet.lines)]
            yield table(
                f"{sheet.name}: recall in percent, in brackets the gap to retrain; for cost, the share of retrain's",
                ["", *(column.title for column in columns)],
                rows,
            )
        yield f"written to {self.folder}: {', '.join(path.name for path in self.files)}"


def bench_run(experiment: Experiment, name: str, out: Path, processes: int | None, quiet: bool) -> BenchSummary:
    """Run what is missing of an experiment, then write everything anew."""
    missing = sum(job.notes for job in plan(experiment, out))
    processes = processes or (default_processes() if experiment.run.device == "cpu" else 1)
    with rounds_bar(name, missing, quiet=quiet) as bar:
        for note in bench(experiment, out, processes):
            bar.step(done=note)
    folder = out / name
    write_json(folder / "results.json", results(experiment, out))
    return write_tables(folder)


def write_tables(folder: Path) -> BenchSummary:
    """Tables and figures from `results.json` alone: the same results give the same bytes."""
    path = folder / "results.json"
    if not path.is_file():
        raise UserError(f"{path}: no such file; name a folder that `ease bench` wrote, such as results/main")
    found = read_json(path)
    if not isinstance(found, dict) or not {"header", "rows", "bands"} <= found.keys():
        raise UserError(f"{path}: not the results of an experiment; run `ease bench` again")
    written = {"tables.md": markdown(found).encode()}
    if found["rows"]:
        written["tables.tex"] = latex(found).encode()
    for name, figure in draw(found).items():
        written |= {f"{name}.{form}": encode(figure, form) for form in ("svg", "pdf")}
    for name, content in written.items():
        write_atomic(folder / name, content)
    return BenchSummary(folder, found, (path, *(folder / name for name in written)))
