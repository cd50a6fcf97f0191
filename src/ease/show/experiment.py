"""An experiment on the report page: who came nearest to retraining, its figure, and its tables."""

import base64
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from ease.config import validate
from ease.show.figures import CAPTIONS, draw, encode
from ease.show.markup import Markup, join, table, tag
from ease.show.records import Bench
from ease.show.tables import (
    PRINTED,
    RETAIN,
    Figure,
    Sheet,
    best_of,
    columns_of,
    figures,
    mean_similarity,
    notes,
    sheets,
)

RANK = RETAIN[-1]
"""The column that methods are ranked by."""


def experiment_section(results: Mapping[str, Any]) -> Markup:
    """From its results alone."""
    bench = validate(Bench, dict(results), "results.json")
    found = sheets(results)
    seeds = len(bench.header.experiment.seeds)
    return tag(
        "section",
        tag("h2", bench.header.title, id="experiment"),
        tag("p", tag("code", bench.header.command), f" {seeds} seed{'s' if seeds > 1 else ''}.", class_="small"),
        _nearest(found),
        *(_drawing(encode(figure, "svg"), CAPTIONS[kind]) for kind, figure in draw(results).items()),
        *(tag("p", *_with_code(note), class_="small") for note in (notes(found) if found else [])),
        *(_sheet(sheet) for sheet in found),
        _overlaps(bench) if bench.subspaces else None,
        aria_labelledby="experiment",
    )


def _with_code(note: str) -> list[Markup | str]:
    """Markdown's code marks as the page has them."""
    return [tag("code", part) if number % 2 else part for number, part in enumerate(note.split("`"))]


def _nearest(found: Sequence[Sheet]) -> Markup | None:
    """The outcome first: the method with the least sum of gaps, where several were compared."""
    compared = [sheet for sheet in found if sum(line.role == "method" for line in sheet.lines) > 1]
    if not compared:
        return None
    lines = [
        tag("span", f"{sheet.name}: ", ", ".join(f"{line.label} ({fmean(sheet.distance(line)):.1f})" for line in best))
        for sheet in compared
        if (best := best_of(sheet, RANK))
    ]
    headline = tag("strong", "Nearest to retraining, by the sum of the gaps at R@1")
    return tag("p", tag("span", headline, *lines), class_="verdict nearest")


def _drawing(content: bytes, caption: str) -> Markup:
    """A figure of the paper's size, which scrolls by itself where letters would become too small."""
    address = "data:image/svg+xml;base64," + base64.b64encode(content).decode()
    picture = tag("img", src=address, alt=caption)
    return tag(
        "figure",
        tag("div", picture, class_="wide drawn", tabindex=0, role="region", aria_label="Figure of the experiment"),
        tag("figcaption", caption),
        class_="experiment",
    )


def _sheet(sheet: Sheet) -> Markup:
    parts = [tag("h3", sheet.name)]
    for name, part in PRINTED.items():
        columns = columns_of(sheet, part)
        cells = [figures(sheet, column) for column in columns]
        rows = [
            [line.label + ("†" if line.tuned else ""), *(_cell(column[number]) for column in cells)]
            for number, line in enumerate(sheet.lines)
        ]
        if columns:
            titles = ["Method", *(column.title for column in columns)]
            parts.append(table(titles, rows, f"{sheet.name}: {name[0].lower()}{name[1:]}"))
    return join(*parts)


def _cell(figure: Figure | None) -> Markup | str:
    if figure is None:
        return ""
    text = figure.value + (f" ± {figure.spread}" if figure.spread else "")
    gap = tag("span", f" ({figure.note.replace('-', '−')})", class_="gap") if figure.note else None
    return join(tag("strong", text) if figure.best else text, gap, "°" if figure.inside else None)


def _overlaps(bench: Bench) -> Markup:
    rows = [[overlap["block"], f"{mean_similarity(overlap):.3f}"] for overlap in bench.subspaces[0]["overlap"]]
    return table(["Block", "mean similarity"], rows, "How alike the update subspaces of two clients are")
