"""What clients can be asked to minimise or to measure, by name, and the building blocks that several losses share.

A method registers the objectives of its own beside itself; whoever does jobs finds them here and knows none by name.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

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
    """A batch as data: which pairs, which caption of each, and what the loss must know of them."""

    rows: np.ndarray
    """Positions in the client's training examples."""
    captions: np.ndarray
    split: int = 0
    """Where the second kind of pairs begins, for objectives that treat forget and retained pairs differently."""
    noise_seed: int = 0


DrawFunction = Callable[[ClientData, np.ndarray, LocalJob, np.random.Generator], Draw | None]
"""None: nothing of the batch is left to learn from."""
LossFunction = Callable[[Tensor, Tensor, Draw, LocalJob], Tensor]
StackedLossFunction = Callable[[Tensor, Tensor, Tensor | None, LocalJob], Tensor]
SlopesFunction = Callable[[Tensor, Tensor, Tensor | None, LocalJob], tuple[Tensor, Tensor, Tensor]]
StatesLossFunction = Callable[[DualEncoder, Tensors, States, Draw, LocalJob], Tensor]
DecideFunction = Callable[[DualEncoder, Params, ClientData, LocalJob], str]
MeasureFunction = Callable[[DualEncoder, Params, ClientData, LocalJob], dict[str, Tensor]]
MeasureTogetherFunction = Callable[
    [DualEncoder, Params, Sequence[tuple[ClientData, LocalJob]]], list[dict[str, Tensor]]
]
Assigned = tuple[Params, LocalJob]
"""A training as a part of a job: where it starts, and what it is."""
PartsFunction = Callable[[Params, LocalJob], Mapping[str, Assigned]]
CombineFunction = Callable[[ClientData, Mapping[str, Update], LocalJob], Update]
PositionsFunction = Callable[[ClientData, LocalJob], np.ndarray]
FinishFunction = Callable[[Update, LocalJob], Update]
ExpectsFunction = Callable[[Params, LocalJob, int, int], Expected]
"""Of the state that is sent, the client's own job, the client, and how many pairs it holds."""


@dataclass(frozen=True)
class Objective:
    """A loss over batches, a measurement that changes nothing, or several trainings under one name.

    A loss sees the job without what is a client's own (`LocalJob.common`), for clients may share its call. What it must
    know of a client, the draw brings.
    """

    draw: DrawFunction | None = None
    """Chooses a batch around some positions."""
    loss: LossFunction | None = None
    """Of the batch's embeddings alone, so that many clients can share a pass through the model."""
    stacked: StackedLossFunction | None = None
    """The same for a stack of batches at once [trainings, pairs, width], with where pairs are real: [trainings]."""
    slopes: SlopesFunction | None = None
    """The same with its gradients at the two embeddings, written out; absent: they come from a graph."""
    loss_of_states: StatesLossFunction | None = None
    """The alternative for a loss that embeds more than once."""
    positions: PositionsFunction | None = None
    """What batches are drawn from; absent: the pairs that the job speaks of."""
    fewest: int = MINIMUM_PAIRS
    """With fewer pairs a client abstains: one pair has no negatives, unless the objective brings them."""
    decide: DecideFunction | None = None
    """Looks at the state a job starts from and may choose a simpler objective for this client."""
    measure: MeasureFunction | None = None
    measure_together: MeasureTogetherFunction | None = None
    """The same of several clients under one state, in passes that they share."""
    parts: PartsFunction | None = None
    """The trainings that a job is made of, each from a state of its own and under another objective."""
    combine: CombineFunction | None = None
    """The one answer to all parts."""
    finish: FinishFunction | None = None
    """What a client makes of its update before it is sent; who asked for it knows how to read that."""
    expects: ExpectsFunction | None = None
    """What an answer must hold; absent: for a training its change and loss, for anything else finite values."""
    all_forget: bool = False
    """Whether a job on forget pairs needs the answers of all who are asked, in one process too."""
    reads: frozenset[Pairs] = frozenset()
    """Pairs it looks at whatever the job's `data` says."""
    passes: float | Callable[[LocalJob], float] = 1.0
    """How often each pair of a job goes through the model, forward and backward; forward alone counts a third.

    Costs are told by it, so what a method does beside plain training is not free.
    """

    def loss_at(self, model: DualEncoder, tensors: Tensors, states: States, draw: Draw, job: LocalJob) -> Tensor:
        """The loss of one client's batch."""
        if self.loss_of_states is not None:
            return self.loss_of_states(model, tensors, states, draw, job)
        assert self.loss is not None  # only measurements have neither
        return self.loss(*embed_states(model, tensors, states), draw, job)

    def passes_of(self, job: LocalJob) -> float:
        return self.passes(job) if callable(self.passes) else self.passes

    def expected(self, state: Params, job: LocalJob, client: int, held: int) -> Expected | None:
        """What an answer must hold; None when no one has said."""
        if self.expects is not None:
            return self.expects(state, job, client, held)
        return None if self.measure is not None or self.answers_in_values else TRAINED

    @property
    def answers_in_values(self) -> bool:
        """Whether what is learnt comes back as values, not as a change of the parameters."""
        return self.finish is not None or self.combine is not None


OBJECTIVES: dict[str, Objective] = {}


def register(name: str, objective: Objective) -> Objective:
    """Make an objective known under a name that jobs can carry."""
    if name in OBJECTIVES:
        raise ValueError(f"{name}: an objective of this name exists already; choose another")
    OBJECTIVES[name] = objective
    return objective


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
    """One random caption for each image: two captions of one image are no negatives."""
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
    """What `align_stack` gives and its gradients: (p - 1 of the right answer) / (2 n temperature), both ways."""
    logits = torch.bmm(image, text.mT).div_(job.temperature)
    if valid is None:
        to_text, to_image = logits.log_softmax(2), logits.log_softmax(1)
    else:
        to_text = logits.masked_fill(~valid[:, None, :], -torch.inf).log_softmax(2)
        to_image = logits.masked_fill_(~valid[:, :, None], -torch.inf).log_softmax(1)
    each = to_text.diagonal(dim1=1, dim2=2) + to_image.diagonal(dim1=1, dim2=2)
    asked = to_text.exp_().add_(to_image.exp_())
    asked.diagonal(dim1=1, dim2=2).sub_(2)
    if valid is None:
        loss = each.mean(1).mul_(-0.5)
        asked.mul_(0.5 / (job.temperature * image.shape[1]))
    else:
        pairs = valid.sum(1, dtype=image.dtype)
        loss = each.masked_fill(~valid, 0.0).sum(1).mul_(-0.5) / pairs
        asked.mul_((0.5 / (job.temperature * pairs))[:, None, None]).mul_(valid[:, :, None] & valid[:, None, :])
    return loss, torch.bmm(asked, text), torch.bmm(asked.mT, image)


ALIGN = register("align", Objective(draw_pairs, align, align_stack, align_slopes, expects=contrasted))


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
