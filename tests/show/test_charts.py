"""Numbers become the right places and the right words."""

import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ease.audit.band import Band
from ease.audit.records import RocPoints
from ease.audit.verdict import Measure
from ease.runs.records import BlockNotes
from ease.show.charts import (
    MOST_DOTS,
    band_picture,
    density,
    forget_energy,
    raincloud,
    retain_damage,
    roc_chart,
    rounds_chart,
)
from ease.show.svg import Scale, spanning

COUNTS = {"forget_directions": 3, "retain_directions": 3, "excised": 2, "forget_energy": 0.7, "retain_damage": 0.2}
BLOCKS = [
    BlockNotes(block="a", cosines=(0.6, 0.2), energies=(0.3, 0.6), **COUNTS),
    BlockNotes(block="b", cosines=(0.9, 0.5, 0.1), energies=(0.2, 0.3, 0.5), **COUNTS),
]


def measured(value: float, retrain: float, band: Band | None) -> Measure:
    return Measure(name="rho", value=value, retrain=retrain, before=None, band=band, retrained=(retrain,), kept=())


def numbers(markup: str, element: str, attribute: str) -> list[float]:
    return [float(x) for x in re.findall(rf'<{element} [^>]*?\b{attribute}="([-\d.]+)"', markup)]


@pytest.mark.parametrize(
    ("delta", "removed", "touched"),
    [(0.0, 0.0, 0.0), (0.1, 0.25, 0.01), (0.2, 0.55, 0.04), (0.55, 0.7, 0.25), (0.6, 0.85, 0.36), (1.0, 0.95, 0.81)],
)
def test_the_trade_off_by_hand(delta: float, removed: float, touched: float) -> None:
    """At 0.55 the first block loses 0.6 (cosine 0.2), the second 0.3 + 0.5: mean 0.7; the greatest cosine is 0.5."""
    assert forget_energy(BLOCKS, delta) == pytest.approx(removed)
    assert retain_damage(BLOCKS, delta) == pytest.approx(touched)


def test_scales_by_hand() -> None:
    assert Scale(0, 10, 100, 200)(2.5) == 125
    assert Scale(0.01, 1, 0, 100, log=True)(0.1) == pytest.approx(50)
    assert Scale(0, 1, 0, 1).ticks() == [0, 0.2, 0.4, 0.6, 0.8, 1]
    assert Scale(1e-3, 1, 0, 1, log=True).ticks() == pytest.approx([0.001, 0.01, 0.1, 1])


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_are_few_and_inside(low: float, width: float) -> None:
    scale = Scale(low, low + width, 0, 1)
    slack = width * 1e-6 + 1e-9
    assert len(scale.ticks()) <= 7
    assert all(scale.low - slack <= tick <= scale.high + slack for tick in scale.ticks())


@given(st.lists(st.floats(-1e3, 1e3), min_size=1))
def test_spanned_values_are_inside_the_scale(values: list[float]) -> None:
    scale = spanning(values, 10, 90)
    assert all(10 - 1e-6 <= scale(value) <= 90 + 1e-6 for value in values)


def test_the_dot_is_in_the_bar_exactly_when_the_value_is_in_the_band() -> None:
    for value in (19.0, 21.0, 25.0, 28.0, 40.0):
        inside = 21 <= value <= 28
        drawn = band_picture(measured(value, 24, Band(low=21, high=28, models=4)))
        [dot], [left], [width] = (
            numbers(drawn, *what) for what in (("circle", "cx"), ("rect", "x"), ("rect", "width"))
        )
        assert (left - 0.011 <= dot <= left + width + 0.011) == inside
        assert ("dot outside" in drawn) == (not inside)


def test_a_band_open_below_begins_at_the_left_edge() -> None:
    drawn = band_picture(measured(0.2, 0.1, Band(low=None, high=0.3, models=4)))
    assert numbers(drawn, "rect", "x") == [0]


def test_without_a_band_there_is_not_a_bar() -> None:
    assert "<rect" not in band_picture(measured(1, 2, None))


def test_a_density_is_the_sum_of_kernels() -> None:
    """Two far points: two equal peaks at the points, and nothing between."""
    where, height = density([0.0] * 10 + [1.0] * 10)
    assert max(height) == 1
    assert height[int(np.abs(np.array(where) - 0.5).argmin())] < 0.9
    assert height == pytest.approx(height[::-1], abs=1e-6)


def test_equal_similarities_still_have_a_cloud() -> None:
    """A collapsed model holds all pairs alike."""
    where, height = density([0.5] * 4)
    assert where[0] < 0.5 < where[-1] and all(map(math.isfinite, height))
    assert "NaN" not in raincloud({"trained": [0.5] * 4}) and "nan" not in raincloud({"trained": [0.5] * 4})


def test_a_cloud_keeps_its_ends_and_its_size() -> None:
    """Of 1000 evenly spread values at most MOST_DOTS are drawn, the smallest and the largest among them."""
    few, many = raincloud({"trained": [0.0, 1.0]}), raincloud({"trained": [i / 999 for i in range(1000)]})
    assert few.count("<circle") == 2
    assert many.count("<circle") == MOST_DOTS
    assert "median 0.50, middle half 0.25 to 0.75" in many


def test_the_band_of_recall_is_at_its_values() -> None:
    """y runs from 0 at 208 down to 100 at 34: 20 is at 173.2 and 30 at 155.8."""
    drawn = rounds_chart({"forget": [80.0, 25.0]}, {"forget": 90.0}, Band(low=20.0, high=30.0, models=4), 24.0)
    assert numbers(drawn, "rect", "y") == [155.8] and numbers(drawn, "rect", "height") == [17.4]
    assert "forget pairs from 90.0 to 25.0; retrain&#39;s forget pairs 24.0" in drawn


def test_a_roc_that_begins_at_zero_is_drawn_on_logarithmic_axes() -> None:
    """FPR 0.1 of a range from 0.01 to 1 lies in the middle of the axis, at (44 + 340) / 2 = 192."""
    drawn = roc_chart({"trained": (RocPoints(fpr=(0.0, 0.1, 1.0), tpr=(0.0, 0.01, 1.0)), 0.5)})
    assert 'd="M44.00 208.00 L192.00 208.00 L340.00 34.00" class="line trained"' in drawn
