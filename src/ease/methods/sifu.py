"""SIFU: go back to the last state that leaving clients can have moved by little, hide that by noise, and train on."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field

from ease.federation.fedavg import TrainingConfig
from ease.federation.protocol import Federation
from ease.methods.base import Need, Step, Trained, Unlearner, fine_tuning, retained_clients
from ease.methods.certified import certificate, largest_ratio, noisy
from ease.methods.rollback import influences
from ease.requests.request import ClientRequest, Request

ASSUMPTIONS = (
    "a round of training moves two models apart by at most the factor `expansion` (1 holds for convex smooth losses "
    "and small steps; it is not proven for these models), and the seed of the noise stays secret"
)


class Sifu(Unlearner):
    """The last round whose sensitivity is hidden by noise of deviation sigma at (epsilon, delta) is kept, with noise.

    Later rounds are repeated on retained data. The sensitivity after n rounds is the sum over rounds s of expansion **
    (n - s) times the leaving clients' part of round s. Clients of closed requests count too.

    Differs from the paper: delta is that of the exact Gaussian mechanism, which holds for every epsilon. Stored updates
    do not bound the part of single pairs or classes, so those requests go back to the start and are exact.
    """

    name: ClassVar[str] = "sifu"
    title: ClassVar[str] = "SIFU"
    source: ClassVar[str] = "Fraboni et al., AISTATS 2024"
    needs: ClassVar[frozenset[Need]] = frozenset({"history"})
    method: Literal["sifu"] = "sifu"
    epsilon: float = Field(8.0, gt=0)
    """Epsilon of the guarantee."""
    delta: float = Field(1e-5, gt=0, lt=1)
    """Delta of the guarantee."""
    sigma: float = Field(0.02, gt=0)
    """Deviation of the noise on every value; more keeps more rounds and spoils the kept state more."""
    expansion: float = Field(1.0, ge=0)
    """Factor by which a round of training may move two models apart; the guarantee assumes it."""

    def unlearn(self, trained: Trained, request: Request, federation: Federation) -> Iterator[Step]:
        retained = retained_clients(request, federation)
        by_clients = all(isinstance(each, ClientRequest) for each in (request, *trained.gone))
        parts = influences(trained, request, retained) if by_clients else []
        reach = self.sigma * largest_ratio(self.epsilon, self.delta)
        found = sensitivities(parts, self.expansion)
        last = max((n for n, each in enumerate(found) if each <= reach and n < trained.training.rounds), default=0)
        state = trained.initial
        for number in range(1, last + 1):
            state = trained.history.state(number)
            if number == last:
                state = noisy(state, self.sigma, trained.seed, self.name)
            yield Step(state, "kept", notes=self._proof(last, found[last]) if number == last else {})
        rounds = trained.training.rounds
        steps = fine_tuning(trained, state, request, federation, rounds, self.name, last + 1, "retraining")
        for number, step in enumerate(steps, last + 1):
            yield step if number > 1 else replace(step, notes={**step.notes, **self._proof(0, 0.0)})

    def _proof(self, last: int, sensitivity: float) -> dict[str, object]:
        if not last:  # from the start state: nothing of the forget data is left
            return certificate(0.0, 0.0, 0.0, "none: the model was trained again from the start", kept_rounds=0)
        return certificate(self.epsilon, self.delta, self.sigma, ASSUMPTIONS, kept_rounds=last, sensitivity=sensitivity)

    def rounds(self, training: TrainingConfig, request: Request) -> int:
        return training.rounds


def sensitivities(parts: Sequence[float], expansion: float) -> list[float]:
    """Bound on how far the state after n rounds is from one without the clients, for n = 0, 1, ..."""
    found = [0.0]
    for part in parts:
        found.append(expansion * found[-1] + part)
    return found
