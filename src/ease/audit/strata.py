"""Groups of forget pairs that a mean would hide: those of rare classes and of small clients."""

from collections import Counter
from collections.abc import Mapping

import numpy as np

from ease.audit.relative import FEWEST_PAIRS, RelativeTest, relative_test
from ease.config import Config
from ease.data.membership import Holding

SMALL = 0.25
"""Rare classes and small clients hold at most this share of all training pairs together."""
RARE, OF_SMALL = "rare classes", "small clients"


class Stratum(Config):
    """The relative test of a group of forget pairs."""

    name: str
    pairs: int
    test: RelativeTest | None
    """None with too few pairs or nothing to see."""


def strata(holdings: tuple[Holding, ...], ids: list[str]) -> dict[str, np.ndarray]:
    """Name -> which of some pairs are in the group: bool [pairs]; groups of none or all of them are left out."""
    label, client = {}, {}
    for holding in holdings:
        for pair_id, own in zip(holding.train_ids, holding.train_classes, strict=True):
            label[pair_id], client[pair_id] = own, holding.client
    rare, small = smallest(Counter(label.values())), smallest(Counter(client.values()))
    found = {
        RARE: np.array([label.get(each) in rare for each in ids], dtype=bool),
        OF_SMALL: np.array([client.get(each) in small for each in ids], dtype=bool),
    }
    return {name: mask for name, mask in found.items() if mask.any() and not mask.all()}


def smallest(counts: Mapping[int, int]) -> set[int]:
    """The smallest groups that together hold at most a quarter of everything."""
    total, held, found = sum(counts.values()), 0, set[int]()
    for group, count in sorted(counts.items(), key=lambda item: (item[1], item[0])):
        held += count
        if held > SMALL * total:
            break
        found.add(group)
    return found


def stratified(odds: Mapping[str, np.ndarray], groups: Mapping[str, np.ndarray]) -> tuple[Stratum, ...]:
    """The relative test of every group."""
    return tuple(
        Stratum(
            name=name,
            pairs=int(mask.sum()),
            test=relative_test(odds, mask) if mask.sum() >= FEWEST_PAIRS else None,
        )
        for name, mask in groups.items()
    )
