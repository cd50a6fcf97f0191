"""Retraining from the start without the forget data: the reference every method is measured against."""

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field

from ease.errors import UserError
from ease.federation.fedavg import TrainingConfig
from ease.federation.protocol import Federation
from ease.methods.base import Step, Trained, Unlearner, retained_clients, share_of, step_of
from ease.requests.request import Request
from ease.trainers import TrainerName, train


class Retrain(Unlearner):
    """The whole training again on retained data, from the same start state."""

    name: ClassVar[str] = "retrain"
    title: ClassVar[str] = "Retrain"
    source: ClassVar[str] = "the reference: training again without the forget data"
    trainers: ClassVar[frozenset[TrainerName]] = frozenset({"fedavg", "sums", "shards"})
    method: Literal["retrain"] = "retrain"
    order: int = Field(0, ge=0)
    """Another number gives another order of the data: several of them make the retrain band."""
    share: float = Field(1.0, gt=0, le=1)
    """Stop after this share of the rounds: a compute-matched reference."""
    keep: bool = False
    """Store every client's updates. Once released, later requests continue from this training instead of the first
    one, whose updates contain forgotten pairs."""

    def unlearn(self, trained: Trained, request: Request, federation: Federation) -> Iterator[Step]:
        self.check(trained.training)
        recipe = trained.training.model_copy(update={"rounds": self.rounds(trained.training, request)})
        clients = retained_clients(request, federation)
        stream = "train" if self.keep else f"retrain-{self.order}"  # more rounds and replays build on it
        given = trained.initial, federation, recipe, trained.seed, trained.temperature, clients
        for finished in train(*given, request=request, stream=stream, again=trained.history):
            step = step_of(finished, "retrain")
            yield replace(step, round=finished) if self.keep or finished.sums is not None else step

    def check(self, training: TrainingConfig) -> None:
        """Refuse to keep what could not take the place of the first training."""
        if self.keep and (self.share < 1 or self.order):
            raise UserError("keep = true: later requests need a whole training; leave out `share` and `order`")
        if self.keep and training.history == "client":
            raise UserError(
                'keep = true: clients keep their updates of the first training (training.history = "client"), and a '
                "second one would overwrite them; train anew into another folder"
            )

    def rounds(self, training: TrainingConfig, request: Request) -> int:
        return share_of(training, self.share)
