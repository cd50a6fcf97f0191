"""Ranks of single pairs, each in its own gallery of similar unseen pairs."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

FEW = 8
"""Fewer pairs than this are looked at one by one: what compares many pairs says little of them."""


@dataclass(frozen=True)
class Standing:
    """Ranks and margins of pairs [n] under one model."""

    rank: np.ndarray
    """In its gallery, 1 is found at once: the geometric mean over its picture and its captions as queries."""
    margin: np.ndarray
    """How much more similar its picture and captions are to each other than to the nearest of the others."""


def standing(image: Tensor, text: Tensor) -> Standing:
    """Ranks of the first pair of each gallery, image [n, size, d] and text [n, size, captions, d].

    A picture finds a pair by its best caption. Ties count half, so that a collapsed model has the middle rank.
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
