"""Ferrari: the model becomes insensitive to the inputs of forget pairs."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from ease.federation.fedavg import TrainingConfig
from ease.federation.protocol import Federation
from ease.methods.base import Need, Space, Step, Trained, Unlearner, forget_then_finetune, share_of
from ease.requests.request import Request


class Ferrari(Unlearner):
    """Holders of forget pairs minimise a sampled Lipschitz constant on them; then fine-tuning on retained data.

    Differs from the paper: it removes a feature of the input at one client in one pass. Here the feature is the whole
    input of a forget pair, in both modalities, as the frozen prefix passes it on; several clients are averaged.
    Fine-tuning repairs what becomes insensitive along with it.
    """

    name: ClassVar[str] = "ferrari"
    title: ClassVar[str] = "Ferrari"
    source: ClassVar[str] = "Gu et al., NeurIPS 2024"
    needs: ClassVar[frozenset[Need]] = frozenset({"forget data", "leaving client"})
    tuned: ClassVar[Space] = {
        "rate": (3.0, 10.0, 30.0, 100.0),
        "forget_rounds": (1, 3, 6),
        "finetune_share": (0.1, 0.2, 0.4),
    }
    method: Literal["ferrari"] = "ferrari"
    forget_rounds: int = Field(3, ge=1)
    """Rounds at the holders of forget pairs, one local epoch each."""
    noise_draws: int = Field(20, ge=1)
    """Noises on each input over which its sensitivity is averaged."""
    rate: float = Field(30.0, gt=0)
    """Step size on forget pairs, relative to training; sensitivities of unit vectors, and their slopes, are small."""
    clip: float = Field(1.0, gt=0)
    """Largest norm of a gradient on forget pairs."""
    finetune_share: float = Field(0.2, ge=0)
    """Rounds of fine-tuning, as a share of the training rounds; 0: none."""

    def unlearn(self, trained: Trained, request: Request, federation: Federation) -> Iterator[Step]:
        job = trained.training.job(
            1,
            trained.seed,
            trained.temperature,
            f"{self.name}-forget",
            self.rate,
            epochs=1,
            request=request,
            data="forget",
            objective="sensitivity",
            settings={"draws": self.noise_draws},
            clip=self.clip,
        )
        repair = share_of(trained.training, self.finetune_share)
        yield from forget_then_finetune(
            trained, trained.final, request, federation, job, self.forget_rounds, "desensitising", repair, self.name
        )

    def rounds(self, training: TrainingConfig, request: Request) -> int:
        return self.forget_rounds + share_of(training, self.finetune_share)
