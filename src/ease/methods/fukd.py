"""FUKD: subtract all that the leaving client ever sent, then let the old model teach what else was lost."""

from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from ease.data.examples import States
from ease.federation.fedavg import TrainingConfig, average, participants
from ease.federation.objectives import Draw, StatesLoss, Tensors, draw_pairs, embed_states, register
from ease.federation.protocol import Federation, LocalJob
from ease.methods.base import Need, Space, Step, Trained, Unlearner, exclusions, retained_clients, share_of, step_of
from ease.methods.fed_recovery import retained_shares, stored_updates
from ease.model.dual_encoder import DualEncoder
from ease.params import Params
from ease.requests.request import Request


def imitate(model: DualEncoder, tensors: Tensors, states: States, draw: Draw, job: LocalJob) -> Tensor:
    """How far the student's softened choices among the batch's captions and images are from the teacher's.

    Kullback-Leibler divergence, the mean of both directions, times the squared softness, so that gradients keep their
    size.
    """
    assert job.reference is not None  # the teacher
    softness = job.settings["softness"]
    image, text = embed_states(model, tensors, states)
    with torch.no_grad():
        teacher_image, teacher_text = embed_states(model, job.reference.tensors, states)
    student, teacher = image @ text.T, teacher_image @ teacher_text.T
    loss = image.new_zeros(())
    for mine, target in ((student, teacher), (student.T, teacher.T)):
        log_p, log_q = ((each / (softness * job.temperature)).log_softmax(1) for each in (target, mine))
        loss = loss + (log_p.exp() * (log_p - log_q)).sum(1).mean() / 2
    return softness**2 * loss


IMITATE = "imitate"
register(IMITATE, StatesLoss(draw=draw_pairs, loss=imitate, passes=1 + 1 / 3))  # the teacher looks too


class Fukd(Unlearner):
    """w_n - sum_t p_k U_k,t on the server, p_k a leaving client's weight in the mean and U_k,t its stored update; then
    knowledge distillation from w_n.

    Differs from the paper: its server distils on unlabelled data of its own. There are none here, so retained clients
    distil on their pairs and are averaged. A batch's similarities, without marking the right ones, replace class
    scores. It takes as many rounds as plain fine-tuning. The paper has no class and sample requests. Ours: the share of
    each client's forgotten pairs is subtracted from its updates. Each client reports the share by one epoch on
    retained pairs, and that step is added.
    """

    name: ClassVar[str] = "fukd"
    title: ClassVar[str] = "FUKD"
    source: ClassVar[str] = "Wu, Zhu and Mitra, 2022"
    needs: ClassVar[frozenset[Need]] = frozenset({"history"})
    tuned: ClassVar[Space] = {
        "subtraction": (0.3, 0.5, 1.0),
        "softness": (1.0, 2.0, 4.0),
        "share": (0.05, 0.1, 0.2, 0.4),
    }
    method: Literal["fukd"] = "fukd"
    subtraction: float = Field(1.0, gt=0)
    """How much of the updates is subtracted; 1 is the paper's."""
    softness: float = Field(2.0, gt=0)
    """Temperature of the distillation, in units of that of training."""
    share: float = Field(0.2, ge=0)
    """Rounds of distillation, as a share of the training rounds; 0: none."""

    def unlearn(self, trained: Trained, request: Request, federation: Federation) -> Iterator[Step]:
        training, retained = trained.training, retained_clients(request, federation)
        asked, kept = retained_shares(trained, request, federation, self.name)
        state = asked.state - self.subtraction * contribution(trained, kept)
        yield Step(state, "subtraction", asked.loss, exclusions(asked))
        for number in range(1, share_of(training, self.share) + 1):
            job = trained.job(
                number,
                self.name,
                request=request,
                data="retain",
                objective=IMITATE,
                settings={"softness": self.softness},
                reference=trained.start,
            )
            drawn = participants(retained, training, trained.seed, number)
            finished = average(state, federation.run(state, job, drawn), training, number)
            state = finished.state
            yield step_of(finished, "distillation")

    def rounds(self, training: TrainingConfig, request: Request) -> int:
        return 1 + share_of(training, self.share)


def contribution(trained: Trained, kept: Mapping[int, float]) -> Params:
    """What goes of all rounds' mean updates: each client's by its weight in the mean and the share that goes."""
    total = trained.initial.zeros().map(Tensor.double)
    for number in range(1, trained.training.rounds + 1):
        for client, (weight, change) in stored_updates(trained, number).items():
            total = total + weight * (1 - kept.get(client, 1.0)) * change.map(Tensor.double)
    return total.zip(lambda sum, state: sum.to(state.dtype), trained.initial)
