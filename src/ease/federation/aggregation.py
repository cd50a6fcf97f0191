"""How the changes of a round become one: the mean, or means that a few hostile clients cannot move far."""

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import median_low
from typing import Literal

import torch
from torch import Tensor

from ease.federation.protocol import Update
from ease.params import Params, weighted_mean

Aggregation = Literal["mean", "median", "trimmed", "krum"]
FEWEST = 3
"""Of fewer updates no one can say which is the odd one."""


def clipped(
    updates: Sequence[Update], norms: Sequence[float], multiple: float, weights: Sequence[float]
) -> tuple[list[Update], dict[int, float]]:
    """Updates no longer than a multiple of the median of their norms, and by which factor some were shortened.

    Who has more pairs than the median client makes more steps in a round, and may go as much further. A few pairs are
    soon fitted, and their steps are long and of little weight: who weighs less may go further by as much.
    """
    if len(updates) < FEWEST:
        return list(updates), {}
    usual, pairs, weight = median_low(norms), median_low([update.pairs for update in updates]), median_low(weights)
    kept, factors = [], {}
    for update, norm, own in zip(updates, norms, weights, strict=True):
        most = multiple * usual * max(1.0, update.pairs / pairs, weight / own)
        if norm > most:
            factors[update.client] = most / norm
            update = replace(update, delta=update.change.within(most))
        kept.append(update)
    return kept, factors


def aggregated(changes: Sequence[tuple[float, Params]], rule: Aggregation = "mean", hostile: float = 0.2) -> Params:
    """One change from weighted ones, in the order given; `hostile` is the share of them that may be anything.

    `mean` weighs them. `median` and `trimmed` go value by value and count every client once, for a weight is a claim:
    the middle value, or the mean without the share at either end. `krum` (multi-Krum) leaves out the share whose
    nearest neighbours are farthest, and weighs the rest.
    """
    count = len(changes)
    outside = min(math.ceil(hostile * count), (count - 1) // 2)
    if rule == "mean" or count < FEWEST:
        return weighted_mean(changes)
    if rule == "krum":
        return weighted_mean([changes[place] for place in krum([change for _, change in changes], outside)])
    cut = (count - 1) // 2 if rule == "median" else outside
    first = changes[0][1]

    def middle(name: str) -> Tensor:
        ordered = torch.stack([change[name].double() for _, change in changes]).sort(dim=0).values
        return ordered[cut : count - cut].mean(0).to(first[name].dtype)

    return Params({name: middle(name) for name in first.tensors}, first.blocks)


def krum(changes: Sequence[Params], hostile: int) -> list[int]:
    """Places of the changes that stay when as many as `hostile` go: those with the smallest scores.

    The score is the sum of squared distances to the nearest n - hostile - 2 others.
    """
    count = len(changes)
    products = torch.zeros(count, count, dtype=torch.float64)
    for name in changes[0].tensors:
        rows = torch.stack([change[name].double().flatten() for change in changes])
        products += rows @ rows.T
    lengths = products.diagonal()
    distances = (lengths[:, None] + lengths[None] - 2 * products).clamp_min(0).fill_diagonal_(torch.inf)
    nearest = distances.sort(dim=1).values[:, : max(1, count - hostile - 2)]
    order = nearest.sum(1).argsort(stable=True).tolist()
    return sorted(order[: count - hostile])
