"""Rollback: go back to the last stored state that the forget data had hardly shaped, and train on from there."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import ClassVar, Literal

from pydantic import Field

from ease.federation.fedavg import TrainingConfig
from ease.federation.protocol import Federation
from ease.methods.base import Need, Space, Step, Trained, Unlearner, fine_tuning, retained_clients
from ease.methods.fed_recovery import residual
from ease.requests.request import ClientRequest, Request


class Rollback(Unlearner):
    """Keep the first stored rounds, as long as the leaving clients' part of them is small, then repeat the others on
    retained data. If the clients joined late, nothing of theirs is left, at the cost of the rounds since then.

    Differs from the paper: this is only the rollback of Crab. Its choice of rounds and clients to store is left out,
    and so is what it does with stored updates afterwards: repeated rounds are plain training. How much of a round is a
    client's is measured our way: by the norm of the mean update less that without the client. For class and sample
    requests it is unknown, so the whole mean update counts.
    """

    name: ClassVar[str] = "rollback"
    title: ClassVar[str] = "Rollback"
    source: ClassVar[str] = "after Crab: Jiang et al., IEEE TIFS 2025"
    needs: ClassVar[frozenset[Need]] = frozenset({"history"})
    tuned: ClassVar[Space] = {"influence": (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)}
    method: Literal["rollback"] = "rollback"
    influence: float = Field(0.3, ge=0, lt=1)
    """Share of the forget data's influence over all rounds that may stay in the state to go back to."""

    def unlearn(self, trained: Trained, request: Request, federation: Federation) -> Iterator[Step]:
        retained = retained_clients(request, federation)
        last = kept_rounds(influences(trained, request, retained), self.influence)
        state = trained.initial
        for number in range(1, last + 1):
            state = trained.history.state(number)
            yield Step(state, "kept")
        rounds = trained.training.rounds
        yield from fine_tuning(trained, state, request, federation, rounds, self.name, last + 1, "retraining")

    def rounds(self, training: TrainingConfig, request: Request) -> int:
        return training.rounds


def influences(trained: Trained, request: Request, retained: Sequence[int]) -> list[float]:
    """How much of each stored round is owed to what goes, and to what went before: stored states hold both."""
    clients_alone = all(isinstance(each, ClientRequest) for each in (request, *trained.gone))
    found = []
    for number in range(1, trained.training.rounds + 1):
        stay = {client: float(client in retained) for client in trained.history.clients(number)}
        mean, part = residual(trained, number, stay)
        found.append((part if clients_alone else mean).norm())
    return found


def kept_rounds(influences: Sequence[float], share: float) -> int:
    """The most first rounds that hold no more than a share of all influence; never all of them."""
    allowed = share * sum(influences)
    return sum(so_far <= allowed for so_far in accumulate(influences[:-1]))
