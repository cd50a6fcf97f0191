"""Noisy fine-tuning: clipping and noise in every round make what was trained before indistinguishable, provably."""

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field

from ease.federation.fedavg import TrainingConfig
from ease.federation.protocol import Federation
from ease.methods.base import Step, Trained, Unlearner, fine_tuning, share_of
from ease.methods.certified import certificate, clipped, largest_ratio, noisy
from ease.requests.request import Request

ASSUMPTIONS = "the start state does not depend on the data, and the seed of the noise stays secret"


class NoisyFinetune(Unlearner):
    """Rounds on retained data; after each the model is clipped to a ball around the start state and noise is added.

    Clipped models are within `2 * radius` of each other, so that noise of deviation sigma lets at most delta_1 =
    delta(2 * radius / sigma) of a difference through, whatever the loss. After T noisy rounds delta_1 ** T is left, by
    the contraction of the hockey-stick divergence (Asoodeh et al., 2020). Sigma follows from epsilon, delta and T.
    Rounds without noise come last and cost no guarantee.

    Differs from the paper: clients train locally and the server clips and adds noise after averaging.
    """

    name: ClassVar[str] = "noisy_finetune"
    title: ClassVar[str] = "Noisy fine-tuning"
    source: ClassVar[str] = "Koloskova et al., ICML 2025"
    method: Literal["noisy_finetune"] = "noisy_finetune"
    epsilon: float = Field(8.0, gt=0)
    """Epsilon of the guarantee."""
    delta: float = Field(1e-5, gt=0, lt=1)
    """Delta of the guarantee."""
    radius: float = Field(1.0, gt=0)
    """Distance from the start state to which the model is clipped; smaller needs less noise and forgets more else."""
    noisy_share: float = Field(0.2, gt=0, le=1)
    """Rounds with noise, as a share of the training rounds."""
    share: float = Field(0.3, ge=0, le=1)
    """Rounds without noise after them, as a share of the training rounds."""

    def sigma(self, rounds: int) -> float:
        """The deviation of the noise for so many noisy rounds."""
        return 2 * self.radius / largest_ratio(self.epsilon, self.delta ** (1 / rounds))

    def unlearn(self, trained: Trained, request: Request, federation: Federation) -> Iterator[Step]:
        count = share_of(trained.training, self.noisy_share)
        sigma, centre = self.sigma(count), trained.initial
        found = certificate(self.epsilon, self.delta, sigma, ASSUMPTIONS, rounds=count, radius=self.radius)
        state = trained.start
        for number in range(1, count + 1):
            (step,) = fine_tuning(trained, state, request, federation, number, self.name, number, "noisy rounds")
            state = noisy(clipped(step.state, centre, self.radius), sigma, trained.seed, self.name, number)
            yield replace(step, state=state, notes={**step.notes, **(found if number == count else {})})
        rounds = share_of(trained.training, self.share)
        yield from fine_tuning(trained, state, request, federation, rounds, "noisy finetune, repair")

    def rounds(self, training: TrainingConfig, request: Request) -> int:
        return share_of(training, self.noisy_share) + share_of(training, self.share)
