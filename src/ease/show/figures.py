"""An experiment's results as figures: the same results always give the same bytes."""

import math
import statistics
from collections.abc import Callable, Sequence
from io import BytesIO
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ease.runs.records import BenchResults
from ease.show.charts import density, some
from ease.show.tables import DIVERGED, Line, Sheet, mean_similarity, sheets, similarities

COLOURS = ("#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255")
"""Told apart by colour-blind readers too (Okabe and Ito, and one of Tol's)."""
FIXED = {"Trained": "0.6", "Retrain": "black", "EASE": "#D55E00"}
"""What looks the same in every figure."""
MARKERS = "os^Dv<>Pp*hXd8H"
PARTS = ("forget", "retain", "test")
SYMBOLS = {
    "delta": "entanglement threshold δ",
    "lock_strength": "lock strength α",
    "partition.clients": "clients K",
    "partition.beta": "Dirichlet concentration β",
}
"""Settings by the letters that papers know them by."""
COLUMN_INCHES = 3.4
"""Width of a column of text."""
PANEL_INCHES = 2.2
"""Width of a panel, three of which fill a page: at that size letters are nearly as large as the text around them."""
STYLE: Any = {
    "font.size": 8,
    "axes.titlesize": 8,
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
HOLE = 25.0
"""Radius at which circular bars begin, in points of recall."""
LETTERS = 9.0
"""Height of a line of text in the curves, in points of recall."""
LEAST_SPAN = 12.0
"""Points of recall that an axis shows at least, so that small differences look small."""


def draw(results: BenchResults) -> dict[str, Figure]:
    """The figures of an experiment's kind, by name; a plain table has none."""
    with matplotlib.rc_context(STYLE):
        return {results.kind: DRAWN[results.kind](results)} if results.kind in DRAWN else {}


def encode(figure: Figure, form: str) -> bytes:
    """A figure as svg, pdf or png, without the date, which would make every file another."""
    dated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}
    target = BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(target, format=form, metadata=dated[form], bbox_inches="tight")
    return target.getvalue()


def curves(results: BenchResults) -> Figure:
    """Recall over the varied setting, one panel for each scenario: the first method in lines, retraining dashed."""
    found = sheets(results)
    setting = next(row.at.name for row in results.rows if row.at)
    scenarios = list(dict.fromkeys(sheet.scenario for sheet in found))
    figure, panels = _panels(len(scenarios), height=2.2)
    for panel, scenario in zip(panels, scenarios, strict=True):
        here = [sheet for sheet in found if sheet.scenario == scenario]
        values = list(dict.fromkeys(line.at for sheet in here for line in sheet.lines if line.at is not None))
        for colour, marker, part in zip(COLOURS, MARKERS, PARTS, strict=False):
            key = f"{part}/recall@1"
            moving = [line for sheet in here for line in sheet.lines if line.role == "method" and line.at is not None]
            means = [_mean(_pick(moving, value), key) for value in values]
            spread = [_deviation(list(_pick(moving, value).values(key).values())) for value in values]
            panel.errorbar(range(len(values)), means, spread, color=colour, marker=marker, capsize=2, label=part)
            goals = [statistics.mean(_reference(here, value).values(key).values()) for value in values]
            panel.plot(range(len(values)), goals, color=colour, linestyle="--", linewidth=1)
        panel.set_xticks(range(len(values)), [_short(value) for value in values])
        panel.set(title=f"{scenario} request", xlabel=SYMBOLS.get(setting, setting), ylim=(-3, 103))
        panel.margins(x=0.08)
    panels[0].set_ylabel(RECALL)
    _label_ends(panels[-1])
    method = next(line.name for sheet in found for line in sheet.lines if line.role == "method")
    seeded = f", mean and deviation over {results.seeds} seeds" if results.seeds > 1 else ""
    styles: list[dict[str, Any]] = [{"marker": "o"}, {"linestyle": "--", "linewidth": 1}]
    _legend(figure, [Line2D([], [], color="0.3", **style) for style in styles], [f"{method}{seeded}", "Retrain"])
    return figure


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


def _pick(lines: Sequence[Line], value: Any) -> Line:
    return next(line for line in lines if line.at == value)


def _reference(here: Sequence[Sheet], value: Any) -> Line:
    """Retraining at a value of the varied setting; a method's setting does not change it."""
    return next((sheet.retrain for sheet in here if sheet.retrain.at == value), here[0].retrain)


