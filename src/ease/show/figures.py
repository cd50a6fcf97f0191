"""An experiment's results as figures: the same results always give the same bytes."""

import math
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path

from ease.show.charts import density, some
from ease.show.placing import Name, write_names
from ease.show.tables import DIVERGED, ModelRow, Sheet, mean_similarity, sheets, similarities
from ease.studies.records import BenchResults

COLOURS = ("#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255")
"""Distinguishable for colour-blind readers too (Okabe and Ito, and one of Tol's)."""
FIXED = {"Trained": "0.6", "Retrain": "black", "EASE": "#D55E00"}
"""What looks the same in every figure."""
SCENARIOS = ("client", "class", "sample")
MARKERS = "os^Dv<>Pp*hXd8H"
PARTS = ("forget", "retain", "test")
SYMBOLS = {
    "delta": "entanglement threshold δ",
    "alpha": "Forget Lock strength α",
    "partition.clients": "clients K",
    "partition.beta": "Dirichlet concentration β",
}
"""Settings by the letters that papers know them by."""
COLUMN_INCHES = 3.4
"""Width of a column of text."""
RADIAL_INCHES = 3.2
DISC = 1.9
"""Diameter of circular bars in inches; names are around it."""
TRADEOFF_INCHES = 2.9
"""Size of panels in which every method is named next to its marks."""
PANEL_INCHES = 2.2
"""Width of a panel, three of which fill a page: at that size letters are nearly as large as the text around them."""
STYLE: Any = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 7,
    "svg.hashsalt": "ease",
    "svg.fonttype": "path",
    "pdf.fonttype": 42,
    "lines.markersize": 4,
    "figure.dpi": 150,
}
RECALL = "R@1 (%)"
DEPTHS = (1, 5, 10)
HOLE = 25.0
"""Radius at which circular bars begin, in points of recall."""
SECTOR_GAP = 1.2
"""Room between two sectors of circular bars, in bars."""
SECTOR_NAMES = {"forget": (0.5, 1.37), "retain": (1.06, -0.24), "test": (-0.06, -0.24)}
"""Radius of the names of sectors, in diameters of the disc: behind the names of the methods."""
SECTOR_STYLE: Any = {"ha": "center", "va": "center", "fontsize": 8, "fontweight": "bold"}
OURS = "EASE"
INK, SOFT, FAINT = "#000000", "#4d4d4d", "#b0b0b0"
SHADES = ("#5b6b7b", "#9dabb8", "#d5dce3")
"""Shades of a bar up to R@1, R@5 and R@10."""
OUR_INK = "#b34700"
"""Colours of letters, which must be darker than marks to be read."""
OUR_SHADES = ("#d55e00", "#ee9a5b", "#f9d5bc")
DARK_PAPER = "#15181c"
DARK = {
    INK: "#e8e6e1",
    SOFT: "#b9bfc5",
    FAINT: "#4a5058",
    "#e6e6e6": "#363b41",
    "#0072b2": "#4a9ad4",
    "#882255": "#b79cff",
    "#d55e00": "#ff9a4d",
    OUR_INK: "#ff9a4d",
    **dict(zip(SHADES, ("#8b9cac", "#566370", "#353d45"), strict=True)),
    **dict(zip(OUR_SHADES[1:], ("#b8621e", "#643a17"), strict=True)),
}
"""Colours on dark paper, where they differ: what is strong on white must be light there."""
LETTERS = 9.0
"""Height of a line of text in the curves, in points of recall."""
PATH = re.compile(rb'(?<=\bd=")[^"]+')
LONG_NUMBER = re.compile(rb"-?\d+\.\d{2,}")
LONG_PATH = 600
"""Bytes of a path, such as a violin, whose numbers are rounded; letters are shorter."""
DRAWN_EVERY = 3
"""One in so many points of a violin and of its dots is drawn, so that the file stays small."""
LEAST_SPAN = 12.0
"""Points of recall that an axis shows at least, so that small differences look small."""


def draw(results: BenchResults) -> dict[str, Figure]:
    """The figures of an experiment's kind, by name; a plain table has none."""
    with matplotlib.rc_context(STYLE):
        if results.kind in RANKINGS and not results.rows:
            return {}
        return {name: DRAWN[name](results) for name in (results.kind, *ALSO.get(results.kind, ())) if name in DRAWN}


