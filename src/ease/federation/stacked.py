"""Many local trainings in one pass: clients, rounds, shadows or seeds share every forward and backward pass.

The frozen weights see one concatenated batch; adapters and projectors are stacked, one copy for each training.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from torch import Tensor

from ease.data.examples import Examples, States
from ease.federation.gram_layer import GramLayer, gram_sides
from ease.federation.local import batches, promoted
from ease.federation.objectives import Draw, EmbeddingLoss, embed_states, objective
from ease.federation.projectors import Factors, Projected, projects_alone
from ease.federation.protocol import LocalJob
from ease.federation.steps import StepRule
from ease.model.dual_encoder import DualEncoder
from ease.params import Modality, Params


@dataclass(frozen=True)
class LocalTraining:
    """One local training: where it starts and the batches it will see, in order."""

    start: Params
    draws: tuple[Draw, ...]


@dataclass(frozen=True)
class LocalResult:
    """The change of parameters of a training and its loss, on the CPU."""

    delta: Params
    loss: Tensor
    """Mean over its batches."""


def training_of(
    start: Params, positions: np.ndarray, captions: int, job: LocalJob, rng: np.random.Generator
) -> LocalTraining:
    """A training with the draws of `align`: an epoch is shuffled, then each pair of a batch gets a caption."""
    drawn = ((chosen, rng.integers(captions, size=len(chosen))) for chosen in batches(positions, job, rng))
    return LocalTraining(start, tuple(Draw(*batch) for batch in drawn))


def train_stacked(
    model: DualEncoder, examples: Examples, trainings: Sequence[LocalTraining], job: LocalJob
) -> list[LocalResult]:
    """Train every training from its own start on its own batches, all in the same passes.

    Those with fewer batches leave early: the longest come first, so those still at work are a leading slice.
    """
    device, minimised, common = examples.device, objective(job.objective), job.common
    assert isinstance(minimised, EmbeddingLoss)  # `can_share` lets no other through
    order = sorted(range(len(trainings)), key=lambda i: len(trainings[i].draws), reverse=True)
    ranked = [trainings[i] for i in order]
    blocks = ranked[0].start.blocks
    stack = {
        name: torch.stack([promoted(one.start[name]) for one in ranked]).to(device) for name in ranked[0].start.tensors
    }
    losses = torch.zeros(len(ranked), device=device, dtype=next(iter(stack.values())).dtype)
    halved = _halved(job, ranked[0].start, device)
    layers = _gram_layers(model, examples, stack, job, torch.bfloat16 if halved else losses.dtype)
    still = {name for layer in layers for name in layer.names}
    names = list(stack)
    stack = {name: tensor for name, tensor in stack.items() if name not in still}
    before = {name: tensor.clone() for name, tensor in stack.items()}
    used = {name: tensor.bfloat16() if name in halved else tensor for name, tensor in stack.items()}
    rule = StepRule(job, ranked[0].start, before)
    rates = rule.rates
    steps = _steps(ranked, device)
    feed = _without(examples, layers).feed([(step.rows.ravel(), step.captions.ravel()) for step in steps])
    here, tensors, active = stack, used, len(ranked)
    for number, (step, states) in enumerate(zip(steps, feed, strict=True), start=1):
        if step.active != active:
            active = step.active
            here = {name: tensor[:active] for name, tensor in stack.items()}
            tensors = {name: tensor[:active] for name, tensor in used.items()}
        with torch.no_grad():
            if projects_alone(model):
                hidden = {layer.side: layer.hidden(step.rows, step.captions, rates[layer.names[0]]) for layer in layers}
                loss, found, at_hidden = _written_out(model, minimised, tensors, states, hidden, step, common)
                for layer in layers:
                    layer.learn(step.rows, step.captions, at_hidden[layer.side])
            else:
                loss, found = _by_graph(model, minimised, tensors, states, step, common)
            losses[:active] += loss
            rule.apply(here, found, number)
            for name in halved - still:
                tensors[name].copy_(here[name])
    moved = {name: tensor.sub_(before[name]) for name, tensor in stack.items()}
    for layer in layers:
        moved |= layer.changes(rates[layer.names[0]])
    changes = {name: moved[name].cpu() for name in names}  # one copy for all trainings
    counts = torch.tensor([max(1, len(one.draws)) for one in ranked])
    means = losses.cpu() / counts
    results = {
        index: LocalResult(Params({name: changes[name][rank] for name in names}, blocks), means[rank])
        for rank, index in enumerate(order)
    }
    return [results[index] for index in range(len(trainings))]


def _halved(job: LocalJob, start: Params, device: torch.device) -> set[str]:
    """Tensors that are multiplied in half precision: of projectors, for a tower may enlarge what is rounded."""
    if job.precision == "float32" or (job.precision == "auto" and not halves_are_faster(device)):
        return set()
    projectors = [name for block in start.blocks if block.kind == "projector" for name in block.tensors]
    return {name for name in projectors if promoted(start[name]).dtype == torch.float32}


@cache
def halves_are_faster(device: torch.device) -> bool:
    """Whether a device multiplies in bfloat16 by instructions of its own; without, it takes longer than in float32."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    able = torch.cpu.get_capabilities()
    return bool(able.get("avx512_bf16") or able.get("amx_bf16"))


