"""Lower bounds on epsilon from guesses about the canaries of one run."""

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import betaincinv

from ease.audit.membership import CONFIDENCE

GUESSED_SHARE = 0.5
"""Share of the canaries that are guessed, half of them as in and half as out. The auditor abstains on the rest."""


@dataclass(frozen=True)
class Guesses:
    """Number of guesses and of correct ones."""

    right: int
    made: int

    @property
    def epsilon(self) -> float:
        """The lower bound on epsilon with 95 % confidence."""
        return max(0.0, lower_bound(self.right, self.made))


def guess(scores: np.ndarray, inside: np.ndarray) -> Guesses:
    """Call the canaries of the highest scores [n] in and those of the lowest out, and count by bool [n] who was in."""
    count = int(GUESSED_SHARE * len(scores) / 2)
    order = np.argsort(scores, kind="stable")
    right = int(inside[order[len(order) - count :]].sum()) + int((~inside[order[:count]]).sum())
    return Guesses(right, 2 * count)


def lower_bound(right: int, made: int) -> float:
    """The lower bound on epsilon; below 0 if guesses were no better than a coin.

    Steinke, Nasr and Jagielski (2023): when each canary was in or out by a fair coin and the training is
    epsilon-differentially private, the number of right guesses is at most that of as many tosses of a coin that shows
    heads with e^epsilon / (1 + e^epsilon), however the guesses depend on each other. Clopper and Pearson's limit of
    that share gives epsilon.
    """
    if right == 0:
        return -math.inf
    share = float(betaincinv(right, made - right + 1, 1 - CONFIDENCE))
    return math.log(share / (1 - share))
