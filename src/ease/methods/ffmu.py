"""FFMU-style unlearning: retraining steps of three values, which a small change of the data would not have changed."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field
from torch import Tensor

from ease.federation.fedavg import TrainingConfig, average, participants
from ease.federation.objectives import ALIGN, register
from ease.federation.protocol import Federation, Update
from ease.methods.base import Space, Step, Trained, Unlearner, retained_clients, share_of, step_of
from ease.methods.ternary import LEAST_SCALE, decode, encode, encoded
from ease.requests.request import Request

register("ternary", replace(ALIGN, finish=lambda update, job: encode(update, job.settings), expects=encoded))


class Ffmu(Unlearner):
    """Retained clients send updates smoothed and quantised to three values, which are certified to stay the same
    under small changes. The server bounds their mean value by value with a map of Lipschitz constant 1.

    Differs from the paper: there the whole training is done so, before any request, and nothing happens at the request.
    Here it is used afterwards, from the trained model and on retained data. The quantiser in closed form and tanh
    as the bounding map are a construction after the published idea, for the paper gives no algorithm to follow.
    """

    name: ClassVar[str] = "ffmu"
    title: ClassVar[str] = "FFMU-style"
    source: ClassVar[str] = "after Che et al., ICML 2023"
    tuned: ClassVar[Space] = {"threshold": (0.25, 0.5, 1.0), "noise": (0.05, 0.1, 0.2), "share": (0.2, 0.4)}
    method: Literal["ffmu"] = "ffmu"
    threshold: float = Field(0.5, ge=0)
    """Values smaller than this many root mean squares of their tensor become 0."""
    noise: float = Field(0.1, gt=0)
    """Width of the smoothing, in the same unit; it sets how far the certificate reaches."""
    ceiling: float = Field(3.0, gt=0)
    """No value of the mean step exceeds this many root mean squares of its tensor."""
    share: float = Field(0.4, gt=0)
    """Rounds, as a share of the training rounds."""

    def unlearn(self, trained: Trained, request: Request, federation: Federation) -> Iterator[Step]:
        training, state = trained.training, trained.start
        clients = retained_clients(request, federation)
        settings = {"threshold": self.threshold, "noise": self.noise}
        for number in range(1, self.rounds(training, request) + 1):
            job = trained.job(number, "ffmu", request=request, data="retain", objective="ternary", settings=settings)
            answers = federation.run(state, job, participants(clients, training, trained.seed, number))
            finished = average(state, [decode(answer, state) for answer in answers], training, number)
            state = state + (finished.state - state).map(self._bounded)
            step = step_of(finished, "ternary")
            yield Step(state, step.phase, step.loss, {**step.notes, **certificate(finished.updates)})

    def rounds(self, training: TrainingConfig, request: Request) -> int:
        return share_of(training, self.share)

    def _bounded(self, step: Tensor) -> Tensor:
        """c · tanh(step / c): the pointwise operator that keeps single values from running away."""
        c = self.ceiling * step.square().mean().sqrt().clamp_min(LEAST_SCALE)
        return c * (step / c).tanh()


def certificate(updates: Sequence[Update]) -> dict[str, Any]:
    """Mean certified radius that clients report: how far a value may move before its quantised one could change."""
    radii = [float(update.values["radius"]) for update in updates if "radius" in update.values]
    finite = [radius for radius in radii if math.isfinite(radius)]
    return {"certified_radius": sum(finite) / len(finite)} if finite else {}