def tradeoff(results: BenchResults) -> Figure:
    """Forget against retain recall: each method's line ends, in its large mark, where the method is strongest; the
    nearer to retraining's cross the better."""
    found = sheets(results)
    figure, panels = _panels(len(found), height=2.4)
    labels = list(dict.fromkeys(line.name for line in found[0].lines if line.role == "method"))
    for panel, sheet in zip(panels, found, strict=True):
        for number, label in enumerate(labels):
            lines = [line for line in sheet.lines if line.role == "method" and line.name == label]
            points = [_place(line) for line in lines]
            style: dict[str, Any] = {"color": _colour(label, number), "marker": MARKERS[number % len(MARKERS)]}
            panel.plot(*zip(*points, strict=True), label=label, linewidth=1, zorder=3, **style)
            panel.plot(*points[-1], markersize=7, zorder=3, **style)
        goal, before = sheet.retrain, next(line for line in sheet.lines if line.role == "trained")
        for line, marker in ((goal, "+"), (before, "x")):
            cross: dict[str, Any] = {"marker": marker, "color": "black", "markersize": 9, "markeredgewidth": 2}
            panel.plot(*_place(line), linestyle="", label=line.label, zorder=4, **cross)
        panel.set(title=f"{sheet.scenario} request", xlabel=f"forget {RECALL}", xlim=(-3, 103))
    low, high = panels[0].get_ylim()
    missing = max(0.0, LEAST_SPAN - (high - low)) / 2
    panels[0].set(ylabel=f"retain {RECALL}", ylim=(max(low - missing, -3), min(high + missing, 103)))
    _legend(figure, *panels[0].get_legend_handles_labels(), title="large mark: the strongest setting")
    return figure


def _place(line: Line) -> tuple[float, float]:
    return _mean(line, "forget/recall@1"), _mean(line, "retain/recall@1")


def grid(results: BenchResults) -> Figure:
    """Attack AUC of every method and scenario: 0.5 finds nothing, and below it pairs show that they were pushed."""
    found = sheets(results)
    lines = found[0].lines
    values = np.array([[_mean(sheet.lines[n], "lira/auc") for sheet in found] for n in range(len(lines))])
    figure = Figure(figsize=(COLUMN_INCHES, 0.9 + 0.2 * len(lines)), layout="constrained")
    panel = figure.add_subplot()
    image = panel.imshow(values, cmap="PuOr_r", vmin=0, vmax=1, aspect="auto")
    for row, column in np.ndindex(*values.shape):
        shade = "white" if abs(values[row, column] - 0.5) > 0.35 else "black"
        shown = DIVERGED if np.isnan(values[row, column]) else f"{values[row, column]:.2f}"
        panel.text(column, row, shown, ha="center", va="center", color=shade)
    panel.set_xticks(range(len(found)), [sheet.scenario for sheet in found])
    panel.set_yticks(range(len(lines)), [line.label for line in lines])
    panel.tick_params(length=0)
    panel.spines[:].set_visible(False)
    panel.hlines(
        [0.5, len(lines) - 1.5], -0.5, len(found) - 0.5, color="white", linewidth=4
    )  # methods between references
    figure.colorbar(image, label="LiRA AUC (0.5: chance)", ticks=[0, 0.25, 0.5, 0.75, 1])
    return figure


