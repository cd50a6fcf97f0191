"""Where single pairs stand in their galleries, against naive counts."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from ease.audit.standing import Standing, standing, standing_measures


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
    rank, margin, level = standing_measures(stand, log_odds)
    assert (rank.value, margin.value, level.value) == (2.0, pytest.approx(-0.1), -2.5)
    assert rank.resolution == 0.25 and rank.signed and margin.signed and level.signed
    assert [each.title for each in (rank, margin, level)] == [
        "rank in its gallery, log2",
        "similarity margin",
        "log-odds",
    ]
