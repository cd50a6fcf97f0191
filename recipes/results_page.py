"""Write the results page, its tables and its figures from finished experiments.

    PYTHONPATH=src python recipes/results_page.py --results results --out docs

Each folder holds NAME/results.json as `ease bench` leaves it. The prose is in results_page.md beside this file, the
paper's figures are in results_page_paper.toml. Prose names no number of its own but asks for it, as in
`{{EXPERIMENT: VIEW arguments}}`, so that the page cannot disagree with what was measured. A section that asks for an
experiment that is not there is left out.
"""

import argparse
import re
import statistics
import sys
import textwrap
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from ease.errors import UserError
from ease.runs.records import read_record
from ease.show.figures import COLOURS, PANEL_INCHES, STYLE, draw, encode
from ease.show.tables import RANKED, ModelRow, Sheet, markdown, mean_similarity, sheets
from ease.storage import write_atomic
from ease.studies.records import BenchExperiment, BenchHeader, BenchResults, BenchRow

HERE = Path(__file__).parent
PLACE = re.compile(r"\{\{([\w+-]+): ([\w-]+)(?: ([^}]*))?\}\}")
PAPER_COLUMNS = (
    *(f"forget/recall@{k}" for k in (1, 5, 10)),
    "mia",
    *(f"retain/recall@{k}" for k in (1, 5, 10)),
)
PAPERS_EASE = "EASE (paper, repaired, early probe)"
"""The row that runs the algorithm which the paper prints as EASE."""
GAPS = RANKED[:2]
"""What a side-by-side table tells of each model."""
MANY_POINTS = 200
"""Of one line of a figure: more are stored as a picture."""
WIDTH = 128
"""Of a line of prose."""
FEW_BYTES = 1 / 3
"""Share of retraining's bytes up to which a method counts as cheap."""


class Missing(LookupError):
    """An experiment that a section asks for was not given."""


@dataclass(frozen=True)
class Finished:
    """An experiment's results under the name of its folder."""

    name: str
    results: BenchResults

    @property
    def header(self) -> BenchHeader:
        return self.results.header

    def sheet(self, scenario: str) -> Sheet | None:
        return next((sheet for sheet in sheets(self.results) if sheet.scenario == scenario), None)

    @property
    def command(self) -> str:
        """As it was typed, but for folders that exist on that machine alone."""
        return re.sub(r"(?<=[\s=\"'])/\S*/", "", self.header.command)


def collect(folders: Sequence[Path]) -> dict[str, Finished]:
    """Every experiment below some folders; a folder may also be an experiment itself."""
    found: dict[str, Finished] = {}
    places = [place for folder in folders for place in (folder, *sorted(folder.glob("*")))]
    for path in (place / "results.json" for place in places if (place / "results.json").is_file()):
        name = path.resolve().parent.name
        if name in found:
            raise UserError(f"{path}: a second experiment called {name}; name each once")
        found[name] = Finished(name, read_record(BenchResults, path))
    if not found:
        raise UserError(f"{', '.join(map(str, folders))}: no NAME/results.json; run `ease bench` first")
    return found


def paper(path: Path = HERE / "results_page_paper.toml") -> tuple[dict[str, Finished], dict[str, Any]]:
    """The paper's tables in the shape of measured ones, so that one view shows both; and its settings and facts."""
    tables = tomllib.loads(path.read_text())
    rest = {name: tables.pop(name) for name in ("settings", "facts")}
    return {name: Finished(name, _as_results(name, table)) for name, table in tables.items()}, rest


def _as_results(name: str, table: Mapping[str, Mapping[str, Sequence[float]]]) -> BenchResults:
    rows = [
        BenchRow(
            scenario=scenario,
            seed=0,
            role="retrain" if label == "Retrain" else "method",
            method=label,
            label=label,
            metrics=dict(zip(PAPER_COLUMNS, values, strict=False)),
        )
        for scenario, lines in table.items()
        for label, values in lines.items()
    ]
    asked = BenchExperiment(
        title=name,
        kind="table",
        run={},
        scenarios=tuple(table),
        seeds=(0,),
        methods=(),
        vary={},
        tuned=None,
        band_retrains=0,
        shadows=0,
    )
    header = BenchHeader(experiment=asked, command="", date="", commit=None, versions={}, machine={})
    return BenchResults(header=header, bands=(), rows=tuple(rows))


