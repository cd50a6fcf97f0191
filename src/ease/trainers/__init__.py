"""How a run is trained: by rounds of federated averaging, or in one round of exact sums. It is decided here."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from ease.federation.fedavg import Round, TrainingConfig, average, fedavg
from ease.federation.history import History
from ease.federation.protocol import Federation
from ease.model.closed_form import solves
from ease.model.dual_encoder import ModelConfig
from ease.params import Params
from ease.requests.request import Request
from ease.subspace import ServerLock
from ease.trainers.sums import sum_and_solve

TrainerName = Literal["fedavg", "sums"]


def trainer_of(model: ModelConfig) -> TrainerName:
    """Which training a model goes through."""
    return "sums" if model.projector == "closed_form" else "fedavg"


def train(
    params: Params,
    federation: Federation,
    config: TrainingConfig,
    seed: int,
    temperature: float,
    clients: Sequence[int] | None = None,
    first_round: int = 1,
    request: Request | None = None,
    stream: str = "train",
    locks: Sequence[ServerLock] = (),
    keep: bool = False,
    again: History | None = None,
    past: Iterable[Params] = (),
) -> Iterator[Round]:
    """Yield every finished round of a training from `params`; with a request, on retained pairs only.

    `again` is the history of the training that is repeated: a closed-form head keeps its clients and ridge strengths.
    """
    if solves(params):
        everyone = federation.clients if clients is None else clients
        if first_round == 1:
            yield sum_and_solve(params, federation, config, seed, temperature, everyone, request, again)
        return
    yield from fedavg(
        params, federation, config, seed, temperature, clients, first_round, request, stream, locks, keep, past
    )


def means_of(history: History, config: TrainingConfig) -> Iterator[Params]:
    """The mean updates of all stored rounds, for a strategy that resumes from them."""
    for number in range(1, history.rounds() + 1):
        start = history.start(number)
        updates = [history.update(number, client) for client in history.clients(number)]
        yield average(start, updates, config, number, clip=False).state - start
