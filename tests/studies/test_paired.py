"""Paired differences: means by hand, and intervals that cover what they should."""

import numpy as np
import pytest

from ease.studies.paired import Unit, differences


def test_only_requests_that_both_answered_count() -> None:
    """Of units 1 and 2 the differences are 3 and 5; unit 3 has no partner. Two are too few for an interval."""
    ours = {(0, "client"): 1.0, (1, "client"): 2.0}
    theirs = {(0, "client"): 4.0, (1, "client"): 7.0, (2, "client"): 99.0}
    (found,) = differences({"ours": ours, "theirs": theirs}, "ours")
    assert (found.method, found.mean, found.units, found.seeds) == ("theirs", 4.0, 2, 2)
    assert found.low is None and not found.clear


def test_equal_differences_have_an_interval_of_one_point() -> None:
    ours = {(seed, name): float(seed) for seed in range(3) for name in ("client", "class")}
    theirs = {unit: value + 2 for unit, value in ours.items()}
    (found,) = differences({"ours": ours, "theirs": theirs}, "ours")
    assert (found.mean, found.low, found.high, found.clear) == (2, 2, 2, True)


def test_effects_shared_by_seeds_widen_the_interval() -> None:
    """Ten requests of each of four seeds that differ by seed alone: there are four things to resample, not forty."""
    shift = np.array([0.0, 2.0, 4.0, 6.0])
    by_seed: dict[Unit, float] = {(seed, str(n)): float(shift[seed]) for seed in range(4) for n in range(10)}
    alone: dict[Unit, float] = {(0, str(n)): float(shift[n % 4]) for n in range(40)}
    ends = []
    for values in (by_seed, alone):
        (found,) = differences({"ours": dict.fromkeys(values, 0.0), "theirs": values}, "ours")
        assert found.mean == 3 and found.low is not None and found.high is not None
        ends.append(found.high - found.low)
    assert ends[0] == pytest.approx(2 * 1.96 * np.sqrt(5 / 4), rel=0.15)
    assert ends[1] < ends[0] / 2


@pytest.mark.slow
def test_intervals_cover_the_truth() -> None:
    """Twelve seeds of one request: nineteen of twenty intervals, or a little fewer."""
    rng, covered, trials = np.random.default_rng(0), 0, 200
    for _ in range(trials):
        values: dict[Unit, float] = {(seed, "client"): float(rng.normal(1)) for seed in range(12)}
        (found,) = differences({"ours": dict.fromkeys(values, 0.0), "theirs": values}, "ours")
        assert found.low is not None and found.high is not None
        covered += found.low <= 1 <= found.high
    assert 0.86 <= covered / trials <= 0.99