def mean(line: ModelRow, key: str) -> float:
    return statistics.mean(line.values(key).values())


def mean_gap(sheet: Sheet, line: ModelRow, key: str) -> str:
    found = sheet.gaps(line, key)
    return signed(statistics.mean(found)) if found else "diverged"


def signed(value: float) -> str:
    return f"{round(value, 1) + 0.0:+.1f}"  # + 0.0: never -0.0


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


# Views: what a placeholder may ask of one experiment or of several.


def comparison(found: Finished) -> str:
    """For each model and scenario: forget R@1 and its gap, the gap on retained pairs, and the sum of gaps."""
    shown = sheets(found.results)
    labels = list(dict.fromkeys(line.label for sheet in shown for line in sheet.lines))
    labels.sort(key=lambda label: _rank(shown, label))
    head = [
        "",
        *(f"{sheet.scenario}: {part}" for sheet in shown for part in ("forget", "retain gap", "sum")),
        "bytes up",
    ]
    rows = [
        [_name(shown, label), *(c for sheet in shown for c in _cells(sheet, label)), _bytes(shown, label)]
        for label in labels
    ]
    band = ["retrain band", *(cell for sheet in shown for cell in _band(sheet)), ""]
    return table(head, [*rows, band])


def _band(sheet: Sheet) -> list[str]:
    """Of forget recall and of the gap on retained pairs, on the seed where it was measured."""
    if sheet.band_seed is None or not set(GAPS) <= set(sheet.bands):
        return ["", "", ""]
    forget, retain = (sheet.bands[key] for key in GAPS)
    zero = sheet.retrain.values(GAPS[1])[sheet.band_seed]
    ends = " to ".join(signed(end - zero) for end in (retain.low, retain.high))
    return [f"{forget.low:.1f} to {forget.high:.1f}", ends, ""]


def _name(shown: Sequence[Sheet], label: str) -> str:
    """With a dagger if a sweep chose its settings."""
    tuned = any(line.tuned for sheet in shown if (line := _line(sheet, label)))
    return _marked(label) + ("†" if tuned else "")


def _marked(label: str) -> str:
    return f"**{label}**" if label == "EASE" else label


def _line(sheet: Sheet, label: str) -> ModelRow | None:
    return next((line for line in sheet.lines if line.label == label), None)


def _rank(shown: Sequence[Sheet], label: str) -> tuple[int, float]:
    """Retraining first, the trained model last, between them the nearest to retraining over all scenarios."""
    lines = [(sheet, _line(sheet, label)) for sheet in shown]
    role = next(line.role for _, line in lines if line)
    distances = [d for sheet, line in lines if line for d in sheet.distance(line)]
    return ("retrain", "method", "trained").index(role), statistics.mean(distances) if distances else float("inf")


def _cells(sheet: Sheet, label: str) -> list[str]:
    line = _line(sheet, label)
    if line is None:
        return ["", "", ""]
    if not line.seeds:
        return ["diverged", "", ""]
    value = f"{mean(line, GAPS[0]):.1f}"
    if line.role == "retrain":
        return [value, "", ""]
    inside = ["°" if line.role == "method" and sheet.inside(line, key) else "" for key in GAPS]
    gaps = [mean_gap(sheet, line, key) for key in GAPS]
    lost = f", {line.diverged} diverged" if line.diverged else ""
    return [
        f"{value} ({gaps[0]}{lost}){inside[0]}",
        gaps[1] + inside[1],
        f"{statistics.mean(sheet.distance(line)):.1f}",
    ]


def _bytes(shown: Sequence[Sheet], label: str) -> str:
    """From the cheapest to the dearest kind of request."""
    lines = [line for sheet in shown if (line := _line(sheet, label))]
    shares = [mean(line, "ratio/bytes_up") for line in lines if line.values("ratio/bytes_up")]
    if not shares:
        return ""
    low, high = f"{min(shares):.0%}", f"{max(shares):.0%}"
    return low if low == high else f"{low} to {high}"


