"""Partition of pairs among clients, by real sites or simulated, with pseudo-classes."""

import numpy as np

from ease.data.classes import cached_classes
from ease.data.config import PartitionConfig
from ease.data.features import Activations
from ease.data.pairs import PairSet
from ease.data.partition import Shard, make_shards, partition, partition_by_site


def deal(
    settings: PartitionConfig, pairs: PairSet, activations: Activations, world_seed: int, seed: int
) -> tuple[tuple[Shard, ...], np.ndarray]:
    """The shards of all clients and the centres of the pseudo-classes in the joint frozen space [classes, width].

    A simulated deal may need classes before there are clients; those are then of all pairs, whatever the clients do.
    """
    assert settings.scheme != "on_site"  # nodes deal to themselves
    pool = pairs.indices("train")
    embeddings = activations.pooled_image[pool], activations.pooled_text[pool]
    names: tuple[str, ...] | None = None
    if settings.scheme != "sites" or not settings.federated_classes:
        labels, centroids = cached_classes(*embeddings, settings.classes, world_seed)
    if settings.scheme == "sites":
        names, dealt = partition_by_site([pairs.sites[position] for position in pool])
    else:
        dealt = partition(settings.scheme, labels, settings.clients, settings.beta, seed)
    if settings.federated_classes:
        labels, centroids = cached_classes(*embeddings, settings.classes, world_seed, dealt)
    return make_shards(pool, pairs.ids, labels, dealt, settings.validation_share, seed, names), centroids
