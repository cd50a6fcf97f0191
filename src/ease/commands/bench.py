"""What `ease bench` does: run an experiment's grid, with progress, and write its results, tables and figures."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import RenderableType
from rich.text import Text

from ease.config import Config
from ease.console import labelled, rounds_bar, table
from ease.errors import UserError
from ease.events import emit_artefact, emit_metrics, emit_start
from ease.runs.records import read_record, write_record
from ease.runs.workers import default_processes
from ease.show.figures import draw, encode
from ease.show.leaderboard import Standing, as_csv, as_html, cell, leaderboard
from ease.show.paper_tables import paper_latex
from ease.show.tables import (
    FORGET,
    RETAIN,
    Figure,
    Sheet,
    caveats,
    columns_of,
    difference_text,
    figures,
    latex,
    markdown,
    paired,
    reference_of,
    sheets,
)
from ease.storage import write_atomic
from ease.studies.bench import bench, results
from ease.studies.experiment import Experiment, plan
from ease.studies.records import BenchResults

RECALLS = {"F-R@1": "forget", "R-R@1": "retain", "T-R@1": "test"}
"""Columns of the tables on a screen of 80 columns, under shorter names."""
VALUES = {"MIA %": "MIA", "LiRA AUC": "LiRA"}
SHARES = {"up MB": "bytes", "GFLOP": "FLOPs", "client steps": "steps"}
"""Costs shown as shares of retraining's. Seconds depend on the machine and are in the files."""
CAPTION = "R@1 in percent with the gap to retrain; ° inside the retrain band; sum: of the absolute gaps, less is better"
COSTS = (
    "MIA in percent, LiRA as AUC; bytes sent by clients, FLOPs and client steps as shares of retrain's; all columns "
    "are in tables.md"
)


class BenchSummary(BenchResults):
    """`ease bench`: the stored results and the files that were written."""

    folder: Path
    files: tuple[Path, ...]

    def render(self) -> Iterator[RenderableType]:
        for sheet in sheets(self):
            yield from _sheet_tables(sheet)
        yield from _paired_table(self)
        yield from (labelled("caveat", note, "yellow") for note in caveats(self))
        yield f"written to {self.folder}: {', '.join(path.name for path in self.files)}"


def _sheet_tables(sheet: Sheet) -> Iterator[RenderableType]:
    """Recalls, then attacks and cost: each fits 80 columns with whole numbers."""
    columns = {column.title: column for column in columns_of(sheet, (*FORGET, *RETAIN))}
    labels: dict[str, Sequence[str | Text]] = {"": [line.label for line in sheet.lines]}
    recalled = {n: [_with_gap(f) for f in figures(sheet, columns[t])] for t, n in RECALLS.items() if t in columns}
    if "sum of gaps" in columns:
        recalled["sum"] = [_bold(f.value, f) if f else "" for f in figures(sheet, columns["sum of gaps"])]
    yield _table(f"{sheet.name}: recall", labels | recalled, CAPTION)
    cells = {
        n: [_bold(f.value, f) if f else "" for f in figures(sheet, columns[t])]
        for t, n in VALUES.items()
        if t in columns
    }
    cells |= {n: [f.note if f else "" for f in figures(sheet, columns[t])] for t, n in SHARES.items() if t in columns}
    if cells:
        yield _table(f"{sheet.name}: attacks and cost", labels | cells, COSTS)


def _paired_table(results: BenchResults) -> Iterator[RenderableType]:
    """Paired differences to one method, the sum of gaps and operations."""
    found = {name: of for name, of in paired(results).items() if name in ("sum of gaps", "FLOPs %") and of}
    methods = list(dict.fromkeys(each.method for of in found.values() for each in of))
    if not methods:
        return
    shown: dict[str, Sequence[str | Text]] = {"": methods}
    for name, of in found.items():
        cells = {each.method: Text(difference_text(each), "bold" if each.clear else "") for each in of}
        shown[name] = [cells.get(method, "") for method in methods]
    units = max(each.units for of in found.values() for each in of)
    counted = f"{results.seeds} seed{'s' if results.seeds > 1 else ''}"
    caption = (
        f"method minus {reference_of(results)} on the same {units} requests of {counted}; 95 % bootstrap "
        "intervals over seeds and requests; bold: excludes 0"
    )
    yield _table("Paired differences, less is better", shown, caption)


def _table(title: str, shown: Mapping[str, Sequence[str | Text]], caption: str) -> RenderableType:
    return table(title, shown, zip(*shown.values(), strict=True), caption=caption)


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
    found = results(experiment, out)
    write_record(folder / "results.json", found)
    written = write_tables(folder)
    emit_start(folder, f"bench {name}", experiment.model_dump(mode="json"))
    for row in found.rows:
        emit_metrics(
            folder, f"bench {name}", {f"{row.scenario}/{row.seed}/{row.label}/{k}": v for k, v in row.metrics.items()}
        )
    for path in written.files:
        emit_artefact(folder, f"bench {name}", path)
    return written


class LeaderboardSummary(Config):
    """`ease bench --compare`: several experiments side by side, and the files that were written."""

    standings: tuple[Standing, ...]
    files: tuple[Path, ...]

    def render(self) -> Iterator[RenderableType]:
        columns = ("rank", "sum_of_gaps", "forget_gap", "flops_share")
        for request in dict.fromkeys(each.request for each in self.standings):
            here = [each for each in self.standings if each.request == request]
            rows = [
                [f"{each.method} ({each.experiment})", *(cell(each, column) for column in columns)] for each in here
            ]
            yield table(f"{request.capitalize()} request", ["", "rank", "sum", "forget", "FLOPs"], rows)
        yield f"written: {', '.join(map(str, self.files))}"


def compare_results(folders: Sequence[Path], out: Path) -> LeaderboardSummary:
    """A leaderboard of the results in several folders, as CSV and HTML in `out`."""
    names = [folder.name for folder in folders]
    labels = [name if names.count(name) == 1 else str(folder) for name, folder in zip(names, folders, strict=True)]
    found = leaderboard([(label, read_results(folder)) for label, folder in zip(labels, folders, strict=True)])
    files = (out / "leaderboard.csv", out / "leaderboard.html")
    write_atomic(files[0], as_csv(found).encode())
    write_atomic(files[1], as_html(found).encode())
    return LeaderboardSummary(standings=found, files=files)


def read_results(folder: Path) -> BenchResults:
    """The results in a folder that `ease bench` wrote."""
    path = folder / "results.json"
    if not path.is_file():
        raise UserError(f"{path}: no such file; name a folder that `ease bench` wrote, such as results/main")
    return read_record(BenchResults, path)


def write_tables(folder: Path) -> BenchSummary:
    """Write tables and figures from `results.json`. The same results give the same bytes."""
    path, found = folder / "results.json", read_results(folder)
    written = {"tables.md": markdown(found).encode()}
    if found.rows:
        written |= {"tables.tex": latex(found).encode(), "paper.tex": paper_latex(found).encode()}
    for name, figure in draw(found).items():
        written |= {f"{name}.{form}": encode(figure, form) for form in ("svg", "pdf")}
    for name, content in written.items():
        write_atomic(folder / name, content)
    return BenchSummary(**dict(found), folder=folder, files=(path, *(folder / name for name in written)))
