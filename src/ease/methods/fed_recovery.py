"""FedRecovery: subtract from the trained model what the leaving client added to each stored round."""

import operator
from collections.abc import Iterator, Mapping
from functools import reduce
from typing import ClassVar, Literal

import torch
from pydantic import Field

from ease.federation.fedavg import Round, TrainingConfig, average
from ease.federation.protocol import Federation
from ease.methods.base import Need, Space, Step, Trained, Unlearner, exclusions, fine_tuning, retained_clients, share_of
from ease.params import Params, weighted_mean
from ease.requests.request import ClientRequest, Request
from ease.seeding import torch_generator


class FedRecovery(Unlearner):
    """Subtract the leaving client's residuals from the trained model: w_n - strength * sum of p_t D_t.

    The residual D_t is the mean update of round t less that mean without the leaving clients. The weight p_t is the
    round's share of the squared norms of all rounds' mean updates. The server computes this without any client.

    Differs from the paper: an update of several local steps replaces a gradient. The paper's weights add up to one,
    so about one T-th of the sum of T residuals is subtracted. With `weights = "sum"` the sum itself is subtracted, and
    `recovery_share` appends rounds of training on retained pairs. The paper's noise hides the remainder only if a
    retrained model carries the same noise. Its size follows from constants that are unknown here, so there is none by
    default. The paper defines no residual for class and sample requests. Ours: each client trains one epoch
    on retained pairs and thereby reports how many it keeps. Its stored updates are weighted by that share, and the
    epoch's step is added. If all clients hold the same share of forget pairs, D_t is zero and only that step remains.
    """

    name: ClassVar[str] = "fed_recovery"
    title: ClassVar[str] = "FedRecovery"
    source: ClassVar[str] = "Zhang et al., IEEE TIFS 2023"
    needs: ClassVar[frozenset[Need]] = frozenset({"history"})
    tuned: ClassVar[Space] = {"strength": (1.0, 2.0, 3.0, 5.0, 7.0, 10.0, 15.0, 20.0)}
    method: Literal["fed_recovery"] = "fed_recovery"
    weights: Literal["norm", "sum"] = "norm"
    """Weights of the rounds' residuals: `norm`, the paper's, add up to one; `sum` weighs every round by one."""
    strength: float = Field(1.0, gt=0)
    """Factor of the weighted residuals. With `weights = "sum"` it is the share of their sum that is subtracted."""
    recovery_share: float = Field(0.0, ge=0)
    """Rounds of training on retained pairs that follow, as a share of the training rounds; the paper has none."""
    noise: float = Field(0.0, ge=0)
    """Gaussian noise, its expected norm as a share of that of what is subtracted."""

    def unlearn(self, trained: Trained, request: Request, federation: Federation) -> Iterator[Step]:
        asked, kept = retained_shares(trained, request, federation, self.name)
        rounds = (residual(trained, number, kept) for number in range(1, trained.training.rounds + 1))
        correction = self.strength * self._combined(rounds)
        rng = torch_generator(trained.seed, self.name)
        deviation = self.noise * correction.norm() / correction.size**0.5
        noise = correction.map(lambda tensor: deviation * torch.randn(tensor.shape, generator=rng).to(tensor.dtype))
        state = asked.state - correction + noise
        yield Step(state, "subtraction", asked.loss, exclusions(asked))
        recovery = share_of(trained.training, self.recovery_share)
        yield from fine_tuning(trained, state, request, federation, recovery, self.name)

    def rounds(self, training: TrainingConfig, request: Request) -> int:
        return 1 + share_of(training, self.recovery_share)

    def _combined(self, rounds: Iterator[tuple[Params, Params]]) -> Params:
        """The residuals of all rounds as one change, from each round's mean update and residual."""
        if self.weights == "norm":
            return weighted_mean((mean.dot(mean), part) for mean, part in rounds)
        return reduce(operator.add, (part for _, part in rounds))


def retained_shares(
    trained: Trained, request: Request, federation: Federation, stream: str
) -> tuple[Round, Mapping[int, float]]:
    """Client -> which share of its pairs a request leaves, and the round in which that was asked.

    Who withdraws keeps nothing, and no one need be asked. For other requests one epoch on retained pairs estimates it.
    A client that is refused there, or does not answer, counts in full."""
    if isinstance(request, ClientRequest):
        shares = dict.fromkeys(retained_clients(request, federation), 1.0) | dict.fromkeys(request.clients, 0.0)
        return Round(0, trained.start, ()), shares
    job = trained.job(1, f"{stream}-ask", request=request, data="retain", epochs=1)
    answers = list(federation.run(trained.start, job, federation.clients))
    asked = average(trained.start, answers, trained.training, 1)
    nothing_left = {answer.client for answer in answers} - asked.rejected.keys()
    left = {update.client: update.pairs / len(federation.members[update.client]) for update in asked.updates}
    return asked, {client: left.get(client, float(client not in nothing_left)) for client in federation.clients}


def residual(trained: Trained, number: int, kept: Mapping[int, float]) -> tuple[Params, Params]:
    """The mean update of a stored round, and the part of it that is there only for what goes.

    Clients that `kept` does not name are gone since long and count neither way. Without anyone left, all of it goes.
    """
    present = {client: each for client, each in stored_updates(trained, number).items() if client in kept}

    def mean(shares: Mapping[int, float]) -> Params:
        weighed = [(shares[client] * weight, change) for client, (weight, change) in present.items()]
        return weighted_mean(weighed) if any(weight for weight, _ in weighed) else trained.initial.zeros()

    whole = mean(dict.fromkeys(present, 1.0))
    return whole, whole - mean(kept)


def stored_updates(trained: Trained, number: int) -> dict[int, tuple[float, Params]]:
    """Client -> its weight in the mean of a round and what it sent."""
    updates = [trained.history.update(number, client) for client in trained.history.clients(number)]
    counts = {update.client: update.pairs if trained.training.weighting == "pairs" else 1 for update in updates}
    return {update.client: (counts[update.client] / sum(counts.values()), update.change) for update in updates}
