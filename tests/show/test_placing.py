"""Names beside points: the geometry by hand, and a knot of points whose names all find room."""

from itertools import combinations

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text

from ease.show.placing import Name, crosses, overlap, write_names

BOX = (0.0, 0.0, 2.0, 1.0)


@pytest.mark.parametrize(
    ("segment", "through"),
    [
        (((-1.0, 0.5), (3.0, 0.5)), True),
        (((-1.0, 2.0), (3.0, 2.0)), False),
        (((1.0, -1.0), (1.0, 3.0)), True),
        (((0.5, 0.5), (0.6, 0.6)), True),  # inside
        (((-1.0, 0.0), (1.0, 2.0)), False),  # past the upper left corner
        (((-1.0, -0.5), (1.0, 0.9)), True),
        (((3.0, 0.5), (5.0, 0.5)), False),  # ends before it
    ],
)
def test_a_line_through_a_box(segment, through: bool) -> None:
    assert crosses(segment, BOX) is through
    assert crosses(segment[::-1], BOX) is through


def test_boxes_that_share_a_corner_do_not_overlap() -> None:
    assert not overlap(BOX, (2.0, 1.0, 3.0, 2.0)) and overlap(BOX, (1.9, 0.9, 3.0, 2.0))


def test_the_names_of_a_knot_find_room() -> None:
    """Ten points within a hundredth of the panel's width."""
    figure = Figure(figsize=(3, 3), dpi=100)
    panel = figure.add_axes((0.1, 0.1, 0.8, 0.8))
    panel.set(xlim=(0, 1), ylim=(0, 1))
    points = [(0.5 + 0.001 * number, 0.5) for number in range(10)]
    write_names(panel, [Name(f"method {n}", point, {"fontsize": 7}) for n, point in enumerate(points)], [points])
    figure.draw_without_rendering()
    written = [text for text in panel.texts if isinstance(text, Annotation)]
    extents = [Text.get_window_extent(text) for text in written]  # without the line to its point
    assert len(extents) == 10
    assert not any(one.overlaps(two) for one, two in combinations(extents, 2))
    frame = panel.get_window_extent()
    assert all(
        frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1 for box in extents
    )
    assert not any(box.contains(*panel.transData.transform(point)) for box in extents for point in points)
