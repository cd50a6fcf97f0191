"""An experiment's results as figures: the same results always give the same bytes."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ease.report.tables import DIVERGED, Line, Sheet, mean_similarity, sheets, similarities

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Told apart by colour-blind readers too (Okabe and Ito)."""
FIXED = {"trained": "0.6", "retrain": "black"}
"""Colours of what methods are compared with."""
MARKERS = "os^Dv<>Pp*hXd8H"
COLUMN_INCHES = 3.4
"""Width of a column of text."""
PANEL_INCHES = 2.4
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
LEAST_SPAN = 12.0
"""Points of recall that an axis shows at least, so that small differences look small."""


def draw(results: Mapping[str, Any]) -> dict[str, Figure]:
    """The figures of an experiment's kind, by name; a plain table has none."""
    kind = results["header"]["kind"]
    with matplotlib.rc_context(STYLE):
        return {kind: DRAWN[kind](results)} if kind in DRAWN else {}


def encode(figure: Figure, form: str) -> bytes:
    """A figure as svg, pdf or png, without the date, which would make every file another."""
    dated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}
    target = BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(target, format=form, metadata=dated[form], bbox_inches="tight")
    return target.getvalue()


def curves(results: Mapping[str, Any]) -> Figure:
    """Recall over the varied setting, one panel for each scenario: the first method in lines, retraining dashed."""
    found = sheets(results)
    setting = next(row["at"]["name"] for row in results["rows"] if "at" in row)
    scenarios = list(dict.fromkeys(sheet.scenario for sheet in found))
    figure, panels = _panels(len(scenarios), height=2.4)
    for panel, scenario in zip(panels, scenarios, strict=True):
        here = [sheet for sheet in found if sheet.scenario == scenario]
        values = list(dict.fromkeys(line.at for sheet in here for line in sheet.lines if line.at is not None))
        for colour, part in zip(COLOURS, ("forget", "retain", "test"), strict=False):
            key = f"{part}/recall@1"
            moving = [line for sheet in here for line in sheet.lines if line.role == "method" and line.at is not None]
            means = [_mean(_pick(moving, value), key) for value in values]
            spread = [_deviation(list(_pick(moving, value).values(key).values())) for value in values]
            panel.errorbar(range(len(values)), means, spread, color=colour, marker="o", capsize=2, label=part)
            goals = [statistics.mean(_reference(here, value).values(key).values()) for value in values]
            panel.plot(range(len(values)), goals, color=colour, linestyle="--", linewidth=1)
        panel.set_xticks(range(len(values)), [str(value) for value in values])
        panel.set(title=f"{scenario} request", xlabel=setting, ylim=(-3, 103))
    panels[0].set_ylabel(RECALL)
    method = next(line.label.split(",")[0] for sheet in found for line in sheet.lines if line.role == "method")
    handles = [*panels[0].get_legend_handles_labels()[0], Line2D([], [], color="black", linestyle="--", linewidth=1)]
    names = [f"{method}: {part}" for part in ("forget", "retain", "test")]
    _legend(figure, handles, [*names, "Retrain"])
    return figure


def _pick(lines: Sequence[Line], value: Any) -> Line:
    return next(line for line in lines if line.at == value)


def _reference(here: Sequence[Sheet], value: Any) -> Line:
    """Retraining at a value of the varied setting; a method's setting does not change it."""
    return next((sheet.retrain for sheet in here if sheet.retrain.at == value), here[0].retrain)