def encode(figure: Figure, form: str) -> bytes:
    """A figure as svg, pdf or png, without the date, which would make every file another."""
    dated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}
    target = BytesIO()
    figure.patch.set_gid("paper")
    with matplotlib.rc_context(STYLE):
        figure.savefig(target, format=form, metadata=dated[form], bbox_inches="tight")
    return _for_the_dark(_rounded(target.getvalue())) if form == "svg" else target.getvalue()


def _rounded(drawing: bytes) -> bytes:
    """A drawing whose long paths have coordinates of a tenth of a point, which is finer than a screen shows."""

    def shorter(path: re.Match[bytes]) -> bytes:
        if len(path[0]) < LONG_PATH:
            return path[0]
        return LONG_NUMBER.sub(lambda number: b"%.1f" % float(number[0]), b" ".join(path[0].split()))

    return PATH.sub(shorter, drawing)


def _for_the_dark(drawing: bytes) -> bytes:
    """A drawing that takes the colours of a dark page where readers ask for one, its own paper included."""
    rules = [
        f"#paper path {{fill: {DARK_PAPER} !important}}",
        f"svg {{fill: {DARK[INK]}}}",
    ]  # black letters say no fill
    rules += [
        f'[style*="{kind}: {light}"] {{{kind}: {dark} !important}}'
        for light, dark in DARK.items()
        for kind in ("fill", "stroke")
    ]
    style = f"@media (prefers-color-scheme: dark) {{{' '.join(rules)}}}</style>"
    return drawing.replace(b"</style>", style.encode(), 1)


def curves(results: BenchResults) -> Figure:
    """Recall over the varied setting: a row of panels for each method, a panel for each scenario, retraining dashed."""
    found = sheets(results)
    setting = next(row.at.name for row in results.rows if row.at)
    scenarios = list(dict.fromkeys(sheet.scenario for sheet in found))
    methods = list(dict.fromkeys(line.name for sheet in found for line in sheet.lines if line.role == "method"))
    figure = Figure(figsize=(PANEL_INCHES * len(scenarios) + 0.3, 2.2 * len(methods) + 0.5), layout="constrained")
    panels = figure.subplots(len(methods), len(scenarios), squeeze=False, sharey=True)
    for method, row in zip(methods, panels, strict=True):
        for scenario, panel in zip(scenarios, row, strict=True):
            _curve(panel, [sheet for sheet in found if sheet.scenario == scenario], method)
            panel.set(title=f"{scenario} request", xlabel=SYMBOLS.get(setting, setting), ylim=(-3, 103))
        row[0].set_ylabel(RECALL if len(methods) == 1 else f"{method}\n{RECALL}")
        _label_ends(row[-1])
    seeded = f", mean and deviation over {results.seeds} seeds" if results.seeds > 1 else ""
    styles: list[dict[str, Any]] = [{"marker": "o"}, {"linestyle": "--", "linewidth": 1}]
    shown = methods[0] if len(methods) == 1 else "the method"
    _legend(figure, [Line2D([], [], color="0.3", **style) for style in styles], [f"{shown}{seeded}", "Retrain"])
    return figure


def _curve(panel: Axes, here: Sequence[Sheet], method: str) -> None:
    """One method and scenario over the varied setting."""
    lines = [line for sheet in here for line in sheet.lines if line.role == "method" and line.name == method]
    moving = [line for line in lines if line.at is not None]
    values = list(dict.fromkeys(line.at for line in moving))
    for colour, marker, part in zip(COLOURS, MARKERS, PARTS, strict=False):
        key = f"{part}/recall@1"
        means = [_mean(_pick(moving, value), key) for value in values]
        spread = [_deviation(list(_pick(moving, value).values(key).values())) for value in values]
        panel.errorbar(range(len(values)), means, spread, color=colour, marker=marker, capsize=2, label=part)
        goals = [statistics.mean(_reference(here, value).values(key).values()) for value in values]
        panel.plot(range(len(values)), goals, color=colour, linestyle="--", linewidth=1)
    panel.set_xticks(range(len(values)), [_short(value) for value in values])
    panel.margins(x=0.08)


def _label_ends(panel: Axes) -> None:
    """Name the three parts beside the right end of their lines, as far apart as letters need."""
    lines: list[Any] = [container.lines[0] for container in panel.containers]  # type: ignore[attr-defined]
    heights = spaced([float(np.nan_to_num(line.get_ydata()[-1])) for line in lines], LETTERS)
    beside: dict[str, Any] = {"xycoords": panel.get_yaxis_transform(), "va": "center", "annotation_clip": False}
    for line, height, part in zip(lines, heights, PARTS, strict=True):
        panel.annotate(part, (1.02, height), color=line.get_color(), **beside)


