"""Objectives: the losses that clients minimise and the measurements that they report, by name.

An objective is a loss of embeddings, a loss of states, a measurement, or a composite of several trainings. A method
registers its own objectives beside itself, and jobs name them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from ease.data.examples import States
from ease.data.partition import MINIMUM_PAIRS
from ease.errors import UserError
from ease.federation.client import ClientData
from ease.federation.expected import TRAINED, Expected, contrasted
from ease.federation.protocol import LocalJob, Update
from ease.model.dual_encoder import DualEncoder
from ease.model.losses import info_nce
from ease.params import Params
from ease.requests.request import forget_mask

Tensors = Mapping[str, Tensor]
Pairs = Literal["retain", "forget"]


@dataclass(frozen=True)
class Draw:
    """A batch as data: which pairs, which caption of each, and what the loss must know about them."""

    rows: np.ndarray
    """Positions in the client's training examples."""
    captions: np.ndarray
    split: int = 0
    """Index at which the second kind of pairs begins, for objectives that treat forget and retained pairs
    differently."""
    noise_seed: int = 0


DrawFunction = Callable[[ClientData, np.ndarray, LocalJob, np.random.Generator], Draw | None]
"""Returns None if nothing of the batch is left to learn from."""
RearrangeFunction = Callable[[Sequence[Draw], ClientData, LocalJob], Iterable[Draw]]
LossFunction = Callable[[Tensor, Tensor, Draw, LocalJob], Tensor]
StackedLossFunction = Callable[[Tensor, Tensor, Tensor | None, LocalJob], Tensor]
SlopesFunction = Callable[[Tensor, Tensor, Tensor | None, LocalJob], tuple[Tensor, Tensor, Tensor]]
StatesLossFunction = Callable[[DualEncoder, Tensors, States, Draw, LocalJob], Tensor]
MeasureFunction = Callable[[DualEncoder, Params, ClientData, LocalJob], dict[str, Tensor]]
MeasureClientsFunction = Callable[[DualEncoder, Params, Sequence[tuple[ClientData, LocalJob]]], list[dict[str, Tensor]]]
Assigned = tuple[Params, LocalJob]
"""A training as a part of a composite: the state where it starts, and its job."""
PartsFunction = Callable[[Params, LocalJob], Mapping[str, Assigned]]
CombineFunction = Callable[[ClientData, Mapping[str, Update], LocalJob], Update]
PositionsFunction = Callable[[ClientData, LocalJob], np.ndarray]
FinishFunction = Callable[[Update, LocalJob], Update]
ExpectsFunction = Callable[[Params, LocalJob, int, int], Expected | None]
"""Arguments: the state that is sent, the client's own job, the client, and how many pairs it has."""


def undeclared(state: Params, job: LocalJob, client: int, pairs: int) -> None:
    """The contract of an answer about which nothing is known, except that its values are finite."""


def trained(state: Params, job: LocalJob, client: int, pairs: int) -> Expected:
    """The contract of an answer to a training: a change of the parameters and a loss."""
    return TRAINED


def selected_positions(client: ClientData, job: LocalJob) -> np.ndarray:
    """Positions of the training pairs that the job names."""
    return client.select(job)


def as_drawn(draws: Sequence[Draw], client: ClientData, job: LocalJob) -> Sequence[Draw]:
    """The batches as they were drawn."""
    return draws


def unchanged(update: Update, job: LocalJob) -> Update:
    """The update as training returned it."""
    return update


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What all kinds of objectives declare to checks, meter and contract tests."""

    trains: ClassVar[bool]
    """Whether clients make training steps."""
    expects: ExpectsFunction = undeclared
    """What an answer must contain."""
    all_forget: bool = False
    """Whether a job on forget pairs needs the answers of all clients that are asked, in one process too."""
    adds_features: bool = False
    """Whether the answer has exact sums of features: those of one pair are its features."""
    reads: frozenset[Pairs] = frozenset()
    """Pairs it looks at whatever the job's `data` says."""
    passes: float | Callable[[LocalJob], float] = 1.0
    """How often each pair of a job goes through the model, forward and backward; forward only counts a third.

    Costs are computed from it, so that what a method does beside plain training is not free.
    """

    def passes_of(self, job: LocalJob) -> float:
        return self.passes(job) if callable(self.passes) else self.passes


