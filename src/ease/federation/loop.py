"""All clients in this process, one after the other: the default engine and the reference for every other."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from ease.federation.client import ClientData
from ease.federation.local import work
from ease.federation.protocol import LocalJob, Update, own_jobs
from ease.model.dual_encoder import DualEncoder
from ease.params import Params


class Loop:
    together = False
    """Whether asking all clients at once is faster than asking one after the other."""

    def __init__(self, model: DualEncoder, clients: Mapping[int, ClientData]):
        self.model = model
        self.data = clients

    @property
    def clients(self) -> Sequence[int]:
        return sorted(self.data)

    @cached_property
    def held(self) -> Mapping[int, frozenset[str]]:
        return {client: frozenset(data.shard.train_ids) for client, data in self.data.items()}

    def run(self, params: Params, job: LocalJob, clients: Sequence[int]) -> Iterator[Update]:
        yield from self.perform(params, own_jobs(self, job, clients))

    def perform(self, state: Params, jobs: Mapping[int, LocalJob]) -> Iterator[Update]:
        """Do jobs that are each client's own already."""
        for client, job in jobs.items():
            yield work(self.model, state, self.data[client], job)
