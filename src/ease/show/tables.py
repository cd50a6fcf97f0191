"""An experiment's results as Markdown and LaTeX: every figure beside retraining, the mean over seeds and its spread."""

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ease.audit.band import Band
from ease.console import plain
from ease.studies.paired import Difference, Unit, differences, unit
from ease.studies.records import BenchResults, BenchRow, Overlap, Varied

FEWEST_SEEDS = 3
"""With fewer, tables carry a caveat."""

RANKED = ("forget/recall@1", "retain/recall@1", "test/recall@1")
"""Their absolute gaps to retraining add up to the rank."""
DIVERGED = "diverged"
"""What tables show of a row without a model."""


@dataclass(frozen=True)
class ModelRow:
    """One model of one scenario over all seeds."""

    scenario: str
    role: str
    """`trained`, `method`, `band` (a retraining in another order) or `retrain`."""
    name: str
    """The same at every value of a varied setting."""
    label: str
    """The name, and the value of a varied setting of the method."""
    tuned: bool
    at: Any
    """Value of the varied setting, if there is one."""
    seeds: dict[int, dict[str, float]]
    """Seed -> metrics, of the seeds that have a model."""
    diverged: int = 0
    """How many seeds have none."""

    def values(self, key: str) -> dict[int, float]:
        return {seed: metrics[key] for seed, metrics in self.seeds.items() if key in metrics}


@dataclass(frozen=True)
class Sheet:
    """One scenario at one value of the run's varied setting: the lines that may be compared, and their reference."""

    scenario: str
    title: str
    lines: tuple[ModelRow, ...]
    retrain: ModelRow
    band_seed: int | None
    bands: Mapping[str, Band]
    """Metric -> where a further retraining of that seed would fall."""

    @property
    def name(self) -> str:
        return f"{self.scenario.capitalize()} request" + (f", {self.title}" if self.title else "")

    def gaps(self, line: ModelRow, key: str) -> list[float]:
        """Signed gaps to retraining of the same seed."""
        reference = self.retrain.values(key)
        return [value - reference[seed] for seed, value in line.values(key).items() if seed in reference]

    def distance(self, line: ModelRow) -> list[float]:
        """Sum of the absolute gaps of forget, retain and test R@1, for each seed."""
        return [sum(map(abs, parts)) for parts in zip(*(self.gaps(line, key) for key in RANKED), strict=True)]

    def inside(self, line: ModelRow, key: str) -> bool:
        """Whether a value is in the retrain band, on the seed where the band was measured."""
        value = line.values(key).get(self.band_seed) if self.band_seed is not None else None
        return value is not None and key in self.bands and self.bands[key].contains(value)


@dataclass(frozen=True)
class Column:
    """One column: its title, the source of its values and their format."""

    title: str
    key: str
    latex: str
    digits: int = 1
    scale: float = 1.0
    judged: str = "gap"
    """`gap`: the best is nearest to retraining; `low`: the smallest; `share`: the smallest, also shown as a share."""


def _recalls(side: str, part: str) -> tuple[Column, ...]:
    return tuple(Column(f"{side}-R@{k}", f"{part}/recall@{k}", rf"${side}\text{{-}}R@{k}$") for k in (1, 5, 10))