def spaced(heights: Sequence[float], least: float) -> list[float]:
    """The same heights, moved up where two are nearer than `least`."""
    moved, below = [0.0] * len(heights), -math.inf
    for number in sorted(range(len(heights)), key=lambda number: heights[number]):
        below = moved[number] = max(heights[number], below + least)
    return moved


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _pick(lines: Sequence[ModelRow], value: Any) -> ModelRow:
    return next(line for line in lines if line.at == value)


def _reference(here: Sequence[Sheet], value: Any) -> ModelRow:
    """Retraining at a value of the varied setting; a method's setting does not change it."""
    return next((sheet.retrain for sheet in here if sheet.retrain.at == value), here[0].retrain)


def tradeoff(results: BenchResults) -> Figure:
    """Forget against retain recall: each method's line ends, in its large mark, where the method is strongest; the
    nearer to retraining's cross the better."""
    found = sheets(results)
    figure, panels = _panels(len(found), height=2.9, width=TRADEOFF_INCHES)
    labels = list(dict.fromkeys(line.name for line in found[0].lines if line.role == "method"))
    labels.sort(key=lambda label: label == OURS)  # on top of the others
    names: list[list[Name]] = []
    drawn: list[list[list[tuple[float, float]]]] = []
    for panel, sheet in zip(panels, found, strict=True):
        names.append([])
        drawn.append([])
        for number, label in enumerate(labels):
            lines = [line for line in sheet.lines if line.role == "method" and line.name == label]
            points = [point for line in lines if not math.isnan((point := _place(line))[0])]
            if not points:
                continue
            drawn[-1].append(points)
            ours, colour = label == OURS, _colour(label, number)
            style: dict[str, Any] = {
                "color": colour,
                "marker": MARKERS[number % len(MARKERS)],
                "zorder": 4 if ours else 3,
            }
            panel.plot(*zip(*points, strict=True), label=label, linewidth=2.2 if ours else 0.8, **style)
            panel.plot(*points[-1], markersize=9 if ours else 7, markeredgecolor=INK if ours else colour, **style)
            bold = {"fontweight": "bold"} if ours else {}
            names[-1].insert(
                0 if ours else len(names[-1]),
                Name(label, points[-1], {"fontsize": 7, "color": OUR_INK if ours else SOFT, **bold}, colour),
            )
        for role, marker in (("retrain", "+"), ("trained", "x")):
            line = next(line for line in sheet.lines if line.role == role)
            cross: dict[str, Any] = {"marker": marker, "color": INK, "markersize": 10, "markeredgewidth": 2.2}
            drawn[-1].append([_place(line)])
            panel.plot(*_place(line), linestyle="", label=line.label, zorder=5, **cross)
            names[-1].insert(0, Name(line.label, _place(line), {"fontsize": 7, "color": INK, "fontweight": "bold"}))
        aim = _place(sheet.retrain)
        panel.axvline(aim[0], color=FAINT, linewidth=0.7, zorder=0)
        panel.axhline(aim[1], color=FAINT, linewidth=0.7, zorder=0)
        panel.set(title=f"{sheet.scenario} request", xlabel=f"forget {RECALL}", xlim=(-3, 103))
    low, high = panels[0].get_ylim()
    missing = max(0.0, LEAST_SPAN - (high - low)) / 2
    panels[0].set(
        ylabel=f"retain {RECALL}", ylim=(max(low - missing, -3), min(high + missing + 0.08 * (high - low), 103))
    )
    large = Line2D([], [], color=SOFT, marker="o", linestyle="", markersize=7)
    _legend(figure, [large], ["a method at its strongest setting; its line leads there from the weakest"])
    settle(figure)
    for panel, sheet, here, ways in zip(panels, found, names, drawn, strict=True):
        (x, y), (low, high), (left, right) = _place(sheet.retrain), panel.get_ylim(), panel.get_xlim()
        write_names(panel, here, [*ways, [(left, y), (right, y)], [(x, low), (x, high)]])
    return figure


