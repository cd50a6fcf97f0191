"""Retraining from the start without the forget data: the reference every method is measured against."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from ease.federation.fedavg import TrainingConfig, fedavg
from ease.federation.protocol import Federation
from ease.methods.base import Step, Trained, Unlearner, retained_clients, share_of, step_of
from ease.requests.request import Request


class Retrain(Unlearner):
    """The whole training again on retained data, from the same start state."""

    name: ClassVar[str] = "retrain"
    title: ClassVar[str] = "Retrain"
    source: ClassVar[str] = "the reference: training again without the forget data"
    method: Literal["retrain"] = "retrain"
    order: int = Field(0, ge=0)
    """Another number gives another order of the data: several of them make the retrain band."""
    share: float = Field(1.0, gt=0, le=1)
    """Stop after this share of the rounds: a compute-matched reference."""

    def unlearn(self, trained: Trained, request: Request, federation: Federation) -> Iterator[Step]:
        recipe = trained.training.model_copy(update={"rounds": self.rounds(trained.training, request)})
        clients = retained_clients(request, federation)
        stream = f"retrain-{self.order}"
        for finished in fedavg(
            trained.initial,
            federation,
            recipe,
            trained.seed,
            trained.temperature,
            clients,
            request=request,
            stream=stream,
        ):
            yield step_of(finished, "retrain")

    def rounds(self, training: TrainingConfig, request: Request) -> int:
        return share_of(training, self.share)
