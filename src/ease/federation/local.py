"""The one local training loop: what a client does with a job, wherever it runs."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ease.federation.client import ClientData
from ease.federation.objectives import OBJECTIVES, Draw
from ease.federation.protocol import LocalJob, Lock, Optimiser, Update, to_8bit
from ease.federation.sophia import SophiaG
from ease.federation.ternary import encode
from ease.model.dual_encoder import DualEncoder
from ease.params import Block, Params
from ease.seeding import generator
from ease.subspace import displacement


def work(model: DualEncoder, params: Params, client: ClientData, job: LocalJob) -> Update:
    """Do a job: train and return the change, or measure and return values.

    The server's tensors live on the CPU and may come in half precision. The client takes them to its own device.
    """
    device = client.train.device
    params = params.map(lambda tensor: tensor.to(device).float())
    job = job if job.lock is None else replace(job, lock=job.lock.to(device))
    job = job if job.reference is None else replace(job, reference=job.reference.to(device))
    job = job if job.sparse is None else replace(job, sparse=job.sparse.to(device))
    update = _work(model, params, client, job)
    delta = None if update.delta is None else update.delta.to("cpu")
    return replace(update, delta=delta, values={name: value.cpu() for name, value in update.values.items()})


def _work(model: DualEncoder, params: Params, client: ClientData, job: LocalJob) -> Update:
    if job.objective == "probe":
        return probe(model, params, client, job)
    objective = OBJECTIVES[job.objective]
    if objective.measure is not None:
        with torch.no_grad():
            values = objective.measure(model, params, client, job)
        return Update(client.shard.client, len(client.train), None, values)
    update = train(model, params, client, job)
    return update if job.encoding == "dense" else encode(update, job.settings)


def train(model: DualEncoder, params: Params, client: ClientData, job: LocalJob) -> Update:
    """Local epochs from `params`; the update is the difference of parameters. A client without pairs abstains."""
    assignment = assignment_of(model, params, client, job)
    if assignment is None:
        return Update(client.shard.client, 0, None)
    tensors = {name: tensor.clone().requires_grad_() for name, tensor in params.tensors.items()}
    optimiser = _optimiser(job, params, tensors)
    objective, draws = OBJECTIVES[assignment.objective], [draw.to(client.train.device) for draw in assignment.draws]
    losses = []
    for draw, states in zip(draws, client.train.feed([(d.rows, d.captions) for d in draws]), strict=True):
        whole = tensors if job.sparse is None else job.sparse.expand(tensors)
        loss = objective.loss_at(model, whole, states, draw, job)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        if job.lock is not None:
            add_lock_gradient(tensors, job.lock)
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
    positions, name = client.select(job), job.objective
    if len(positions) < OBJECTIVES[name].fewest:
        return None
    decide = OBJECTIVES[name].decide
    if decide is not None:
        name = decide(model, params, client, job)
    draw = OBJECTIVES[name].draw
    assert draw is not None  # measurements are sent elsewhere
    rng = generator(job.seed, job.stream, job.round, client.shard.client)
    return Assignment(
        name, len(positions), tuple(draw(client, chosen, job, rng) for chosen in batches(positions, job, rng))
    )


def probe(model: DualEncoder, params: Params, client: ClientData, job: LocalJob) -> Update:
    """One state down, two updates back: what the forget pairs and what the retained pairs would teach."""
    return probed(client, {kind: train(model, params, client, part) for kind, part in probe_parts(job).items()})


def probe_parts(job: LocalJob) -> dict[str, LocalJob]:
    """The two trainings of a probe."""
    kinds: tuple[Literal["forget", "retain"], ...] = ("forget", "retain")
    return {kind: replace(job, objective="align", data=kind, stream=f"{job.stream}-{kind}") for kind in kinds}


def probed(client: ClientData, updates: Mapping[str, Update]) -> Update:
    """The answer to a probe: both updates in 8 bit; what a client has too little of is left out."""
    values: dict[str, Tensor] = {}
    for kind, update in updates.items():
        if update.delta is not None:
            values |= {f"{kind}/{name}": tensor for name, tensor in to_8bit(update.delta.tensors).items()}
    return Update(client.shard.client, len(client.train), None, values)


def batches(positions: np.ndarray, job: LocalJob, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Shuffled batches of nearly equal size: a small remainder would have too few negatives to learn from."""
    for _ in range(job.epochs):
        yield from np.array_split(rng.permutation(positions), job.batch_count(len(positions)))