def settle(figure: Figure) -> None:
    """Lay the panels out now and for good, so that places on the page can be computed."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")


def _place(line: ModelRow) -> tuple[float, float]:
    return _mean(line, "forget/recall@1"), _mean(line, "retain/recall@1")


def grid(results: BenchResults) -> Figure:
    """Attack AUC of every method and scenario, a panel for each value of a varied setting: 0.5 finds nothing, and below
    it pairs show that they were pushed."""
    found = sheets(results)
    titles = list(dict.fromkeys(sheet.title for sheet in found))
    lines = found[0].lines
    size = (COLUMN_INCHES + PANEL_INCHES * (len(titles) - 1), 0.9 + 0.2 * len(lines))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(1, len(titles), squeeze=False, sharey=True)[0]
    for title, panel in zip(titles, panels, strict=True):
        image = _aucs(panel, [sheet for sheet in found if sheet.title == title])
        panel.set_title(title)
    panels[0].set_yticks(range(len(lines)), [line.label for line in lines])
    figure.colorbar(image, ax=panels, label="LiRA AUC (0.5: chance)", ticks=[0, 0.25, 0.5, 0.75, 1])
    return figure


def _aucs(panel: Axes, found: Sequence[Sheet]) -> Any:
    """A heat map of methods by scenarios, with every value written into it."""
    lines = found[0].lines
    values = np.array([[_mean(sheet.lines[n], "lira/auc") for sheet in found] for n in range(len(lines))])
    image = panel.imshow(values, cmap="PuOr_r", vmin=0, vmax=1, aspect="auto")
    for row, column in np.ndindex(*values.shape):
        shade = "white" if abs(values[row, column] - 0.5) > 0.35 else "#1a1a1a"  # not ink: cells stay light in the dark
        shown = DIVERGED if np.isnan(values[row, column]) else f"{values[row, column]:.2f}"
        panel.text(column, row, shown, ha="center", va="center", color=shade)
    panel.set_xticks(range(len(found)), [sheet.scenario for sheet in found])
    panel.tick_params(length=0)
    panel.spines[:].set_visible(False)
    panel.hlines(
        [0.5, len(lines) - 1.5], -0.5, len(found) - 0.5, color="white", linewidth=4
    )  # methods between references
    return image


def tpr(results: BenchResults) -> Figure:
    """True positives of the attack at 1 % false positives: one row of `tpr_grid`."""
    return tpr_grid([results])


def tpr_grid(experiments: Sequence[BenchResults]) -> Figure:
    """True positives of the likelihood-ratio attack at 1 % false positives: a row of panels for each experiment, and a
    column for each value of its varied setting, or for each kind of request if it varies none."""
    rows = [_tpr_row(sheets(results)) for results in experiments]
    wide = max(map(len, rows))
    names = list(dict.fromkeys(name for row in rows for panel in row for name in panel.methods))
    size = (PANEL_INCHES * wide + 1.3, len(rows) * (0.8 + 0.17 * len(names)) + 0.4)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(rows), wide, squeeze=False, sharex=True)
    for results, row, axes in zip(experiments, rows, panels, strict=True):
        for panel in axes[len(row) :]:
            panel.set_visible(False)
        for number, (panel, shown) in enumerate(zip(axes, row, strict=False)):
            _tprs(panel, shown)
            panel.set_title(shown.title)
            panel.set_yticks(range(len(shown.methods)), shown.methods if number == 0 else [])
        if len(rows) > 1:
            axes[0].set_ylabel(results.title, fontsize=7)
    for panel in panels[-1]:
        panel.set_xlabel("TPR (%) at 1 % FPR")
    scenarios = list(dict.fromkeys(name for row in rows for panel in row for name in panel.scenarios))
    marks = [Line2D([], [], color=_scenario_colour(s), marker=_scenario_marker(s), linestyle="") for s in scenarios]
    dotted = Line2D([], [], color=SOFT, linestyle=":", linewidth=1)
    _legend(figure, [*marks, dotted], [*(f"{scenario} request" for scenario in scenarios), "1 %: guessing"])
    return figure


@dataclass(frozen=True)
class TprPanel:
    """One panel of `tpr_grid`: sheets of one value of the varied setting, with the same methods."""

    title: str
    found: tuple[Sheet, ...]

    @property
    def methods(self) -> list[str]:
        return [line.label for line in self.found[0].lines]

    @property
    def scenarios(self) -> list[str]:
        return [sheet.scenario for sheet in self.found]


def _tpr_row(found: Sequence[Sheet]) -> list[TprPanel]:
    titles = list(dict.fromkeys(sheet.title for sheet in found))
    if titles == [""]:
        return [TprPanel(f"{sheet.scenario} request", (sheet,)) for sheet in found]
    return [TprPanel(title, tuple(sheet for sheet in found if sheet.title == title)) for title in titles]


def _tprs(panel: Axes, shown: TprPanel) -> None:
    for sheet in shown.found:
        places = np.arange(len(sheet.lines)) + 0.2 * (shown.found.index(sheet) - (len(shown.found) - 1) / 2)
        values = [[100 * value for value in line.values("lira/tpr").values()] for line in sheet.lines]
        means = [statistics.mean(each) if each else math.nan for each in values]
        spread = [_deviation(each) for each in values]
        style: dict[str, Any] = {"color": _scenario_colour(sheet.scenario), "marker": _scenario_marker(sheet.scenario)}
        panel.errorbar(means, places, xerr=spread, linestyle="", capsize=1.5, **style)
    if not any(line.values("lira/tpr") for sheet in shown.found for line in sheet.lines):
        panel.text(0.5, 0.5, "too few non-members", transform=panel.transAxes, ha="center", color=SOFT, fontsize=7)
    panel.axvline(1, color=SOFT, linestyle=":", linewidth=1)
    panel.set(ylim=(len(shown.methods) - 0.5, -0.5), xlim=(-2, 102))
    panel.tick_params(axis="y", length=0)
    panel.grid(axis="x", color=FAINT, linewidth=0.4)


def _scenario_colour(scenario: str) -> str:
    return COLOURS[SCENARIOS.index(scenario)]


def _scenario_marker(scenario: str) -> str:
    return MARKERS[SCENARIOS.index(scenario)]


def baselines(results: BenchResults) -> Figure:
    """Forget and retained recall of every method, one panel each: a bar for each kind of request."""
    found = sheets(results)
    lines = [line for line in found[0].lines if line.role != "trained"]
    places, width = np.arange(len(lines)), 0.8 / len(found)
    figure, panels = _panels(2, height=2.2, width=COLUMN_INCHES)
    for panel, part in zip(panels, ("forget", "retain"), strict=True):
        for number, sheet in enumerate(found):
            shown = [line for line in sheet.lines if line.role != "trained"]
            means = [_mean(line, f"{part}/recall@1") for line in shown]
            spread = [_deviation(list(line.values(f"{part}/recall@1").values())) for line in shown]
            where = places + width * (number - (len(found) - 1) / 2)
            style: dict[str, Any] = {"color": _scenario_colour(sheet.scenario), "label": f"{sheet.scenario} request"}
            errors: dict[str, Any] = {"yerr": spread, "capsize": 2} if any(spread) else {}
            panel.bar(where, np.nan_to_num(means), 0.9 * width, **errors, **style)
        panel.set_xticks(places, [line.label for line in lines])
        panel.set(title=f"{part} pairs", ylim=(0, 103))
    panels[0].set_ylabel(RECALL)
    _legend(figure, *panels[0].get_legend_handles_labels())
    return figure


def bars(results: BenchResults) -> Figure:
    """Circular bars: a sector for each set of pairs, a bar for each method, as long as the value is large, dark up to
    R@1, paler up to R@5 and R@10; and the black arcs of retraining, which they should reach and not pass."""
    found = sheets(results)
    size = (RADIAL_INCHES * len(found), RADIAL_INCHES + 0.6)
    figure = Figure(figsize=size)
    for number, sheet in enumerate(found):
        left, wide, tall = number + (1 - DISC / RADIAL_INCHES) / 2, DISC / size[0], DISC / size[1]
        panel: Any = figure.add_axes((left / len(found), 0.24, wide, tall), projection="polar")
        shown = [line for line in sheet.lines if line.role != "retrain"]
        width = 2 * math.pi / (len(PARTS) * (len(shown) + SECTOR_GAP))
        first = -width * len(shown) / 2  # so that the first sector is at the top
        sectors = {part: first + 2 * math.pi * p / len(PARTS) for p, part in enumerate(PARTS)}
        for place, line in enumerate(shown):
            angles = [start + width * (place + 0.5) for start in sectors.values()]
            ours, shades = line.label == OURS, OUR_SHADES if line.label == OURS else SHADES
            for k, shade in reversed(list(zip(DEPTHS, shades, strict=True))):  # the longest below
                # A value that is not a number has no bar.
                means = np.nan_to_num([_mean(line, f"{part}/recall@{k}") for part in PARTS])
                panel.bar(angles, means, 0.8 * width, bottom=HOLE, color=shade, label=f"{line.label} R@{k}", zorder=2)
            name = line.label if line.seeds else f"{line.label} ({DIVERGED})"
            for angle in angles:
                _rim_name(panel, angle, name, color=OUR_INK if ours else INK, fontweight="bold" if ours else "normal")
        for part, start in sectors.items():
            arc = np.linspace(start, start + width * len(shown), 60)
            for k, thick in zip(DEPTHS, (2.0, 1.1, 0.6), strict=True):
                height = HOLE + _mean(sheet.retrain, f"{part}/recall@{k}")
                panel.plot(arc, [height] * len(arc), color=INK, linewidth=thick, label=f"Retrain R@{k}", zorder=3)
            panel.text(*SECTOR_NAMES[part], f"{part} pairs", transform=panel.transAxes, **SECTOR_STYLE)
        panel.set_theta_zero_location("N")
        panel.set_theta_direction(-1)
        panel.set_xticks([])
        panel.set_yticks([HOLE + 50, HOLE + 100], [])
        panel.yaxis.grid(color=FAINT, linewidth=0.6)
        for ring in (50, 100):  # in the gap behind the first sector, where no bar is
            panel.text(math.pi / len(PARTS), HOLE + ring, str(ring), ha="center", va="center", fontsize=6, color=SOFT)
        panel.set(ylim=(0, HOLE + 100))
        panel.set_title(f"{sheet.scenario} request", y=1.46)
        panel.spines["polar"].set_visible(False)
    swatches: list[Any] = [Patch(color=shade) for shade in SHADES] + [Line2D([], [], color=INK, linewidth=2.0)]
    _legend(figure, swatches, ["R@1", "up to R@5", "up to R@10", "Retrain (thinner: R@5, R@10)"], title="recall in %")
    return figure


def _rim_name(panel: Any, angle: float, name: str, **style: Any) -> None:
    """A name outside the rim, turned outwards; on the left half the other way round, so that none is upside down."""
    turned = math.degrees(angle) % 360
    right = turned <= 180
    panel.text(
        angle,
        HOLE + 104,
        name,
        rotation=(90 if right else 270) - turned,
        rotation_mode="anchor",
        ha="left" if right else "right",
        va="center",
        fontsize=6.5,
        **style,
    )


def raincloud(results: BenchResults) -> Figure:
    """Pair similarities: half a violin, a box and the pairs themselves for each model; above forget, below retain. The
    thin line is retraining's median."""
    clouds: dict[tuple[str, str], list[dict[str, tuple[float, ...]]]] = {}
    for row in results.rows:
        if row.role != "band" and row.pairs is not None:  # without pairs it diverged
            clouds.setdefault((row.scenario, row.label), []).append(row.pairs)
    scenarios, labels = (list(dict.fromkeys(names)) for names in zip(*clouds, strict=True))
    size = (PANEL_INCHES * len(scenarios) + 0.3, 0.8 + 0.7 * len(labels))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(2, len(scenarios), squeeze=False, sharex=True, sharey=True)
    for column, scenario in enumerate(scenarios):
        for row_of, part in enumerate(("forget", "retain")):
            panel = panels[row_of][column]
            for place, label in enumerate(labels):
                here = clouds.get((scenario, label))
                if not here:
                    continue
                values = np.concatenate([pairs[part] for pairs in here])
                _cloud(panel, values, len(labels) - 1 - place, _colour(label, place - 1))
                if label == "Retrain":
                    panel.axvline(np.median(values), color="black", linewidth=0.6, zorder=0)
            panel.set_yticks(range(len(labels)), labels[::-1])
            panel.tick_params(axis="y", length=0)
            panel.set_title(f"{scenario} request: {part} pairs")
    panels[0][0].locator_params(axis="x", nbins=5)
    figure.supxlabel("cosine of image and caption", fontsize=8)
    return figure


