"""Where single pairs stand in their galleries, against naive counts."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

from ease.audit.few_pairs import standing_measures
from ease.audit.statistic import statistics
from ease.measures.ranks import Standing, standing


def drawn(pairs: int, size: int, captions: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(pairs + size)
    meaning = torch.randn(pairs, size, 8, generator=rng)
    image = meaning + torch.randn(pairs, size, 8, generator=rng)
    text = meaning[:, :, None] + torch.randn(pairs, size, captions, 8, generator=rng)
    return normalize(image, dim=-1), normalize(text, dim=-1)


def test_ranks_and_margins_by_counting() -> None:
    """A picture asks for the best caption of each pair, a caption asks for a picture; both directions weigh alike."""
    images, texts = drawn(3, 15, 4)
    found = standing(images, texts)
    for place, (image, text) in enumerate(zip(images.double(), texts.double(), strict=True)):
        best = [max(float(image[0] @ caption) for caption in captions) for captions in text]
        log_ranks, margins = [np.log(1 + sum(other > best[0] for other in best[1:]))], [best[0] - max(best[1:])]
        asked = [[float(caption @ picture) for picture in image] for caption in text[0]]
        log_ranks.append(np.mean([np.log(1 + sum(other > row[0] for other in row[1:])) for row in asked]))
        margins.append(np.mean([row[0] - max(row[1:]) for row in asked]))
        assert found.rank[place] == pytest.approx(np.exp(np.mean(log_ranks)))
        assert found.margin[place] == pytest.approx(np.mean(margins))
    assert found.rank.max() > 1, "some pair is not found at once"


def test_a_collapsed_model_has_the_middle_rank_and_a_perfect_one_the_first() -> None:
    same = torch.zeros(1, 9, 4)
    same[..., 0] = 1.0
    found = standing(same, same[:, :, None].expand(1, 9, 2, 4))
    assert found.rank.tolist() == [pytest.approx(5.0)] and found.margin.tolist() == [0.0]
    own = torch.eye(4)[None]
    found = standing(own, own[:, :, None])
    assert found.rank.tolist() == [1.0] and found.margin.tolist() == [1.0]


def test_measures_are_means_over_pairs_and_know_what_one_pair_may_do() -> None:
    """Ranks 1 and 16 are 0 and 4 as logarithms; one direction of one of two pairs off by an octave is a quarter."""
    models = ("unlearned", "trained", "retrain", "retrain-1")
    stand = {name: Standing(np.array([1.0, 16.0]), np.array([0.1, -0.3])) for name in models}
    log_odds = {name: np.array([-1.0, -4.0]) for name in models}
    rank, margin, level = standing_measures(stand, log_odds, 50, 16, 0.07)
    assert (rank.value, margin.value, level.value) == (2.0, pytest.approx(-0.1), -2.5)
    assert rank.resolution == 0.25 and rank.signed and margin.signed and level.signed
    assert [each.title for each in (rank, margin, level)] == [
        "rank in its gallery, log2",
        "similarity margin",
        "log-odds",
    ]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(2, 5), st.integers(2, 12), st.floats(0.01, 1.0), st.integers(0, 99))
def test_no_band_of_few_pairs_leaves_what_its_measure_can_be(
    pairs: int, models: int, size: int, temperature: float, seed: int
) -> None:
    """Of models drawn without rule; two of them make bands of 22 deviations."""
    rng, names = torch.Generator().manual_seed(seed), ["unlearned", "trained", "retrain"]
    names += [f"retrain-{order}" for order in range(1, models)]
    stand, odds = {}, {}
    for name in names:
        image, text = (
            normalize(torch.randn(*shape, 3, generator=rng), dim=-1) for shape in ((pairs, size), (pairs, size, 2))
        )
        pool = normalize(torch.randn(2, 16, 3, generator=rng), dim=-1)
        stand[name] = standing(image, text)
        odds[name] = statistics(image[:, 0], text[:, 0], pool[0], pool[1], temperature)["log_odds"]
    rank, margin, level = standing_measures(stand, odds, size, 16, temperature)
    middle, reach = -np.log(16), 2 / temperature
    for measure, least, most in ((rank, 0, np.log2(size)), (margin, -2, 2), (level, middle - reach, middle + reach)):
        assert measure.band is not None and measure.band.low is not None
        assert least - 1e-9 <= measure.band.low <= measure.band.high <= most + 1e-9
        assert all(least - 1e-6 <= value <= most + 1e-6 for value in (measure.value, *measure.retrained))
