"""Canaries: pairs planted into the training with probability one half, so that an auditor's guesses can be counted.

A canary is a validation photograph with the captions of another one. No model can guess such a pair, so whatever it
knows of one it has from the training. Heads, a client trains on it; tails, no one does; nothing else distinguishes the
two. They are of no split: never part of a gallery, a pool or a test."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ease.data.pairs import PairSet
from ease.data.partition import Shard
from ease.errors import UserError
from ease.seeding import generator
from ease.storage import digest

SPLIT = "canary"


@dataclass(frozen=True)
class Toss:
    """The random draws for all canaries, made before training: arrays [canaries]."""

    heads: np.ndarray
    """bool: given to a client."""
    home: np.ndarray
    """The client that was to have it, whatever the coin said."""


def with_canaries(pairs: PairSet, count: int, seed: int) -> PairSet:
    """The pairs, with some validation pairs turned into canaries."""
    if not count:
        return pairs
    spare = pairs.indices("validation")
    check_count(count, len(spare))
    chosen = generator(seed, "canaries").permutation(spare)[:count]
    ids, captions = list(pairs.ids), list(pairs.captions)
    splits, digests = list(pairs.splits), list(pairs.digests)
    for position, other in zip(chosen.tolist(), np.roll(chosen, 1).tolist(), strict=True):
        ids[position] = f"canary-{pairs.ids[position]}"
        captions[position] = pairs.captions[other]
        splits[position] = SPLIT
        digests[position] = digest("canary", pairs.digests[position], pairs.digests[other])
    return replace(
        pairs,
        ids=tuple(ids),
        captions=tuple(captions),
        splits=tuple(splits),
        digests=tuple(digests),
        fingerprint=digest("canaries", pairs.fingerprint, count, seed),
    )


def check_count(count: int, spare: int) -> None:
    """Refuse more canaries than there are validation pairs."""
    if not 2 <= count <= spare:
        raise UserError(
            f"data.canaries = {count}: canaries are made of validation pairs, 2 or more, and there are {spare}; "
            "ask for fewer or add validation pairs"
        )


def toss(ids: Sequence[str], clients: Sequence[int], seed: int) -> Toss:
    """A fair coin and a client for each canary, independent of all others."""
    draws = [generator(seed, "canary", each) for each in ids]
    heads = np.array([rng.random() < 0.5 for rng in draws], dtype=bool)
    return Toss(heads, np.array([rng.choice(np.asarray(clients)) for rng in draws], dtype=np.int64))


def plant(
    shards: tuple[Shard, ...], pairs: PairSet, classes_of: Callable[[np.ndarray], np.ndarray], seed: int
) -> tuple[Shard, ...]:
    """The shards with their canaries appended."""
    canaries = pairs.indices(SPLIT)
    if not len(canaries):
        return shards
    drawn = toss([pairs.ids[each] for each in canaries], [shard.client for shard in shards], seed)
    classes = classes_of(canaries)
    planted = []
    for shard in shards:
        own = drawn.heads & (drawn.home == shard.client)
        planted.append(
            replace(
                shard,
                train=np.concatenate([shard.train, canaries[own]]),
                train_ids=(*shard.train_ids, *(pairs.ids[each] for each in canaries[own])),
                train_classes=np.concatenate([shard.train_classes, classes[own]]),
            )
        )
    return tuple(planted)
