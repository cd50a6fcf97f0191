"""Gradient ascent: the forget pairs' loss is raised to chance, then training repairs the rest."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from ease.federation.fedavg import LARGEST_RATE, TrainingConfig
from ease.federation.protocol import Federation
from ease.methods.base import Need, Space, Step, Trained, Unlearner, forget_then_finetune, share_of
from ease.methods.neg_grad_plus import DIFFERENCE
from ease.requests.request import Request


class GradAscent(Unlearner):
    """Holders of forget pairs climb their loss, their mean is the new state; then fine-tuning on retained data.

    Differs from the paper: Thudi et al. add stored gradients back at the start weights. This is the ascent that later
    work compares with under their name. It stops when a batch of forget pairs is matched at chance level, because
    higher values of InfoNCE have no meaning.
    """

    name: ClassVar[str] = "grad_ascent"
    title: ClassVar[str] = "GradAscent"
    source: ClassVar[str] = "after Thudi et al., Unrolling SGD, EuroS&P 2022"
    needs: ClassVar[frozenset[Need]] = frozenset({"forget data", "leaving client"})
    tuned: ClassVar[Space] = {
        "rate": (0.1, 0.3, 1.0, 3.0),
        "forget_rounds": (1, 3, 6),
        "finetune_share": (0.1, 0.2, 0.4),
    }
    method: Literal["grad_ascent"] = "grad_ascent"
    forget_rounds: int = Field(3, ge=1)
    """Rounds of ascent, one local epoch each."""
    rate: float = Field(1.0, gt=0, le=LARGEST_RATE)
    """Step size of the ascent, relative to training."""
    clip: float = Field(1.0, gt=0)
    """Largest norm of an ascent gradient."""
    finetune_share: float = Field(0.2, ge=0)
    """Rounds of fine-tuning, as a share of the training rounds; 0 shows what ascent alone destroys."""

    def unlearn(self, trained: Trained, request: Request, federation: Federation) -> Iterator[Step]:
        job = trained.job(
            1,
            f"{self.name}-forget",
            self.rate,
            epochs=1,
            request=request,
            data="forget",
            objective=DIFFERENCE,
            settings={"retain": 0.0, "forget": 1.0},
            clip=self.clip,
        )
        repair = share_of(trained.training, self.finetune_share)
        yield from forget_then_finetune(
            trained, trained.start, request, federation, job, self.forget_rounds, "ascent", repair, self.name
        )

    def rounds(self, training: TrainingConfig, request: Request) -> int:
        return self.forget_rounds + share_of(training, self.finetune_share)
