"""Shadow models: federations like the audited one, in which every tested pair is a member half of the time."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from ease.audit.side_by_side import SideBySide
from ease.audit.subjects import Candidates
from ease.data.examples import examples_at
from ease.data.features import Activations
from ease.data.partition import MINIMUM_PAIRS, Shard
from ease.federation.fedavg import Round, TrainingConfig, average, moved_by, participants
from ease.federation.history import History
from ease.federation.microbatching import GroupSize, train_in_groups
from ease.federation.protocol import Federation, Update
from ease.federation.stacked import LocalTraining, training_of
from ease.federation.strategies import strategy_of
from ease.methods.base import Trained, Unlearner
from ease.model.dual_encoder import DualEncoder
from ease.params import Params
from ease.requests.request import Request, SampleRequest, forget_mask
from ease.seeding import generator
from ease.trainers.shards import merged, split

Done = TypeVar("Done")
AssignedTraining = tuple[int, Shard, LocalTraining]
"""A local training to be done: for which federation, for which of its clients, and what."""


def shadow_shards(
    shards: Sequence[Shard], request: Request, candidates: Candidates, included: np.ndarray
) -> tuple[Shard, ...]:
    """The clients of a shadow federation: everybody's retained pairs, and the included candidates at their homes."""
    result = []
    for shard in shards:
        kept = ~forget_mask(request, shard)
        own = np.flatnonzero(included & (candidates.home == shard.client))
        result.append(
            Shard(
                client=shard.client,
                train=np.concatenate([shard.train[kept], candidates.positions[own]]),
                validation=shard.validation,
                train_ids=(*np.array(shard.train_ids, dtype=object)[kept], *(candidates.ids[i] for i in own)),
                train_classes=np.concatenate([shard.train_classes[kept], candidates.classes[own]]),
                validation_classes=shard.validation_classes,
            )
        )
    return tuple(result)


def shadow_request(request: Request, candidates: Candidates, included: np.ndarray) -> Request:
    """The request of a shadow federation: the candidates that it trained on."""
    if isinstance(request, SampleRequest):
        return SampleRequest(ids=tuple(sorted(candidates.ids[i] for i in np.flatnonzero(included))))
    return request


def train_federations(
    model: DualEncoder,
    activations: Activations,
    device: torch.device,
    federations: Sequence[tuple[Shard, ...]],
    streams: Sequence[str],
    start: Params,
    training: TrainingConfig,
    seed: int,
    temperature: float,
) -> Iterator[list[Round]]:
    """FedAvg of several federations at once, equal to training each by itself; yields one round of all."""
    if training.shards > 1:
        together = model, activations, device
        yield from _in_shards(together, federations, streams, start, training, seed, temperature)
        return
    positions = np.unique(np.concatenate([shard.train for shards in federations for shard in shards]))
    examples = examples_at(activations, positions, device)
    captions, group_size = examples.captions, GroupSize.on(device)
    states, rules = [start] * len(federations), [strategy_of(training) for _ in federations]
    for number in range(1, training.rounds + 1):
        trainings: list[AssignedTraining] = []
        for index, (shards, stream) in enumerate(zip(federations, streams, strict=True)):
            job = training.job(number, seed, temperature, stream)
            clients = {shard.client: shard for shard in shards}
            for client in participants(sorted(clients), training, seed, number):
                if len(clients[client].train) < MINIMUM_PAIRS:
                    continue  # drawn and abstaining, as it would alone
                rows = np.searchsorted(positions, clients[client].train)
                rng = generator(seed, stream, number, client)
                trainings.append((index, clients[client], training_of(states[index], rows, captions, job, rng)))
        updates: list[list[Update]] = [[] for _ in federations]
        for group in _groups(trainings, device):
            results = train_in_groups(model, examples, [one for _, _, one in group], job, group_size)
            for (index, shard, _), result in zip(group, results, strict=True):
                updates[index].append(Update(shard.client, len(shard.train), result.delta, {"loss": result.loss}))
        averaged = partial(average, config=training, number=number)
        rounds = on_all_cores(averaged, zip(states, updates, strict=True), device)
        rounds = [moved_by(*each) for each in zip(rules, states, rounds, strict=True)]
        states = [finished.state for finished in rounds]
        yield rounds


