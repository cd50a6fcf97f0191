"""The rules that combine the changes of a round: the mean, and rules that a few hostile clients cannot move far."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median_low
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from ease.federation.protocol import Update
from ease.params import Params, weighted_mean

FEWEST = 3
"""Fewer updates do not show which one is the outlier, so every rule is the mean."""


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


Changes = Sequence[tuple[float, Params]]
"""The clients' changes of the parameters with their weights, in the order of clients."""


def trimmed_mean(changes: Changes, cut: int) -> Params:
    """The mean of each value without the `cut` smallest and the `cut` largest.

    Every client counts once, because its weight is only a claim.
    """
    first, count = changes[0][1], len(changes)

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


def median(changes: Changes, hostile: int) -> Params:
    """The middle of each value, whatever the weights."""
    return trimmed_mean(changes, (len(changes) - 1) // 2)


def multi_krum(changes: Changes, hostile: int) -> Params:
    """The weighted mean of the changes whose nearest neighbours are near (Blanchard et al., 2017)."""
    return weighted_mean([changes[place] for place in krum([change for _, change in changes], hostile)])


def mean(changes: Changes, hostile: int) -> Params:
    """The weighted mean, which a single client can move anywhere."""
    return weighted_mean(changes)


Rule = Callable[[Changes, int], Params]
"""One change from those of a round, of which as many as the second argument may be anything."""
RULES: dict[str, Rule] = {
    "mean": mean,
    "median": median,
    "trimmed": trimmed_mean,
    "krum": multi_krum,
}
"""The choices of `training.aggregation`."""
if TYPE_CHECKING:
    Aggregation = str
else:
    Aggregation = Literal[*RULES]


def aggregated(changes: Changes, rule: Aggregation = "mean", hostile: float = 0.2) -> Params:
    """One change from weighted ones, by the rule of this name; `hostile` is the share of them that may be anything."""
    if len(changes) < FEWEST:
        return weighted_mean(changes)
    return RULES[rule](changes, min(math.ceil(hostile * len(changes)), (len(changes) - 1) // 2))