FORGET = (
    *_recalls("F", "forget"),
    Column("MIA %", "mia", r"MIA \%", scale=100),
    Column("LiRA AUC", "lira/auc", "LiRA", digits=2),
    Column("LiRA TPR %", "lira/tpr", r"TPR@1\% FPR", scale=100),
    Column("rho", "rho", r"$\rho$", digits=2, judged="low"),
)
RETAIN = (
    *_recalls("R", "retain"),
    _recalls("T", "test")[0],
    Column("up MB", "cost/bytes_up", "Up (MB)", scale=1e-6, judged="share"),
    Column("down MB", "cost/bytes_down", "Down (MB)", scale=1e-6, judged="share"),
    Column("GFLOP", "cost/flops", "GFLOP", scale=1e-9, judged="share"),
    Column("client steps", "cost/client_steps", "Steps", digits=0, judged="share"),
    Column("time s", "cost/seconds", "Time (s)", judged="share"),
    Column("sum of gaps", "rank", r"$\Sigma|$gap$|$", judged="rank"),
)
SIDES = (("Forgetting", FORGET), ("Keeping, and what it costs", RETAIN))
_NAMED = {column.title: column for column in (*FORGET, *RETAIN)}
PRINTED = {
    name: tuple(_NAMED[title] for title in titles)
    for name, titles in (
        ("Forgetting", ("F-R@1", "F-R@5", "F-R@10", "MIA %")),
        ("Keeping, and what it costs", ("R-R@1", "R-R@5", "R-R@10", "up MB", "down MB")),
        ("The rest", ("T-R@1", "LiRA AUC", "LiRA TPR %", "rho", "GFLOP", "client steps", "time s", "sum of gaps")),
    )
}
"""The parts of a table on a page: the paper's two, then those that the paper lacks. More columns, or three scenarios of
them side by side, would be too small to read."""
NOTE = (
    "Recall in percent, mean ± standard deviation over seeds, in brackets the gap to retraining of the same seed; for "
    "cost, the share of retraining's. ° inside the retrain band: a 95 % prediction interval from retrainings of the "
    "first seed in other orders. Bold: least mean of |gap|, or least. Sum of gaps: |forget| + |retain| + |test| at "
    "R@1, by which methods are ranked. F, R, T: forget, retained and test pairs. Time is the wall clock of one machine "
    "with whatever else it did; compare methods by GFLOP, client steps and bytes."
)
REDUCED = "Made smaller by --quick: these figures show that the grid runs, not how methods compare."
FEW_SEEDS = "{seeds} seed{s}: differences between methods may be chance; see the paired differences."
COMPARED: tuple[tuple[str, str], ...] = (
    ("sum of gaps", "points of R@1"),
    ("LiRA gap", "AUC, distance to retraining"),
    ("bytes %", "sent by clients, share of retraining"),
    ("FLOPs %", "share of retraining"),
)
"""Quantities of paired differences, of which less is better, and what they are."""
TUNED = "† settings chosen by `ease sweep`, each method with the same budget; the others at their defaults."


def sheets(results: BenchResults) -> list[Sheet]:
    """Group the rows: over seeds into lines, and lines that share a retraining into sheets."""
    grouped: dict[tuple[str, str], dict[tuple[str, str, str], list[BenchRow]]] = {}
    run_setting = results.run_setting
    for row in results.rows:
        of_run = row.at is not None and row.at.name == run_setting
        title = _title(row.at) if of_run else ""
        label = row.label if row.at is None or of_run else f"{row.label}, {_title(row.at)}"
        models = grouped.setdefault((row.scenario, title), {})
        models.setdefault((row.role, label, str(row.settings)), []).append(row)
    found = []
    for (scenario, title), groups in grouped.items():
        lines = [_line(scenario, role, label, rows) for (role, label, _), rows in groups.items()]
        retrain = next(line for line in lines if line.role == "retrain")
        shown = tuple(line for line in lines if line.role != "band")
        band = next((b for b in results.bands if (b.scenario, _title(b.at)) == (scenario, title)), None)
        seed, metrics = (band.seed, band.metrics) if band else (None, {})
        found.append(Sheet(scenario, title, shown, retrain, seed, metrics))
    return found


def _title(at: Varied | None) -> str:
    return at.words if at else ""


def _line(scenario: str, role: str, label: str, rows: Sequence[BenchRow]) -> ModelRow:
    first = rows[0]
    metrics = {row.seed: row.metrics for row in rows if not row.diverged}
    at = first.at.value if first.at else None
    return ModelRow(scenario, role, first.label, label, first.tuned, at, metrics, len(rows) - len(metrics))


@dataclass(frozen=True)
class Figure:
    """One cell of a table before it is written in any language."""

    value: str
    spread: str
    note: str
    """Signed gap or share, and how many seeds diverged."""
    inside: bool
    best: bool


