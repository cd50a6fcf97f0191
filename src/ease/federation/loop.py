"""All clients in this process, one after the other: the default engine and the reference for every other."""

from collections.abc import Iterator, Mapping, Sequence

from ease.federation.client import ClientData
from ease.federation.local import work
from ease.federation.protocol import LocalJob, Update
from ease.model.dual_encoder import DualEncoder
from ease.params import Params


class Loop:
    def __init__(self, model: DualEncoder, clients: Mapping[int, ClientData]):
        self.model = model
        self.data = clients

    @property
    def clients(self) -> Sequence[int]:
        return sorted(self.data)

    def run(self, params: Params, job: LocalJob, clients: Sequence[int]) -> Iterator[Update]:
        for client in clients:
            yield work(self.model, params, self.data[client], job)
