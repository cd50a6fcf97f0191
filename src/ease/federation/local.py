"""The one local training loop: what a client does with a job, wherever it runs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ease.federation.client import ClientData
from ease.federation.objectives import Draw, objective
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
    update = _work(model, params, client, job)
    delta = None if update.delta is None else update.delta.to("cpu")
    return replace(update, delta=delta, values={name: value.cpu() for name, value in update.values.items()})


def measures_together(job: LocalJob, device: torch.device) -> bool:
    """Whether clients share the passes of a measurement: on a GPU, which one client's few pairs leave idle."""
    return device.type != "cpu" and objective(job.objective).measure_together is not None


def measure_together(model: DualEncoder, params: Params, asked: Sequence[tuple[ClientData, LocalJob]]) -> list[Update]:
    """What clients of one device measure under one state, in passes that they share; jobs differ in what is own."""
    together = objective(asked[0][1].objective).measure_together
    assert together is not None  # whoever asks has looked
    with torch.no_grad():
        found = together(model, params.to(asked[0][0].train.device).map(promoted), asked)
    return [
        Update(client.shard.client, len(client.train), None, {name: value.cpu() for name, value in values.items()})
        for (client, _), values in zip(asked, found, strict=True)
    ]


def _ready(state: Params, like: Params) -> Params:
    """A state as it is computed with, where another one is."""
    return state.to(next(iter(like.tensors.values())).device).map(promoted)


def promoted(tensor: Tensor) -> Tensor:
    """What is computed with: halves only travel."""
    return tensor.float() if tensor.element_size() < 4 else tensor


def _work(model: DualEncoder, params: Params, client: ClientData, job: LocalJob) -> Update:
    asked = objective(job.objective)
    if asked.measure is not None:
        with torch.no_grad():
            values = asked.measure(model, params, client, job)
        return Update(client.shard.client, len(client.train), None, values)
    if asked.parts is not None and asked.combine is not None:
        parts = asked.parts(params, job).items()
        updates = {name: train(model, _ready(start, params), client, part) for name, (start, part) in parts}
        return asked.combine(client, updates, job)
    update = train(model, params, client, job)
    return update if asked.finish is None else asked.finish(update, job)


def train(model: DualEncoder, params: Params, client: ClientData, job: LocalJob) -> Update:
    """Local epochs from `params`; the update is the difference of parameters. A client without pairs abstains."""
    assignment = assignment_of(model, params, client, job)
    if assignment is None or not assignment.draws:
        return Update(client.shard.client, 0, None)
    minimised, draws, common = objective(assignment.objective), assignment.draws, job.common
    stack = {name: tensor.clone().unsqueeze(0) for name, tensor in params.tensors.items()}
    rule = StepRule(job, params, {name: tensor.unsqueeze(0) for name, tensor in params.tensors.items()})
    losses = []
    feed = client.train.feed([(draw.rows, draw.captions) for draw in draws])
    for number, (draw, states) in enumerate(zip(draws, feed, strict=True), start=1):
        tensors = {name: tensor[0].detach().requires_grad_() for name, tensor in stack.items()}
        whole = tensors if job.sparse is None else job.sparse.expand(tensors)
        loss = minimised.loss_at(model, whole, states, draw, common)
        gradients = torch.autograd.grad(loss, list(tensors.values()), materialize_grads=True)
        rule.apply(stack, {name: each.unsqueeze(0) for name, each in zip(tensors, gradients, strict=True)}, number)
        losses.append(loss.detach())
    delta = Params({name: tensor[0] - params[name] for name, tensor in stack.items()}, params.blocks)
    return Update(client.shard.client, assignment.pairs, delta, {"loss": torch.stack(losses).mean().cpu()})


@dataclass(frozen=True)
class Assignment:
    """What a client will train on."""

    objective: str
    pairs: int
    draws: tuple[Draw, ...]


def assignment_of(model: DualEncoder, params: Params, client: ClientData, job: LocalJob) -> Assignment | None:
    """The client's objective and its batches; None when it has too few pairs and abstains."""
    name = job.objective
    choose = objective(name).positions
    positions = client.select(job) if choose is None else choose(client, job)
    if len(positions) < objective(name).fewest:
        return None
    decide = objective(name).decide
    if decide is not None:
        name = decide(model, params, client, job)
    draw = objective(name).draw
    assert draw is not None  # measurements are sent elsewhere
    rng = generator(job.seed, job.stream, job.round, client.shard.client)
    drawn = (draw(client, chosen, job, rng) for chosen in batches(positions, job, rng))
    return Assignment(name, len(positions), tuple(each for each in drawn if each is not None))


def batches(positions: np.ndarray, job: LocalJob, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Shuffled batches of nearly equal size: a small remainder would have too few negatives to learn from."""
    for _ in range(job.epochs):
        yield from np.array_split(rng.permutation(positions), job.batch_count(len(positions)))
