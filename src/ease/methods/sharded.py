"""Sharded retraining: only the shards that hold forget pairs are trained again, which is exact."""

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar, Literal

from ease.errors import UserError
from ease.federation.fedavg import TrainingConfig
from ease.federation.history import History
from ease.federation.protocol import Federation
from ease.methods.base import Need, Step, Trained, Unlearner, retained_clients, step_of
from ease.requests.request import ClientRequest, Request, leaving_clients
from ease.trainers import TrainerName
from ease.trainers.shards import merged, shard_of, split, stored_rounds, train_shards


class Sharded(Unlearner):
    """Shards that held a forget pair are trained again from the start; the others keep their models to the byte.

    The result is what the whole sharded training gives without the forget pairs. Who withdraws is known by number. For
    classes and single pairs every shard repeats its first round, and a shard in which a client has fewer pairs than
    before is trained to the end.

    Differs from the paper: shards are groups of clients, and the release is the mean of their models instead of a vote.
    """

    name: ClassVar[str] = "sharded"
    title: ClassVar[str] = "Sharded retraining"
    source: ClassVar[str] = "Bourtoule et al., IEEE S&P 2021"
    needs: ClassVar[frozenset[Need]] = frozenset({"history"})
    trainers: ClassVar[frozenset[TrainerName]] = frozenset({"shards"})
    method: Literal["sharded"] = "sharded"

    def unlearn(self, trained: Trained, request: Request, federation: Federation) -> Iterator[Step]:
        clients = retained_clients(request, federation)
        affected = self._affected(trained, request, federation)
        kept = [shard for shard in split(clients, trained.training.shards) if shard not in affected]
        again = train_shards(
            dict.fromkeys(affected, trained.initial),
            federation,
            trained.training,
            trained.seed,
            trained.temperature,
            [client for client in clients if shard_of(client, trained.training.shards) in affected],
            request=request,
        )
        before = stored_rounds(trained.history, trained.training, kept)
        for _ in range(trained.training.rounds):
            finished = merged(next(before, {}) | next(again, {}))
            step = step_of(finished, "retrain shards")
            yield replace(step, round=finished, notes={**step.notes, "shards": sorted(affected)})

    def _affected(self, trained: Trained, request: Request, federation: Federation) -> set[int]:
        """Shards that held a forget pair."""
        shards = trained.training.shards
        if isinstance(request, ClientRequest):
            return {shard_of(client, shards) for client in leaving_clients(request)}
        first = train_shards(
            dict.fromkeys(range(shards), trained.initial),
            federation,
            trained.training.model_copy(update={"rounds": 1}),
            trained.seed,
            trained.temperature,
            retained_clients(request, federation),
            request=request,
        )
        before = pairs_of(trained.history)
        return {
            shard
            for rounds in first
            for shard, finished in rounds.items()
            if any(update.pairs != before.get(update.client) for update in finished.updates)
            or {update.client for update in finished.updates} != {c for c in before if shard_of(c, shards) == shard}
        }

    def check(self, training: TrainingConfig) -> None:
        """Refuse a training without shards."""
        if training.shards == 1:
            raise UserError("sharded: only for runs trained in shards; train with --set training.shards=4, for example")

    def rounds(self, training: TrainingConfig, request: Request) -> int:
        return training.rounds

    def estimated_work(
        self, training: TrainingConfig, request: Request, holders: float, replay_cost: float = 1.0
    ) -> float:
        """One shard for a client, all of them for forget pairs that are everywhere."""
        return training.rounds * (1 / training.shards if isinstance(request, ClientRequest) else 1.0)


def pairs_of(history: History) -> dict[int, int]:
    """Client -> its pairs in the first round."""
    return history.pairs(1)