@dataclass(frozen=True)
class StackedBatch:
    """A batch of each training that still works, filled up to the widest [active, pairs]."""

    rows: np.ndarray
    captions: np.ndarray
    draws: tuple[Draw, ...]
    valid: Tensor | None
    """Mask of real pairs; None when all are."""

    @property
    def active(self) -> int:
        return len(self.rows)


def _steps(ranked: Sequence[LocalTraining], device: torch.device) -> list[StackedBatch]:
    """All steps of a training. What losses need goes to the device now, so that no step waits for the host."""
    found = []
    for number in range(len(ranked[0].draws)):
        draws = [one.draws[number] for one in ranked if number < len(one.draws)]
        sizes = np.array([len(draw.rows) for draw in draws])
        if (sizes == sizes[0]).all():
            rows, captions = (np.stack([getattr(draw, kind) for draw in draws]) for kind in ("rows", "captions"))
            found.append(StackedBatch(rows, captions, tuple(draws), None))
            continue
        rows, captions = (np.zeros((len(draws), sizes.max()), dtype=np.int64) for _ in range(2))
        for place, draw in enumerate(draws):
            rows[place] = draw.rows[0]  # filled up with a pair of its own: no training looks at another's data
            rows[place, : sizes[place]], captions[place, : sizes[place]] = draw.rows, draw.captions
        valid = torch.from_numpy(np.arange(sizes.max()) < sizes[:, None]).to(device)
        found.append(StackedBatch(rows, captions, tuple(draws), valid))
    return found


def _by_graph(
    model: DualEncoder,
    minimised: EmbeddingLoss,
    tensors: Mapping[str, Tensor],
    states: States,
    step: StackedBatch,
    job: LocalJob,
) -> tuple[Tensor, dict[str, Tensor | Factors]]:
    """The loss of each training [trainings] and its gradients, through towers that are adapted."""
    with torch.enable_grad():
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
        image, text = (each.view(*step.rows.shape, -1) for each in embed_states(model, leaves, states))
        loss = minimised.of_stack(image, text, step.valid, step.draws, job)
        found = torch.autograd.grad(loss.sum(), list(leaves.values()))
    return loss.detach(), dict(zip(leaves, found, strict=True))


def _written_out(
    model: DualEncoder,
    minimised: EmbeddingLoss,
    tensors: Mapping[str, Tensor],
    states: States,
    hidden: Mapping[Modality, Tensor],
    step: StackedBatch,
    job: LocalJob,
) -> tuple[Tensor, dict[str, Tensor | Factors], dict[Modality, Tensor]]:
    """The losses and gradients of projectors over fixed features, and the gradients at the outputs of first layers.

    `hidden` has the outputs of Gram layers.
    """

    def projected(side: Modality, own: Tensor, mask: Tensor | None) -> Projected:
        if side in hidden:
            return Projected.of(side, tensors, None, hidden[side])
        return Projected.of(side, tensors, getattr(model, side).features(own, mask).view(*step.rows.shape, -1))

    sides = projected("image", states[0], None), projected("text", states[1], states[2])
    image, text = (each.embeddings for each in sides)
    loss, *slopes = minimised.with_slopes(image, text, step.valid, step.draws, job)
    found: dict[str, Tensor | Factors] = {}
    at_hidden: dict[Modality, Tensor] = {}
    for each, slope in zip(sides, slopes, strict=True):
        own, at_hidden[each.side] = each.gradients(tensors, slope)
        found |= own
    return loss, found, at_hidden


def _gram_layers(
    model: DualEncoder, examples: Examples, stack: Mapping[str, Tensor], job: LocalJob, kind: torch.dtype
) -> list[GramLayer]:
    sides = gram_sides(model, examples, job)
    return [GramLayer.of(model, side, examples, stack, kind) for side in sides]


def _without(examples: Examples, layers: Sequence[GramLayer]) -> Examples:
    """The examples without the features of sides whose first layer is a Gram layer."""
    empty = {layer.side: getattr(examples, layer.side)[..., :0] for layer in layers}
    return replace(examples, **empty)
