"""Pseudo-classes: clusters of the pairs in the frozen space, found in one place or without bringing pairs together.

Without bringing them together, every client clusters its own pairs and gives centres and counts, the server clusters
those into the first centres, and then both do Lloyd's steps: clients give sums and counts for each centre, the server
divides. Up to the small groups that clients keep to themselves this is Lloyd's algorithm on all pairs.
`local_centres`, `group_sums` and `nearest` are what a client does with its own pairs; `first_centres` and `moved` are
what the server does with the answers. A client sees the common centres and no other client's answer.
"""

import hashlib
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from ease.data.cache import cached
from ease.data.partition import joint_embedding
from ease.errors import UserError
from ease.seeding import stream_seed
from ease.storage import cache_folder, digest, read_tensors, write_tensors

SMALLEST_GROUP = 5
"""Fewest pairs whose sum or mean leaves a client."""
MOST_STEPS = 50
STILL = 1e-6
"""Largest squared move of a centre that ends the steps; embeddings have the squared length 2."""


class Groups(NamedTuple):
    """Message of a client: for each group of its pairs the sum of their embeddings, and their number.

    The server learns the mean embedding of every group of at least `SMALLEST_GROUP` pairs and roughly how a client's
    pairs are spread over the classes, at every step. It also sees differences: where a single pair is all that changes
    its group from one step to the next, the sums differ by that pair's embedding. Sums can be added up by secure
    aggregation, which hides all of this but the totals; the centres that a client gives at first cannot.
    """

    sums: np.ndarray
    """[groups, width]"""
    counts: np.ndarray
    """int [groups]"""

    @property
    def nbytes(self) -> int:
        return self.sums.nbytes + self.counts.nbytes


class FederatedClasses(NamedTuple):
    labels: list[np.ndarray]
    """Class of each pair, client by client; it stays there."""
    centres: np.ndarray
    """[classes, width]"""
    steps: int
    bytes_up: int
    """Bytes of all clients together."""
    bytes_down: int