def tradeoff(results: Mapping[str, Any]) -> Figure:
    """Forget against retain recall: each method's line runs over its strength, and retraining's cross is the aim."""
    found = sheets(results)
    figure, panels = _panels(len(found), height=2.8)
    labels = list(dict.fromkeys(line.label.split(",")[0] for line in found[0].lines if line.role == "method"))
    for panel, sheet in zip(panels, found, strict=True):
        for number, label in enumerate(labels):
            lines = [line for line in sheet.lines if line.role == "method" and line.label.split(",")[0] == label]
            points = [(_mean(line, "forget/recall@1"), _mean(line, "retain/recall@1")) for line in lines]
            style: dict[str, Any] = {
                "color": COLOURS[number % len(COLOURS)],
                "marker": MARKERS[number % len(MARKERS)],
                "linewidth": 1,
            }
            panel.plot(*zip(*points, strict=True), label=label, zorder=3 if label == "EASE" else 2, **style)
        goal, before = sheet.retrain, next(line for line in sheet.lines if line.role == "trained")
        for line, marker, label in ((goal, "+", "Retrain"), (before, "x", "Trained")):
            at = _mean(line, "forget/recall@1"), _mean(line, "retain/recall@1")
            panel.plot(*at, marker=marker, color="black", markersize=9, markeredgewidth=2, linestyle="", label=label)
        low, high = panel.get_ylim()
        missing = max(0.0, LEAST_SPAN - (high - low)) / 2
        panel.set(title=f"{sheet.scenario} request", xlabel=f"forget {RECALL}", ylim=(low - missing, high + missing))
    panels[0].set_ylabel(f"retain {RECALL}")
    _legend(figure, *panels[0].get_legend_handles_labels())
    return figure


def grid(results: Mapping[str, Any]) -> Figure:
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
    figure.colorbar(image, label="LiRA AUC")
    return figure


def bars(results: Mapping[str, Any]) -> Figure:
    """Circular bars: a sector for each metric, a bar for each method, as long as the value is large."""
    metrics = [f"{part}/recall@{k}" for part in ("forget", "retain", "test") for k in (1, 5, 10)]
    names = [f"{part}\nR@{k}" for part in ("forget", "retain", "test") for k in (1, 5, 10)]
    found = sheets(results)
    figure = Figure(figsize=(PANEL_INCHES * len(found), PANEL_INCHES + 0.6), layout="constrained")
    for number, sheet in enumerate(found):
        panel: Any = figure.add_subplot(1, len(found), number + 1, projection="polar")
        sector = 2 * math.pi / len(metrics)
        width = 0.86 * sector / len(sheet.lines)
        for place, line in enumerate(sheet.lines):
            angles = [sector * m + width * (place - (len(sheet.lines) - 1) / 2) for m in range(len(metrics))]
            means = np.nan_to_num([_mean(line, key) for key in metrics])  # no bar can be drawn of what is no number
            label = line.label if line.seeds else f"{line.label} ({DIVERGED})"
            panel.bar(angles, means, width, bottom=25, label=label, color=_colour(line.role, place - 1))
        panel.set_theta_zero_location("N")
        panel.set_theta_direction(-1)
        panel.set_xticks([sector * m for m in range(len(metrics))], names)
        panel.set_yticks([75, 125], ["50", "100"], color="0.4")
        panel.set_rlabel_position(math.degrees(sector * 6))  # the bars are shortest there
        panel.set(ylim=(0, 128))
        panel.xaxis.grid(False)
        panel.set_title(f"{sheet.scenario} request", pad=14)
        panel.spines["polar"].set_visible(False)
    _legend(figure, *figure.axes[0].get_legend_handles_labels())
    return figure


def raincloud(results: Mapping[str, Any]) -> Figure:
    """Pair similarities: half a violin, a box and the pairs themselves for each model; above forget, below retain."""
    rows = [row for row in results["rows"] if row["role"] != "band" and "pairs" in row]
    scenarios = list(dict.fromkeys(row["scenario"] for row in rows))
    labels = list(dict.fromkeys(row["label"] for row in rows))
    size = (PANEL_INCHES * len(scenarios) + 0.6, 0.8 + 0.75 * len(labels))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(2, len(scenarios), squeeze=False, sharex="col", sharey=True)
    for column, scenario in enumerate(scenarios):
        for row_of, part in enumerate(("forget", "retain")):
            panel = panels[row_of][column]
            for place, label in enumerate(labels):
                here = [row["pairs"][part] for row in rows if (row["scenario"], row["label"]) == (scenario, label)]
                role = next(row["role"] for row in rows if row["label"] == label)
                if here:  # else it diverged
                    _cloud(panel, np.concatenate(here), len(labels) - 1 - place, _colour(role, place - 1))
            panel.set_yticks(range(len(labels)), labels[::-1])
            panel.set_title(f"{scenario}: {part} pairs")
        panels[1][column].set_xlabel("cosine of image and caption")
        panels[1][column].locator_params(axis="x", nbins=4)
    return figure


