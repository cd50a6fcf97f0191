"""What the evaluator measures: which pairs are to be forgotten, kept or were never seen, and recall on each."""

import numpy as np
from torch import Tensor

from ease.audit.alignment import pair_similarity
from ease.audit.evaluate import common_size, embed_pairs, recalls
from ease.params import Params
from ease.requests.request import ClassRequest, Request, forget_mask
from ease.runs.world import World


def evaluation_sets(world: World, request: Request) -> dict[str, np.ndarray]:
    """Positions of forget, retained and test pairs. For a class request, test pairs of that class are left out.

    Forget pairs are those the request names, closed or not; retained ones are what the clients hold beside them.
    Canaries are no data and count nowhere, but in a request that names nothing else.
    """
    seen, test, data = world.evaluator.shards, world.evaluator.test, world.evaluator.data
    if isinstance(request, ClassRequest):
        test = test[~np.isin(world.evaluator.classes_of(test), request.classes)]
    named = np.concatenate([shard.train[forget_mask(request, shard)] for shard in seen])
    return {
        "forget": data(named) if len(data(named)) else named,
        "retain": data(np.concatenate([shard.train[~forget_mask(request, shard)] for shard in world.shards])),
        "test": test,
    }


def measure(world: World, state: Params, sets: dict[str, np.ndarray], draws: int = 5) -> dict[str, float]:
    """Recall of forget, retained and test pairs on galleries of one size; a set that has vanished has none."""
    there = {name: positions for name, positions in sets.items() if len(positions)}
    seen, size = world.evaluator, world.config.gallery
    results = recalls(seen.model, state, seen.activations, there, size, seen.device, draws)
    metrics = {f"{name}/recall@{k}": result[f"recall@{k}"].mean for name, result in results.items() for k in (1, 5, 10)}
    return metrics | {"gallery": float(common_size(there, size))}


def similarities(world: World, state: Params, positions: np.ndarray) -> Tensor:
    """Cosine of each pair under a state [n]."""
    seen = world.evaluator
    return pair_similarity(*embed_pairs(seen.model, state, seen.activations, positions, seen.device))