def nearest(found: Finished) -> str:
    """Who is nearest to retraining in each scenario: of all, of those that send little, and where EASE stands."""
    rows = []
    for sheet in sheets(found.results):
        ranked = sorted(
            (line for line in sheet.lines if line.role == "method" and line.seeds and not line.diverged),
            key=lambda line: statistics.mean(sheet.distance(line)),
        )
        cheap = [line for line in ranked if mean(line, "ratio/bytes_up") <= FEW_BYTES]
        place = next((str(n) for n, line in enumerate(ranked, start=1) if line.label == "EASE"), "none")
        reported = [_reported(sheet, lines[0]) if lines else "none" for lines in (ranked, cheap)]
        ease = [_reported(sheet, line) for line in ranked if line.label == "EASE"] or ["none"]
        rows.append([sheet.scenario, *reported, *ease, f"{place} of {len(ranked)}"])
    return table(["request", "nearest", f"nearest with at most {FEW_BYTES:.0%} of the bytes", "EASE", "its rank"], rows)


def _reported(sheet: Sheet, line: ModelRow) -> str:
    return f"{line.label} {statistics.mean(sheet.distance(line)):.1f} ({mean(line, 'ratio/bytes_up'):.0%})"


def curve(found: Finished) -> str:
    """Gaps over the values of the varied setting, forget / retain; a group of columns for each method."""
    shown = sheets(found.results)
    lines = [(sheet, line) for sheet in shown for line in sheet.lines if line.role == "method" and line.at is not None]
    points = {
        (line.at, line.name, sheet.scenario): " / ".join(mean_gap(sheet, line, key) for key in GAPS)
        for sheet, line in lines
    }
    names, scenarios, values = (
        list(dict.fromkeys(column))
        for column in zip(*((line.name, sheet.scenario, line.at) for sheet, line in lines), strict=True)
    )
    setting = next(row.at.name for row in found.results.rows if row.at)
    columns = [(name, scenario) for name in names for scenario in scenarios]
    head = [scenario if len(names) == 1 else f"{name}, {scenario}" for name, scenario in columns]
    rows = [[str(value), *(points.get((value, *column), "") for column in columns)] for value in values]
    return table([f"`{setting}`", *head], rows)


def overlap(found: Finished, part: str = "") -> str:
    """Similarity of two clients, from the least to the most entangled block, of all or of those so named."""
    blocks = [block for block in found.results.subspaces[0].blocks if part in block.block]
    values = sorted(map(mean_similarity, blocks))
    return f"{values[0]:.2f} to {values[-1]:.2f}"


def value(found: Finished, label: str, scenario: str, key: str) -> str:
    sheet = found.sheet(scenario)
    line = _line(sheet, label) if sheet else None
    if line is None or not line.values(key):
        raise Missing(f"{found.name}: {label}, {scenario}, {key}")
    return f"{mean(line, key):.1f}"


def figure(found: Finished, caption: str) -> str:
    return f"![{caption}](figures/{found.name}.svg)"


def beside(found: Sequence[Finished], printed: Finished) -> str:
    """The models that the paper prints too: gaps to retraining, forget / retain, as measured and as printed."""
    columns = [
        (scenario, one)
        for scenario in dict.fromkeys(row.scenario for row in printed.results.rows)
        for one in (*found, printed)
    ]
    labels = list(dict.fromkeys(row.label for row in printed.results.rows))
    rows = []
    for label in (label for label in labels if label != "Retrain"):
        for own in _measured_as(label, found):
            cells = [_gaps(one.sheet(scenario), label if one is printed else own) for scenario, one in columns]
            rows.append([_marked(own), *cells])
    rows.append(["Retrain itself", *(_levels(one.sheet(scenario)) for scenario, one in columns)])
    head = ["", *(f"{scenario}, {'paper' if one is printed else world(one)}" for scenario, one in columns)]
    return table(head, rows)


def _measured_as(label: str, found: Sequence[Finished]) -> list[str]:
    """The labels of our rows for a row of the paper: its EASE was measured as the paper's algorithm and as ours."""
    ran = {row.label for one in found for row in one.results.rows}
    return [own for own in (PAPERS_EASE, label) if own in ran] or [label] if label == "EASE" else [label]


def _gaps(sheet: Sheet | None, label: str) -> str:
    line = _line(sheet, label) if sheet else None
    return " / ".join(mean_gap(sheet, line, key) for key in GAPS) if sheet and line else ""