def learning_rates(optimiser: Optimiser, params: Params) -> dict[str, float]:
    """The step size of each tensor."""
    rates = {"projector": optimiser.learning_rate, "lora": optimiser.lora_learning_rate or optimiser.learning_rate}
    return {name: rates[block.kind] for block in params.blocks for name in block.tensors}


def _optimiser(job: LocalJob, params: Params, tensors: Mapping[str, Tensor]) -> torch.optim.Optimizer:
    rates = learning_rates(job.optimiser, params)
    groups = [
        {"params": [tensors[name] for name in rates if rates[name] == rate], "lr": rate}
        for rate in sorted(set(rates.values()))
    ]
    if job.optimiser.kind == "sophia":
        return SophiaG(groups, job.batch_size)
    return torch.optim.Adam(groups) if job.optimiser.kind == "adam" else torch.optim.SGD(groups)


@torch.no_grad()
def project_to_ball(tensors: Mapping[str, Tensor], centre: Params, radius: float) -> None:
    """Move the tensors back, in place, to the nearest point of the ball around `centre`."""
    distance = (Params(tensors, centre.blocks) - centre).norm()
    if distance > radius:
        for name, tensor in tensors.items():
            tensor.copy_(torch.lerp(centre[name], tensor, radius / distance))


@torch.no_grad()
def add_lock_gradient(tensors: Mapping[str, Tensor], lock: Lock) -> None:
    """Add the exact gradient of the Forget Lock, 2 · strength · Pi_u (w - w_ref), to `.grad`."""
    for name, part in lock_pulls(tensors, lock).items():
        _gradient(tensors[name]).add_(part, alpha=2 * lock.strength)


def lock_pulls(tensors: Mapping[str, Tensor], lock: Lock) -> dict[str, Tensor]:
    """Pi_u (w - w_ref) of every locked tensor; an axis-aligned lock weighs each value instead."""
    if lock.importance is not None:
        return {name: lock.importance[name] * (tensors[name] - lock.reference[name]) for name in tensors}
    pulls: dict[str, Tensor] = {}
    for block in lock.reference.blocks:
        if block.name in lock.bases:
            pulls |= lock_pull(block, tensors, lock)
    return pulls


def lock_pull(block: Block, tensors: Mapping[str, Tensor], lock: Lock) -> dict[str, Tensor]:
    """Pi_u (w - w_ref) of one block by tensor; for trained factors the chain rule takes it to B and to A."""
    basis = lock.bases[block.name]
    state = Params({name: tensors[name].detach() for name in block.tensors}, (block,))
    amounts = basis.weights * basis.components(displacement(block, state, lock.reference))
    if isinstance(basis.directions, Tensor):
        pull = basis.directions @ amounts.to(basis.directions)
        parts = pull.split([tensors[name].numel() for name in block.tensors])
        return {name: part.view_as(tensors[name]) for name, part in zip(block.tensors, parts, strict=True)}
    a, b = block.tensors
    gamma = basis.coefficients @ amounts
    grad_a, grad_b = torch.zeros_like(tensors[a]), torch.zeros_like(tensors[b])
    for weight, column in zip(gamma.tolist(), basis.directions, strict=True):
        left, right = column.left.to(grad_b), column.right.to(grad_a)
        grad_b += weight * left @ (right @ tensors[a].T)
        grad_a += weight * (tensors[b].T @ left) @ right
    return {a: grad_a, b: grad_b}


def _gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None  # the loss reaches every trained tensor
    return tensor.grad
