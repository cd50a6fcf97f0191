"""The statistic of a pair against naive loops: it depends on the pair, the model and the fixed pool alone."""

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from ease.audit.statistic import STATISTICS, Gauge, features, statistics
from ease.errors import UserError

TEMPERATURE = 0.2


def embeddings(pairs: int, captions: int, pool: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    rng = torch.Generator().manual_seed(seed)
    shapes = [(pairs, 6), (pairs, captions, 6), (pool, 6), (pool, 6)]
    return tuple(normalize(torch.randn(shape, generator=rng), dim=-1) for shape in shapes)


def naive(image, text, pool_image, pool_text) -> dict[str, list[float]]:
    """One pair, one caption and one pool item at a time, in Python's floats."""

    def scaled(a, b) -> float:
        return sum(float(x) * float(y) for x, y in zip(a, b, strict=True)) / TEMPERATURE

    found: dict[str, list[float]] = {name: [] for name in STATISTICS}
    for picture, captions in zip(image, text, strict=True):
        each: dict[str, list[float]] = {name: [] for name in STATISTICS}
        for caption in captions:
            own = scaled(picture, caption)
            to_text = [math.exp(scaled(picture, other)) for other in pool_text]
            to_image = [math.exp(scaled(other, caption)) for other in pool_image]
            each["log_odds"].append(own - (math.log(sum(to_text)) + math.log(sum(to_image))) / 2)
            each["cosine"].append(own * TEMPERATURE)
            shares = [math.exp(own) / (math.exp(own) + sum(others)) for others in (to_text, to_image)]
            each["loss"].append(-sum(map(math.log, shares)) / 2)
        for name, values in each.items():
            found[name].append(sum(values) / len(values))
    return found


@pytest.mark.parametrize("captions", [1, 5])
def test_every_statistic_is_the_naive_loop_averaged_over_captions(captions: int) -> None:
    world = embeddings(7, captions, 11)
    found, expected = statistics(*world, TEMPERATURE), naive(*world)
    assert list(found) == list(STATISTICS)
    for name in STATISTICS:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-6)


def test_two_pairs_by_hand() -> None:
    """Image = caption = e1, pool e2 both ways, temperature 1: s = 1, logsumexp = 0; log-odds 1, loss ln(1 + 1/e)."""
    first, second = torch.eye(2)[:1], torch.eye(2)[1:]
    found = statistics(first, first[:, None], second, second, 1.0)
    assert found["log_odds"] == pytest.approx([1.0])
    assert found["cosine"] == pytest.approx([1.0])
    assert found["loss"] == pytest.approx([math.log(1 + math.exp(-1))])


def test_stronger_memorisation_scores_higher_except_for_the_loss() -> None:
    image, text, pool_image, pool_text = embeddings(20, 5, 30)
    nearer = normalize(text + image[:, None], dim=-1)
    before, after = (statistics(image, each, pool_image, pool_text, TEMPERATURE) for each in (text, nearer))
    assert (after["log_odds"] > before["log_odds"]).all() and (after["cosine"] > before["cosine"]).all()
    assert (after["loss"] < before["loss"]).all()


def test_one_broken_embedding_is_refused() -> None:
    image, text, pool_image, pool_text = embeddings(4, 2, 5)
    for broken in (math.nan, math.inf):
        spoilt = image.clone()
        spoilt[1, 0] = broken
        with pytest.raises(UserError, match="not finite: the model diverged"):
            statistics(spoilt, text, pool_image, pool_text, TEMPERATURE)


def test_features_are_concatenated() -> None:
    read = {name: np.full((2, 3), number) for number, name in enumerate(STATISTICS)}
    assert features(read).shape == (2, 3, 3)
    assert features(read)[0, 0].tolist() == [0, 1, 2]


# --- the gauge ---


@pytest.fixture(scope="module")
def gauge(world) -> Gauge:
    return Gauge(
        world.server.model,
        world.evaluator.activations,
        world.evaluator.pairs.indices("test"),
        TEMPERATURE,
        world.server.device,
    )


def test_readings_of_a_pair_do_not_depend_on_the_others(gauge, world) -> None:
    """In-batch negatives would make it depend on the company, and so on the company's membership."""
    state, train = world.server.initial(), world.evaluator.pairs.indices("train")
    together = gauge.read(state, train)
    for chosen in ([3], [3, 40, 7], list(range(59, -1, -1))):
        alone = gauge.read(state, train[chosen])
        for name in STATISTICS:
            np.testing.assert_allclose(alone[name], together[name][chosen], rtol=1e-5, atol=1e-6)


def test_the_pool_is_the_one_given_and_each_of_its_pairs_counts(gauge, world) -> None:
    state, train = world.server.initial(), world.evaluator.pairs.indices("train")[:5]
    other = Gauge(world.server.model, world.evaluator.activations, gauge.pool[:-1], TEMPERATURE, world.server.device)
    full, fewer = gauge.read(state, train), other.read(state, train)
    assert (full["log_odds"] < fewer["log_odds"]).all()
    np.testing.assert_array_equal(full["cosine"], fewer["cosine"])


def test_a_diverged_state_is_refused(gauge, world) -> None:
    state = world.server.initial().map(lambda tensor: torch.full_like(tensor, torch.nan))
    with pytest.raises(UserError, match="not finite"):
        gauge.read(state, world.evaluator.pairs.indices("train")[:3])
