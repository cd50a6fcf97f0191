"""FedRecover: replay the training on the server, guessing what retained clients would have sent, rarely asking."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator

from ease.federation.fedavg import TrainingConfig, average
from ease.federation.protocol import Federation, Update
from ease.methods.base import Need, Space, Step, Trained, Unlearner, retained_clients, step_of
from ease.methods.lbfgs import Secant, hessian_product, make_secant
from ease.params import Params
from ease.requests.request import Request

LARGEST_CORRECTION = 5.0
"""A correction longer than this many stored updates is noise, and the stored update alone is the better estimate."""
LARGEST_ESTIMATE = 2.0
"""Longest estimate, in lengths of the longest stored update."""


@dataclass(frozen=True)
class Limits:
    """Largest values and norms of the stored updates of retained clients."""

    value: float
    """Largest value that is not abnormal."""
    norm: float


class FedRecover(Unlearner):
    """Start again from the start state. Each round a client's update is estimated from its stored one and from how its
    updates turn with the state (L-BFGS). Clients are asked in the first rounds, then rarely, and where an estimate
    is abnormal.

    Differs from the paper: an update of several local steps replaces its gradient; the more steps and the larger, the
    less accurate is the correction. Secants of too little curvature are left out, a client without any or with an
    overlong correction keeps its stored update, and overlong estimates are shortened. Asked clients take the data order
    of the stored round. For class and sample requests estimates start from updates that saw the forget pairs, which
    cannot be taken out: expect weak forgetting.
    """

    name: ClassVar[str] = "fed_recover"
    title: ClassVar[str] = "FedRecover"
    source: ClassVar[str] = "Cao et al., IEEE S&P 2023"
    needs: ClassVar[frozenset[Need]] = frozenset({"history"})
    tuned: ClassVar[Space] = {
        "warm_up": (3, 5, 8),
        "correction_interval": (3, 6, 12),
        "final_rounds": (1, 2, 4),
    }
    method: Literal["fed_recover"] = "fed_recover"
    warm_up: int = Field(3, ge=1)
    """First rounds, in which clients are asked; more than `secants`."""
    correction_interval: int = Field(12, ge=1)
    """After the first rounds, clients are asked every so many rounds."""
    final_rounds: int = Field(1, ge=0)
    """Last rounds, in which clients are asked."""
    secants: int = Field(2, ge=1)
    """How many times it is remembered of each client how its update turned as the state moved."""
    tolerance: float = Field(1e-6, ge=0, lt=1)
    """Share of the stored values above which a value counts as abnormal."""

    @model_validator(mode="after")
    def _fills_the_secants(self) -> "FedRecover":
        if self.warm_up <= self.secants:  # the first round starts from w_0 and gives no difference of states
            raise ValueError(f"warm_up must be larger than secants = {self.secants}")
        return self

    def unlearn(self, trained: Trained, request: Request, federation: Federation) -> Iterator[Step]:
        training, history = trained.training, trained.history
        retained = set(retained_clients(request, federation))
        limits = self._limits(trained, retained)
        known: dict[int, tuple[Secant, ...]] = {}
        state = trained.initial
        for number in range(1, training.rounds + 1):
            phase = self._phase(number, training)
            clients = [client for client in history.clients(number) if client in retained]
            stored = {client: history.update(number, client) for client in clients}
            drift = (state - history.state(number - 1)).map(torch.Tensor.double)
            estimates: dict[int, Update] = {}
            for client in clients if phase == "estimation" else []:
                correction = hessian_product(known.get(client, ()), drift)
                change = estimate(stored[client].change, correction, limits)
                if change is not None:
                    estimates[client] = replace(stored[client], delta=change)
            asked = [client for client in clients if client not in estimates]
            # The data order of training: what then differs from the stored update is the state's doing.
            job = trained.training_job(number, request=request, data="retain")
            answers = federation.run(state, job, asked)
            finished = average(state, [*answers, *estimates.values()], training, number)
            if phase != "estimation":
                for update in finished.updates:
                    turn = stored[update.client].change - update.change  # an update points against its gradient
                    secant = make_secant(drift, turn)
                    if secant is not None:
                        known[update.client] = (*known.get(update.client, ()), secant)[-self.secants :]
            state = finished.state
            step = step_of(finished, phase)
            yield Step(state, phase, step.loss, {**step.notes, "asked": asked})

    def rounds(self, training: TrainingConfig, request: Request) -> int:
        return training.rounds

    def _phase(self, number: int, training: TrainingConfig) -> str:
        if number <= self.warm_up:
            return "warm-up"
        if number > training.rounds - self.final_rounds:
            return "final tuning"
        return "estimation" if (number - self.warm_up) % self.correction_interval else "correction"

    def _limits(self, trained: Trained, retained: set[int]) -> Limits:
        limits = Limits(0.0, 0.0)
        for number in range(1, trained.training.rounds + 1):
            clients = [client for client in trained.history.clients(number) if client in retained]
            changes = [trained.history.update(number, client).change for client in clients]
            if changes:
                values = torch.cat([t.abs().flatten() for change in changes for t in change.tensors.values()])
                rank = max(1, math.ceil((1 - self.tolerance) * len(values)))
                largest = float(values.kthvalue(rank).values)
                limits = Limits(max(limits.value, largest), max(limits.norm, *(change.norm() for change in changes)))
        return limits


def estimate(stored: Params, correction: Params, limits: Limits) -> Params | None:
    """The update a client would have sent from the recovered state; None if it is abnormal and must be asked for."""
    usable = correction.is_finite() and correction.norm() <= LARGEST_CORRECTION * stored.norm()
    change = stored.map(torch.Tensor.double) - (correction if usable else correction.zeros())
    if max(float(tensor.abs().max()) for tensor in change.tensors.values()) > limits.value:
        return None
    factor = min(1.0, LARGEST_ESTIMATE * limits.norm / max(change.norm(), 1e-30))
    return change.zip(lambda new, old: (factor * new).to(old.dtype), stored)
