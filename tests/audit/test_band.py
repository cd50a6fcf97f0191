"""The band of retrained models: a prediction interval, checked by simulation and by hand."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ease.audit.band import prediction_band, reach
from ease.seeding import generator


@pytest.mark.parametrize("at_most", [False, True])
@pytest.mark.parametrize("models", [3, 4, 8])
def test_a_further_model_falls_inside_95_times_of_100(models: int, at_most: bool) -> None:
    """4000 worlds: the standard error of the share is 0.34 points, so 1.4 points are four of them."""
    draws = generator(models, "band").normal(7, 3, (4000, models + 1))
    bands = [prediction_band(list(known), at_most) for *known, _ in draws]
    inside = [band is not None and band.contains(further) for band, further in zip(bands, draws[:, -1], strict=True)]
    assert np.mean(inside) == pytest.approx(0.95, abs=0.014)


def test_the_range_of_those_at_hand_is_too_narrow() -> None:
    """Of n + 1 equal models the last is the smallest or the largest in 2 of n + 1 cases: 2 of 5 for four."""
    draws = generator(0, "range").normal(size=(4000, 5))
    outside = (draws[:, -1] < draws[:, :-1].min(1)) | (draws[:, -1] > draws[:, :-1].max(1))
    assert outside.mean() == pytest.approx(0.4, abs=0.03)


def test_two_models_by_hand() -> None:
    """Of 1 and 3: mean 2, deviation sqrt 2, t(0.975, 1) = 12.706; the reach is 12.706 sqrt(3/2) sqrt 2 = 22.01."""
    band = prediction_band([1.0, 3.0])
    assert band is not None and band.models == 2
    assert (band.low, band.high) == (pytest.approx(2 - 22.008, abs=0.01), pytest.approx(2 + 22.008, abs=0.01))
    assert reach(2) == pytest.approx(12.7062 * math.sqrt(1.5), abs=1e-3)


def test_at_most_is_open_below_and_closer_above() -> None:
    band, both = prediction_band([1.0, 2.0, 4.0], at_most=True), prediction_band([1.0, 2.0, 4.0])
    assert band is not None and both is not None
    assert band.low is None and band.contains(-1e9)
    assert 4 < band.high < both.high and not band.contains(band.high + 1e-9)


@pytest.mark.parametrize("values", [[], [1.0]])
def test_fewer_than_two_make_no_band(values: list[float]) -> None:
    assert prediction_band(values) is None


def test_equal_models_make_a_band_of_one_point() -> None:
    band = prediction_band([2.0, 2.0, 2.0])
    assert band is not None and band.contains(2.0) and not band.contains(2.0001)


def test_models_that_agree_are_not_taken_to_agree_for_ever() -> None:
    """Four times 0 of 100 pairs found: one of 100 more is no finding. t(0.975, 3) = 3.182, times 0.01 · sqrt(1.25)."""
    band = prediction_band([0.0, 0.0, 0.0, 0.0], resolution=0.01)
    assert band is not None and band.high == pytest.approx(0.03558, rel=1e-3) and band.contains(0.01)


@given(
    st.lists(st.floats(0, 1), min_size=2, max_size=6),
    st.sampled_from([(0.0, 1.0), (0.0, 100.0), (-2.0, 2.0), (0.0, math.inf)]),
    st.integers(1, 7),
    st.booleans(),
)
def test_no_band_leaves_what_a_measure_can_be_and_each_holds_the_mean(
    shares: list[float], limits: tuple[float, float], pairs: int, at_most: bool
) -> None:
    """Recalls of -0.6 or 107 were seen with few pairs and few models."""
    least, most = limits
    top = most if math.isfinite(most) else 50.0
    values = [least + share * (top - least) for share in shares]
    band = prediction_band(values, at_most, (top - least) / pairs, limits)
    assert band is not None and band.high <= most
    assert band.low is None if at_most else least <= band.low <= band.high
    assert band.contains(min(max(float(np.mean(values)), least), most))