def _levels(sheet: Sheet | None) -> str:
    return " / ".join(f"{mean(sheet.retrain, key):.1f}" for key in RANKED if sheet.retrain.values(key)) if sheet else ""


def world(found: Finished) -> str:
    """What the data are called: by the name of their file, as in `dataset_flickr8k.json`, if they have one."""
    data = _run(found)["data"]
    return Path(data["path"]).stem.removeprefix("dataset_").capitalize() if data["path"] else data["name"]


def _run(found: Finished) -> Mapping[str, Any]:
    return found.header.experiment.run


def settings(found: Sequence[Finished], printed: Mapping[str, str]) -> str:
    """What the paper ran and what was run here."""
    columns = [dict(printed)]
    for one in found:
        run, experiment = _run(one), one.header.experiment
        towers = (
            f"LoRA in both towers, rank {run['model']['lora_rank']}"
            if run["model"]["lora"] != "off"
            else "none: fixed features"
        )
        reported = [
            world(one),
            run["model"]["backbone"],
            towers,
            f"{run['partition']['clients']}, {run['partition']['beta']}",
            f"{run['training']['rounds']}, {run['training']['local_epochs']}",
            str(experiment.shadows),
            str(len(experiment.seeds)),
        ]
        columns.append(dict(zip(printed, reported, strict=True)))
    return table(
        ["", "paper", *(f"`{one.name}`" for one in found)], [[name, *(c[name] for c in columns)] for name in printed]
    )


def sources(found: Sequence[Finished]) -> str:
    """Where everything comes from: one point for each commit and machine, with the commands that ran there."""
    places: dict[str, list[str]] = {}
    for one in found:
        header = one.header
        date = datetime.fromisoformat(header.date)
        seeds = one.results.seeds
        facts = [*sorted(header.versions.items()), *sorted(header.machine.items())]
        place = f"Commit `{header.commit or 'unknown'}`; {', '.join(f'{name} {fact}' for name, fact in facts)}:"
        ran = f"{seeds} seed{'s' if seeds > 1 else ''}, {date.day} {date:%B %Y}"
        places.setdefault(place, []).append(f"[{one.name}](tables/{one.name}.md): `{one.command}`, {ran}")
    return "\n".join(f"- {place}\n" + "\n".join(f"  - {ran}" for ran in runs) for place, runs in places.items())


OF_ONE: dict[str, Callable[..., str]] = {
    "comparison": comparison,
    "nearest": nearest,
    "curve": curve,
    "overlap": overlap,
    "value": value,
    "figure": figure,
}


def answer(found: Mapping[str, Finished], names: str, view: str, arguments: str) -> str:
    """What a placeholder stands for. Several experiments are joined by `+`, of which those that are there are shown."""
    printed, rest = paper()
    if names == "paper":
        if view == "fact":
            return str(rest["facts"][arguments])
        source, *words = arguments.split(", ")
        return OF_ONE[view](printed[source], *words)
    chosen = list(found.values()) if names == "all" else [found[name] for name in names.split("+") if name in found]
    if not chosen:
        raise Missing(names)
    if view == "sources":
        return sources(chosen)
    if view == "settings":
        return settings(chosen, rest["settings"])
    if view == "beside":
        return beside(chosen, printed[arguments])
    words = [arguments] if view == "figure" else arguments.split(", ") if arguments else []
    return OF_ONE[view](chosen[0], *words)


def page(template: str, found: Mapping[str, Finished]) -> tuple[str, list[str]]:
    """The template filled in, and what had to be left out; headings with nothing below them go too."""
    kept: list[str] = []
    missing: list[str] = []
    for section in re.split(r"^(?=#+ )", template, flags=re.MULTILINE)[1:]:
        try:
            filled = PLACE.sub(lambda place: answer(found, place[1], place[2], place[3] or ""), section)
            kept.append("\n\n".join(map(wrapped, filled.split("\n\n"))))
        except Missing as gone:
            missing.append(f"{section.splitlines()[0].lstrip('# ')} ({gone})")
    following = [*kept[1:], "# end"]
    bare = [len(section.split("\n", 1)[1].strip()) == 0 for section in kept]
    deeper = [_level(after) > _level(section) for section, after in zip(kept, following, strict=True)]
    return "".join(s for s, b, d in zip(kept, bare, deeper, strict=True) if d or not b), missing


