"""Measurements of the evaluator: forget, retained and test pairs, and recall on each."""

import numpy as np
from torch import Tensor

from ease.measures.alignment import pair_similarity
from ease.measures.evaluate import common_size, embed_pairs, recalls
from ease.measures.nearest import resembling
from ease.measures.ranks import FEW
from ease.measures.retrieval import GalleryRecall, first_recall
from ease.params import Params
from ease.requests.request import ClientRequest, Request, forget_mask
from ease.runs.world import World
from ease.seeding import generator


def evaluation_sets(world: World, request: Request) -> dict[str, np.ndarray]:
    """Positions of forget, retained and test pairs. For a class request, test pairs of that class are left out.

    Forget pairs are those that the request names, closed or not; retained pairs are all others of the clients.
    Canaries are not data and count only in a request that names nothing else.
    """
    seen, test, data = world.evaluator.shards, world.evaluator.test, world.evaluator.data
    if not isinstance(request, ClientRequest) and request.classes:
        test = test[~np.isin(world.evaluator.classes_of(test), request.classes)]
    named = np.concatenate([shard.train[forget_mask(request, shard)] for shard in seen])
    return {
        "forget": data(named) if len(data(named)) else named,
        "retain": data(np.concatenate([shard.train[~forget_mask(request, shard)] for shard in world.shards])),
        "test": test,
    }


def galleries(world: World, positions: np.ndarray, size: int) -> np.ndarray:
    """For each pair a gallery of itself and the most similar test pairs, first those of its pseudo-class: [n, size]."""
    seen = world.evaluator
    classes, test_classes = seen.classes_of(positions), seen.classes_of(seen.test)
    others = resembling(seen.activations, positions, classes, seen.test, test_classes, size - 1)
    return np.column_stack([positions, others])


def embed_galleries(world: World, state: Params, drawn: np.ndarray) -> tuple[Tensor, Tensor]:
    """Embeddings of galleries of positions [n, size]: image [n, size, d] and text [n, size, captions, d]."""
    seen = world.evaluator
    positions, places = np.unique(drawn, return_inverse=True)
    image, text = embed_pairs(seen.model, state, seen.activations, positions, seen.device)
    places = places.reshape(drawn.shape)
    return image[places], text[places]


def recalls_of(world: World, state: Params, sets: dict[str, np.ndarray], draws: int) -> dict[str, GalleryRecall]:
    """Recall of each set on galleries of one size; a few forget pairs are searched among similar test pairs.

    Among random pairs a single pair is found by its kind, whether or not the model has seen it.
    """
    seen, size = world.evaluator, common_size(sets, world.config.gallery)
    found = recalls(seen.model, state, seen.activations, sets, size, seen.device, draws)
    forget = sets.get("forget", seen.test[:0])
    if 0 < len(forget) < FEW and len(seen.test):
        embedded = embed_galleries(world, state, galleries(world, forget, size))
        found["forget"] = first_recall(*embedded, generator(0, "gallery", "few"))
    return found


def measure(world: World, state: Params, sets: dict[str, np.ndarray], draws: int = 5) -> dict[str, float]:
    """Recall of forget, retained and test pairs on galleries of one size; empty sets are left out."""
    there = {name: positions for name, positions in sets.items() if len(positions)}
    results = recalls_of(world, state, there, draws)
    metrics = {f"{name}/recall@{k}": result[f"recall@{k}"].mean for name, result in results.items() for k in (1, 5, 10)}
    return metrics | {"gallery": float(common_size(there, world.config.gallery))}


def similarities(world: World, state: Params, positions: np.ndarray) -> Tensor:
    """The cosine of each pair under a state [n]."""
    seen = world.evaluator
    return pair_similarity(*embed_pairs(seen.model, state, seen.activations, positions, seen.device))
