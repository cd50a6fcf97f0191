"""Retained pairs that resemble forget pairs: the hardest to keep, and, where they are copies, impossible to forget."""

import numpy as np

from ease.data.features import Activations
from ease.data.partition import joint_embedding

SAME_CONTENT = 0.98
"""Cosine in the joint frozen space from which a retained pair counts as a near-duplicate of a forget pair."""
FEWEST_NEAR = 20
"""Neighbours of a few forget pairs: recall of fewer says little."""
PAIRS_AT_ONCE = 4096
"""Retained pairs that are compared with all forget pairs at a time: a whole matrix would not fit into memory."""


def nearest_forget(activations: Activations, forget: np.ndarray, retain: np.ndarray) -> np.ndarray:
    """Cosine of each retained pair to the forget pair that is nearest to it in the joint frozen space."""
    some = _joint(activations, forget).T
    starts = range(0, len(retain), PAIRS_AT_ONCE)
    return np.concatenate([(_joint(activations, retain[n : n + PAIRS_AT_ONCE]) @ some).max(axis=1) for n in starts])


def near_forget(nearest: np.ndarray, forget: np.ndarray, retain: np.ndarray) -> np.ndarray:
    """The retained pairs nearest to forget pairs, as many as there are forget pairs, or some more of a few."""
    return np.sort(retain[nearest.argsort(kind="stable")[::-1][: max(len(forget), FEWEST_NEAR)]])


def alike(
    activations: Activations,
    positions: np.ndarray,
    classes: np.ndarray,
    others: np.ndarray,
    other_classes: np.ndarray,
    count: int,
) -> np.ndarray:
    """So many of `others` for each pair [n, count]: those of its class first, the nearest of them first."""
    cosines = _joint(activations, positions) @ _joint(activations, others).T
    foreign = classes[:, None] != other_classes[None]
    return others[np.lexsort((-cosines, foreign), axis=1)[:, :count]]


def near_duplicates(nearest: np.ndarray) -> int:
    """How many retained pairs show and say nearly what a forget pair does."""
    return int((nearest >= SAME_CONTENT).sum())


def _joint(activations: Activations, positions: np.ndarray) -> np.ndarray:
    joint = joint_embedding(activations.pooled_image[positions], activations.pooled_text[positions])
    return (joint / np.linalg.norm(joint, axis=1, keepdims=True)).astype(np.float32)