def _cloud(panel: Axes, values: np.ndarray, height: float, colour: str) -> None:
    where, tall = density(values.tolist())
    floor = height + 0.1
    ends, heights = np.array(where)[::DRAWN_EVERY], floor + 0.5 * np.array(tall)[::DRAWN_EVERY]
    panel.fill([ends[0], *ends, ends[-1]], [floor, *heights, floor], color=colour, alpha=0.6, lw=0)
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
    panel.plot([low, high], [height, height], color=colour, linewidth=5, solid_capstyle="butt")
    panel.plot([middle], [height], marker="|", color="white", markersize=4.5, markeredgewidth=1.5)
    dots = np.array(some(values.tolist())[::DRAWN_EVERY])
    scatter = height - 0.14 - 0.14 * np.random.default_rng(0).random(len(dots))
    panel.add_patch(_points(dots, scatter, colour))


def _points(x: np.ndarray, y: np.ndarray, colour: str) -> PathPatch:
    """Dots as one path of tiny strokes with round ends, because markers would make the drawing five times as large."""
    ends = np.stack([np.stack([x, y], 1), np.stack([x + 1e-6, y], 1)], 1).reshape(-1, 2)
    path = Path(ends, np.tile([Path.MOVETO, Path.LINETO], len(x)))
    return PathPatch(path, fill=False, edgecolor=colour, linewidth=1.5, alpha=0.6, capstyle="round")


