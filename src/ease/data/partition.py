"""Who holds what: training pairs dealt to clients, by chance or skewed by pseudo-class."""

import hashlib
import warnings
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from ease.errors import UserError
from ease.seeding import generator, stream_seed
from ease.storage import cache_folder, digest, read_tensors, write_tensors

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
    """Where each training pair stood when the run was trained, if some have gone since; None: where it stands now."""
    dealt: int | None = None
    """How many training pairs there were then; None: as many as now."""

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


def cached_classes(image: np.ndarray, text: np.ndarray, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """`pseudo_classes` from the cache, found by what the embeddings hold, or computed now."""
    content = [(part.shape, hashlib.sha256(np.ascontiguousarray(part).data).hexdigest()) for part in (image, text)]
    path = cache_folder() / "classes" / f"{digest('classes', count, seed, content)}.safetensors"
    try:
        kept = read_tensors(path)
        return kept["labels"].numpy(), kept["centroids"].numpy()
    except (UserError, KeyError):  # absent or damaged
        labels, centroids = pseudo_classes(image, text, count, seed)
        write_tensors(path, {"labels": torch.from_numpy(labels), "centroids": torch.from_numpy(centroids)})
        return labels, centroids


def pseudo_classes(image: np.ndarray, text: np.ndarray, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """KMeans over the concatenated unit-norm frozen embeddings: labels [pairs], centroids [count, width]."""
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning
    from threadpoolctl import threadpool_limits

    joint = joint_embedding(image, text)
    if count > len(joint):
        raise UserError(
            f"partition.classes = {count}: more pseudo-classes than the {len(joint)} training pairs; "
            "lower it or add training data"
        )
    model = KMeans(count, n_init=4, random_state=stream_seed(seed, "pseudo-classes") % 2**32)
    # Threads add up in the order they finish; one thread gives every machine the same classes, run after run.
    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        try:
            model.fit(joint)
        except ConvergenceWarning as warning:
            raise UserError(
                f"partition.classes = {count}: more pseudo-classes than distinct training pairs; lower it or add data"
            ) from warning
    return model.labels_.astype(np.int64), model.cluster_centers_


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
    """Deal positions 0..n-1 to clients: by chance, skewed by Dirichlet(beta) per class, or each class evenly."""
    if clients * MINIMUM_PAIRS > len(labels):
        raise UserError(
            f"partition.clients = {clients}: {len(labels)} pairs cannot give every client {MINIMUM_PAIRS}; "
            "use fewer clients or more data"
        )
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


def make_shards(
    pool: np.ndarray,
    ids: tuple[str, ...],
    labels: np.ndarray,
    dealt: list[np.ndarray],
    validation_share: float,
    seed: int,
) -> tuple[Shard, ...]:
    """Turn dealt positions of `pool` into shards and set each client's validation share aside."""
    shards = []
    for client, positions in enumerate(dealt):
        order = generator(seed, "validation", client).permutation(positions)
        held_out = min(round(validation_share * len(order)), len(order) - MINIMUM_PAIRS)
        validation, train = np.sort(order[:held_out]), np.sort(order[held_out:])
        shards.append(
            Shard(
                client=client,
                train=pool[train],
                validation=pool[validation],
                train_ids=tuple(ids[position] for position in pool[train]),
                train_classes=labels[train],
                validation_classes=labels[validation],
            )
        )
    return tuple(shards)
