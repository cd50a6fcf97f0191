"""Retained pairs near forget pairs, against the whole matrix of cosines."""

import numpy as np

import ease.audit.nearest
from ease.audit.nearest import near_duplicates, near_forget, nearest_forget
from ease.data.partition import joint_embedding


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


def test_nearness_is_the_same_in_parts_and_takes_half_the_memory(learnt, monkeypatch) -> None:
    """Against the whole matrix in double precision."""
    world = learnt.world
    forget, retain = world.shards[1].train, np.concatenate([world.shards[n].train for n in (0, 2, 3)])
    pooled = world.evaluator.activations.pooled_image, world.evaluator.activations.pooled_text
    whole = [joint_embedding(*(side[positions] for side in pooled)) for positions in (retain, forget)]
    unit = [rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in whole]
    monkeypatch.setattr(ease.audit.nearest, "PAIRS_AT_ONCE", 7)
    sizes = []
    joint = ease.audit.nearest._joint
    monkeypatch.setattr(ease.audit.nearest, "_joint", lambda a, p: sizes.append(len(p)) or joint(a, p))
    nearest = nearest_forget(world.evaluator.activations, forget, retain)
    np.testing.assert_allclose(nearest, (unit[0] @ unit[1].T).max(axis=1), atol=1e-5)
    assert nearest.dtype == np.float32 and max(sizes[1:]) <= 7
