"""FedEraser: replay the training with steps as long as the stored ones, in directions that retained data gives."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from ease.federation.fedavg import TrainingConfig, average
from ease.federation.protocol import Federation, reject_reason
from ease.methods.base import Need, Space, Step, Trained, Unlearner, retained_clients, step_of
from ease.params import Params
from ease.requests.request import ClientRequest, Request

SMALLEST_NORM = 1e-12
LARGEST_GROWTH = 10.0
"""A calibration step is lengthened to at most this many times itself: beyond, its direction is noise."""


class FedEraser(Unlearner):
    """Rebuild the model from the start state. Retained clients train briefly, only for a direction. Each tensor's
    step gets the length that the client's stored update of that round had.

    Differs from the paper: lengths are taken by client and by tensor, and weights sum to one. A calibration step
    without length stays zero, as that of a LoRA factor whose partner is still zero. For class and sample requests every
    client calibrates on its retained pairs, in the first round too, whose stored update would carry the forget pairs.
    Stored lengths still do.
    """

    name: ClassVar[str] = "fed_eraser"
    title: ClassVar[str] = "FedEraser"
    source: ClassVar[str] = "Liu et al., IWQoS 2021"
    needs: ClassVar[frozenset[Need]] = frozenset({"history"})
    tuned: ClassVar[Space] = {"calibration_ratio": (0.5, 1.0), "interval": (1, 2, 3, 4)}
    method: Literal["fed_eraser"] = "fed_eraser"
    calibration_ratio: float = Field(0.5, gt=0, le=1)
    """Local epochs of a calibration, as a share of those of training."""
    interval: int = Field(1, ge=1)
    """Every so many stored rounds are replayed; more than 1 is cheaper and leaves the model less trained."""

    def unlearn(self, trained: Trained, request: Request, federation: Federation) -> Iterator[Step]:
        training, history = trained.training, trained.history
        retained = set(retained_clients(request, federation))
        epochs = math.ceil(self.calibration_ratio * training.local_epochs)
        state = trained.initial
        for number in self._replayed(training):
            clients = [client for client in history.clients(number) if client in retained]
            if number == 1 and isinstance(request, ClientRequest):  # from w_0 the stored updates are exact
                finished = average(state, (history.update(number, client) for client in clients), training, number)
                yield step_of(finished, "replay")
            else:
                job = trained.job(number, "fed_eraser", request=request, data="retain", epochs=epochs)
                answers = federation.run(state, job, clients)
                calibrated = (
                    answer
                    if reject_reason(answer, state)  # left to the average to refuse
                    else replace(answer, delta=calibrate(answer.change, history.update(number, answer.client).change))
                    for answer in answers
                )
                finished = average(state, calibrated, training, number)
                yield step_of(finished, "calibration")
            state = finished.state

    def rounds(self, training: TrainingConfig, request: Request) -> int:
        return len(self._replayed(training))

    def _replayed(self, training: TrainingConfig) -> range:
        count = max(1, training.rounds // self.interval)
        return range(1, 1 + count * self.interval, self.interval)


def calibrate(step: Params, stored: Params) -> Params:
    """Each tensor of a step, as long as the stored one."""

    def rescale(new: Tensor, old: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(new.double())
        if length < SMALLEST_NORM:
            return torch.zeros_like(new)
        ratio = torch.linalg.vector_norm(old.double()) / length
        return new * float(ratio.clamp_max(LARGEST_GROWTH))

    return step.zip(rescale, stored)
