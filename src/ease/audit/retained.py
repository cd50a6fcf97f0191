"""Attack on retained pairs: whether forgetting exposes them."""

import numpy as np


def beyond_unseen(
    held: np.ndarray, held_at_start: np.ndarray, unseen: np.ndarray, unseen_at_start: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Scores of retained and unseen pairs: log-odds above those of an equally hard unseen pair.

    A retained pair is a member of every shadow and of every retrained model, so there is no model without it to compare
    with, and no likelihood ratio. The attacker does have the public start of training, which shows how hard a pair is,
    and pairs that nobody trained on. A line through the latter predicts the log-odds that the attacked model gives to
    an unseen pair of a given hardness. The score of a pair is its distance above that line. Without any relation
    between the two models the line is level, and the score is the plain log-odds."""
    hardness = unseen_at_start - unseen_at_start.mean()
    slope = float(hardness @ unseen) / max(float(hardness @ hardness), np.finfo(float).tiny)

    def above(values: np.ndarray, at_start: np.ndarray) -> np.ndarray:
        return values - unseen.mean() - slope * (at_start - unseen_at_start.mean())

    return above(held, held_at_start), above(unseen, unseen_at_start)
