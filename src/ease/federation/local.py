"""The one local training loop: what a client does with a job, wherever it runs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ease.federation.client import ClientData
from ease.federation.lock import add_lock_gradient
from ease.federation.objectives import Draw, objective
from ease.federation.protocol import LocalJob, Optimiser, Update
from ease.federation.sophia import SophiaG
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
    device, common = client.train.device, job.common
    tensors = {name: tensor.clone().requires_grad_() for name, tensor in params.tensors.items()}
    optimiser = _optimiser(job, params, tensors)
    minimised, draws = objective(assignment.objective), assignment.draws
    hold = None if job.lock is None else job.lock.on(device)
    losses = []
    for draw, states in zip(draws, client.train.feed([(d.rows, d.captions) for d in draws]), strict=True):
        whole = tensors if job.sparse is None else job.sparse.expand(tensors)
        loss = minimised.loss_at(model, whole, states, draw, common)
        optimiser.zero_grad()
        loss.backward()
        if hold is not None:
            add_lock_gradient(tensors, hold)
        if job.clip is not None:
            torch.nn.utils.clip_grad_norm_(tensors.values(), job.clip)
        optimiser.step()
        if job.radius is not None:
            project_to_ball(tensors, params, job.radius)
        losses.append(loss.detach())
    delta = params.zip(
        lambda before, after: after - before, Params({n: t.detach() for n, t in tensors.items()}, params.blocks)
    )
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


def learning_rates(optimiser: Optimiser, params: Params) -> dict[str, float]:
    """The step size of each tensor."""
    rates = {"projector": optimiser.learning_rate, "lora": optimiser.lora_learning_rate or optimiser.learning_rate}
    return {name: rates[block.kind] for block in params.blocks for name in block.tensors}


class Descent:
    """Plain gradient descent, bit by bit that of torch.optim.SGD, whose first use imports a compiler for a second."""

    def __init__(self, groups: Sequence[Mapping[str, Any]]) -> None:
        self.groups = groups

    def zero_grad(self) -> None:
        for group in self.groups:
            for tensor in group["params"]:
                tensor.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for group in self.groups:
            moved = [tensor for tensor in group["params"] if tensor.grad is not None]
            torch._foreach_add_(moved, [tensor.grad for tensor in moved], alpha=-group["lr"])


def _optimiser(job: LocalJob, params: Params, tensors: Mapping[str, Tensor]) -> torch.optim.Optimizer | Descent:
    rates = learning_rates(job.optimiser, params)
    groups = [
        {"params": [tensors[name] for name in rates if rates[name] == rate], "lr": rate}
        for rate in sorted(set(rates.values()))
    ]
    if job.optimiser.kind == "sophia":
        return SophiaG(groups, job.batch_size)
    return torch.optim.Adam(groups) if job.optimiser.kind == "adam" else Descent(groups)


@torch.no_grad()
def project_to_ball(tensors: Mapping[str, Tensor], centre: Params, radius: float) -> None:
    """Move the tensors back, in place, to the nearest point of the ball around `centre`."""
    distance = (Params(tensors, centre.blocks) - centre).norm()
    if distance > radius:
        for name, tensor in tensors.items():
            tensor.copy_(torch.lerp(centre[name], tensor, radius / distance))
