"""NegGrad+: descent on retained pairs and ascent on forget pairs in the same steps."""

from collections.abc import Iterator
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field
from torch import Tensor

from ease.federation.fedavg import TrainingConfig
from ease.federation.objectives import Draw, EmbeddingLoss, draw_both_kinds, own_log_probabilities, register
from ease.federation.protocol import Federation, LocalJob
from ease.methods.base import Need, Space, Step, Trained, Unlearner, share_of
from ease.methods.joint import joint_rounds
from ease.model.losses import info_nce
from ease.requests.request import Request


def difference(image: Tensor, text: Tensor, draw: Draw, job: LocalJob) -> Tensor:
    """Retained pairs are learnt and forget pairs unlearnt: retain · L_r - forget · min(L_f, log N).

    At log N a pair is matched among N candidates by chance; ascent beyond that only destroys what is shared.
    """
    forget, loss = draw.split, image.new_zeros(())
    if forget < len(image):
        loss = loss + job.settings["retain"] * info_nce(image[forget:], text[forget:], job.temperature)
    if forget:
        surprise = -own_log_probabilities(image, text, forget, job.temperature).mean()
        loss = loss - job.settings["forget"] * surprise.clamp(max=float(np.log(len(image))))
    return loss


DIFFERENCE = "difference"
register(
    DIFFERENCE, EmbeddingLoss(draw=draw_both_kinds, loss=difference, fewest=1, reads=frozenset({"retain", "forget"}))
)


class NegGradPlus(Unlearner):
    """Minimise balance · L_r - (1 - balance) · L_f on batches that hold both kinds of pairs.

    Differs from the paper: it was made for classifiers at one site. Here L is InfoNCE, L_f ends at chance, clients
    train locally and are averaged; a client that withdraws has only the second term.
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
        job = trained.job(
            0,
            self.name,
            request=request,
            objective=DIFFERENCE,
            settings={"retain": self.balance, "forget": 1 - self.balance},
            clip=self.clip,
        )
        rounds = self.rounds(trained.training, request)
        yield from joint_rounds(trained, request, federation, job, rounds, self.forget_rounds)

    def rounds(self, training: TrainingConfig, request: Request) -> int:
        return share_of(training, self.share)