def figures(sheet: Sheet, column: Column) -> list[Figure | None]:
    """A column of a sheet; None where a line has no such value."""
    return [_figure(sheet, line, column, line in best_of(sheet, column)) for line in sheet.lines]


def _figure(sheet: Sheet, line: ModelRow, column: Column, best: bool) -> Figure | None:
    values = [value * column.scale for value in _values(sheet, line, column)]
    if not values:
        return None if line.seeds else Figure(DIVERGED, "", "", inside=False, best=False)
    mean = statistics.mean(values)
    spread = f"{statistics.stdev(values):.{column.digits}f}" if len(values) > 1 else ""
    note = ""
    if line.role != "retrain" and column.judged == "gap":
        gap = statistics.mean(sheet.gaps(line, column.key)) * column.scale
        note = f"{round(gap, column.digits) + 0.0:+.{column.digits}f}"  # + 0.0: never -0.0
    if line.role != "retrain" and column.judged == "share":
        shares = [metrics[column.key.replace("cost/", "ratio/")] for metrics in line.seeds.values()]
        note = f"{statistics.mean(shares):.0%}"
    if line.diverged:
        note = ", ".join(filter(None, [note, f"{line.diverged} {DIVERGED}"]))
    inside = line.role == "method" and column.judged == "gap" and sheet.inside(line, column.key)
    return Figure(f"{mean:.{column.digits}f}", spread, note, inside, best)


def _values(sheet: Sheet, line: ModelRow, column: Column) -> list[float]:
    return sheet.distance(line) if column.judged == "rank" else list(line.values(column.key).values())


def best_of(sheet: Sheet, column: Column) -> list[ModelRow]:
    """The methods that a column is won by; neither the trained model nor retraining takes part, and no method that
    diverged on some seed."""
    scores = {}
    for number, line in enumerate(sheet.lines):
        if line.role == "method" and not line.diverged and _values(sheet, line, column):
            gap = column.judged == "gap"
            found = sheet.gaps(line, column.key) if gap else _values(sheet, line, column)
            scores[number] = round(statistics.mean(map(abs, found)), 9)  # signed gaps would cancel
    least = min(scores.values(), default=0.0)
    return [sheet.lines[number] for number, score in scores.items() if score == least]


def columns_of(sheet: Sheet, side: Sequence[Column]) -> list[Column]:
    """The columns that some line has values for."""
    return [column for column in side if any(_values(sheet, line, column) for line in sheet.lines)]


def similarities(overlap: Overlap) -> np.ndarray:
    """Similarity of every two clients: the mean cosine of their principal angles."""
    return np.array([[statistics.mean(cosines) for cosines in row] for row in overlap.cosines])


def mean_similarity(overlap: Overlap) -> float:
    """Similarities of two different clients."""
    found = similarities(overlap)
    return float(found[~np.eye(len(found), dtype=bool)].mean())


def caveats(results: BenchResults) -> list[str]:
    """Why a result must not be taken for more than it is."""
    few = FEW_SEEDS.format(seeds=results.seeds, s="s" if results.seeds > 1 else "")
    return [*([REDUCED] if results.header.experiment.reduced else []), *([few] if results.seeds < FEWEST_SEEDS else [])]


def paired(results: BenchResults) -> dict[str, tuple[Difference, ...]]:
    """Quantity -> every method's paired difference to the reference method."""
    reference = reference_of(results)
    if reference is None:
        return {}
    setting = results.run_setting
    values: dict[str, dict[str, dict[Unit, float]]] = {name: {} for name, _ in COMPARED}
    retrained = {unit(row, setting): row.metrics for row in results.rows if row.role == "retrain"}
    for row in results.rows:
        if row.role != "method" or row.diverged:
            continue
        where = unit(row, setting)
        for name, value in _compared(row.metrics, retrained[where]).items():
            values[name].setdefault(row_label(row, setting), {})[where] = value
    return {name: differences(of, reference) for name, of in values.items() if reference in of}


def reference_of(results: BenchResults) -> str | None:
    """The method that others are compared with: EASE, or else the first one."""
    setting = results.run_setting
    labels = list(dict.fromkeys(row_label(row, setting) for row in results.rows if row.role == "method"))
    return next((label for label in labels if label == "EASE"), labels[0] if len(labels) > 1 else None)


