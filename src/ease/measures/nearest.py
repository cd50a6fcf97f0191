"""Retained pairs that resemble forget pairs, and duplicates of them."""

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
    """The cosine of each retained pair to its nearest forget pair in the joint frozen space."""
    some = _joint(activations, forget).T
    starts = range(0, len(retain), PAIRS_AT_ONCE)
    return np.concatenate([(_joint(activations, retain[n : n + PAIRS_AT_ONCE]) @ some).max(axis=1) for n in starts])


def near_forget(nearest: np.ndarray, forget: np.ndarray, retain: np.ndarray) -> np.ndarray:
    """The retained pairs nearest to forget pairs, about as many as there are forget pairs."""
    return np.sort(retain[nearest.argsort(kind="stable")[::-1][: max(len(forget), FEWEST_NEAR)]])


def resembling(
    activations: Activations,
    positions: np.ndarray,
    classes: np.ndarray,
    others: np.ndarray,
    other_classes: np.ndarray,
    count: int,
) -> np.ndarray:
    """The `count` most similar of `others` for each pair [n, count], first those of its class."""
    cosines = _joint(activations, positions) @ _joint(activations, others).T
    foreign = classes[:, None] != other_classes[None]
    return others[np.lexsort((-cosines, foreign), axis=1)[:, :count]]


def near_duplicates(nearest: np.ndarray) -> int:
    """The number of retained pairs that nearly duplicate a forget pair."""
    return int((nearest >= SAME_CONTENT).sum())


def _joint(activations: Activations, positions: np.ndarray) -> np.ndarray:
    joint = joint_embedding(activations.pooled_image[positions], activations.pooled_text[positions])
    return (joint / np.linalg.norm(joint, axis=1, keepdims=True)).astype(np.float32)
