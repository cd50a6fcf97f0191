"""Fine-tuning on retained data: the floor that every claim of forgetting must clear."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from ease.federation.fedavg import TrainingConfig
from ease.federation.protocol import Federation
from ease.methods.base import Space, Step, Trained, Unlearner, fine_tuning, share_of
from ease.requests.request import Request


class Finetune(Unlearner):
    """Train the trained model for a few more rounds, on retained data only."""

    name: ClassVar[str] = "finetune"
    title: ClassVar[str] = "Fine-tune"
    source: ClassVar[str] = "the floor: more training on retained data"
    tuned: ClassVar[Space] = {"share": (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4)}
    method: Literal["finetune"] = "finetune"
    share: float = Field(0.2, gt=0)
    """Rounds, as a share of the training rounds."""

    def unlearn(self, trained: Trained, request: Request, federation: Federation) -> Iterator[Step]:
        rounds = self.rounds(trained.training, request)
        yield from fine_tuning(trained, trained.start, request, federation, rounds, "finetune")

    def rounds(self, training: TrainingConfig, request: Request) -> int:
        return share_of(training, self.share)