@dataclass(frozen=True, kw_only=True)
class Loss(Objective):
    """A loss over batches that local training minimises.

    It sees the job without the fields of single clients (`LocalJob.common`), because clients may share its call. The
    draw brings what it must know about a client.
    """

    trains: ClassVar[bool] = True
    draw: DrawFunction
    """Chooses a batch around some positions."""
    rearrange: RearrangeFunction = as_drawn
    """Distributes the drawn pairs over other batches."""
    positions: PositionsFunction = selected_positions
    """What batches are drawn from."""
    fewest: int = MINIMUM_PAIRS
    """With fewer pairs a client abstains: one pair has no negatives, unless the objective brings them."""
    finish: FinishFunction = unchanged
    """Encodes an update before it is sent, so that who asked for it can decode it; `expects` declares the result."""
    expects: ExpectsFunction = trained

    def at(self, model: DualEncoder, tensors: Tensors, states: States, draw: Draw, job: LocalJob) -> Tensor:
        """The loss of one client's batch."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class EmbeddingLoss(Loss):
    """A loss of a batch's embeddings, so that many clients can share a pass through the model."""

    loss: LossFunction
    stacked: StackedLossFunction | None = None
    """The same for a stack of batches [trainings, pairs, width], with where pairs are real: [trainings]."""
    slopes: SlopesFunction | None = None
    """The same with its gradients at both embeddings, written out; without it they come from autograd."""

    def at(self, model: DualEncoder, tensors: Tensors, states: States, draw: Draw, job: LocalJob) -> Tensor:
        return self.loss(*embed_states(model, tensors, states), draw, job)

    def of_stack(
        self, image: Tensor, text: Tensor, valid: Tensor | None, draws: Sequence[Draw], job: LocalJob
    ) -> Tensor:
        """The loss of each training over its own batch [trainings]."""
        if self.stacked is not None:
            return self.stacked(image, text, valid, job)
        parts = zip(image, text, draws, strict=True)
        return torch.stack([self.loss(i[: len(draw.rows)], t[: len(draw.rows)], draw, job) for i, t, draw in parts])

    def with_slopes(
        self, image: Tensor, text: Tensor, valid: Tensor | None, draws: Sequence[Draw], job: LocalJob
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The loss of each training, and its gradients at the image and at the text embeddings."""
        if self.slopes is not None:
            return self.slopes(image, text, valid, job)
        with torch.enable_grad():
            image, text = (each.detach().requires_grad_() for each in (image, text))
            loss = self.of_stack(image, text, valid, draws, job)
            at_image, at_text = torch.autograd.grad(loss.sum(), [image, text])
        return loss.detach(), at_image, at_text


@dataclass(frozen=True, kw_only=True)
class StatesLoss(Loss):
    """A loss that embeds a batch more than once, or by another model too."""

    loss: StatesLossFunction

    def at(self, model: DualEncoder, tensors: Tensors, states: States, draw: Draw, job: LocalJob) -> Tensor:
        return self.loss(model, tensors, states, draw, job)


@dataclass(frozen=True, kw_only=True)
class Measurement(Objective):
    """Values that a client computes from its data and a state, which it does not change."""

    trains: ClassVar[bool] = False
    measure: MeasureFunction


@dataclass(frozen=True, kw_only=True)
class SharedMeasurement(Measurement):
    """A measurement that can also be made for several clients under one state, in passes that they share."""

    measure_clients: MeasureClientsFunction


@dataclass(frozen=True, kw_only=True)
class Composite(Objective):
    """Several trainings of one client, each from a state of its own, that give one answer."""

    trains: ClassVar[bool] = True
    parts: PartsFunction
    combine: CombineFunction


OBJECTIVES: dict[str, Objective] = {}


def register(name: str, objective: Objective) -> None:
    """Make an objective known under a name that jobs can carry."""
    if name in OBJECTIVES:
        raise ValueError(f"{name}: an objective of this name exists already; choose another")
    OBJECTIVES[name] = objective


def objective(name: str) -> Objective:
    """The objective that a job names."""
    if name not in OBJECTIVES:
        known = ", ".join(sorted(OBJECTIVES))
        raise UserError(f"objective {name!r}: not known here; install the method that brings it (known: {known})")
    return OBJECTIVES[name]


def embed_states(model: DualEncoder, tensors: Tensors, states: States) -> tuple[Tensor, Tensor]:
    image, text, mask = states
    return model.embed(tensors, "image", image), model.embed(tensors, "text", text, mask)


def draw_pairs(client: ClientData, positions: np.ndarray, job: LocalJob, rng: np.random.Generator) -> Draw:
    """One random caption for each image: two captions of one image are not negatives."""
    return Draw(positions, rng.integers(client.train.captions, size=len(positions)))


def align(image: Tensor, text: Tensor, draw: Draw, job: LocalJob) -> Tensor:
    """Symmetric InfoNCE: the ordinary training objective."""
    return info_nce(image, text, job.temperature)


def align_stack(image: Tensor, text: Tensor, valid: Tensor | None, job: LocalJob) -> Tensor:
    """Symmetric InfoNCE of each training [trainings]; padding counts neither as query nor as answer."""
    logits = image @ text.mT / job.temperature
    positive = logits.diagonal(dim1=1, dim2=2)
    if valid is None:
        return ((logits.logsumexp(1) + logits.logsumexp(2)) / 2 - positive).mean(1)
    to_text = logits.masked_fill(~valid[:, None, :], -torch.inf).logsumexp(2)
    to_image = logits.masked_fill(~valid[:, :, None], -torch.inf).logsumexp(1)
    each = ((to_text + to_image) / 2 - positive).masked_fill(~valid, 0.0)
    return each.sum(1) / valid.sum(1)


def align_slopes(image: Tensor, text: Tensor, valid: Tensor | None, job: LocalJob) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of `align_stack` and its gradients: (p - 1 at the right answer) / (2 n temperature), both ways."""
    logits = torch.bmm(image, text.mT).div_(job.temperature)
    if valid is None:
        to_text, to_image = logits.log_softmax(2), logits.log_softmax(1)
    else:
        to_text = logits.masked_fill(~valid[:, None, :], -torch.inf).log_softmax(2)
        to_image = logits.masked_fill_(~valid[:, :, None], -torch.inf).log_softmax(1)
    each = to_text.diagonal(dim1=1, dim2=2) + to_image.diagonal(dim1=1, dim2=2)
    slopes = to_text.exp_().add_(to_image.exp_())
    slopes.diagonal(dim1=1, dim2=2).sub_(2)
    if valid is None:
        loss = each.mean(1).mul_(-0.5)
        slopes.mul_(0.5 / (job.temperature * image.shape[1]))
    else:
        pairs = valid.sum(1, dtype=image.dtype)
        loss = each.masked_fill(~valid, 0.0).sum(1).mul_(-0.5) / pairs
        slopes.mul_((0.5 / (job.temperature * pairs))[:, None, None]).mul_(valid[:, :, None] & valid[:, None, :])
    return loss, torch.bmm(slopes, text), torch.bmm(slopes.mT, image)


ALIGN = EmbeddingLoss(draw=draw_pairs, loss=align, stacked=align_stack, slopes=align_slopes, expects=contrasted)
register("align", ALIGN)


def draw_both_kinds(client: ClientData, positions: np.ndarray, job: LocalJob, rng: np.random.Generator) -> Draw:
    """Forget pairs, then retained pairs."""
    forget, retained = both_kinds(client, positions, job, rng)
    return replace(draw_pairs(client, np.concatenate([forget, retained]), job, rng), split=len(forget))


def both_kinds(
    client: ClientData, positions: np.ndarray, job: LocalJob, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Forget pairs and retained pairs of a batch, each kind filled up to half a batch with what the client has of it.

    A forget pair alone would have no negatives: its loss, and the gradient of that, would be 0.
    """
    assert job.request is not None  # it says which are which
    named = forget_mask(job.request, client.shard)

    def filled(kind: np.ndarray) -> np.ndarray:
        present = positions[kind[positions]]
        others = rng.permutation(np.setdiff1d(np.flatnonzero(kind), present))
        return np.concatenate([present, others[: max(0, job.batch_size // 2 - len(present))]])

    return filled(named), filled(~named)


def own_log_probabilities(image: Tensor, text: Tensor, anchors: int, temperature: float) -> Tensor:
    """log p of the right caption and of the right image for the first pairs [2, anchors].

    All pairs are candidates, but only the anchors move: forgetting must not drag retained pairs along.
    """
    to_text = image[:anchors] @ torch.cat([text[:anchors], text[anchors:].detach()]).T
    to_image = text[:anchors] @ torch.cat([image[:anchors], image[anchors:].detach()]).T
    return torch.stack([(each / temperature).log_softmax(1).diagonal() for each in (to_text, to_image)])
