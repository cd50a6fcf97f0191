"""Many local trainings in one pass: clients, shadows or seeds share every forward and backward pass.

The frozen weights see one concatenated batch; adapters and projectors are stacked, one copy for each pupil.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ease.data.features import Activations
from ease.data.partition import MINIMUM_PAIRS, Shard
from ease.errors import UserError
from ease.federation.local import ClientData, Examples, batches, examples_at, learning_rates
from ease.federation.protocol import LocalJob, Update
from ease.federation.simulation import Simulation
from ease.model.dual_encoder import DualEncoder
from ease.params import Params
from ease.seeding import generator

Batch = tuple[np.ndarray, np.ndarray]
"""Positions in the examples, and the caption chosen for each."""


TOGETHER = {"cpu": 16, "cuda": 512}
"""Most models in one pass; more no longer help, for the passes are busy already."""


@dataclass(frozen=True)
class Pupil:
    """One local training: where it starts and the batches it will see, in order."""

    start: Params
    batches: tuple[Batch, ...]


@dataclass(frozen=True)
class Lesson:
    """What a pupil learnt."""

    delta: Params
    loss: Tensor
    """Mean over its batches."""


def pupil(start: Params, positions: np.ndarray, captions: int, job: LocalJob, rng: np.random.Generator) -> Pupil:
    """The same draws as training alone: an epoch is shuffled, then each pair of each batch gets a caption."""
    return Pupil(
        start, tuple((chosen, rng.integers(captions, size=len(chosen))) for chosen in batches(positions, job, rng))
    )


def train_together(model: DualEncoder, examples: Examples, pupils: Sequence[Pupil], job: LocalJob) -> list[Lesson]:
    """Train every pupil by InfoNCE from its own start on its own batches, all in the same passes.

    Pupils with fewer batches leave early: the longest come first, so those still at work are a leading slice.
    """
    device = examples.image.device
    order = sorted(range(len(pupils)), key=lambda i: len(pupils[i].batches), reverse=True)
    ranked = [pupils[i] for i in order]
    stack = {
        name: torch.stack([one.start[name].float() for one in ranked]).to(device) for name in ranked[0].start.tensors
    }
    before = {name: tensor.clone() for name, tensor in stack.items()}
    rates = learning_rates(job.optimiser, ranked[0].start)
    adam = job.optimiser.kind == "adam"
    moments = {name: (torch.zeros_like(t), torch.zeros_like(t)) for name, t in stack.items()} if adam else {}
    losses = torch.zeros(len(ranked), device=device)
    for step, (active, batch) in enumerate(_padded(ranked, device)):
        tensors = {name: tensor[:active].detach().requires_grad_() for name, tensor in stack.items()}
        loss = _losses(model, tensors, examples, *batch, job.temperature)
        losses[:active] += loss.detach()
        gradients = torch.autograd.grad(loss.sum(), list(tensors.values()))
        for (name, tensor), gradient in zip(stack.items(), gradients, strict=True):
            change = gradient
            if adam:
                first, second = (moment[:active] for moment in moments[name])
                change = _adam_direction(first, second, gradient, step + 1)
            tensor[:active].sub_(change, alpha=rates[name])
    lessons: dict[int, Lesson] = {}
    for rank, index in enumerate(order):
        delta = Params({name: stack[name][rank] - before[name][rank] for name in stack}, pupils[index].start.blocks)
        lessons[index] = Lesson(delta, losses[rank] / max(1, len(pupils[index].batches)))
    return [lessons[index] for index in range(len(pupils))]


def train_in_groups(
    model: DualEncoder, examples: Examples, pupils: Sequence[Pupil], job: LocalJob, together: int | None = None
) -> Iterator[Lesson]:
    """Train pupils in groups that keep the device busy, and in smaller ones where its memory does not suffice."""
    together = together or TOGETHER[examples.image.device.type]
    for first in range(0, len(pupils), together):
        group = pupils[first : first + together]
        try:
            lessons = train_together(model, examples, group, job)
        except torch.OutOfMemoryError as error:
            if len(group) == 1:
                raise UserError(
                    f"training.batch_size = {job.batch_size}: one client's batch does not fit into the memory of "
                    f"{examples.image.device}; choose a smaller one"
                ) from error
            lessons = []
        if lessons:
            yield from lessons
        else:  # outside of the handler, which would keep the failed attempt's tensors alive
            yield from train_in_groups(model, examples, group, job, (len(group) + 1) // 2)


def _padded(
    ranked: Sequence[Pupil], device: torch.device
) -> Iterator[tuple[int, tuple[Tensor, Tensor, Tensor | None]]]:
    """For each step: how many pupils are at work, and their positions, captions and validity [pupils, pairs].

    All indices go to the device at once, before the first step, so that no step waits for the host.
    """
    steps, width = len(ranked[0].batches), max(len(positions) for one in ranked for positions, _ in one.batches)
    table = np.zeros((3, steps, len(ranked), width), dtype=np.int64)
    widths = np.zeros((steps, len(ranked)), dtype=np.int64)
    for rank, one in enumerate(ranked):
        for step, (positions, captions) in enumerate(one.batches):
            table[:, step, rank, : len(positions)] = positions, captions, np.ones_like(positions)
            widths[step, rank] = len(positions)
    on_device = torch.from_numpy(table).to(device)
    for step in range(steps):
        active, widest = int((widths[step] > 0).sum()), int(widths[step].max())
        positions, captions, valid = on_device[:, step, :active, :widest]
        full = bool((widths[step, :active] == widest).all())
        yield active, (positions, captions, None if full else valid.bool())


def _losses(
    model: DualEncoder,
    tensors: dict[str, Tensor],
    examples: Examples,
    positions: Tensor,
    captions: Tensor,
    valid: Tensor | None,
    temperature: float,
) -> Tensor:
    """Symmetric InfoNCE of each pupil over its own batch [pupils]; padding counts neither as query nor as answer."""
    rows = positions.flatten()
    lines = rows * examples.text.shape[1] + captions.flatten()
    mask = None if examples.text_mask is None else examples.text_mask.flatten(0, 1).index_select(0, lines)
    words = examples.text.flatten(0, 1).index_select(0, lines)
    image = model.embed(tensors, "image", examples.image.index_select(0, rows)).view(*positions.shape, -1)
    text = model.embed(tensors, "text", words, mask).view(*positions.shape, -1)
    logits = image @ text.mT / temperature
    positive = logits.diagonal(dim1=1, dim2=2)
    if valid is None:
        return ((logits.logsumexp(1) + logits.logsumexp(2)) / 2 - positive).mean(1)
    to_text = logits.masked_fill(~valid[:, None, :], -torch.inf).logsumexp(2)
    to_image = logits.masked_fill(~valid[:, :, None], -torch.inf).logsumexp(1)
    each = ((to_text + to_image) / 2 - positive).masked_fill(~valid, 0.0)
    return each.sum(1) / valid.sum(1)


def _adam_direction(first: Tensor, second: Tensor, gradient: Tensor, step: int) -> Tensor:
    """Adam's direction with its usual constants; by hand, for torch's own cannot let single models of a stack stop."""
    first.lerp_(gradient, 0.1)
    second.lerp_(gradient.square(), 0.001)
    return (first / (1 - 0.9**step)) / ((second / (1 - 0.999**step)).sqrt() + 1e-8)


class Cohort(Simulation):
    """All clients of a round in one pass where the job is plain training; anything else one after the other."""

    def __init__(
        self, model: DualEncoder, pool: Examples, clients: Mapping[int, ClientData], offsets: Mapping[int, int]
    ):
        super().__init__(model, clients)
        self.pool = pool
        self.offsets = offsets

    @classmethod
    def of(
        cls, model: DualEncoder, shards: Sequence[Shard], activations: Activations, device: torch.device
    ) -> "Cohort":
        """Clients whose training pairs lie one after the other in one pool, each seeing its own part of it."""
        pool = examples_at(activations, np.concatenate([shard.train for shard in shards]), device)
        ends = np.cumsum([len(shard.train) for shard in shards])
        clients, offsets = {}, {}
        for shard, end in zip(shards, ends.tolist(), strict=True):
            offsets[shard.client] = end - len(shard.train)
            held_out = examples_at(activations, shard.validation, device)
            clients[shard.client] = ClientData(shard, pool.part(offsets[shard.client], end), held_out)
        return cls(model, pool, clients, offsets)

    def run(self, params: Params, job: LocalJob, clients: Sequence[int]) -> Iterator[Update]:
        if not _plain(job):
            yield from super().run(params, job, clients)
            return
        captions = self.pool.text.shape[1]
        able = []
        for client in clients:
            positions = self.data[client].select(job)
            if len(positions) < MINIMUM_PAIRS:
                yield Update(client, 0, None)
                continue
            rng = generator(job.seed, job.stream, job.round, client)
            able.append((client, len(positions), pupil(params, self.offsets[client] + positions, captions, job, rng)))
        lessons = train_in_groups(self.model, self.pool, [one for _, _, one in able], job)
        for (client, pairs, _), lesson in zip(able, lessons, strict=True):
            yield Update(client, pairs, lesson.delta.to("cpu"), {"loss": lesson.loss.cpu()})


def _plain(job: LocalJob) -> bool:
    """Whether the job is what `train_together` does: InfoNCE by SGD or Adam, and nothing besides."""
    special = (job.lock, job.clip, job.radius, job.sparse)
    usual = job.objective == "align" and job.optimiser.kind != "sophia" and job.encoding == "dense"
    return usual and all(part is None for part in special)
