"""FedOSD: descent on an unlearning loss along a direction that no retained client's gradient sees."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from ease.federation.fedavg import LARGEST_RATE, TrainingConfig, average, participants
from ease.federation.objectives import Draw, EmbeddingLoss, draw_both_kinds, own_log_probabilities, register
from ease.federation.protocol import Federation, LocalJob
from ease.methods.base import Need, Space, Step, Trained, Unlearner, forget_clients, retained_clients, share_of, step_of
from ease.params import Params, weighted_mean
from ease.requests.request import Request


def unlearning_cross_entropy(image: Tensor, text: Tensor, draw: Draw, job: LocalJob) -> Tensor:
    """-log(1 - p / 2) of forget pairs, p the probability of the right partner: descent on it is bounded by 0."""
    probabilities = own_log_probabilities(image, text, draw.split, job.temperature).exp()
    return -torch.log1p(-probabilities / 2).mean()


register(
    "unlearning cross-entropy",
    EmbeddingLoss(draw=draw_both_kinds, loss=unlearning_cross_entropy, fewest=1, reads=frozenset({"retain", "forget"})),
)


class FedOsd(Unlearner):
    """Orthogonal steepest descent, then training whose steps may not lead back to the trained model.

    Differs from the paper: probabilities are those of the right partner in a batch, both ways, and a client that has
    forget and retained pairs plays both parts. Local changes replace gradients, so they include the rate.
    Recovery trains at the full rate: the published one is so small that a fifth of the rounds would change nothing.
    """

    name: ClassVar[str] = "fed_osd"
    title: ClassVar[str] = "FedOSD"
    source: ClassVar[str] = "Pan et al., AAAI 2025"
    needs: ClassVar[frozenset[Need]] = frozenset({"forget data", "leaving client"})
    tuned: ClassVar[Space] = {
        "rate": (0.3, 1.0, 3.0),
        "forget_share": (0.1, 0.2, 0.4),
        "recovery_share": (0.1, 0.2, 0.4),
    }
    method: Literal["fed_osd"] = "fed_osd"
    forget_share: float = Field(0.2, gt=0)
    """Rounds of orthogonal descent, as a share of the training rounds."""
    rate: float = Field(1.0, gt=0, le=LARGEST_RATE)
    """Step size of the descent, relative to training."""
    recovery_share: float = Field(0.2, ge=0)
    """Rounds of training on retained data, as a share of the training rounds."""

    def unlearn(self, trained: Trained, request: Request, federation: Federation) -> Iterator[Step]:
        state, training = trained.start, trained.training
        holders, clients = forget_clients(request, federation), retained_clients(request, federation)
        for number in range(1, self.rounds(training, request) + 1):
            forgetting = number <= share_of(training, self.forget_share)
            job = trained.job(number, self.name, self.rate if forgetting else 1.0, request=request)
            drawn = participants(clients, training, trained.seed, number)
            finished = average(state, federation.run(state, replace(job, data="retain"), drawn), training, number)
            changes = [update.delta for update in finished.updates if update.delta is not None]
            if forgetting:
                job = replace(job, data="forget", objective="unlearning cross-entropy", stream=f"{self.name}-forget")
                forgotten = average(state, federation.run(state, job, holders), training, number, clip=False)
                step = orthogonal(forgotten.state - state, changes)
                finished = replace(forgotten, rejected=finished.rejected | forgotten.rejected)
            else:
                away = state - trained.start
                step = weighted_mean((1, not_back(change, away)) for change in changes) if changes else state.zeros()
            state = state + step
            yield step_of(replace(finished, state=state), "descent" if forgetting else "recovery")

    def rounds(self, training: TrainingConfig, request: Request) -> int:
        return share_of(training, self.forget_share) + share_of(training, self.recovery_share)


def orthogonal(change: Params, others: Sequence[Params]) -> Params:
    """The part of a change that is orthogonal to all others, at the length of the whole.

    If almost nothing is orthogonal, the remainder is rounding noise, and the update is zero.
    """
    part = change.map(torch.Tensor.double)
    if others:
        rows = {name: torch.stack([other[name].flatten() for other in others]).double() for name in change.tensors}
        gram = torch.stack([row @ row.T for row in rows.values()]).sum(0)
        against = torch.stack([row @ part[name].flatten() for name, row in rows.items()]).sum(0)
        amounts = torch.linalg.pinv(gram, rtol=1e-10, hermitian=True) @ against
        part = part - Params({name: (amounts @ row).view_as(part[name]) for name, row in rows.items()}, change.blocks)
    if part.norm() <= 1e-6 * change.norm():
        return change.zeros()
    scaled = part * (change.norm() / part.norm())
    return scaled.zip(lambda value, like: value.to(like.dtype), change)


def not_back(change: Params, away: Params) -> Params:
    """A change without its part that leads back from where we went away to, at its old length."""
    return orthogonal(change, [away]) if change.dot(away) < 0 else change
