"""The one local training loop: what a client does with a job, wherever it runs."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ease.data.features import Activations
from ease.data.partition import MINIMUM_PAIRS, Shard, unit_embeddings
from ease.data.request import forget_mask
from ease.federation.objectives import OBJECTIVES
from ease.federation.protocol import LocalJob, Lock, Optimiser, Update, pack
from ease.model.dual_encoder import DualEncoder
from ease.params import Block, Params
from ease.seeding import generator
from ease.subspace import displacement


@dataclass(frozen=True)
class Examples:
    """Cached activations of some pairs, ready for the adapted part of the model."""

    image: Tensor
    """[pairs, ...]"""
    text: Tensor
    """[pairs, captions, ...]"""
    text_mask: Tensor | None
    """bool [pairs, captions, tokens]"""
    pooled_image: Tensor
    """Frozen unit-norm image embeddings, for densities [pairs, width]."""
    pooled_text: Tensor
    """Frozen unit-norm mean caption embeddings [pairs, width]."""

    def __len__(self) -> int:
        return len(self.image)

    def take(self, positions: np.ndarray) -> "Examples":
        index = torch.from_numpy(np.ascontiguousarray(positions)).to(self.image.device)
        mask = None if self.text_mask is None else self.text_mask[index]
        return Examples(self.image[index], self.text[index], mask, self.pooled_image[index], self.pooled_text[index])

    def batch(self, positions: np.ndarray, captions: np.ndarray) -> tuple[Tensor, Tensor, Tensor | None]:
        """Image states of some pairs, the states of one chosen caption each, and its mask."""
        rows, chosen = (
            torch.from_numpy(np.ascontiguousarray(index)).to(self.image.device) for index in (positions, captions)
        )
        return (
            self.image[rows],
            self.text[rows, chosen],
            None if self.text_mask is None else self.text_mask[rows, chosen],
        )


@dataclass(frozen=True)
class ClientData:
    """Everything a client holds: its shard and the activations of its own pairs."""

    shard: Shard
    train: Examples
    validation: Examples

    @classmethod
    def of(cls, shard: Shard, activations: Activations, device: torch.device | str) -> "ClientData":
        return cls(
            shard, examples_at(activations, shard.train, device), examples_at(activations, shard.validation, device)
        )

    def select(self, job: LocalJob) -> np.ndarray:
        """Positions of the training pairs the job speaks of."""
        if job.data == "all" or job.request is None:
            return np.arange(len(self.train))
        forget = forget_mask(job.request, self.shard)
        return np.flatnonzero(forget if job.data == "forget" else ~forget)


def examples_at(activations: Activations, positions: np.ndarray, device: torch.device | str) -> Examples:
    """Copy the activations of some pairs out of the memory-mapped cache."""
    mask = activations.text_mask
    return Examples(
        torch.from_numpy(np.array(activations.image[positions])).to(device),
        torch.from_numpy(np.array(activations.text[positions])).to(device),
        None if mask is None else torch.from_numpy(np.array(mask[positions])).to(device),
        *(
            torch.from_numpy(part).float().to(device)
            for part in unit_embeddings(activations.pooled_image[positions], activations.pooled_text[positions])
        ),
    )


def work(model: DualEncoder, params: Params, client: ClientData, job: LocalJob) -> Update:
    """Do a job: train and return the change, or measure and return values.

    The server's tensors live on the CPU and may come in half precision. The client takes them to its own device.
    """
    device = client.train.image.device
    params = params.map(lambda tensor: tensor.to(device).float())
    job = job if job.lock is None else replace(job, lock=job.lock.to(device))
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
    return train(model, params, client, job)


def train(model: DualEncoder, params: Params, client: ClientData, job: LocalJob) -> Update:
    """Local epochs from `params`; the update is the difference of parameters. A client without pairs abstains."""
    positions = client.select(job)
    if len(positions) < MINIMUM_PAIRS:
        return Update(client.shard.client, 0, None)
    objective = OBJECTIVES[job.objective]
    if objective.decide is not None:
        objective = OBJECTIVES[objective.decide(model, params, client, job)]
    assert objective.loss is not None  # `work` sends measurements elsewhere
    tensors = {name: tensor.clone().requires_grad_() for name, tensor in params.tensors.items()}
    optimiser = _optimiser(job, params, tensors)
    rng = generator(job.seed, job.stream, job.round, client.shard.client)
    losses = []
    for positions_of_batch in batches(positions, job, rng):
        loss = objective.loss(model, tensors, client, positions_of_batch, job, rng)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        if job.lock is not None:
            add_lock_gradient(tensors, job.lock)
        optimiser.step()
        losses.append(loss.detach())
    delta = params.zip(
        lambda before, after: after - before, Params({n: t.detach() for n, t in tensors.items()}, params.blocks)
    )
    return Update(client.shard.client, len(positions), delta, {"loss": torch.stack(losses).mean().cpu()})


def probe(model: DualEncoder, params: Params, client: ClientData, job: LocalJob) -> Update:
    """One state down, two updates back: what the forget pairs and what the retained pairs would teach, in 8 bit."""
    values: dict[str, Tensor] = {}
    for data in ("forget", "retain"):
        update = train(model, params, client, replace(job, objective="align", data=data, stream=f"{job.stream}-{data}"))
        if update.delta is not None:
            values |= {f"{data}/{name}": tensor for name, tensor in pack(update.delta.tensors).items()}
    return Update(client.shard.client, len(client.train), None, values)


def batches(positions: np.ndarray, job: LocalJob, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Shuffled batches of nearly equal size: a small remainder would have too few negatives to learn from."""
    # A batch of one pair has no negatives at all.
    count = max(1, min(round(len(positions) / job.batch_size), len(positions) // 2))
    for _ in range(job.epochs):
        yield from np.array_split(rng.permutation(positions), count)


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
    return torch.optim.Adam(groups) if job.optimiser.kind == "adam" else torch.optim.SGD(groups)


@torch.no_grad()
def add_lock_gradient(tensors: Mapping[str, Tensor], lock: Lock) -> None:
    """Add the exact gradient of the Forget Lock, 2 · strength · Pi_u (w - w_ref), to `.grad`."""
    for block in lock.reference.blocks:
        if lock.importance is not None:
            for name in block.tensors:
                drift = tensors[name] - lock.reference[name]
                _gradient(tensors[name]).add_(lock.importance[name] * drift, alpha=2 * lock.strength)
        elif block.name in lock.bases:
            for name, part in lock_pull(block, tensors, lock).items():
                _gradient(tensors[name]).add_(part, alpha=2 * lock.strength)


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
