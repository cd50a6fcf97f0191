"""Sharded training: groups of clients train models of their own, and the release is the mean of these models.

A client's data reach the model of its own shard only, so that forgetting retrains one shard and is exact.
"""

from collections.abc import Iterator, Mapping, Sequence

from ease.federation.fedavg import Round, TrainingConfig, average, fedavg
from ease.federation.history import History
from ease.federation.protocol import Federation
from ease.params import Params, weighted_mean
from ease.requests.request import Request


def shard_of(client: int, shards: int) -> int:
    """The shard of a client, which does not depend on the other clients."""
    return client % shards


def split(clients: Sequence[int], shards: int) -> dict[int, list[int]]:
    """Shard -> its clients; shards without any are left out."""
    found: dict[int, list[int]] = {}
    for client in sorted(clients):
        found.setdefault(shard_of(client, shards), []).append(client)
    return dict(sorted(found.items()))


def train_shards(
    starts: Mapping[int, Params],
    federation: Federation,
    config: TrainingConfig,
    seed: int,
    temperature: float,
    clients: Sequence[int],
    first_round: int = 1,
    request: Request | None = None,
    stream: str = "train",
) -> Iterator[dict[int, Round]]:
    """Train every shard from its own start by federated averaging; yields a round of each: shard -> round."""
    groups = split(clients, config.shards)
    trainings = [
        fedavg(starts[shard], federation, config, seed, temperature, own, first_round, request, stream)
        for shard, own in groups.items()
    ]
    for finished in zip(*trainings, strict=True):
        yield dict(zip(groups, finished, strict=True))


def stored_rounds(history: History, config: TrainingConfig, shards: Sequence[int]) -> Iterator[dict[int, Round]]:
    """The rounds of some shards of a finished training, computed again from stored updates and to the byte."""
    states = dict.fromkeys(shards, history.state(0))
    for number in range(1, history.rounds() + 1):
        rounds = {}
        for shard in shards:
            own = [client for client in history.clients(number) if shard_of(client, config.shards) == shard]
            updates = [history.update(number, client) for client in own]
            rounds[shard] = average(states[shard], updates, config, number, clip=False)
            states[shard] = rounds[shard].state
        yield rounds


def merged(rounds: Mapping[int, Round]) -> Round:
    """One round of all shards: the mean of their models, weighted by the pairs of their updates."""
    ordered = [rounds[shard] for shard in sorted(rounds)]
    weights = [float(sum(update.pairs for update in each.updates)) for each in ordered]
    there = [(weight, each.state) for weight, each in zip(weights, ordered, strict=True) if weight]
    state = weighted_mean(there) if there else ordered[0].state
    return Round(
        ordered[0].number,
        state,
        tuple(sorted((update for each in ordered for update in each.updates), key=lambda update: update.client)),
        {client: why for each in ordered for client, why in each.rejected.items()},
        clipped={client: factor for each in ordered for client, factor in each.clipped.items()},
        lengths={client: length for each in ordered for client, length in each.lengths.items()},
    )
