"""An experiment's results in the layout of the EASE paper's tables, as LaTeX."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ease.show.tables import DIVERGED, ModelRow, Sheet, escape, sheets
from ease.studies.records import BenchResults

PREAMBLE = r"""% Needs \usepackage[table,dvipsnames]{xcolor} and \usepackage{amsmath,booktabs,graphicx,makecell}
\providecommand{\up}[1]{{\scriptsize\textcolor{ForestGreen}{($\uparrow$#1)}}}
\providecommand{\down}[1]{{\scriptsize\textcolor{red}{($\downarrow$#1)}}}
\providecommand{\gap}[1]{{\scriptsize\textcolor{gray!70!black}{(#1)}}}
\providecommand{\best}[1]{\textcolor{red}{\textbf{\underline{#1}}}}
\providecommand{\second}[1]{\textcolor{blue}{#1}}"""
NOTE = (
    "Mean over seeds, in parentheses the absolute gap to retraining: green closer to the ideal than retraining, red "
    "farther. Red: nearest to retraining; blue: second. Retrain does not take part. Differs from the paper: it ranks "
    "by the lowest forget and the highest retain recall."
)


@dataclass(frozen=True)
class Column:
    """A column of the paper: its head, its metric, and how a value compares with retraining's."""

    head: str
    key: str
    ideal: int = 0
    """-1: lower is better, 1: higher; 0: only the distance to retraining counts."""
    digits: int = 1
    scale: float = 1.0
    least: bool = False
    """Ranked by its value, not by its distance to retraining."""


def _recalls(side: str, part: str, ideal: int, arrow: str) -> tuple[Column, ...]:
    return tuple(Column(rf"${side}\text{{-}}R@{k}\;{arrow}$", f"{part}/recall@{k}", ideal=ideal) for k in (1, 5, 10))


FORGET = (*_recalls("F", "forget", -1, r"\downarrow"), Column("$MIA$", "mia", scale=100))
RETAIN = _recalls("R", "retain", 1, r"\uparrow")
COMM = Column(r"$Comm.\;\downarrow$", "comm", scale=1e-6, least=True)
"""Megabytes in both directions."""
RHO = Column(r"$\rho\;\downarrow$", "rho", ideal=-1, digits=2, least=True)


def paper_latex(results: BenchResults) -> str:
    """Two tables below each other with the kinds of request side by side, for each value of a varied run setting."""
    ablation = results.kind == "ablation"
    head = "Variant" if ablation else "Method"
    found, parts = sheets(results), [PREAMBLE]
    for title in dict.fromkeys(sheet.title for sheet in found):
        here = [sheet for sheet in found if sheet.title == title]
        caption = escape(results.title + (f" ({title})" if title else ""))
        parts += [
            r"\begin{table*}[t]",
            r"\centering",
            r"\setlength{\tabcolsep}{3pt}",
            rf"\caption{{{caption}. {escape(NOTE)}}}",
            *_tabular(here, FORGET, head, scenarios=True),
            r"\par\vspace{1pt}",
            *_tabular(here, (*RETAIN, RHO if ablation else COMM), head),
            r"\end{table*}",
            "",
        ]
    return "\n".join(parts)


def _tabular(here: Sequence[Sheet], columns: Sequence[Column], head: str, scenarios: bool = False) -> list[str]:
    columns = [column for column in columns if any(_values(line, column) for sheet in here for line in sheet.lines)]
    width = len(columns)
    lines = [r"\resizebox{\linewidth}{!}{%", rf"\begin{{tabular}}{{l{('|' + 'c' * width) * len(here)}}}"]
    lines += [r"\Xhline{1.2pt}", r"\rowcolor{CadetBlue!20}"]
    heads = [column.head for _ in here for column in columns]
    if scenarios:
        ends = ["c|"] * (len(here) - 1) + ["c"]
        groups = [
            rf"\multicolumn{{{width}}}{{{end}}}{{\textbf{{{sheet.scenario.capitalize()} Unlearning}}}}"
            for sheet, end in zip(here, ends, strict=True)
        ]
        rules = [rf"\cmidrule(lr){{{2 + width * n}-{1 + width * (n + 1)}}}" for n in range(len(here))]
        lines += [_row(rf"\textbf{{{head}}}", *groups), "".join(rules), r"\rowcolor{CadetBlue!20}", _row("", *heads)]
    else:
        lines += [_row(rf"\textbf{{{head}}}", *heads)]
    lines += [r"\Xhline{1.2pt}"]
    cells = [_cells(sheet, column) for sheet in here for column in columns]
    shaded = False
    for number, line in enumerate(here[0].lines):
        if line.role == "trained":
            continue
        retrain, shaded = line.role == "retrain", not shaded
        label = rf"\textit{{{escape(line.label)}}}" if retrain else escape(line.label)
        lines += [r"\hline"] if retrain else [r"\rowcolor{gray!10}"] if shaded else []
        lines.append(_row(label, *(column[number] for column in cells)))
    return [*lines, r"\Xhline{1.2pt}", r"\end{tabular}}"]


def _row(*cells: str) -> str:
    return " & ".join(cells) + r" \\"


def _cells(sheet: Sheet, column: Column) -> list[str]:
    """A column of a sheet, a cell for each line."""
    marks = _marks(sheet, column)
    return [_cell(sheet, line, column, marks.get(number, "")) for number, line in enumerate(sheet.lines)]


def _cell(sheet: Sheet, line: ModelRow, column: Column, mark: str) -> str:
    values = _values(line, column)
    if not values:
        return "" if line.seeds else DIVERGED
    mean = f"{statistics.mean(values.values()):.{column.digits}f}"
    text = rf"\{mark}{{{mean}}}" if mark else mean
    gaps = _gaps(sheet, line, column)
    signed = round(statistics.mean(gaps), column.digits) if gaps else 0.0
    if line.role == "retrain" or not signed:
        return text
    direction = "gap" if not column.ideal else "up" if signed * column.ideal > 0 else "down"
    return rf"{text} \{direction}{{{abs(signed):.{column.digits}f}}}"


def _values(line: ModelRow, column: Column) -> dict[int, float]:
    """Seed -> value in the unit of the column."""
    if column.key == "comm":
        up, down = (line.values(f"cost/bytes_{way}") for way in ("up", "down"))
        return {seed: (up[seed] + down[seed]) * column.scale for seed in up}
    return {seed: value * column.scale for seed, value in line.values(column.key).items()}


def _gaps(sheet: Sheet, line: ModelRow, column: Column) -> list[float]:
    """Signed gaps to retraining of the same seed."""
    reference = _values(sheet.retrain, column)
    return [value - reference[seed] for seed, value in _values(line, column).items() if seed in reference]


def _marks(sheet: Sheet, column: Column) -> dict[int, str]:
    """Number of a line -> `best` or `second`, among methods that diverged on no seed."""
    scores = {}
    for number, line in enumerate(sheet.lines):
        if line.role != "method" or line.diverged:
            continue
        found = list(_values(line, column).values()) if column.least else _gaps(sheet, line, column)
        if found:
            scores[number] = round(statistics.mean(map(abs, found)), 9)
    ranked = sorted(set(scores.values()))[:2]
    return {number: ("best", "second")[ranked.index(score)] for number, score in scores.items() if score in ranked}
