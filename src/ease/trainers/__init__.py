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
from ease.trainers.shards import merged, stored_rounds, train_shards
from ease.trainers.sums import sum_and_solve

TrainerName = Literal["fedavg", "sums", "shards"]


def trainer_of(model: ModelConfig, training: TrainingConfig | None = None) -> TrainerName:
    """Which training a model goes through; without a recipe, shards count as federated averaging."""
    if model.projector == "closed_form":
        return "sums"
    return "shards" if training is not None and training.shards > 1 else "fedavg"


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

    `again` is the history of the training that is repeated or resumed: a closed-form head keeps its clients and ridge
    strengths, and shards continue from their own models.
    """
    if solves(params):
        everyone = federation.clients if clients is None else clients
        if first_round == 1:
            yield sum_and_solve(params, federation, config, seed, temperature, everyone, request, again)
        return
    if config.shards > 1:
        everyone = federation.clients if clients is None else clients
        starts = dict.fromkeys(range(config.shards), params)
        if first_round > 1 and again is not None:
            *_, last = stored_rounds(again, config, range(config.shards))
            starts = {shard: finished.state for shard, finished in last.items()}
        recipe = federation, config, seed, temperature, everyone, first_round, request, stream
        yield from map(merged, train_shards(starts, *recipe))
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
