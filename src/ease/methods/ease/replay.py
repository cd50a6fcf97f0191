"""Replay: a client repeats its local training of earlier rounds, batch for batch, without the pairs to be forgotten."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from ease.data.partition import MINIMUM_PAIRS
from ease.federation.client import ClientData
from ease.federation.expected import Expected, Value
from ease.federation.objectives import ALIGN, Assigned, Composite, Draw, register
from ease.federation.protocol import LocalJob, Update
from ease.model.dual_encoder import DualEncoder
from ease.params import Params
from ease.requests.request import forget_mask

REPLAY = "replay"
ROUND = "replayed round"


LEFT_OUT = -1
"""Marks the place of a pair that takes no part."""


def retained_rows(client: ClientData, job: LocalJob) -> np.ndarray:
    """Which of its pairs a client keeps, ascending."""
    assert job.request is not None  # it says which are left out
    return np.flatnonzero(~forget_mask(job.request, client.shard))


def forget_count(model: DualEncoder, params: Params, client: ClientData, job: LocalJob) -> dict[str, torch.Tensor]:
    """How many of its training pairs a request names."""
    return {"count": torch.tensor(float(len(client.train) - len(retained_rows(client, job))))}


def places(client: ClientData, job: LocalJob) -> np.ndarray:
    """The pair at every place of the original training; empty when too few pairs are left.

    Batches are drawn as they were then, so places of pairs that are forgotten or gone are kept, without the pair.
    """
    kept, shard = retained_rows(client, job), client.shard
    if len(kept) < MINIMUM_PAIRS:
        return kept[:0]
    stood = np.full(len(client.train) if shard.dealt is None else shard.dealt, LEFT_OUT)
    stood[kept if shard.places is None else shard.places[kept]] = kept
    return stood


def draw_retained(client: ClientData, stood: np.ndarray, job: LocalJob, rng: np.random.Generator) -> Draw:
    """The batch as it was, captions too, less what is forgotten or gone."""
    captions = rng.integers(client.train.captions, size=len(stood))
    kept = stood != LEFT_OUT
    return Draw(stood[kept], captions[kept])


def refilled(draws: Sequence[Draw], client: ClientData, job: LocalJob) -> Iterator[Draw]:
    """As many batches per epoch as retraining takes, with the pairs in the same order.

    A step moves the model by the mean over its batch. With a step too many, retained pairs are trained too much.
    """
    count, fewer = len(draws) // job.epochs, job.batch_count(len(retained_rows(client, job)))
    for first in range(0, len(draws), count):
        epoch = draws[first : first + count]
        if fewer < count:
            rows, captions = (np.concatenate(part) for part in zip(*((d.rows, d.captions) for d in epoch), strict=True))
            parts = zip(np.array_split(rows, fewer), np.array_split(captions, fewer), strict=True)
            epoch = [Draw(*part) for part in parts]
        yield from (draw for draw in epoch if len(draw.rows) >= MINIMUM_PAIRS)


def replay_parts(state: Params, job: LocalJob) -> dict[str, Assigned]:
    """One training for each round, from the state that the round began from."""
    return {
        str(each.round): (each.start, replace(job, round=each.round, objective=ROUND, replays=()))
        for each in job.replays
    }


def summed(client: ClientData, updates: Mapping[str, Update], job: LocalJob) -> Update:
    """The weighted sum of the replayed changes in each group of rounds, in half precision; one pair is a pair kept."""
    pairs = len(retained_rows(client, job))
    values: dict[str, torch.Tensor] = {}
    for group in sorted({each.group for each in job.replays}):
        total: dict[str, torch.Tensor] = {}
        for each in job.replays:
            change = updates[str(each.round)].delta
            if each.group == group and change is not None:
                for name, tensor in change.tensors.items():
                    if name not in total:
                        total[name] = torch.zeros(tensor.shape, dtype=torch.double)
                    total[name].add_(tensor, alpha=each.weight)
        # Scaled to 1 before they are rounded: half precision has a narrow range.
        for name, tensor in total.items():
            scale = tensor.abs().max().clamp_min(1e-30)
            values |= {f"{group}/{name}": (tensor / scale).half(), f"{group}/{name}:scale": scale.float()}
    return Update(client.shard.client, pairs, None, values)


def replayed(state: Params, job: LocalJob, client: int, held: int) -> Expected:
    """Expected values of a replay: all sums of a group, or none if too few pairs are left."""
    groups = []
    for group in sorted({each.group for each in job.replays}):
        form: dict[str, Value] = {}
        for name, tensor in state.tensors.items():
            form[f"{group}/{name}"] = Value(tuple(tensor.shape), torch.half, -1.0, 1.0)
            form[f"{group}/{name}:scale"] = Value((), torch.float32, 0.0)
        groups.append(form)
    return Expected(groups=tuple(groups))


def read_sum(values: Mapping[str, torch.Tensor], group: int, like: Params) -> Params | None:
    """The sum of one group in a client's answer; None when it had nothing to train on."""
    if f"{group}/{next(iter(like.tensors))}" not in values:
        return None
    tensors = {
        name: values[f"{group}/{name}"].double() * values[f"{group}/{name}:scale"].double() for name in like.tensors
    }
    return Params(tensors, like.blocks)


register(ROUND, replace(ALIGN, draw=draw_retained, rearrange=refilled, positions=places))
register(
    REPLAY,
    Composite(
        parts=replay_parts,
        combine=summed,
        expects=replayed,
        reads=frozenset({"retain"}),
        passes=lambda job: len(job.replays),
    ),
)
