"""Ways in a plane: hand-made ones, of which every distance is known."""

from itertools import combinations

import numpy as np
import pytest
from benchmarks.paths import flatten, paths_figure
from matplotlib.text import Annotation, Text

from ease.show.figures import encode

START = np.array([1.0, 1.0, 1.0, 0.0])


@pytest.fixture
def ways() -> dict[str, np.ndarray]:
    """Retraining goes 5 along (3, 4, 0, 0) / 5; training 2 along it and 6 across; EASE lies 7 outside of the plane."""
    along, across, out = np.array([0.6, 0.8, 0, 0]), np.array([-0.8, 0.6, 0, 0]), np.array([0.0, 0, 0, 1])
    return {
        "training": START + np.array([0 * along, along + 2 * across, 2 * along + 6 * across]),
        "retraining": START + np.array([0 * along, 5 * along]),
        "counterfactual": START + np.array([0 * along, 4 * along + across]),
        "EASE": START + np.array([4 * along + across, 5 * along + across + 7 * out]),
    }


def test_paths_are_at_their_projected_places(ways: dict[str, np.ndarray]) -> None:
    flat = flatten(ways, along="retraining", across="training")
    assert flat.places["retraining"] == pytest.approx(np.array([[0, 0], [5, 0]]))
    assert flat.places["training"] == pytest.approx(np.array([[0, 0], [1, 2], [2, 6]]))
    assert flat.places["counterfactual"] == pytest.approx(np.array([[0, 0], [4, 1]]))
    assert flat.places["EASE"] == pytest.approx(np.array([[4, 1], [5, 1]]))
    assert flat.outside == pytest.approx({"training": 0, "retraining": 0, "counterfactual": 0, "EASE": 7}, abs=1e-12)


def test_the_figure_names_every_way_in_both_panels_without_touching(ways: dict[str, np.ndarray]) -> None:
    figure = paths_figure(flatten(ways, along="retraining", across="training"), "without client 8")
    figure.draw_without_rendering()
    for panel in figure.axes:
        names = [text for text in panel.texts if isinstance(text, Annotation)]
        assert [text.get_text() for text in names] == list(ways)
        boxes = [Text.get_window_extent(text) for text in names]
        assert not any(one.overlaps(two) for one, two in combinations(boxes, 2))
        assert np.ptp(panel.get_xlim()) == pytest.approx(np.ptp(panel.get_ylim()))
    assert encode(figure, "svg") == encode(figure, "svg")
