"""Updates of many clients whose pairs are in one place, so that their trainings share passes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ease.data.examples import Examples
from ease.federation.client import ClientData
from ease.federation.gram_layer import gram_sides
from ease.federation.local import draws_of, loss_named, promoted
from ease.federation.microbatching import GroupSize, train_all
from ease.federation.objectives import Composite, EmbeddingLoss, objective
from ease.federation.protocol import LocalJob, Update
from ease.federation.stacked import LocalTraining
from ease.model.dual_encoder import DualEncoder
from ease.params import Params


@dataclass(frozen=True)
class Pool:
    """Training pairs of some clients in one place, and where those of each client start."""

    examples: Examples
    clients: Mapping[int, ClientData]
    offsets: Mapping[int, int]

    def place(self, client: int, rows: np.ndarray) -> np.ndarray:
        """Positions of a client's pairs in the pool."""
        return self.offsets[client] + rows


@dataclass(frozen=True)
class SharedPool(Pool):
    """A pool whose clients share pairs. Each pair is stored once, so that there are no offsets."""

    rows: Mapping[int, np.ndarray]
    """Client -> position of each of its pairs."""

    def place(self, client: int, rows: np.ndarray) -> np.ndarray:
        return self.rows[client][rows]


ClientJob = tuple[int, Params, LocalJob]
"""A client, the state that it is sent, and its job."""


def vectorized_updates(
    model: DualEncoder, pool: Pool, asked: Sequence[ClientJob], group_size: GroupSize
) -> dict[int, Update]:
    """The updates of clients that may start from different states; their jobs have the same common part."""
    name = asked[0][2].objective
    kind = objective(name)
    if isinstance(kind, Composite):
        parts = [(c, name, *part) for c, state, job in asked for name, part in kind.parts(state, job).items()]
        done = _trained(model, pool, [(client, start, part) for client, _, start, part in parts], group_size)
        found: dict[int, dict[str, Update]] = {client: {} for client, _, _ in asked}
        for (client, name, _, _), update in zip(parts, done, strict=True):
            found[client][name] = update
        return {client: kind.combine(pool.clients[client], found[client], job) for client, _, job in asked}
    updates = zip(asked, _trained(model, pool, asked, group_size), strict=True)
    return {client: loss_named(name).finish(update, job) for (client, _, job), update in updates}


def _trained(model: DualEncoder, pool: Pool, asked: Sequence[ClientJob], group_size: GroupSize) -> list[Update]:
    """Do trainings, each of a client from a state, in shared passes."""
    able: dict[int | None, list[tuple[int, int, LocalTraining]]] = {}
    updates = [Update(client, 0, None) for client, _, _ in asked]
    placed_states: dict[int, Params] = {}
    for number, (client, state, job) in enumerate(asked):
        if id(state) not in placed_states:
            placed_states[id(state)] = state.to(pool.examples.device).map(promoted)
        drawn = draws_of(pool.clients[client], job)
        if drawn.draws:
            # Inner products of a client's own few features are worth more than passes shared with others.
            home = client if gram_sides(model, pool.clients[client].train, job) else None
            placed = tuple(
                replace(draw, rows=pool.place(client, draw.rows) if home is None else draw.rows) for draw in drawn.draws
            )
            training = LocalTraining(placed_states[id(state)], placed)
            able.setdefault(home, []).append((number, drawn.pairs, training))
    for home, entries in able.items():
        common = asked[entries[0][0]][2].common
        examples = pool.examples if home is None else pool.clients[home].train
        results = train_all(model, examples, [one for _, _, one in entries], common, group_size)
        for (number, pairs, _), result in zip(entries, results, strict=True):
            updates[number] = Update(asked[number][0], pairs, result.delta, {"loss": result.loss})
    return updates


def can_share(state: Params, job: LocalJob) -> bool:
    """Whether trainings of a job can share passes: its losses need embeddings only, and no sparse adapter."""
    asked = objective(job.objective)
    if isinstance(asked, Composite):
        return all(can_share(start, part) for start, part in asked.parts(state, job).values())
    return isinstance(asked, EmbeddingLoss) and job.sparse is None
