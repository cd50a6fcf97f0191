"""FedOSD: descent on an unlearning loss along a direction that no retained client's gradient sees."""

from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field

from ease.data.request import Request
from ease.federation.fedavg import TrainingConfig, average, participants
from ease.federation.protocol import Federation
from ease.methods.base import Need, Step, Trained, Unlearner, forget_holders, retained_clients, share_of, step_of
from ease.params import Params, weighted_mean


class FedOsd(Unlearner):
    """Orthogonal steepest descent, then training whose steps may not lead back to the trained model.

    Differs from the paper: probabilities are those of the right partner in a batch, both ways, and a client that has
    forget and retained pairs plays both parts. Local changes stand for gradients, so the rate is in them already.
    Recovery trains at the full rate: the published one is so small that a fifth of the rounds would change nothing.
    """

    name: ClassVar[str] = "fed_osd"
    title: ClassVar[str] = "FedOSD"
    source: ClassVar[str] = "Pan et al., AAAI 2025"
    needs: ClassVar[frozenset[Need]] = frozenset({"forget data", "leaving client"})
    method: Literal["fed_osd"] = "fed_osd"
    forget_share: float = Field(0.2, gt=0)
    """Rounds of orthogonal descent, as a share of the training rounds."""
    rate: float = Field(1.0, gt=0)
    """Step size of the descent, relative to training."""
    recovery_share: float = Field(0.2, ge=0)
    """Rounds of training on retained data, as a share of the training rounds."""

    def unlearn(self, trained: Trained, request: Request, federation: Federation) -> Iterator[Step]:
        state, training = trained.final, trained.training
        holders, clients = forget_holders(request, federation), retained_clients(request, federation)
        forgetting = share_of(training, self.forget_share)
        for number in range(1, self.rounds(training, request) + 1):
            rate = self.rate if number <= forgetting else 1.0
            job = training.job(
                number, trained.seed, trained.temperature, self.name, rate, request=request, data="retain"
            )
            drawn = participants(clients, training, trained.seed, number)
            retained = average(state, federation.run(state, job, drawn), training, number)
            changes = [update.delta for update in retained.updates if update.delta is not None]
            if number <= forgetting:
                job = training.job(
                    number,
                    trained.seed,
                    trained.temperature,
                    f"{self.name}-forget",
                    rate,
                    request=request,
                    data="forget",
                    objective="unlearning cross-entropy",
                )
                finished = average(state, federation.run(state, job, holders), training, number)
                state = state + orthogonal(finished.state - state, changes)
                yield step_of(finished, "descent", state)
            else:
                away = state - trained.final
                if changes:
                    state = state + weighted_mean((1, not_back(change, away)) for change in changes)
                yield step_of(retained, "recovery", state)

    def rounds(self, training: TrainingConfig, request: Request) -> int:
        return share_of(training, self.forget_share) + share_of(training, self.recovery_share)


def orthogonal(change: Params, others: Sequence[Params]) -> Params:
    """The part of a change that is orthogonal to all others, at the length of the whole.

    If next to nothing is orthogonal, what is left is rounding noise and no direction: the answer is no change.
    """
    part = change.map(torch.Tensor.double)
    if others:
        gram = torch.tensor([[one.dot(other) for other in others] for one in others], dtype=torch.float64)
        against = torch.tensor([other.dot(change) for other in others], dtype=torch.float64)
        amounts = torch.linalg.pinv(gram, rtol=1e-10, hermitian=True) @ against
        for amount, other in zip(amounts.tolist(), others, strict=True):
            part = part - amount * other.map(torch.Tensor.double)
    if part.norm() <= 1e-6 * change.norm():
        return change.zeros()
    scaled = part * (change.norm() / part.norm())
    return scaled.zip(lambda value, like: value.to(like.dtype), change)


def not_back(change: Params, away: Params) -> Params:
    """A change without its part that leads back from where we went away to, at its old length."""
    towards = change.dot(away)
    return orthogonal(change, [away]) if towards < 0 else change
