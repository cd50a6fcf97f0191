"""Recall of sets of any size, down to a single pair, on galleries of one size."""

import numpy as np
import pytest
import torch

from ease.measures import evaluate
from ease.measures.evaluate import LEAST_GALLERY, common_size, embed_pairs, recalls


def sets(**sizes: int) -> dict[str, np.ndarray]:
    return {name: np.arange(size) for name, size in sizes.items()}


@pytest.mark.parametrize(
    ("given", "size", "expected"),
    [
        (sets(forget=193, retain=900, test=400), 500, 193),
        (sets(forget=193, retain=900, test=400), 100, 100),
        (sets(forget=1, retain=900, test=400), 500, LEAST_GALLERY),
        (sets(forget=49, retain=900, test=400), 30, 30),
        (sets(forget=1, retain=900, test=20), 500, 20),
        (sets(forget=30, retain=900, test=20), 500, 20),
        (sets(seen=20, unseen=3), 500, 3),
    ],
)
def test_the_size_of_all_galleries(given, size: int, expected: int) -> None:
    assert common_size(given, size) == expected


@pytest.mark.parametrize("learned", [True, False])
def test_a_single_pair_is_looked_for_among_test_pairs(learnt, learned: bool) -> None:
    """A naive count of who is nearer, for every gallery of the pair and all test pairs but one: recall lies between."""
    world = learnt.world
    state = learnt.trained.final if learned else learnt.trained.initial
    named = {
        "forget": world.shards[0].train[7:8],
        "retain": world.shards[1].train,
        "test": world.evaluator.pairs.indices("test"),
    }
    count = min(LEAST_GALLERY, len(named["test"]))
    named["test"] = named["test"][:count]
    found = recalls(world.server.model, state, world.evaluator.activations, named, 500, world.server.device)["forget"]
    assert found.size == count
    both = np.concatenate([named["forget"], named["test"]])
    image, text = embed_pairs(world.server.model, state, world.evaluator.activations, both, "cpu")
    own = text[0] @ image[0]
    nearer_texts = (text[1:] @ image[0] > own.max()).sum(1)
    nearer_images = torch.stack([image[1:] @ caption > score for caption, score in zip(text[0], own, strict=True)])
    for k in (1, 5, 10):
        hits = []
        for left_out in range(count):
            kept = torch.arange(count) != left_out
            to_text = float(nearer_texts[kept].sum() < k)
            to_image = float((nearer_images[:, kept].sum(1) < k).float().mean())
            hits.append(100 * (to_text + to_image) / 2)
        assert min(hits) - 1e-4 <= found[f"recall@{k}"].mean <= max(hits) + 1e-4
    assert learned == (found["recall@1"].mean > 90)


def test_large_sets_are_measured_as_ever(learnt, monkeypatch) -> None:
    """Filling up is for small sets alone: where all are large enough it changes nothing."""
    world = learnt.world
    named = {"forget": world.shards[0].train, "test": world.evaluator.pairs.indices("test")}
    assert min(map(len, named.values())) >= 10
    monkeypatch.setattr(evaluate, "LEAST_GALLERY", 10)
    one = recalls(
        world.server.model, learnt.trained.final, world.evaluator.activations, named, 500, world.server.device
    )
    monkeypatch.setattr(evaluate, "LEAST_GALLERY", 0)
    two = recalls(
        world.server.model, learnt.trained.final, world.evaluator.activations, named, 500, world.server.device
    )
    assert one == two
    assert torch.isfinite(torch.tensor(one["forget"]["recall@1"].mean))