def _cloud(panel: Axes, values: np.ndarray, height: float, colour: str) -> None:
    points = np.linspace(values.min(), values.max(), 120)
    width = max(1.06 * values.std() * len(values) ** -0.2, 1e-3)
    density = np.exp(-0.5 * ((points[:, None] - values) / width) ** 2).mean(axis=1)
    panel.fill_between(
        points, height + 0.08, height + 0.08 + 0.5 * density / density.max(), color=colour, alpha=0.6, lw=0
    )
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
    panel.plot([low, high], [height, height], color=colour, linewidth=4, solid_capstyle="butt")
    panel.plot([middle], [height], marker="|", color="white", markersize=5, markeredgewidth=1.5)
    scatter = height - 0.14 - 0.14 * np.random.default_rng(0).random(len(values))
    panel.plot(values, scatter, ".", color=colour, markersize=1.2, alpha=0.5)


def subspaces(results: Mapping[str, Any]) -> Figure:
    """How alike the clients' update subspaces are, and the principal angles of five pairs, in each side's most
    entangled block."""
    overlaps = results["subspaces"][0]["overlap"]
    by_side = [[overlap for overlap in overlaps if overlap["modality"] == side] for side in ("image", "text")]
    chosen = [max(side, key=mean_similarity) for side in by_side if side]
    figure = Figure(figsize=(2 * COLUMN_INCHES, 2.6 * len(chosen)), layout="constrained")
    panels = figure.subplots(len(chosen), 2, squeeze=False)
    for (heat, angles), overlap in zip(panels, chosen, strict=True):
        similarity, clients = similarities(overlap), overlap["clients"]
        image = heat.imshow(np.where(np.eye(len(clients)), np.nan, similarity), cmap="viridis", vmin=0)
        heat.set_xticks(range(len(clients)), clients)
        heat.set_yticks(range(len(clients)), clients)
        heat.set(
            title=f"{overlap['block'].replace('.tower.blocks', '')}\nmean similarity {mean_similarity(overlap):.2f}"
        )
        heat.set(xlabel="client", ylabel="client")
        heat.spines[:].set_visible(False)
        figure.colorbar(image, ax=heat, label="mean cosine")
        for number, (i, j) in enumerate(representative_pairs(similarity)):
            spectrum = np.degrees(np.arccos(np.clip(overlap["cosines"][i][j], 0, 1)))
            style: dict[str, Any] = {"color": COLOURS[number], "marker": MARKERS[number]}
            angles.plot(range(1, len(spectrum) + 1), spectrum, label=f"{clients[i]} and {clients[j]}", **style)
        angles.set(title="principal angles of five pairs", xlabel="direction", ylabel="degrees", ylim=(-3, 93))
        angles.set_yticks([0, 30, 60, 90])
        angles.legend(title="clients", title_fontsize=7, loc="lower right")
    return figure


def representative_pairs(similarity: np.ndarray, count: int = 5) -> list[tuple[int, int]]:
    """Pairs of clients from the most to the least alike, at even ranks."""
    pairs = [(i, j) for i in range(len(similarity)) for j in range(i + 1, len(similarity))]
    pairs.sort(key=lambda pair: -similarity[pair])
    ranks = np.linspace(0, len(pairs) - 1, min(count, len(pairs))).round().astype(int)
    return [pairs[rank] for rank in ranks]


DRAWN: dict[str, Callable[[Mapping[str, Any]], Figure]] = {
    "curves": curves,
    "grid": grid,
    "tradeoff": tradeoff,
    "bars": bars,
    "raincloud": raincloud,
    "subspaces": subspaces,
}


def _panels(count: int, height: float) -> tuple[Figure, Sequence[Axes]]:
    figure = Figure(figsize=(PANEL_INCHES * count + 0.3, height + 0.5), layout="constrained")
    return figure, figure.subplots(1, count, squeeze=False)[0]


def _legend(figure: Figure, handles: Sequence[Any], labels: Sequence[str]) -> None:
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 5 if len(figure.axes) > 1 else 3))


def _colour(role: str, number: int) -> str:
    return FIXED.get(role) or COLOURS[number % len(COLOURS)]


def _mean(line: Line, key: str) -> float:
    """Not a number where every seed diverged, which leaves a gap in the figure."""
    return statistics.mean(line.values(key).values()) if line.values(key) else math.nan


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0
