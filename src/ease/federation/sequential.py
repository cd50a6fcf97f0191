"""All clients in this process, one after the other: the default engine and the reference for every other."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from ease.federation.client import ClientData
from ease.federation.client_pool import Pool, can_share, vectorized_updates
from ease.federation.local import work
from ease.federation.microbatching import GroupSize
from ease.federation.objectives import Composite, objective
from ease.federation.projectors import projects_alone
from ease.federation.protocol import Capabilities, LocalJob, Update, own_jobs
from ease.model.dual_encoder import DualEncoder
from ease.params import Params


class Sequential:
    capabilities = Capabilities()

    def __init__(self, model: DualEncoder, clients: Mapping[int, ClientData]):
        self.model = model
        self.data = clients

    @property
    def clients(self) -> Sequence[int]:
        return sorted(self.data)

    @cached_property
    def members(self) -> Mapping[int, frozenset[str]]:
        return {client: frozenset(data.shard.train_ids) for client, data in self.data.items()}

    def run(self, params: Params, job: LocalJob, clients: Sequence[int]) -> Iterator[Update]:
        return self.perform(params, own_jobs(self, job, clients))

    def perform(self, state: Params, jobs: Mapping[int, LocalJob]) -> Iterator[Update]:
        """Do jobs that are addressed to single clients. Clients store what they receive and send if the job asks for
        it."""
        for update in self._answered(state, restored(self.data, jobs)):
            if jobs[update.client].keep:
                self.data[update.client].keep(jobs[update.client].round, state, update)
            yield update

    def _answered(self, state: Params, jobs: Mapping[int, LocalJob]) -> Iterator[Update]:
        """One client after the other; a job that is made of many trainings shares its passes.

        Plain steps of projectors are written out there: a stack of one takes less time than its graph.
        """
        for client, job in jobs.items():
            data = self.data[client]
            stacked = isinstance(objective(job.objective), Composite) or (projects_alone(self.model) and job.plain)
            if stacked and can_share(state, job):
                own = Pool(data.train, {client: data}, {client: 0})
                size = GroupSize.on(data.train.device)
                yield from vectorized_updates(self.model, own, [(client, state, job)], size).values()
            else:
                yield work(self.model, state, data, job)


def restored(clients: Mapping[int, ClientData], jobs: Mapping[int, LocalJob]) -> dict[int, LocalJob]:
    """Jobs with the states, that their replayed rounds only name, read from each client's own disk.

    What clients keep of one round is the same state: each checks its own file, and they share the memory.
    """
    read: dict[str, Params] = {}

    def with_states(client: ClientData, job: LocalJob) -> LocalJob:
        begun = []
        for each in job.replays:
            if isinstance(each.state, str):
                found = client.required_history.start(each.round, each.state)
                each = replace(each, state=read.setdefault(each.state, found))
            begun.append(each)
        return replace(job, replays=tuple(begun))

    return {
        client: with_states(clients[client], job) if isinstance(objective(job.objective), Composite) else job
        for client, job in jobs.items()
    }