def bars(results: BenchResults) -> Figure:
    """Circular bars: a sector for each metric, a bar for each method, as long as the value is large, and the black arc
    of retraining, which they should reach and not pass."""
    depths = (1, 5, 10)
    found = sheets(results)
    figure = Figure(figsize=(PANEL_INCHES * len(found) + 0.3, PANEL_INCHES + 0.8), layout="constrained")
    gap = 0.25  # between the three parts, in sectors
    sector = 2 * math.pi / (len(PARTS) * (len(depths) + gap))
    metrics = {
        f"{part}/recall@{k}": sector * (p * (len(depths) + gap) + d + 0.5)
        for p, part in enumerate(PARTS)
        for d, k in enumerate(depths)
    }
    for number, sheet in enumerate(found):
        panel: Any = figure.add_subplot(1, len(found), number + 1, projection="polar")
        shown = [line for line in sheet.lines if line.role != "retrain"]
        width = 0.86 * sector / len(shown)
        for place, line in enumerate(shown):
            angles = [middle + width * (place - (len(shown) - 1) / 2) for middle in metrics.values()]
            means = np.nan_to_num([_mean(line, key) for key in metrics])  # no bar can be drawn of what is no number
            label = line.label if line.seeds else f"{line.label} ({DIVERGED})"
            panel.bar(angles, means, width, bottom=HOLE, label=label, color=_colour(line.label, place - 1))
        for key, middle in metrics.items():
            arc = np.linspace(middle - 0.47 * sector, middle + 0.47 * sector, 20)
            panel.plot(
                arc, [HOLE + _mean(sheet.retrain, key)] * len(arc), color="black", linewidth=1.6, label="Retrain"
            )
        panel.set_theta_zero_location("N")
        panel.set_theta_direction(-1)
        names = [f"$\\bf{{{part}}}$\nR@{k}" if k == 5 else f"R@{k}" for part in PARTS for k in depths]
        panel.set_xticks(list(metrics.values()), names, fontsize=7)
        panel.tick_params(axis="x", pad=1)
        panel.set_yticks([HOLE + 50, HOLE + 100], [])
        for ring in (50, 100):  # in the gap before the first sector, where no bar is
            number_of_ring = panel.text(-gap * sector / 2, HOLE + ring, str(ring), ha="center", va="center", fontsize=6)
            number_of_ring.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.5})
        panel.set(ylim=(0, HOLE + 104))
        panel.xaxis.grid(False)
        panel.set_title(f"{sheet.scenario} request", pad=8)
        panel.spines["polar"].set_visible(False)
    handles, labels = figure.axes[0].get_legend_handles_labels()  # the arcs come first
    _legend(figure, [*handles[len(metrics) :], handles[0]], [*labels[len(metrics) :], labels[0]], title="recall in %")
    return figure


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
    panel.fill_between(where, floor, floor + 0.5 * np.array(tall), color=colour, alpha=0.6, lw=0)
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
    panel.plot([low, high], [height, height], color=colour, linewidth=5, solid_capstyle="butt")
    panel.plot([middle], [height], marker="|", color="white", markersize=4.5, markeredgewidth=1.5)
    dots = some(values.tolist())
    scatter = height - 0.14 - 0.14 * np.random.default_rng(0).random(len(dots))
    panel.plot(dots, scatter, ".", color=colour, markersize=1.5, alpha=0.6)


def subspaces(results: BenchResults) -> Figure:
    """How alike the clients' update subspaces are, and the principal angles of five pairs, in each side's most
    entangled block."""
    blocks = results.subspaces[0].blocks
    by_side = [[overlap for overlap in blocks if overlap.modality == side] for side in ("image", "text")]
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


DRAWN: dict[str, Callable[[BenchResults], Figure]] = {
    "curves": curves,
    "grid": grid,
    "tradeoff": tradeoff,
    "bars": bars,
    "raincloud": raincloud,
    "subspaces": subspaces,
}


CAPTIONS = {
    "curves": "Recall@1 over the varied setting; dashed, in the same colour, what retraining gives.",
    "grid": "AUC of the likelihood-ratio attack: 0.5 is chance; below it pairs show that they were pushed away.",
    "tradeoff": "Recall@1 of retained over that of forget pairs as each method grows stronger; the cross is the aim.",
    "bars": "Recall of each method in percent; the black arc is retraining, which bars should reach and not pass.",
    "raincloud": "Cosine of picture and caption for each pair: half violin, quartiles and dots; the thin line is "
    "retraining’s median.",
    "subspaces": "Likeness of the clients’ update subspaces, and the principal angles of five pairs of clients.",
}
"""What a reader must know to read each kind of figure."""


def _panels(count: int, height: float) -> tuple[Figure, Sequence[Axes]]:
    figure = Figure(figsize=(PANEL_INCHES * count + 0.3, height + 0.5), layout="constrained")
    return figure, figure.subplots(1, count, squeeze=False, sharey=True)[0]


def _legend(figure: Figure, handles: Sequence[Any], labels: Sequence[str], title: str = "") -> None:
    columns = min(len(labels), 5 if len(figure.axes) > 1 else 3)
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, title=title, title_fontsize=7)


def _colour(label: str, number: int) -> str:
    return FIXED.get(label) or COLOURS[number % len(COLOURS)]


def _mean(line: Line, key: str) -> float:
    """Not a number where every seed diverged, which leaves a gap in the figure."""
    return statistics.mean(line.values(key).values()) if line.values(key) else math.nan


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0
