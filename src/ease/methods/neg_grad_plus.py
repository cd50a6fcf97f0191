"""NegGrad+: descent on retained pairs and ascent on forget pairs in the same steps."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from ease.federation.fedavg import TrainingConfig
from ease.federation.protocol import Federation
from ease.methods.base import Need, Space, Step, Trained, Unlearner, share_of
from ease.methods.joint import joint_rounds
from ease.requests.request import Request


class NegGradPlus(Unlearner):
    """Minimise balance · L_r - (1 - balance) · L_f on batches that hold both kinds of pairs.

    Differs from the paper: it was made for classifiers at one site. Here L is InfoNCE, L_f ends at chance, clients
    train locally and are averaged; a client that withdraws has the second term alone.
    """

    name: ClassVar[str] = "neg_grad_plus"
    title: ClassVar[str] = "NegGrad+"
    source: ClassVar[str] = "Kurmanji et al., SCRUB, NeurIPS 2023"
    needs: ClassVar[frozenset[Need]] = frozenset({"forget data", "leaving client"})
    tuned: ClassVar[Space] = {"balance": (0.8, 0.9, 0.95, 0.98), "share": (0.1, 0.2, 0.4)}
    method: Literal["neg_grad_plus"] = "neg_grad_plus"
    balance: float = Field(0.95, gt=0, lt=1)
    """Weight of retained pairs; the rest is that of the ascent."""
    share: float = Field(0.2, gt=0)
    """Rounds, as a share of the training rounds."""
    forget_rounds: int = Field(3, ge=1)
    """Client requests: rounds after which the client that withdraws is gone."""
    clip: float = Field(1.0, gt=0)
    """Largest norm of a gradient."""

    def unlearn(self, trained: Trained, request: Request, federation: Federation) -> Iterator[Step]:
        job = trained.training.job(
            0,
            trained.seed,
            trained.temperature,
            self.name,
            request=request,
            objective="difference",
            settings={"retain": self.balance, "forget": 1 - self.balance},
            clip=self.clip,
        )
        rounds = self.rounds(trained.training, request)
        yield from joint_rounds(trained, request, federation, job, rounds, self.forget_rounds)

    def rounds(self, training: TrainingConfig, request: Request) -> int:
        return share_of(training, self.share)
