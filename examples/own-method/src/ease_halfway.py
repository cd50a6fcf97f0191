"""Halfway: go part of the way back to the start state, then train on retained pairs with a softened loss.

An example of a method, its loss included, in a package of its own. It is simple on purpose and forgets little.
"""

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor
from torch.nn.functional import cross_entropy

from ease.federation.fedavg import TrainingConfig, average, participants
from ease.federation.objectives import Draw, EmbeddingLoss, draw_pairs, register
from ease.federation.protocol import Federation, LocalJob
from ease.methods.base import Space, Step, Trained, Unlearner, retained_clients, share_of, step_of
from ease.requests.request import Request


def softened(image: Tensor, text: Tensor, draw: Draw, job: LocalJob) -> Tensor:
    """InfoNCE whose labels give a share to all other pairs of the batch."""
    logits = image @ text.T / job.temperature
    right = logits.detach().argmax(1).new_tensor(range(len(logits)))
    soft = job.settings["softness"]
    return sum(cross_entropy(each, right, label_smoothing=soft) for each in (logits, logits.T)) / 2


register("halfway: softened", EmbeddingLoss(draw=draw_pairs, loss=softened))


class Halfway(Unlearner):
    """A share of the way from the trained back to the start state, then rounds with smoothed labels."""

    name: ClassVar[str] = "halfway"
    title: ClassVar[str] = "Halfway"
    source: ClassVar[str] = "an example of a method in a package of its own"
    tuned: ClassVar[Space] = {"back": (0.25, 0.5, 0.75)}
    method: Literal["halfway"] = "halfway"
    back: float = Field(0.5, ge=0, le=1)
    """Share of the way back to the start state."""
    softness: float = Field(0.1, ge=0, lt=1)
    """Share of each label that other pairs of the batch get."""
    share: float = Field(0.2, gt=0)
    """Rounds, as a share of the training rounds."""

    def unlearn(self, trained: Trained, request: Request, federation: Federation) -> Iterator[Step]:
        state = trained.start + self.back * (trained.initial - trained.start)
        clients = retained_clients(request, federation)
        for number in range(1, self.rounds(trained.training, request) + 1):
            job = trained.job(
                number,
                self.name,
                request=request,
                data="retain",
                objective="halfway: softened",
                settings={"softness": self.softness},
            )
            drawn = participants(clients, trained.training, trained.seed, number)
            finished = average(state, federation.run(state, job, drawn), trained.training, number)
            state = finished.state
            yield step_of(finished, "softened")

    def rounds(self, training: TrainingConfig, request: Request) -> int:
        return share_of(training, self.share)
