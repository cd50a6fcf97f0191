"""Distance of forgotten pairs from where retraining leaves them."""

from torch import Tensor

EPSILON = 1e-3
"""Guards pairs that training hardly moved."""


def pair_similarity(image: Tensor, text: Tensor) -> Tensor:
    """Mean cosine of each image with its captions [n], from unit-norm image [n, d] and text [n, captions, d]."""
    return (image[:, None] * text).sum(-1).mean(1)


def alignment_residual(unlearned: Tensor, trained: Tensor, retrained: Tensor) -> float:
    """rho: median over forget pairs of |s - s_retrained| / (|s_trained - s_retrained| + epsilon).

    0: every pair is where retraining leaves it. 1: pairs are as far away as in the trained model.
    """
    return float(((unlearned - retrained).abs() / ((trained - retrained).abs() + EPSILON)).median())
