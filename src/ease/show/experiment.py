"""An experiment on the report page: who came nearest to retraining, its figure, and its tables."""

import base64
from collections.abc import Iterator, Sequence
from statistics import fmean

from markupsafe import Markup

from ease.show.figures import CAPTIONS, draw, encode
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
from ease.show.template import render
from ease.studies.records import BenchResults

RANK = RETAIN[-1]
"""The column that methods are ranked by."""


def experiment_section(results: BenchResults) -> Markup:
    """It needs only the results."""
    found = sheets(results)
    blocks = results.subspaces[0].blocks if results.subspaces else ()
    return render(
        "experiment.html",
        results=results,
        sheets=found,
        nearest=_nearest(found),
        drawings=[(_address(encode(figure, "svg")), CAPTIONS[kind]) for kind, figure in draw(results).items()],
        notes=notes(found) if found else [],
        parts=_parts,
        overlaps=[[overlap.block, f"{mean_similarity(overlap):.3f}"] for overlap in blocks],
    )


def _nearest(found: Sequence[Sheet]) -> list[str]:
    """For each request where several methods were compared, those with the least sum of gaps."""
    compared = [sheet for sheet in found if sum(line.role == "method" for line in sheet.lines) > 1]
    return [
        f"{sheet.name}: " + ", ".join(f"{line.label} ({fmean(sheet.distance(line)):.1f})" for line in best)
        for sheet in compared
        if (best := best_of(sheet, RANK))
    ]


def _address(drawing: bytes) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(drawing).decode()


def _parts(sheet: Sheet) -> Iterator[tuple[str, list[str], list[list[Markup | str]]]]:
    """Caption, columns and rows of each table of a sheet."""
    for name, part in PRINTED.items():
        columns = columns_of(sheet, part)
        cells = [figures(sheet, column) for column in columns]
        rows = [
            [line.label + ("†" if line.tuned else ""), *(_cell(column[number]) for column in cells)]
            for number, line in enumerate(sheet.lines)
        ]
        if columns:
            titles = ["Method", *(column.title for column in columns)]
            yield f"{sheet.name}: {name[0].lower()}{name[1:]}", titles, rows


def _cell(figure: Figure | None) -> Markup | str:
    if figure is None:
        return ""
    text = figure.value + (f" ± {figure.spread}" if figure.spread else "")
    gap = Markup('<span class="gap"> ({})</span>').format(figure.note.replace("-", "−")) if figure.note else ""
    shown = Markup("<strong>{}</strong>").format(text) if figure.best else text
    return Markup("{}{}{}").format(shown, gap, "°" if figure.inside else "")