def row_label(row: BenchRow, run_setting: str | None) -> str:
    """A method with the value of its own varied setting."""
    return row.label if row.at is None or row.at.name == run_setting else f"{row.label}, {_title(row.at)}"


def _compared(metrics: Mapping[str, float], retrained: Mapping[str, float]) -> dict[str, float]:
    """The compared quantities of one model."""
    found = {}
    if all(key in metrics and key in retrained for key in RANKED):
        found["sum of gaps"] = sum(abs(metrics[key] - retrained[key]) for key in RANKED)
    if "lira/auc" in metrics and "lira/auc" in retrained:
        found["LiRA gap"] = abs(metrics["lira/auc"] - retrained["lira/auc"])
    if "ratio/bytes_up" in metrics:
        found["bytes %"] = 100 * metrics["ratio/bytes_up"]
    if "ratio/flops" in metrics:
        found["FLOPs %"] = 100 * metrics["ratio/flops"]
    return found


def difference_text(found: Difference, digits: int = 1) -> str:
    """A paired difference with its interval, in words."""
    mean = f"{round(found.mean, digits) + 0.0:+.{digits}f}"
    if found.low is None or found.high is None:
        return mean
    return f"{mean} [{round(found.low, digits) + 0.0:+.{digits}f}, {round(found.high, digits) + 0.0:+.{digits}f}]"


def notes(found: Sequence[Sheet]) -> list[str]:
    """What must be known to read the tables."""
    tuned = any(line.tuned for sheet in found for line in sheet.lines)
    return [NOTE, *([TUNED] if tuned else [])]


def markdown(results: BenchResults) -> str:
    """Two tables for each scenario: what is forgotten, and what is kept at which cost; or the overlap of each block."""
    found = sheets(results)
    command = f"{_code(results.header.command)}, {results.seeds} seed{'s' if results.seeds > 1 else ''}."
    parts = [f"# {_words(results.title)}", "", command, ""]
    if results.subspaces:
        return "\n".join([*parts, "| Block | Mean similarity of two clients |", "|---|---|", *_overlaps(results), ""])
    parts += [line for note in (*caveats(results), *notes(found)) for line in (note, "")]
    for sheet in found:
        parts += [f"## {_words(sheet.name)}", ""]
        for name, side in SIDES:
            columns = columns_of(sheet, side)
            parts += [f"{name}:", "", f"| Method | {' | '.join(column.title for column in columns)} |"]
            parts += ["|---" * (len(columns) + 1) + "|"]
            cells = [figures(sheet, column) for column in columns]
            for number, line in enumerate(sheet.lines):
                label = _words(line.label) + ("†" if line.tuned else "")
                parts.append(f"| {label} | {' | '.join(_markdown(column[number]) for column in cells)} |")
            parts.append("")
    return "\n".join([*parts, *_paired_markdown(results)])


def _paired_markdown(results: BenchResults) -> list[str]:
    """Paired differences as a table; nothing with a single method."""
    found = paired(results)
    methods = list(dict.fromkeys(each.method for of in found.values() for each in of))
    if not methods:
        return []
    units = max(each.units for of in found.values() for each in of)
    names, seeds = dict(COMPARED), f"{results.seeds} seed{'s' if results.seeds > 1 else ''}"
    parts = [
        f"## Paired differences to {_words(reference_of(results) or '')}",
        "",
        f"Each method minus it, on the same {units} requests of {seeds}, 95 % bootstrap intervals over seeds "
        "and requests. Less is better.",
        "",
        f"| Difference | {' | '.join(f'{name} ({names[name]})' for name in found)} |",
        "|---" * (len(found) + 1) + "|",
    ]
    for method in methods:
        cells = [next((each for each in of if each.method == method), None) for of in found.values()]
        digits = [2 if name == "LiRA gap" else 1 for name in found]
        shown = [difference_text(each, d) if each else "" for each, d in zip(cells, digits, strict=True)]
        parts.append(f"| {_words(method)} | {' | '.join(shown)} |")
    return [*parts, ""]


