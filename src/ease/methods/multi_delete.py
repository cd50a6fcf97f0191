"""MultiDelete: the two sides of a forget pair become strangers, while retained pairs stay where they were."""

from collections.abc import Iterator
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import mse_loss

from ease.data.examples import States
from ease.federation.fedavg import TrainingConfig
from ease.federation.objectives import Draw, StatesLoss, Tensors, draw_both_kinds, embed_states, register
from ease.federation.protocol import Federation, LocalJob
from ease.methods.base import Need, Space, Step, Trained, Unlearner, share_of
from ease.methods.joint import joint_rounds
from ease.model.dual_encoder import DualEncoder
from ease.requests.request import Request


def decouple(model: DualEncoder, tensors: Tensors, states: States, draw: Draw, job: LocalJob) -> Tensor:
    """Forget pairs become as alike as strangers are to the reference; retained pairs stay where it has them.

    Retained pairs keep their embeddings in each modality, and the product of the two embeddings.
    """
    assert job.reference is not None  # the teacher
    image, text = embed_states(model, tensors, states)
    with torch.no_grad():
        teacher_image, teacher_text = embed_states(model, job.reference.tensors, states)
    forget, loss = draw.split, image.new_zeros(())
    if forget:
        strangers = (teacher_image * teacher_text.roll(1, 0)).sum(1)  # every image with another image's caption
        similarity = (image * text).sum(1)
        loss = loss + job.settings["forget"] * mse_loss(similarity[:forget], strangers[:forget])
    if forget < len(image):
        drifts = image - teacher_image, text - teacher_text, image * text - teacher_image * teacher_text
        loss = loss + sum(drift[forget:].square().sum(1).mean() for drift in drifts)
    return loss


register(
    "decouple",
    StatesLoss(
        draw=draw_both_kinds,
        loss=decouple,
        fewest=1,
        reads=frozenset({"retain", "forget"}),
        passes=1 + 1 / 3,  # the teacher
    ),
)


class MultiDelete(Unlearner):
    """Modality decoupling, multimodal and unimodal knowledge retention, with the trained model as the teacher.

    Differs from the paper: it was made for one site. Here clients train locally and are averaged; a client that
    withdraws has only the first term. The joint representation of both modalities is the product of their embeddings,
    because a dual encoder fuses them in no other way.
    """

    name: ClassVar[str] = "multi_delete"
    title: ClassVar[str] = "MultiDelete"
    source: ClassVar[str] = "Cheng and Amiri, ECCV 2024"
    needs: ClassVar[frozenset[Need]] = frozenset({"forget data", "leaving client"})
    tuned: ClassVar[Space] = {"decoupling": (0.1, 0.3, 1.0, 3.0, 10.0), "share": (0.1, 0.2, 0.4)}
    method: Literal["multi_delete"] = "multi_delete"
    decoupling: float = Field(1.0, gt=0)
    """Weight of the decoupling of forget pairs against the retention of others."""
    share: float = Field(0.2, gt=0)
    """Rounds, as a share of the training rounds."""
    forget_rounds: int = Field(3, ge=1)
    """Client requests: rounds after which the client that withdraws is gone."""

    def unlearn(self, trained: Trained, request: Request, federation: Federation) -> Iterator[Step]:
        job = trained.job(
            0,
            self.name,
            request=request,
            objective="decouple",
            settings={"forget": self.decoupling},
            reference=trained.start,
        )
        rounds = self.rounds(trained.training, request)
        yield from joint_rounds(trained, request, federation, job, rounds, self.forget_rounds)

    def rounds(self, training: TrainingConfig, request: Request) -> int:
        return share_of(training, self.share)