def subspaces(results: BenchResults) -> Figure:
    """Similarity of the clients' update subspaces and the principal angles of five pairs, in each side's most
    entangled projector layer; in its most entangled block if the model has no projectors."""
    blocks = results.subspaces[0].blocks
    projectors = [overlap for overlap in blocks if ".projector." in overlap.block] or blocks
    by_side = [[overlap for overlap in projectors if overlap.modality == side] for side in ("image", "text")]
    chosen = [max(side, key=mean_similarity) for side in by_side if side]
    figure = Figure(figsize=(2 * COLUMN_INCHES, 2.6 * len(chosen)), layout="constrained")
    panels = figure.subplots(len(chosen), 2, squeeze=False)
    for (heat, angles), overlap in zip(panels, chosen, strict=True):
        similarity, clients = similarities(overlap), overlap.clients
        image = heat.imshow(np.where(np.eye(len(clients)), np.nan, similarity), cmap="viridis")
        heat.set_xticks(range(len(clients)), clients)
        heat.set_yticks(range(len(clients)), clients)
        block = overlap.block.replace(".tower.blocks", "")
        heat.set(title=f"{block}\nmean of all pairs {mean_similarity(overlap):.2f}")
        heat.set(xlabel="client", ylabel="client")
        heat.spines[:].set_visible(False)
        figure.colorbar(image, ax=heat, label="subspace similarity (mean cosine)")
        for number, (i, j) in enumerate(representative_pairs(similarity)):
            spectrum = np.degrees(np.arccos(np.clip(overlap.cosines[i][j], 0, 1)))
            style: dict[str, Any] = {"color": COLOURS[number], "marker": MARKERS[number]}
            angles.plot(range(1, len(spectrum) + 1), spectrum, label=f"{clients[i]} and {clients[j]}", **style)
        angles.set(title="from shared to own directions", xlabel="principal direction", ylabel="principal angle (°)")
        angles.set(ylim=(-3, 93), xticks=range(1, len(spectrum) + 1))
        angles.set_yticks([0, 30, 60, 90])
        angles.legend(title="clients, most alike first", title_fontsize=7, loc="lower right")
    return figure


