"""All clients of a round in one pass wherever the job allows it."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from ease.data.examples import examples_at
from ease.data.features import Activations
from ease.data.partition import Shard
from ease.federation.client import ClientData
from ease.federation.client_pool import Pool, can_share, vectorized_updates
from ease.federation.local import can_measure_vectorized, measure_vectorized
from ease.federation.microbatching import GroupSize
from ease.federation.protocol import Capabilities, LocalJob, Update
from ease.federation.sequential import Sequential
from ease.model.dual_encoder import DualEncoder
from ease.params import Params


class Vectorized(Sequential):
    """Jobs that cannot share a pass are done one client after the other."""

    capabilities = Capabilities(concurrent=True)

    def __init__(self, model: DualEncoder, pool: Pool):
        super().__init__(model, pool.clients)
        self.pool = pool
        self.group_size = GroupSize.on(pool.examples.device)

    @classmethod
    def of(
        cls, model: DualEncoder, shards: Sequence[Shard], activations: Activations, device: torch.device
    ) -> "Vectorized":
        """Clients whose training pairs are consecutive in one pool; each sees its own part."""
        pool = examples_at(activations, np.concatenate([shard.train for shard in shards]), device)
        ends = np.cumsum([len(shard.train) for shard in shards])
        clients, offsets = {}, {}
        for shard, end in zip(shards, ends.tolist(), strict=True):
            offsets[shard.client] = end - len(shard.train)
            held_out = examples_at(activations, shard.validation, device)
            clients[shard.client] = ClientData(shard, pool.part(offsets[shard.client], end), held_out)
        return cls(model, Pool(pool, clients, offsets))

    def _answered(self, state: Params, jobs: Mapping[int, LocalJob]) -> Iterator[Update]:
        """Clients whose jobs differ only in what is their own share their passes."""
        groups: dict[LocalJob, dict[int, LocalJob]] = {}
        for client, job in jobs.items():
            groups.setdefault(job.common, {})[client] = job
        if len(groups) == 1:
            yield from self._answered_alike(state, jobs)  # each answer as soon as it is there
            return
        updates = {each.client: each for own in groups.values() for each in self._answered_alike(state, own)}
        for client in jobs:
            yield updates[client]

    def _answered_alike(self, state: Params, jobs: Mapping[int, LocalJob]) -> Iterator[Update]:
        """Jobs that differ only in what is a client's own, in passes that they share where they can."""
        first = next(iter(jobs.values()))
        if can_share(state, first):
            asked = [(client, state, job) for client, job in jobs.items()]
            updates = vectorized_updates(self.model, self.pool, asked, self.group_size)
            yield from (updates[client] for client in jobs)
        elif can_measure_vectorized(first, self.pool.examples.device):
            yield from measure_vectorized(self.model, state, [(self.data[client], job) for client, job in jobs.items()])
        else:
            yield from super()._answered(state, jobs)