def _in_shards(
    together: tuple[DualEncoder, Activations, torch.device],
    federations: Sequence[tuple[Shard, ...]],
    streams: Sequence[str],
    start: Params,
    training: TrainingConfig,
    seed: int,
    temperature: float,
) -> Iterator[list[Round]]:
    """The same of federations whose clients train in shards: every shard is a federation of its own."""
    whole = training.model_copy(update={"shards": 1})
    groups = [split([shard.client for shard in shards], training.shards) for shards in federations]
    parts = [
        (index, shard, tuple(each for each in shards if each.client in own), stream)
        for index, (shards, stream) in enumerate(zip(federations, streams, strict=True))
        for shard, own in groups[index].items()
    ]
    each, named = [part for _, _, part, _ in parts], [stream for *_, stream in parts]
    for rounds in train_federations(*together, each, named, start, whole, seed, temperature):
        found: list[dict[int, Round]] = [{} for _ in federations]
        for (index, shard, *_), finished in zip(parts, rounds, strict=True):
            found[index][shard] = finished
        yield [merged(one) for one in found]


def on_all_cores(work: Callable[..., Done], each: Iterable[tuple[Any, ...]], device: torch.device) -> list[Done]:
    """Call a function for each federation, on all cores if a GPU trains them."""
    if device.type == "cpu":
        return [work(*one) for one in each]
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(min(8, before)) as threads:
            return list(threads.map(lambda one: work(*one), each))
    finally:
        torch.set_num_threads(before)


def _groups(trainings: list[AssignedTraining], device: torch.device) -> list[list[AssignedTraining]]:
    """On a CPU the same client of all federations, whose batches are alike and need no padding; on a GPU everything."""
    if device.type != "cpu":
        return [trainings]
    ordered = sorted(trainings, key=lambda entry: entry[1].client)
    return [list(group) for _, group in groupby(ordered, key=lambda entry: entry[1].client)]


def scratch_history(
    folder: Path,
    start: Params,
    shards: Sequence[Shard],
    readers: Sequence[Unlearner],
    request: Request,
    training: TrainingConfig,
) -> History:
    """A temporary history with only the updates that some methods read."""
    clients = sum(len(shard.train) >= MINIMUM_PAIRS for shard in shards)
    read = [method.reads_updates_of(request, training, clients) for method in readers]
    some = [chosen for chosen in read if chosen is not None]
    history = History(folder, durable=False, keeps=frozenset[int]().union(*some) if len(some) == len(read) else None)
    start.save(history.initial_path, durable=False)
    return history


@dataclass(frozen=True, kw_only=True)
class Ends(History):
    """A history with only the first and the last state, for methods that read nothing else."""

    first: Params
    last: Params

    def initial(self) -> Params:
        return self.first

    def state(self, number: int) -> Params:
        """The start state for round 0, else the last state."""
        return self.last if number else self.first


@dataclass(frozen=True)
class Shadow:
    """A trained shadow, ready to be unlearned."""

    shards: Sequence[Shard]
    trained: Trained
    request: Request


def unlearn_shadows(
    model: DualEncoder, activations: Activations, device: torch.device, shadows: Sequence[Shadow], method: Unlearner
) -> list[Params]:
    """The shadows after the target's unlearning method, computed in shared passes."""

    def whole(shadow: Shadow, federation: Federation) -> Params:
        state = shadow.trained.start
        for step in method.unlearn(shadow.trained, shadow.request, federation):
            state = step.state
        return state

    together = SideBySide.of(model, [shadow.shards for shadow in shadows], activations, device)
    return together.unlearn([partial(whole, shadow) for shadow in shadows])
