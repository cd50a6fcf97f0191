"""Where single pairs stand in a real gallery: unseen pairs of their own kind, each pair in a gallery of its own."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ease.audit.verdict import Measure

FEW = 8
"""Fewer pairs than this are looked at one by one: what compares many pairs says little of them."""


@dataclass(frozen=True)
class Standing:
    """Of each pair [n] under one model."""

    rank: np.ndarray
    """In its gallery, 1 is found at once: the geometric mean over its picture and its captions as queries."""
    margin: np.ndarray
    """How much more similar its picture and captions are to each other than to the nearest of the others."""


def standing(image: Tensor, text: Tensor) -> Standing:
    """Of the first pair of each gallery, image [n, size, d] and text [n, size, captions, d].

    A picture finds a pair by the best of its captions. Ties count half, so that a collapsed model has the middle rank.
    """
    image, text = image.double(), text.double()
    to_text = torch.einsum("nd,nscd->nsc", image[:, 0], text).amax(2)[:, None]
    to_image = torch.einsum("ncd,nsd->ncs", text[:, 0], image)
    ranks, margins = zip(*(_queries(scores) for scores in (to_text, to_image)), strict=True)
    return Standing(
        rank=torch.stack(ranks).mean(0).exp().numpy(),
        margin=torch.stack(margins).mean(0).numpy(),
    )


def _queries(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Mean log rank and mean margin [n] of the first item over queries, scores [n, queries, items]."""
    own, others = scores[..., :1], scores[..., 1:]
    ranks = 1 + (others > own).sum(-1) + (others == own).sum(-1) / 2
    return ranks.double().log().mean(1), (own.squeeze(-1) - others.amax(-1)).mean(1)


def standing_measures(
    found: Mapping[str, Standing], log_odds: Mapping[str, np.ndarray], gallery: int, pool: int, temperature: float
) -> list[Measure]:
    """Means over the pairs, model by model, each in a gallery and against a pool of so many pairs.

    Ranks as logarithms: one place among the first says as much as many among the last. One direction of one pair may
    always be an octave off. Bands end where cosines do: margins at 2, and log-odds at 2 / temperature from what a pool
    of pairs all alike would give.
    """
    pairs = len(next(iter(log_odds.values())))
    ranks = {name: float(np.log2(each.rank).mean()) for name, each in found.items()}
    margins = {name: float(each.margin.mean()) for name, each in found.items()}
    levels = {name: float(each.mean()) for name, each in log_odds.items()}
    last, alike, reach = float(np.log2(gallery)), -float(np.log(pool)), 2 / temperature
    return [
        Measure.of("pair/rank", ranks, 0.5 / pairs, "0 is the first place, 1 the second, 2 the fourth", (0, last)),
        Measure.of(
            "pair/margin", margins, note="similarity to the own partner less that to the nearest other", limits=(-2, 2)
        ),
        Measure.of(
            "pair/log_odds",
            levels,
            note="of being partners, against the pool",
            limits=(alike - reach, alike + reach),
        ),
    ]