def wrapped(paragraph: str) -> str:
    """Prose of even width, since placeholders are longer than what they stand for; tables and pictures as they are."""
    if paragraph.lstrip()[:1] in ("|", "!", "#"):
        return paragraph
    points = re.split(r"\n(?= *- )", paragraph.rstrip("\n"))
    tail = paragraph[len(paragraph.rstrip("\n")) :]
    return "\n".join(map(_point, points)) + tail


def _point(text: str) -> str:
    margin = " " * (len(text) - len(text.lstrip(" ")))
    hanging = margin + ("  " if text.lstrip().startswith("- ") else "")
    words = " ".join(text.split())
    return textwrap.fill(
        words, WIDTH, initial_indent=margin, subsequent_indent=hanging, break_long_words=False, break_on_hyphens=False
    )


def _level(section: str) -> int:
    return len(section) - len(section.lstrip("#"))


def drawn(found: Finished) -> Figure | None:
    """The figure of the experiment's kind; a table of one method's variants is drawn as gaps."""
    if found.results.rows and found.results.kind == "table":
        with matplotlib.rc_context(STYLE):
            return gap_chart(found.results)
    picture = next(iter(draw(found.results).values()), None)
    for line in (line for panel in (picture.axes if picture else []) for line in panel.lines):
        line.set_rasterized(len(line.get_xydata()) > MANY_POINTS)  # thousands of single dots would make a large file
    return picture


def gap_chart(results: BenchResults) -> Figure:
    """Gaps of forget and retained R@1, a panel for each scenario and a row for each model; grey is the retrain band."""
    shown = sheets(results)
    labels = [line.label for line in shown[0].lines if line.role == "method"][::-1]
    size = (PANEL_INCHES * len(shown) + 1.2, 0.9 + 0.18 * len(labels))
    drawing = Figure(figsize=size, layout="constrained")
    panels = drawing.subplots(1, len(shown), squeeze=False, sharey=True)[0]
    for panel, sheet in zip(panels, shown, strict=True):
        if "forget/recall@1" in sheet.bands and sheet.band_seed is not None:
            goal = sheet.retrain.values("forget/recall@1")[sheet.band_seed]
            band = sheet.bands["forget/recall@1"]
            panel.axvspan(band.low - goal, band.high - goal, color="0.9", label="retrain band, forget")
        panel.axvline(0, color="black", linewidth=0.8)
        for key, colour, marker in zip(GAPS, COLOURS, "oD", strict=False):
            lines = [(place, _line(sheet, label)) for place, label in enumerate(labels)]
            dots = [(gap, place) for place, line in lines if line for gap in sheet.gaps(line, key)]
            panel.plot(*zip(*dots, strict=True), marker, color=colour, alpha=0.7, markersize=3, label=key.split("/")[0])
        panel.set_yticks(range(len(labels)), labels)
        panel.set(
            ylim=(-0.6, len(labels) - 0.4),
            title=f"{sheet.scenario} request",
            xlabel="gap to retraining, R@1, each seed",
        )
    handles, names = panels[0].get_legend_handles_labels()
    drawing.legend(handles, names, loc="outside lower center", ncols=3)
    return drawing


def write(folders: Sequence[Path], out: Path, template: Path = HERE / "results_page.md") -> list[str]:
    """Everything into a folder of documents; what was left out."""
    found = collect(folders)
    text, missing = page(template.read_text(), found)
    write_atomic(out / "results.md", text.encode())
    for one in found.values():
        header = one.header.model_copy(update={"command": one.command})
        reported = one.results.model_copy(update={"header": header})
        link = f"From [results](../results.md).\n\n{sources([one]).replace('(tables/', '(')}\n"
        write_atomic(out / "tables" / f"{one.name}.md", f"{markdown(reported).rstrip()}\n\n{link}".encode())
        picture = drawn(one)
        if picture is not None:
            write_atomic(out / "figures" / f"{one.name}.svg", encode(picture, "svg"))
    return missing


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--results", type=Path, nargs="+", required=True, help="folders with NAME/results.json")
    parser.add_argument("--out", type=Path, default=Path("docs"), help="folder of documents")
    given = parser.parse_args(words)
    try:
        missing = write(given.results, given.out)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"written to {given.out}: results.md, tables/, figures/")
    for name in missing:
        print(f"left out, no results: {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
