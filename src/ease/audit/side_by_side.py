"""Several unlearnings side by side: what their methods ask of clients at the same time is done in shared passes."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np
import torch

from ease.data.examples import Chosen, examples_at
from ease.data.features import Activations
from ease.data.partition import Shard
from ease.federation.client import ClientData
from ease.federation.client_pool import ClientJob, SharedPool, can_share, vectorized_updates
from ease.federation.local import can_measure_vectorized, measure_vectorized, work
from ease.federation.microbatching import GroupSize
from ease.federation.objectives import Composite, objective
from ease.federation.protocol import Capabilities, Federation, LocalJob, Update, own_jobs
from ease.model.dual_encoder import DualEncoder
from ease.params import Params

Work = Callable[[Federation], Params]
"""What one of them does with its own federation, and the state it ends in."""


class _Abandoned(BaseException):
    """Another one has failed, and no one waits for this one any more."""


@dataclass
class _SharedFederation:
    """The federation of one unlearning: it asks, and sleeps until all the others have asked too.

    A method is a generator that calls its federation from within, so that each has a thread of its own. Only one of
    them is awake at any time: nothing depends on which is faster.
    """

    members: Mapping[int, frozenset[str]]
    asked: tuple[Params, dict[int, LocalJob]] | None = None
    answers: list[Update] = field(default_factory=list)
    ended: Params | BaseException | None = None
    abandoned: bool = False
    _awake: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    _asleep: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities()

    @property
    def clients(self) -> Sequence[int]:
        return sorted(self.members)

    def run(self, params: Params, job: LocalJob, clients: Sequence[int]) -> Iterator[Update]:
        self.asked = params, own_jobs(self, job, clients)
        self._asleep.release()
        self._awake.acquire()
        if self.abandoned:
            raise _Abandoned
        self.asked = None
        yield from self.answers

    def begin(self, job: Work) -> None:
        def whole() -> None:
            self._awake.acquire()
            try:
                self.ended = _Abandoned() if self.abandoned else job(self)
            except BaseException as error:
                self.ended = error
            self._asleep.release()

        threading.Thread(target=whole, daemon=True).start()

    def wake(self) -> None:
        """Let it run until it asks again or ends."""
        self._awake.release()
        self._asleep.acquire()


@dataclass(frozen=True)
class SideBySide:
    """Federations like each other: the same numbers of clients, with many pairs in common."""

    model: DualEncoder
    pool: SharedPool
    """By numbers of our own, one for each client of each federation."""
    keys: Sequence[Mapping[int, int]]
    """For each federation: client -> its number in the pool."""
    group_size: GroupSize

    @classmethod
    def of(
        cls,
        model: DualEncoder,
        federations: Sequence[Sequence[Shard]],
        activations: Activations,
        device: torch.device,
    ) -> "SideBySide":
        every = [shard for shards in federations for shard in shards]
        positions = np.unique(np.concatenate([part for shard in every for part in (shard.train, shard.validation)]))
        shared = examples_at(activations, positions, device)

        def chosen(some: np.ndarray) -> Chosen:
            return Chosen(shared.image, shared.text, shared.text_mask, np.searchsorted(positions, some))

        data = {key: ClientData(each, chosen(each.train), chosen(each.validation)) for key, each in enumerate(every)}
        rows = {key: np.searchsorted(positions, each.train) for key, each in enumerate(every)}
        numbers = iter(data)
        keys = [{shard.client: next(numbers) for shard in shards} for shards in federations]
        return cls(model, SharedPool(shared, data, {}, rows), keys, GroupSize.on(device))

    def unlearn(self, jobs: Sequence[Work]) -> list[Params]:
        """Run each job with its own federation and return the final states. The first exception ends all of them."""
        lanes = [
            _SharedFederation(
                {client: frozenset(self.pool.clients[key].shard.train_ids) for client, key in keys.items()}
            )
            for keys in self.keys
        ]
        for lane, job in zip(lanes, jobs, strict=True):
            lane.begin(job)
        try:
            self._run_all(lanes)
        finally:
            for lane in lanes:
                if lane.ended is None:
                    lane.abandoned = True
                    lane.wake()
        ends = [lane.ended for lane in lanes]
        assert all(isinstance(end, Params) for end in ends)  # whatever else they are was raised
        return [end for end in ends if isinstance(end, Params)]

    def _run_all(self, lanes: Sequence[_SharedFederation]) -> None:
        while True:
            for lane in lanes:
                if lane.ended is None:
                    lane.wake()
                if isinstance(lane.ended, BaseException):
                    raise lane.ended
            waiting = {number: lane.asked for number, lane in enumerate(lanes) if lane.asked and lane.ended is None}
            if not waiting:
                return
            for number, answers in self._answered(waiting).items():
                lanes[number].answers = answers

    def _answered(self, waiting: Mapping[int, tuple[Params, dict[int, LocalJob]]]) -> dict[int, list[Update]]:
        """Number of a federation -> its clients' answers, in the order in which they were asked."""
        asked: list[ClientJob] = [
            (self.keys[number][client], state, job)
            for number, (state, jobs) in waiting.items()
            for client, job in jobs.items()
        ]
        updates: dict[int, Update] = {}
        shared: dict[LocalJob, list[ClientJob]] = {}
        measured: dict[tuple[int, str], list[ClientJob]] = {}
        for key, state, job in asked:
            if can_share(state, job):
                shared.setdefault(_shared_job(job), []).append((key, state, job))
            elif can_measure_vectorized(job, self.pool.examples.device):
                measured.setdefault((id(state), job.objective), []).append((key, state, job))
            else:
                updates[key] = work(self.model, state, self.pool.clients[key], job)
        for entries in shared.values():
            for group in self._groups(entries):
                updates |= vectorized_updates(self.model, self.pool, group, self.group_size)
        for entries in measured.values():
            data = [(self.pool.clients[key], job) for key, _, job in entries]
            answers = measure_vectorized(self.model, entries[0][1], data)
            updates |= {key: answer for (key, _, _), answer in zip(entries, answers, strict=True)}
        return {
            number: [replace(updates[self.keys[number][client]], client=client) for client in jobs]
            for number, (_, jobs) in waiting.items()
        }

    def _groups(self, entries: list[ClientJob]) -> list[list[ClientJob]]:
        """On a CPU the same client of all federations, whose batches are alike and need no padding.

        If each has to do many trainings, as in a replay, the same holds elsewhere: all replies together fill the
        memory."""
        if self.pool.examples.device.type != "cpu" and not isinstance(objective(entries[0][2].objective), Composite):
            return [entries]

        def client(entry: ClientJob) -> int:
            return self.pool.clients[entry[0]].shard.client

        return [list(group) for _, group in groupby(sorted(entries, key=client), key=client)]


def _shared_job(job: LocalJob) -> LocalJob:
    """What must be the same for jobs to share a pass: all but the random numbers, which only choose batches."""
    return replace(job.common, seed=0, stream="", round=0)
