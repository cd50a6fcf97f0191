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
from ease.data.examples import examples_at
from ease.data.features import Activations
from ease.data.partition import MINIMUM_PAIRS, Shard
from ease.errors import UserError
from ease.federation.fedavg import Round, TrainingConfig, average, participants
from ease.federation.history import History
from ease.federation.microbatching import GroupSize, train_in_groups
from ease.federation.protocol import Federation, Update
from ease.federation.stacked import LocalTraining, training_of
from ease.measures.ranks import FEW
from ease.methods.base import Trained, Unlearner
from ease.model.dual_encoder import DualEncoder
from ease.params import Params
from ease.requests.request import Request, SampleRequest, forget_mask
from ease.seeding import generator

Done = TypeVar("Done")
Enlisted = tuple[int, Shard, LocalTraining]
"""A local training to be done: for which federation, for which of its clients, and what."""
MOST_MISMATCH = 0.1
"""Total variation distance allowed between the class mix of the forget pairs and that of the non-members."""


@dataclass(frozen=True)
class Candidates:
    """The pairs whose membership is tested: forget pairs, and pairs like them that the target never saw."""

    positions: np.ndarray
    member: np.ndarray
    """bool [n]: trained on by the target."""
    home: np.ndarray
    """The client that holds each, or would hold it."""
    classes: np.ndarray
    ids: tuple[str, ...]
    mismatch: float
    """Total variation distance of the class mixes of members and non-members."""

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def members(self) -> int:
        return int(self.member.sum())

    @property
    def others(self) -> int:
        return len(self) - self.members

    def why_no_attack(self, fewest: int = FEW) -> str:
        """What attacks lack, which compare many pairs; nothing where they can be made."""
        if self.members < fewest:
            return f"attacks compare many pairs, {fewest} at least, and the request names {self.members}"
        if self.others < 2:
            return (
                f"attacks compare forget pairs with pairs of no client, and {self.others} of those are of the forget "
                "pairs' pseudo-classes"
            )
        return ""

    def included(self, shadow: int, seed: int) -> np.ndarray:
        """Which candidates a shadow trains on: bool [n].

        Shadows 2j and 2j + 1 are complementary, so every pair is in exactly half of any even number of them, and more
        shadows can be added later. Coin flips would leave some pairs without a shadow on one side.
        """
        drawn = generator(seed, "shadow", shadow // 2).permutation(len(self)) < len(self) / 2
        return drawn if shadow % 2 == 0 else ~drawn


def choose_candidates(
    shards: Sequence[Shard],
    request: Request,
    others: np.ndarray,
    other_classes: np.ndarray,
    ids: Sequence[str],
    seed: int,
) -> Candidates:
    """Forget pairs and as many of `others`, which no client holds, as have the same mix of pseudo-classes.

    There may be few of either kind; `why_no_attack` tells whether they do for attacks.
    Non-members of another mix would let an attack score by telling the classes apart. Each gets a home where pairs of
    its class are forgotten, since shadows train on it there.
    """
    rng = generator(seed, "candidates")
    masks = [forget_mask(request, shard) for shard in shards]
    forget = np.concatenate([shard.train[mask] for shard, mask in zip(shards, masks, strict=True)])
    classes = np.concatenate([shard.train_classes[mask] for shard, mask in zip(shards, masks, strict=True)])
    home = np.concatenate([np.full(mask.sum(), shard.client) for shard, mask in zip(shards, masks, strict=True)])
    if not len(forget):
        raise UserError("the request names no pair that a client holds: there is nothing to measure")
    order = rng.permutation(len(others))
    chosen = order[match_classes(classes, other_classes[order])]
    homes = np.array([rng.choice(home[classes == label]) for label in other_classes[chosen]], dtype=home.dtype)
    return Candidates(
        positions=np.concatenate([forget, others[chosen]]),
        member=np.arange(len(forget) + len(chosen)) < len(forget),
        home=np.concatenate([home, homes]),
        classes=np.concatenate([classes, other_classes[chosen]]),
        ids=tuple(ids[position] for position in np.concatenate([forget, others[chosen]])),
        mismatch=_mismatch(classes, other_classes[chosen]) if len(chosen) else 0.0,
    )


def match_classes(wanted: np.ndarray, available: np.ndarray) -> np.ndarray:
    """As many indices into `available` classes as keep their mix within `MOST_MISMATCH` of the wanted one."""
    shares = np.bincount(wanted, minlength=int(available.max(initial=0)) + 1) / len(wanted)
    places = {label: np.flatnonzero(available == label) for label in np.flatnonzero(shares)}
    for total in range(len(available), 0, -1):
        kept = [place[: round(shares[label] * total)] for label, place in places.items()]
        chosen = np.concatenate(kept)
        if len(chosen) and _mismatch(wanted, available[chosen]) <= MOST_MISMATCH:
            return np.sort(chosen)
    return np.zeros(0, dtype=np.int64)


def _mismatch(a: np.ndarray, b: np.ndarray) -> float:
    size = int(max(a.max(), b.max())) + 1
    shares = [np.bincount(labels, minlength=size) / len(labels) for labels in (a, b)]
    return float(np.abs(shares[0] - shares[1]).sum() / 2)


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
    """What the shadow federation is asked to forget: the candidates it trained on."""
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
    """FedAvg of several federations at once, each as it would train alone; yields a round of all of them at a time."""
    positions = np.unique(np.concatenate([shard.train for shards in federations for shard in shards]))
    examples = examples_at(activations, positions, device)
    captions, group_size = examples.captions, GroupSize.on(device)
    states = [start] * len(federations)
    for number in range(1, training.rounds + 1):
        trainings: list[Enlisted] = []
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
        states = [finished.state for finished in rounds]
        yield rounds


def on_all_cores(work: Callable[..., Done], each: Iterable[tuple[Any, ...]], device: torch.device) -> list[Done]:
    """What the host does for one federation after the other; where a GPU trains many at once, on all cores."""
    if device.type == "cpu":
        return [work(*one) for one in each]
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(min(8, before)) as threads:
            return list(threads.map(lambda one: work(*one), each))
    finally:
        torch.set_num_threads(before)


def _groups(trainings: list[Enlisted], device: torch.device) -> list[list[Enlisted]]:
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
    """A history for what some methods read of a shadow's training, and nothing else of it."""
    clients = sum(len(shard.train) >= MINIMUM_PAIRS for shard in shards)
    read = [method.reads_updates_of(request, training, clients) for method in readers]
    some = [chosen for chosen in read if chosen is not None]
    history = History(folder, durable=False, keeps=frozenset[int]().union(*some) if len(some) == len(read) else None)
    start.save(history.initial_path, durable=False)
    return history


@dataclass(frozen=True, kw_only=True)
class Ends(History):
    """Both ends of a training whose rounds are not kept: all that a method reads that asks for no history."""

    first: Params
    last: Params

    def initial(self) -> Params:
        return self.first

    def state(self, number: int) -> Params:
        """Of any round but the start's, the last one's: `Trained.final` asks for no other."""
        return self.last if number else self.first

    def verify_state(self, number: int) -> None:
        """They came from files that are checked as they are read."""


@dataclass(frozen=True)
class Shadow:
    """A trained shadow, ready to be unlearned."""

    shards: Sequence[Shard]
    trained: Trained
    request: Request


def unlearn_shadows(
    model: DualEncoder, activations: Activations, device: torch.device, shadows: Sequence[Shadow], method: Unlearner
) -> list[Params]:
    """The shadows after the same unlearning that the target went through, all side by side."""

    def whole(shadow: Shadow, federation: Federation) -> Params:
        state = shadow.trained.start
        for step in method.unlearn(shadow.trained, shadow.request, federation):
            state = step.state
        return state

    together = SideBySide.of(model, [shadow.shards for shadow in shadows], activations, device)
    return together.unlearn([partial(whole, shadow) for shadow in shadows])
