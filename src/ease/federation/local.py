"""The one local training loop: what a client does with a job, wherever it runs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ease.errors import UserError
from ease.federation.client import ClientData
from ease.federation.objectives import Composite, Draw, Loss, Measurement, SharedMeasurement, objective
from ease.federation.protocol import LocalJob, Update
from ease.federation.steps import StepRule
from ease.model.dual_encoder import DualEncoder
from ease.params import Params
from ease.seeding import generator


def work(model: DualEncoder, params: Params, client: ClientData, job: LocalJob) -> Update:
    """Do a job: train and return the change, or measure and return values.

    The server's tensors live on the CPU and may come in half precision. The client takes them to its own device.
    """
    device = client.train.device
    params = params.to(device).map(promoted)
    job = job if job.reference is None else replace(job, reference=job.reference.to(device))
    job = job if job.sparse is None else replace(job, sparse=job.sparse.to(device))
    asked = objective(job.objective)
    if isinstance(asked, Measurement):
        with torch.no_grad():
            values = asked.measure(model, params, client, job)
        update = Update(client.shard.client, len(client.train), None, values)
    elif isinstance(asked, Composite):
        parts = asked.parts(params, job).items()
        updates = {name: train(model, _ready(start, params), client, part) for name, (start, part) in parts}
        update = asked.combine(client, updates, job)
    else:
        update = loss_named(job.objective).finish(train(model, params, client, job), job)
    delta = None if update.delta is None else update.delta.to("cpu")
    return replace(update, delta=delta, values={name: value.cpu() for name, value in update.values.items()})


def can_measure_vectorized(job: LocalJob, device: torch.device) -> bool:
    """Whether clients share the passes of a measurement: on a GPU, which the few pairs of one client leave idle."""
    return device.type != "cpu" and isinstance(objective(job.objective), SharedMeasurement)


def measure_vectorized(
    model: DualEncoder, params: Params, asked: Sequence[tuple[ClientData, LocalJob]]
) -> list[Update]:
    """The measurements of clients of one device under one state, in passes that they share."""
    measurement = objective(asked[0][1].objective)
    assert isinstance(measurement, SharedMeasurement)  # `can_measure_vectorized` lets no other through
    with torch.no_grad():
        found = measurement.measure_clients(model, params.to(asked[0][0].train.device).map(promoted), asked)
    return [
        Update(client.shard.client, len(client.train), None, {name: value.cpu() for name, value in values.items()})
        for (client, _), values in zip(asked, found, strict=True)
    ]


def _ready(state: Params, like: Params) -> Params:
    """A state in the precision of computations, on the device of another one."""
    return state.to(next(iter(like.tensors.values())).device).map(promoted)


def promoted(tensor: Tensor) -> Tensor:
    """The tensor in single precision at least: half precision is for transport only."""
    return tensor.float() if tensor.element_size() < 4 else tensor


def train(model: DualEncoder, params: Params, client: ClientData, job: LocalJob) -> Update:
    """Local epochs from `params`; the update is the difference of parameters. A client without pairs abstains."""
    drawn = draws_of(client, job)
    if not drawn.draws:
        return Update(client.shard.client, 0, None)
    minimised, common = loss_named(job.objective), job.common
    stack = {name: tensor.clone().unsqueeze(0) for name, tensor in params.tensors.items()}
    rule = StepRule(job, params, {name: tensor.unsqueeze(0) for name, tensor in params.tensors.items()})
    losses = []
    feed = client.train.feed([(draw.rows, draw.captions) for draw in drawn.draws])
    for number, (draw, states) in enumerate(zip(drawn.draws, feed, strict=True), start=1):
        tensors = {name: tensor[0].detach().requires_grad_() for name, tensor in stack.items()}
        whole = tensors if job.sparse is None else job.sparse.expand(tensors)
        loss = minimised.at(model, whole, states, draw, common)
        gradients = torch.autograd.grad(loss, list(tensors.values()), materialize_grads=True)
        rule.apply(stack, {name: each.unsqueeze(0) for name, each in zip(tensors, gradients, strict=True)}, number)
        losses.append(loss.detach())
    delta = Params({name: tensor[0] - params[name] for name, tensor in stack.items()}, params.blocks)
    return Update(client.shard.client, drawn.pairs, delta, {"loss": torch.stack(losses).mean().cpu()})


@dataclass(frozen=True)
class Draws:
    """The batches that a client trains on, in order, and the number of pairs that they come from."""

    pairs: int
    draws: tuple[Draw, ...]


def draws_of(client: ClientData, job: LocalJob) -> Draws:
    """The client's batches for a job; none if it has too few pairs, so that it abstains."""
    minimised = loss_named(job.objective)
    positions = minimised.positions(client, job)
    if len(positions) < minimised.fewest:
        return Draws(0, ())
    rng = generator(job.seed, job.stream, job.round, client.shard.client)
    drawn = [minimised.draw(client, chosen, job, rng) for chosen in batches(positions, job, rng)]
    draws = minimised.rearrange([each for each in drawn if each is not None], client, job)
    return Draws(len(positions), tuple(draws))


def loss_named(name: str) -> Loss:
    """The objective of this name, which must be one that clients can minimise."""
    found = objective(name)
    if not isinstance(found, Loss):
        raise UserError(f"objective {name!r}: a {type(found).__name__}, and a loss is expected; name one to train on")
    return found


def batches(positions: np.ndarray, job: LocalJob, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Shuffled batches of nearly equal size: a small remainder would have too few negatives to learn from."""
    for _ in range(job.epochs):
        yield from np.array_split(rng.permutation(positions), job.batch_count(len(positions)))
