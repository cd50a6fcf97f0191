"""PGD: gradient ascent that stays near a model which the forget data did not shape."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from ease.federation.fedavg import LARGEST_RATE, TrainingConfig
from ease.federation.protocol import Federation
from ease.methods.base import Need, Space, Step, Trained, Unlearner, forget_then_finetune, share_of
from ease.methods.neg_grad_plus import DIFFERENCE
from ease.params import Params
from ease.requests.request import ClientRequest, Request


class Pgd(Unlearner):
    """Subtract the client's last model, climb its loss inside a ball around the rest, then fine-tune.

    Differs from the paper: the ball's radius is a share of the length of training, while the paper measures random
    models. Ascent ends at chance, while the paper stops at a fixed distance from the client's own model. Steps are
    plain SGD. A class or sample request has no client whose model could be subtracted. Its ball is around the
    trained model, and the ascents of all holders are averaged, which cannot leave the ball.
    """

    name: ClassVar[str] = "pgd"
    title: ClassVar[str] = "PGD"
    source: ClassVar[str] = "Halimi et al., 2022"
    needs: ClassVar[frozenset[Need]] = frozenset({"history", "forget data", "leaving client"})
    tuned: ClassVar[Space] = {"rate": (0.3, 1.0, 3.0), "radius": (0.1, 1 / 3, 1.0), "finetune_share": (0.1, 0.2, 0.4)}
    method: Literal["pgd"] = "pgd"
    epochs: int = Field(5, ge=1)
    """Local epochs of ascent, all in one round."""
    rate: float = Field(1.0, gt=0, le=LARGEST_RATE)
    """Step size of the ascent, relative to training."""
    radius: float = Field(1 / 3, gt=0)
    """Radius of the ball, relative to the distance that training went."""
    clip: float = Field(5.0, gt=0)
    """Largest norm of an ascent gradient."""
    finetune_share: float = Field(0.2, ge=0)
    """Rounds of fine-tuning, as a share of the training rounds; 0: none."""

    def unlearn(self, trained: Trained, request: Request, federation: Federation) -> Iterator[Step]:
        centre = without_clients(trained, request.clients) if isinstance(request, ClientRequest) else trained.start
        job = trained.job(
            1,
            f"{self.name}-forget",
            self.rate,
            epochs=self.epochs,
            request=request,
            data="forget",
            objective=DIFFERENCE,
            settings={"retain": 0.0, "forget": 1.0},
            clip=self.clip,
            radius=self.radius * (trained.final - trained.initial).norm(),
        )
        repair = share_of(trained.training, self.finetune_share)
        yield from forget_then_finetune(trained, centre, request, federation, job, 1, "ascent", repair, self.name)

    def rounds(self, training: TrainingConfig, request: Request) -> int:
        return 1 + share_of(training, self.finetune_share)


def without_clients(trained: Trained, leaving: tuple[int, ...]) -> Params:
    """The last round without some clients: (w_n - sum p_k w_k) / (1 - sum p_k), p_k a client's share of the average.

    If all have the same weight, this is the paper's (K w_n - w_k) / (K - 1). A client that was not drawn has no share.
    """
    last, history = trained.training.rounds, trained.history
    pairs = history.pairs(last)
    weights = pairs if trained.training.weighting == "pairs" else dict.fromkeys(pairs, 1)
    shares = {client: weights[client] / sum(weights.values()) for client in leaving if client in weights}
    start = history.state(last - 1)
    rest = trained.final
    for client, share in shares.items():
        rest = rest - share * (start + history.update(last, client).change)
    kept = 1 - sum(shares.values())
    rest = start if len(shares) == len(weights) else rest * (1 / kept)
    # Pairs forgotten since the training stay forgotten.
    return rest if trained.start is trained.final else trained.start + (rest - trained.final)
