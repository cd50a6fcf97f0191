"""Retained pairs near forget pairs, against the whole matrix of cosines."""

import numpy as np

import ease.measures.nearest
from ease.data.partition import joint_embedding
from ease.measures.nearest import FEWEST_NEAR, near_duplicates, near_forget, nearest_forget, resembling


def test_near_forget_pairs_are_the_nearest_retained_and_copies_are_counted(learnt) -> None:
    world = learnt.world
    forget, retain = world.shards[1].train, np.concatenate([world.shards[n].train for n in (0, 2, 3)])
    nearest = nearest_forget(world.evaluator.activations, forget, retain)
    near = near_forget(nearest, forget, retain)
    assert len(near) == len(forget) and set(near) <= set(retain)
    assert nearest[np.isin(retain, near)].min() >= nearest[~np.isin(retain, near)].max()
    assert near_duplicates(nearest) == 0
    copies = np.concatenate([retain, forget[:3]])
    nearest = nearest_forget(world.evaluator.activations, forget, copies)
    assert near_duplicates(nearest) == 3
    assert set(forget[:3]) <= set(near_forget(nearest, forget, copies))


def test_a_single_pair_has_neighbours_enough_to_look_at(learnt) -> None:
    world = learnt.world
    forget, retain = world.shards[1].train[:1], world.shards[0].train
    nearest = nearest_forget(world.evaluator.activations, forget, retain)
    assert len(near_forget(nearest, forget, retain)) == FEWEST_NEAR


def test_pairs_alike_are_of_the_class_first_and_the_nearest_first(learnt) -> None:
    """Against one sorted list for each pair."""
    seen = learnt.world.evaluator
    positions, others = learnt.world.shards[0].train[:3], seen.test
    classes, other_classes = seen.classes_of(positions), seen.classes_of(others)
    found = resembling(seen.activations, positions, classes, others, other_classes, 25)
    assert found.shape == (3, 25) and (np.bincount(other_classes) < 25).all(), "no class fills a gallery by itself"

    def direction(position: int) -> np.ndarray:
        both = seen.activations.pooled_image[[position]], seen.activations.pooled_text[[position]]
        (row,) = joint_embedding(*both)
        return row / np.linalg.norm(row)

    for row, position, label in zip(found, positions, classes, strict=True):
        near = {int(other): float(direction(other) @ direction(position)) for other in others}
        kind = dict(zip(others.tolist(), other_classes, strict=True))
        wanted = sorted(near, key=lambda other: (kind[other] != label, -near[other]))
        assert row.tolist() == wanted[:25]


def test_nearness_is_the_same_in_parts_and_takes_half_the_memory(learnt, monkeypatch) -> None:
    """Against the whole matrix in double precision."""
    world = learnt.world
    forget, retain = world.shards[1].train, np.concatenate([world.shards[n].train for n in (0, 2, 3)])
    pooled = world.evaluator.activations.pooled_image, world.evaluator.activations.pooled_text
    whole = [joint_embedding(*(side[positions] for side in pooled)) for positions in (retain, forget)]
    unit = [rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in whole]
    monkeypatch.setattr(ease.measures.nearest, "PAIRS_AT_ONCE", 7)
    sizes = []
    joint = ease.measures.nearest._joint
    monkeypatch.setattr(ease.measures.nearest, "_joint", lambda a, p: sizes.append(len(p)) or joint(a, p))
    nearest = nearest_forget(world.evaluator.activations, forget, retain)
    np.testing.assert_allclose(nearest, (unit[0] @ unit[1].T).max(axis=1), atol=1e-5)
    assert nearest.dtype == np.float32 and max(sizes[1:]) <= 7
