"""SOUL: the difference of retain and forget loss, minimised by the second-order optimiser Sophia."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from ease.federation.fedavg import LARGEST_RATE, TrainingConfig
from ease.federation.protocol import Federation, Optimiser
from ease.methods.base import Need, Space, Step, Trained, Unlearner, share_of
from ease.methods.joint import joint_rounds
from ease.methods.neg_grad_plus import DIFFERENCE
from ease.requests.request import Request


class Soul(Unlearner):
    """Minimise retain · L_r - L_f by Sophia-G on batches that hold both kinds of pairs.

    Differs from the paper: it was made for language models at one site. Here L is InfoNCE and L_f ends at chance;
    clients run Sophia locally, with a state that starts anew each round, and are averaged. The batch size in its step
    is the recipe's own: the published 5120 belongs to other gradients. Momentum enters once a step, where the released
    code applies it twice. No weight decay, which would pull adapters and projectors to zero.
    """

    name: ClassVar[str] = "soul"
    title: ClassVar[str] = "SOUL"
    source: ClassVar[str] = "Jia et al., EMNLP 2024"
    needs: ClassVar[frozenset[Need]] = frozenset({"forget data", "leaving client"})
    tuned: ClassVar[Space] = {"learning_rate": (1e-4, 3e-4, 1e-3, 3e-3), "retain": (1.0, 2.0, 4.0)}
    method: Literal["soul"] = "soul"
    retain: float = Field(2.0, ge=0)
    """Weight of the loss of retained pairs against that of forget pairs."""
    learning_rate: float = Field(3e-4, gt=0, le=LARGEST_RATE)
    """Largest change of a value in one step. It does not follow training's rate, because Sophia's steps are clipped."""
    share: float = Field(0.2, gt=0)
    """Rounds, as a share of the training rounds."""
    forget_rounds: int = Field(3, ge=1)
    """Client requests: rounds after which the client that withdraws is gone."""
    clip: float = Field(1.0, gt=0)
    """Largest norm of a gradient."""

    def unlearn(self, trained: Trained, request: Request, federation: Federation) -> Iterator[Step]:
        job = trained.job(
            0,
            self.name,
            request=request,
            objective=DIFFERENCE,
            settings={"retain": self.retain, "forget": 1.0},
            optimiser=Optimiser(kind="sophia", learning_rate=self.learning_rate),
            clip=self.clip,
        )
        rounds = self.rounds(trained.training, request)
        yield from joint_rounds(trained, request, federation, job, rounds, self.forget_rounds)

    def rounds(self, training: TrainingConfig, request: Request) -> int:
        return share_of(training, self.share)
