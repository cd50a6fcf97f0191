"""Names beside points of a figure, each where it touches nothing else.

Written by hand because figures must be the same bytes each time; by default adjustText stops after a second.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.axes import Axes

Box = tuple[float, float, float, float]
"""Left, bottom, right, top, in points."""
Segment = tuple[tuple[float, float], tuple[float, float]]

AWAY = (8, 12, 17, 23, 30, 38, 47, 57, 68, 80, 95)
"""Distances of a name from its point that are tried, in points."""
DIRECTIONS = 16
AIR = 1.5
"""Points between a name and anything else."""
MARK = 4.0
"""Half the width of a mark, in points."""


@dataclass(frozen=True)
class Name:
    """A label: its text, its place and its style."""

    text: str
    at: tuple[float, float]
    style: dict[str, Any]
    """Style of the letters."""
    tie: str = "black"
    """Colour of the line between both."""


def write_names(panel: Axes, names: Sequence[Name], lines: Sequence[Sequence[tuple[float, float]]]) -> None:
    """Write each name near its place and tie it to it, off all lines, their points and the names before it.

    The figure's layout must be final: a place on the page is computed from it.
    """
    figure: Any = panel.figure
    scale = 72 / figure.dpi
    x0, y0, x1, y1 = panel.get_window_extent().extents * scale
    inside = (x0 + AIR, y0 + AIR, x1 - AIR, y1 - AIR)
    drawn = [[tuple(point) for point in panel.transData.transform(line) * scale] for line in map(np.asarray, lines)]
    segments = [(one, two) for line in drawn for one, two in pairwise(line)]
    marks = [(x - MARK, y - MARK, x + MARK, y + MARK) for line in drawn for x, y in line]
    taken: list[Box] = []
    for name in names:
        text = panel.text(*name.at, name.text, **name.style)
        width, height = text.get_window_extent().size * scale
        text.remove()
        x, y = panel.transData.transform(name.at) * scale
        place = min(
            _around(x, y, width, height),
            key=lambda box: _crowd(box, (x, y), inside, taken, marks, segments),
        )
        taken.append(place)
        middle = (place[0] + place[2]) / 2 - x, (place[1] + place[3]) / 2 - y
        panel.annotate(
            name.text,
            name.at,
            middle,
            textcoords="offset points",
            ha="center",
            va="center",
            arrowprops={
                "arrowstyle": "-",
                "color": name.tie,
                "linewidth": 0.5,
                "shrinkB": MARK,
            },
            zorder=6,
            **name.style,
        )


def _around(x: float, y: float, width: float, height: float) -> Iterator[Box]:
    """Boxes around a place, the nearest first: of equals `min` takes the first."""
    for away in AWAY:
        for number in range(DIRECTIONS):
            angle = 2 * math.pi * number / DIRECTIONS
            # The near edge, not the middle, is so far away: a long name begins beside its point.
            left = x + away * math.cos(angle) + (math.cos(angle) - 1) * width / 2
            bottom = y + away * math.sin(angle) + (math.sin(angle) - 1) * height / 2
            yield left, bottom, left + width, bottom + height


def _crowd(
    box: Box,
    point: tuple[float, float],
    inside: Box,
    taken: Sequence[Box],
    marks: Sequence[Box],
    segments: Sequence[Segment],
) -> int:
    """How much a name would touch in a place; another name is worst, and leaving the panel no better."""
    wide = (box[0] - AIR, box[1] - AIR, box[2] + AIR, box[3] + AIR)
    outside = box[0] < inside[0] or box[1] < inside[1] or box[2] > inside[2] or box[3] > inside[3]
    string = point, ((box[0] + box[2]) / 2, (box[1] + box[3]) / 2)
    return (
        100 * (outside + sum(overlap(wide, other) for other in taken))
        + 20 * sum(crosses(string, other) for other in taken)
        + 5 * sum(overlap(wide, mark) for mark in marks)
        + 3 * sum(crosses(segment, wide) for segment in segments)
    )


def overlap(one: Box, two: Box) -> bool:
    return one[0] < two[2] and two[0] < one[2] and one[1] < two[3] and two[1] < one[3]


def crosses(segment: Segment, box: Box) -> bool:
    """Whether a line passes through a box: the part of it between the box's sides is not empty (Liang and Barsky)."""
    (x, y), (to_x, to_y) = segment
    first, last = 0.0, 1.0
    for start, end, low, high in ((x, to_x, box[0], box[2]), (y, to_y, box[1], box[3])):
        way = end - start
        if way == 0:
            if not low < start < high:
                return False
            continue
        enter, leave = sorted(((low - start) / way, (high - start) / way))
        first, last = max(first, enter), min(last, leave)
    return first < last
