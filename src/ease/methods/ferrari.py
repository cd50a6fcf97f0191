"""Ferrari: the model becomes insensitive to the inputs of forget pairs."""

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from ease.data.examples import States
from ease.federation.client import ClientData
from ease.federation.fedavg import LARGEST_RATE, TrainingConfig
from ease.federation.objectives import Draw, StatesLoss, Tensors, draw_pairs, register
from ease.federation.protocol import Federation, LocalJob
from ease.methods.base import Need, Space, Step, Trained, Unlearner, forget_then_finetune, share_of
from ease.model.dual_encoder import DualEncoder
from ease.params import Modality
from ease.requests.request import Request

NOISE = (0.05, 1.0)
"""Least and largest noise, relative to the input, under which sensitivity is measured."""


def draw_with_noise(client: ClientData, positions: np.ndarray, job: LocalJob, rng: np.random.Generator) -> Draw:
    return replace(draw_pairs(client, positions, job, rng), noise_seed=int(rng.integers(2**63)))


def sensitivity(model: DualEncoder, tensors: Tensors, states: States, draw: Draw, job: LocalJob) -> Tensor:
    """How far noise on the input moves an embedding, for its size: a sampled Lipschitz constant, both modalities added.

    Noise is relative to the mean size of a value. It goes onto the cached states, which are the input a client has.
    """
    image, text, mask = states
    draws, rng = int(job.settings["draws"]), np.random.default_rng(draw.noise_seed)
    loss = image.new_zeros(())
    branches: tuple[tuple[Modality, Tensor, Tensor | None], ...] = (("image", image, None), ("text", text, mask))
    for modality, clean_states, visible in branches:
        clean = model.embed(tensors, modality, clean_states, visible)
        unit = clean_states.norm(dim=-1).mean() / clean_states.shape[-1] ** 0.5
        for _ in range(draws):
            sigma = rng.uniform(*NOISE)
            drawn = rng.standard_normal(tuple(clean_states.shape), dtype=np.float32)
            noise = torch.from_numpy(sigma * drawn).to(clean_states)
            if visible is not None:
                # Rows after the tokens are not padding: a tower may keep more than tokens there.
                noise[:, : visible.shape[1]] *= visible[..., None]
            with torch.no_grad():
                noisy = model.embed(tensors, modality, clean_states + unit * noise, visible)
            # The root of exactly 0 has no gradient.
            moved = ((clean - noisy).square().sum(1) + 1e-12).sqrt()
            loss = loss + (moved / noise.flatten(1).norm(dim=1).clamp_min(1e-6)).mean() / draws
    return loss


register(
    "sensitivity",
    StatesLoss(
        draw=draw_with_noise,
        loss=sensitivity,
        fewest=1,
        passes=lambda job: 1 + job.settings.get("draws", 0) / 3,  # noisy copies
    ),
)


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
    rate: float = Field(30.0, gt=0, le=LARGEST_RATE)
    """Step size on forget pairs, relative to training; sensitivities of unit vectors, and their slopes, are small."""
    clip: float = Field(1.0, gt=0)
    """Largest norm of a gradient on forget pairs."""
    finetune_share: float = Field(0.2, ge=0)
    """Rounds of fine-tuning, as a share of the training rounds; 0: none."""

    def unlearn(self, trained: Trained, request: Request, federation: Federation) -> Iterator[Step]:
        job = trained.job(
            1,
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
            trained, trained.start, request, federation, job, self.forget_rounds, "desensitising", repair, self.name
        )

    def rounds(self, training: TrainingConfig, request: Request) -> int:
        return self.forget_rounds + share_of(training, self.finetune_share)
