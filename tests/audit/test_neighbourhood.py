"""Neighbourhood probes: other pictures and captions, the same numbers where nothing is changed."""

import numpy as np
import pytest

from ease.audit.neighbourhood import Neighbours, cropped, shortened
from ease.audit.relative import relative_test
from ease.audit.statistic import Gauge


@pytest.fixture(scope="module")
def places(learnt) -> tuple[np.ndarray, np.ndarray]:
    """Positions of forget pairs and of the pool."""
    return learnt.world.shards[1].train, learnt.world.evaluator.test


def test_unchanged_neighbours_are_the_pairs_themselves(learnt, places) -> None:
    """A whole picture and a whole caption, read through the same towers as the cached activations."""
    world, (forget, pool) = learnt.world, places
    same = Neighbours.of(world, forget, pool, crop=1.0, words=1.0)
    server = world.server
    gauge = Gauge(server.model, world.evaluator.activations, pool, world.config.model.temperature, server.device)
    expected = gauge.read(learnt.trained.final, forget)["log_odds"]
    np.testing.assert_allclose(same.log_odds(learnt.trained.final), expected, rtol=1e-3, atol=1e-3)


def test_a_model_that_forgot_too_much_knows_the_neighbours_less(learnt, places) -> None:
    """Between retrained models and beyond them, on the line away from the trained one."""
    neighbours, trained = Neighbours.of(learnt.world, *places), learnt.trained
    rng = np.random.default_rng(0)
    start = neighbours.log_odds(trained.initial)
    odds = {f"retrain-{n}": start + 0.05 * rng.standard_normal(len(start)) for n in range(4)}
    odds["trained"] = neighbours.log_odds(trained.final)
    below = 2 * start - odds["trained"]
    found = relative_test({**odds, "unlearned": below})
    assert found is not None and found.share.high < -0.5
    known = relative_test({**odds, "unlearned": odds["trained"]})
    assert known is not None and known.closer == "trained"


def test_crops_and_shortened_captions() -> None:
    rng = np.random.default_rng(0)
    picture = rng.integers(0, 256, (20, 20, 3), dtype=np.uint8)
    assert np.array_equal(cropped(picture, 1.0, rng), picture)
    other = cropped(picture, 0.8, rng)
    assert other.shape == picture.shape and not np.array_equal(other, picture)
    assert shortened("a red kite over the sea", 1.0, rng) == "a red kite over the sea"
    fewer = shortened("a red kite over the sea", 0.5, rng).split()
    assert len(fewer) == 3 and [word for word in ["a", "red", "kite", "over", "the", "sea"] if word in fewer] == fewer
    assert shortened("", 0.5, rng) == "" and shortened("kite", 0.1, rng) == "kite"
