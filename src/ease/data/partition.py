"""Partition of training pairs among clients: random, skewed by pseudo-class, or by real sites."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from ease.errors import UserError
from ease.seeding import generator

MINIMUM_PAIRS = 2
"""InfoNCE over a single pair is constant, so a client with one training pair could not learn."""


@dataclass(frozen=True)
class Shard:
    """One client's pairs, as positions in the pair set. Validation pairs are never trained on."""

    client: int
    train: np.ndarray
    validation: np.ndarray
    train_ids: tuple[str, ...]
    train_classes: np.ndarray
    validation_classes: np.ndarray
    name: str | None = None
    """What people call the client, where the data name their sites."""
    places: np.ndarray | None = None
    """Position of each training pair when the run was trained, if some were forgotten since; None: the current
    position."""
    dealt: int | None = None
    """How many training pairs there were then; None: as many as now."""
    validation_ids: tuple[str, ...] = ()
    """Ids of the validation pairs, for shards whose pairs people can name."""

    def keep(self, kept: np.ndarray) -> "Shard":
        """The shard with only some of its training pairs, bool [pairs]; it remembers where each stood."""
        places = np.arange(len(self.train)) if self.places is None else self.places
        return replace(
            self,
            train=self.train[kept],
            train_ids=tuple(pair_id for pair_id, keep in zip(self.train_ids, kept, strict=True) if keep),
            train_classes=self.train_classes[kept],
            places=places[kept],
            dealt=len(self.train) if self.dealt is None else self.dealt,
        )

    def without_held_out(self, ids: Collection[str]) -> "Shard":
        """The shard without some of its validation pairs."""
        kept = np.array([pair_id not in ids for pair_id in self.validation_ids], dtype=bool)
        if kept.all():
            return self
        return replace(
            self,
            validation=self.validation[kept],
            validation_classes=self.validation_classes[kept],
            validation_ids=tuple(pair_id for pair_id, keep in zip(self.validation_ids, kept, strict=True) if keep),
        )


def unit_embeddings(image: np.ndarray, text: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Unit-norm image and mean-caption embeddings [pairs, width] from pooled [pairs, (captions,) width]."""
    parts = [part.astype(np.float64) for part in (image, text.mean(axis=1))]
    image, text = (part / np.maximum(np.linalg.norm(part, axis=1, keepdims=True), 1e-6) for part in parts)
    return image, text


def joint_embedding(image: np.ndarray, text: np.ndarray) -> np.ndarray:
    """Unit-norm image and mean-caption embeddings side by side: [pairs, image width + text width]."""
    return np.concatenate(unit_embeddings(image, text), axis=1)


def partition(
    scheme: Literal["iid", "dirichlet", "uniform"], labels: np.ndarray, clients: int, beta: float, seed: int
) -> list[np.ndarray]:
    """Positions 0..n-1 of each client: random, skewed by Dirichlet(beta) per class, or each class evenly."""
    check_clients(clients, len(labels))
    rng = generator(seed, "partition", scheme)
    if scheme == "iid":
        return [np.sort(part) for part in np.array_split(rng.permutation(len(labels)), clients)]
    shards: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        if scheme == "uniform":
            # Starting at a random client keeps the remainders from piling up on the first ones.
            parts = np.array_split(members, clients)
            parts = [parts[index] for index in rng.permutation(clients)]
        else:
            shares = rng.dirichlet(np.full(clients, beta))
            parts = np.split(members, (np.cumsum(shares)[:-1] * len(members)).round().astype(int))
        for shard, part in zip(shards, parts, strict=True):
            shard.append(part)
    dealt = [np.sort(np.concatenate(parts)) for parts in shards]
    smallest = min(range(clients), key=lambda client: len(dealt[client]))
    if len(dealt[smallest]) < MINIMUM_PAIRS:
        raise UserError(
            f"partition.beta = {beta}: client {smallest} got {len(dealt[smallest])} pairs, at least {MINIMUM_PAIRS} "
            "are needed; raise partition.beta, lower partition.clients or change the seed"
        )
    return dealt


def check_clients(clients: int, pairs: int) -> None:
    """Refuse more clients than there are pairs for."""
    if clients * MINIMUM_PAIRS > pairs:
        raise UserError(
            f"partition.clients = {clients}: {pairs} pairs cannot give every client {MINIMUM_PAIRS}; "
            "use fewer clients or more data"
        )


def partition_by_site(sites: Sequence[str | None]) -> tuple[tuple[str, ...], list[np.ndarray]]:
    """The sites' names in sorted order, and the positions of each one's pairs."""
    held: dict[str, list[int]] = {}
    for position, site in enumerate(sites):
        assert site is not None  # checked when the data were read
        held.setdefault(site, []).append(position)
    for site, positions in sorted(held.items()):
        if len(positions) < MINIMUM_PAIRS:
            raise UserError(
                f"site {site!r} has {len(positions)} training pair, at least {MINIMUM_PAIRS} are needed; add pairs, "
                "join it with another site or remove it"
            )
    names = tuple(sorted(held))
    return names, [np.array(held[name]) for name in names]


def set_aside(positions: np.ndarray, share: float, seed: int, client: int) -> tuple[np.ndarray, np.ndarray]:
    """A client's positions in two parts, ascending: those that it trains on, and a share that it never does."""
    order = generator(seed, "validation", client).permutation(positions)
    held_out = min(round(share * len(order)), len(order) - MINIMUM_PAIRS)
    return np.sort(order[held_out:]), np.sort(order[:held_out])


def make_shards(
    pool: np.ndarray,
    ids: tuple[str, ...],
    labels: np.ndarray,
    dealt: list[np.ndarray],
    validation_share: float,
    seed: int,
    names: Sequence[str] | None = None,
) -> tuple[Shard, ...]:
    """The shards of the clients' positions in `pool`, with validation shares set aside."""
    return tuple(
        make_shard(client, positions, pool, ids, labels, validation_share, seed, names[client] if names else None)
        for client, positions in enumerate(dealt)
    )


def make_shard(
    client: int,
    positions: np.ndarray,
    pool: np.ndarray,
    ids: tuple[str, ...],
    labels: np.ndarray,
    validation_share: float,
    seed: int,
    name: str | None = None,
) -> Shard:
    """One client's positions of `pool`, with its validation share set aside."""
    train, validation = set_aside(positions, validation_share, seed, client)
    return Shard(
        client=client,
        train=pool[train],
        validation=pool[validation],
        train_ids=tuple(ids[position] for position in pool[train]),
        train_classes=labels[train],
        validation_classes=labels[validation],
        name=name,
        validation_ids=tuple(ids[position] for position in pool[validation]),
    )