def cached_classes(
    image: np.ndarray, text: np.ndarray, count: int, seed: int, clients: Sequence[np.ndarray] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Labels [pairs] and centroids [count, width] from the cache, found by what the embeddings hold, or computed now.

    `clients`: positions of each client's pairs, which then find the classes without leaving it.
    """
    content = [(part.shape, hashlib.sha256(np.ascontiguousarray(part).data).hexdigest()) for part in (image, text)]
    key: list[object] = ["classes", count, seed, content]
    if clients is not None:
        key += ["federated", SMALLEST_GROUP, [hashlib.sha256(positions.tobytes()).hexdigest() for positions in clients]]
    path = cache_folder() / "classes" / f"{digest(*key)}.safetensors"
    return cached(partial(_kept, path), lambda: _keep(path, *_classes(image, text, count, seed, clients)))


def _kept(path: Path) -> tuple[np.ndarray, np.ndarray]:
    kept = read_tensors(path)
    return kept["labels"].numpy(), kept["centroids"].numpy()


def _keep(path: Path, labels: np.ndarray, centroids: np.ndarray) -> None:
    write_tensors(path, {"labels": torch.from_numpy(labels), "centroids": torch.from_numpy(centroids)})


def _classes(
    image: np.ndarray, text: np.ndarray, count: int, seed: int, clients: Sequence[np.ndarray] | None
) -> tuple[np.ndarray, np.ndarray]:
    if clients is None:
        return pseudo_classes(image, text, count, seed)
    found = federated_classes([joint_embedding(image[own], text[own]) for own in clients], count, seed)
    labels = np.empty(len(image), np.int64)
    for own, classes in zip(clients, found.labels, strict=True):
        labels[own] = classes
    return labels, found.centres


def pseudo_classes(image: np.ndarray, text: np.ndarray, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """KMeans over the concatenated unit-norm frozen embeddings: labels [pairs], centroids [count, width]."""
    joint = joint_embedding(image, text)
    if count > len(joint):
        raise UserError(
            f"partition.classes = {count}: more pseudo-classes than the {len(joint)} training pairs; "
            "lower it or add training data"
        )
    labels, centres = _kmeans(joint, count, stream_seed(seed, "pseudo-classes"))
    if len(centres) < count:
        raise UserError(
            f"partition.classes = {count}: more pseudo-classes than distinct training pairs; lower it or add data"
        )
    return labels, centres


def _kmeans(
    points: np.ndarray, count: int, seed: int, weights: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Labels [points] and centres; as many centres as there are distinct points, if those are fewer than asked for."""
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning
    from threadpoolctl import threadpool_limits

    model = KMeans(count, n_init=4, random_state=seed % 2**32)
    # Threads add up in the order they finish; one thread gives every machine the same classes, run after run.
    with threadpool_limits(1), warnings.catch_warnings(), suppress(ConvergenceWarning):
        warnings.simplefilter("error", ConvergenceWarning)
        if len(points) >= count:
            model.fit(points, sample_weight=weights)
            return model.labels_.astype(np.int64), model.cluster_centers_
    centres, labels = np.unique(points, axis=0, return_inverse=True)
    return labels.astype(np.int64), centres


# --- what a client computes from its own pairs ---


def local_centres(joint: np.ndarray, count: int, seed: int, client: int, smallest: int = SMALLEST_GROUP) -> Groups:
    """The client's own clusters, at most `count`; smaller ones are joined to the nearest that is large enough.

    A client with fewer than `smallest` pairs gives nothing.
    """
    most = min(count, len(joint) // smallest)
    if most == 0:
        return Groups(np.zeros((0, joint.shape[1])), np.zeros(0, np.int64))
    labels, centres = _kmeans(joint, most, stream_seed(seed, "pseudo-classes", client))
    counts = np.bincount(labels, minlength=len(centres))
    large = np.flatnonzero(counts >= smallest)
    stray = counts[labels] < smallest
    labels[stray] = large[nearest(joint[stray], centres[large])]
    return _grouped(joint, np.searchsorted(large, labels), len(large))


def nearest(joint: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """The nearest centre of each pair; of equally near ones the first."""
    # One centre after the other: no array of [pairs, centres, width], and no sum that depends on threads.
    distances = [((joint - centre) ** 2).sum(axis=1) for centre in centres]
    return np.stack(distances, axis=1).argmin(axis=1)


def group_sums(joint: np.ndarray, centres: np.ndarray, smallest: int = SMALLEST_GROUP) -> Groups:
    """Sums and counts of the client's pairs by their nearest centre; groups of fewer than `smallest` give zero."""
    found = _grouped(joint, nearest(joint, centres), len(centres))
    small = found.counts < smallest
    return Groups(np.where(small[:, None], 0.0, found.sums), np.where(small, 0, found.counts))


def _grouped(joint: np.ndarray, labels: np.ndarray, count: int) -> Groups:
    sums = [joint[labels == group].sum(axis=0) for group in range(count)]
    return Groups(np.stack(sums), np.bincount(labels, minlength=count))


# --- what the server does with the answers ---


def first_centres(answers: Sequence[Groups], count: int, seed: int) -> np.ndarray:
    """Cluster the clients' centres, each as heavy as its count, into `count` common ones."""
    counts = np.concatenate([given.counts for given in answers])
    points = np.concatenate([given.sums for given in answers]) / counts[:, None]
    _, centres = _kmeans(points, count, stream_seed(seed, "pseudo-classes"), counts)
    if len(centres) < count:
        raise UserError(
            f"partition.classes = {count}: the clients' groups of at least {SMALLEST_GROUP} pairs have {len(centres)} "
            'distinct centres; lower it, add training data or set partition.clustering = "pooled"'
        )
    return centres


def moved(centres: np.ndarray, answers: Sequence[Groups]) -> np.ndarray:
    """Each centre at the mean of its pairs; one that no client gave pairs for stays."""
    sums = np.sum([given.sums for given in answers], axis=0)
    counts = np.sum([given.counts for given in answers], axis=0)[:, None]
    return np.where(counts > 0, sums / np.maximum(counts, 1), centres)


def agreed_centres(
    own: Sequence[Groups],
    ask: Callable[[np.ndarray], Sequence[Groups]],
    count: int,
    seed: int,
    most_steps: int = MOST_STEPS,
) -> np.ndarray:
    """The common centres, from what clients found by themselves and their answers to each step's centres."""
    centres, still = first_centres(own, count, seed), False
    for _ in range(most_steps):
        if still:
            break
        before, centres = centres, moved(centres, ask(centres))
        still = bool(((centres - before) ** 2).sum(axis=1).max() <= STILL)
    return centres


# --- both together ---


def federated_classes(
    clients: Sequence[np.ndarray], count: int, seed: int, smallest: int = SMALLEST_GROUP, most_steps: int = MOST_STEPS
) -> FederatedClasses:
    """Classes of all clients' pairs, given as joint embeddings [pairs, width] of each."""
    own = [local_centres(joint, count, seed, client, smallest) for client, joint in enumerate(clients)]
    bytes_up, steps = sum(given.nbytes for given in own), 0

    def asked(centres: np.ndarray) -> list[Groups]:
        nonlocal bytes_up, steps
        answers = [group_sums(joint, centres, smallest) for joint in clients]
        bytes_up += sum(given.nbytes for given in answers)
        steps += 1
        return answers

    centres = agreed_centres(own, asked, count, seed, most_steps)
    labels = [nearest(joint, centres).astype(np.int64) for joint in clients]
    return FederatedClasses(labels, centres, steps, bytes_up, (steps + 1) * len(clients) * centres.nbytes)