def _words(text: str) -> str:
    """Text of others inside a Markdown table: it stays in its cell and is not markup."""
    escaped = re.sub(r"[\\|`<\[\]*]", r"\\\g<0>", " ".join(text.split()))
    return plain(escaped)


def _code(text: str) -> str:
    """Text of others as Markdown code, in more backticks than it holds itself."""
    line = plain(" ".join(text.split()))
    fence = "`" * (1 + max(map(len, re.findall("`+", line)), default=0))
    return f"{fence} {line} {fence}" if len(fence) > 1 else f"`{line}`"


def _overlaps(results: BenchResults) -> list[str]:
    return [f"| {_words(overlap.block)} | {mean_similarity(overlap):.3f} |" for overlap in results.subspaces[0].blocks]


def _markdown(figure: Figure | None) -> str:
    if figure is None:
        return ""
    text = figure.value + (f" ± {figure.spread}" if figure.spread else "")
    text = f"**{text}**" if figure.best else text
    return text + (f" ({figure.note})" if figure.note else "") + ("°" if figure.inside else "")


def latex(results: BenchResults) -> str:
    """The same in parts below each other, with the scenarios side by side."""
    found = sheets(results)
    parts = [r"% Needs \usepackage{amsmath,booktabs,graphicx}"]
    for title in dict.fromkeys(sheet.title for sheet in found):
        here = [sheet for sheet in found if sheet.title == title]
        caption = results.title + (f" ({title})" if title else "")
        parts += [
            r"\begin{table*}[t]",
            r"\centering",
            r"\setlength{\tabcolsep}{3pt}",
            rf"\caption{{{escape(caption)}. {escape(' '.join(notes(here)))}}}",
        ]
        for part in PRINTED.values():
            columns = [column for column in part if any(columns_of(sheet, [column]) for sheet in here)]
            parts += [r"\par\vspace{4pt}", *_tabular(here, columns)] if columns else []
        parts += [r"\end{table*}", ""]
    return "\n".join(parts)


def _tabular(here: Sequence[Sheet], columns: Sequence[Column]) -> list[str]:
    width, last = len(columns), len(here) * len(columns) + 1
    groups = [rf"\multicolumn{{{width}}}{{c}}{{{sheet.scenario.capitalize()} request}}" for sheet in here]
    rules = [rf"\cmidrule(lr){{{2 + width * n}-{1 + width * (n + 1)}}}" for n in range(len(here))]
    lines = [r"\resizebox{\linewidth}{!}{%", rf"\begin{{tabular}}{{l{'c' * (last - 1)}}}", r"\toprule"]
    lines += [" & ".join(["", *groups]) + r" \\", " ".join(rules)]
    lines += [" & ".join(["Method", *(column.latex for _ in here for column in columns)]) + r" \\", r"\midrule"]
    cells = [figures(sheet, column) for sheet in here for column in columns]
    for number, line in enumerate(here[0].lines):
        lines += [r"\midrule"] if line.role == "retrain" else []
        label = escape(line.label + ("†" if line.tuned else ""))
        lines.append(" & ".join([label, *(_latex(column[number]) for column in cells)]) + r" \\")
    return [*lines, r"\bottomrule", r"\end{tabular}}"]


def _latex(figure: Figure | None) -> str:
    if figure is None:
        return ""
    text = rf"\textbf{{{figure.value}}}" if figure.best else figure.value
    text += rf"{{\scriptsize$\pm${figure.spread}}}" if figure.spread else ""
    note = escape(figure.note).replace("-", "$-$")
    return text + (f" ({note})" if note else "") + (r"$^\circ$" if figure.inside else "")


ESCAPES = str.maketrans(
    {character: rf"\{character}" for character in "&%#_{}$"}
    | {character: f"${character}$" for character in "|<>"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {"±": r"$\pm$", "°": r"$^\circ$", "†": r"$^\dagger$", "`": ""}
)


def escape(text: str) -> str:
    """Text as LaTeX, on one line and without control characters."""
    return plain(" ".join(text.split())).translate(ESCAPES)