def representative_pairs(similarity: np.ndarray, count: int = 5) -> list[tuple[int, int]]:
    """Pairs of clients from the most to the least alike, at even ranks."""
    pairs = [(i, j) for i in range(len(similarity)) for j in range(i + 1, len(similarity))]
    pairs.sort(key=lambda pair: -similarity[pair])
    ranks = np.linspace(0, len(pairs) - 1, min(count, len(pairs))).round().astype(int)
    return [pairs[rank] for rank in ranks]


def ranking(results: BenchResults) -> Figure:
    """Every method's sum of gaps to retraining, the smallest mean above, and its operations beside retraining's."""
    found = [sheet for sheet in sheets(results) if sheet.title == sheets(results)[0].title]
    labels = [line.label for line in found[0].lines if line.role == "method"]
    sums = {label: [_of_label(sheet, label) for sheet in found] for label in labels}
    order = sorted(labels, key=lambda label: _sum_key(found, sums[label]), reverse=True)
    figure = Figure(figsize=(2 * PANEL_INCHES + 1.3, 0.9 + 0.17 * len(order)), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    offsets = np.linspace(-0.2, 0.2, len(found)) if len(found) > 1 else np.zeros(1)
    for sheet, offset in zip(found, offsets, strict=True):
        style: dict[str, Any] = {"color": _scenario_colour(sheet.scenario), "marker": _scenario_marker(sheet.scenario)}
        lines = [_of_label(sheet, label) for label in order]
        distances = [sheet.distance(line) if line else [] for line in lines]
        shares = [[100 * v for v in line.values("ratio/flops").values()] if line else [] for line in lines]
        for panel, values in zip(panels, (distances, shares), strict=True):
            means = [statistics.mean(each) if each else math.nan for each in values]
            spread = [_deviation(each) for each in values]
            places = np.arange(len(order)) + offset
            panel.errorbar(means, places, xerr=spread, linestyle="", capsize=1.5, **style)
    panels[0].set_yticks(range(len(order)), order)
    for panel, title in zip(panels, ("sum of gaps (points of R@1)", "FLOPs (% of retraining)"), strict=True):
        panel.set_xlabel(title)
        panel.grid(axis="x", color=FAINT, linewidth=0.4)
        panel.set_xlim(left=0)
        panel.tick_params(axis="y", length=0)
    names = [sheet.scenario for sheet in found]
    marks = [Line2D([], [], color=_scenario_colour(s), marker=_scenario_marker(s), linestyle="") for s in names]
    _legend(figure, marks, [f"{name} request" for name in names])
    return figure


def _of_label(sheet: Sheet, label: str) -> ModelRow | None:
    return next((line for line in sheet.lines if line.role == "method" and line.label == label), None)


def _sum_key(found: Sequence[Sheet], lines: Sequence[ModelRow | None]) -> float:
    """Mean sum of gaps over scenarios; methods without a model come last."""
    each = [
        statistics.mean(d) for sheet, line in zip(found, lines, strict=True) if line and (d := sheet.distance(line))
    ]
    return statistics.mean(each) if each else math.inf


RANKINGS = ("table", "ablation")
DRAWN: dict[str, Callable[[BenchResults], Figure]] = {
    **dict.fromkeys(RANKINGS, ranking),
    "curves": curves,
    "grid": grid,
    "tpr": tpr,
    "baselines": baselines,
    "tradeoff": tradeoff,
    "bars": bars,
    "raincloud": raincloud,
    "subspaces": subspaces,
}


ALSO = {"grid": ("tpr",)}
"""Further figures of a kind."""
CAPTIONS = {
    "table": "Sum of the gaps to retraining at R@1, and operations beside retraining's: less is better.",
    "ablation": "Sum of the gaps to retraining at R@1, and operations beside retraining's: less is better.",
    "curves": "Recall@1 over the varied setting; dashed, in the same colour, what retraining gives.",
    "grid": "AUC of the likelihood-ratio attack: 0.5 is chance; below it pairs show that they were pushed away.",
    "tpr": "True positives of the likelihood-ratio attack at 1 % false positives; dotted: guessing.",
    "baselines": "Recall@1 of forget and of retained pairs: a good method has the bars of retraining.",
    "tradeoff": "Recall@1 of retained over that of forget pairs as each method grows stronger; the cross is the aim.",
    "bars": "Recall of each method in percent, R@1, R@5 and R@10 in one bar; the arcs are retraining, which "
    "bars should reach and not pass.",
    "raincloud": "Cosine of picture and caption for each pair: half violin, quartiles and dots; the thin line is "
    "retraining’s median.",
    "subspaces": "Likeness of the clients’ update subspaces, and the principal angles of five pairs of clients.",
}
"""Explanation of each kind of figure."""


def _panels(count: int, height: float, width: float = PANEL_INCHES) -> tuple[Figure, Sequence[Axes]]:
    figure = Figure(figsize=(width * count + 0.3, height + 0.5), layout="constrained")
    return figure, figure.subplots(1, count, squeeze=False, sharey=True)[0]


def _legend(figure: Figure, handles: Sequence[Any], labels: Sequence[str], title: str = "") -> None:
    columns = min(len(labels), 5 if len(figure.axes) > 1 else 3)
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, title=title, title_fontsize=7)


def _colour(label: str, number: int) -> str:
    return FIXED.get(label) or COLOURS[number % len(COLOURS)]


def _mean(line: ModelRow, key: str) -> float:
    """Not a number where every seed diverged, which leaves a gap in the figure."""
    return statistics.mean(line.values(key).values()) if line.values(key) else math.nan


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0
