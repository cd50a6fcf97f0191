"""The contrastive objective and the log-odds that measure how strongly a model holds a pair."""

import torch
from torch import Tensor
from torch.nn import functional as F


def info_nce(image: Tensor, text: Tensor, temperature: float) -> Tensor:
    """Symmetric InfoNCE over a batch of unit-norm embeddings [n, d]."""
    logits = image @ text.T / temperature
    labels = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def log_odds(
    image: Tensor, text: Tensor, pool_image: Tensor, pool_text: Tensor, weights: Tensor, temperature: float
) -> Tensor:
    """phi [n]: two-way log-odds of each pair against other pairs; higher means held more strongly.

    `weights` [n, pool] says how much each negative counts; 0 leaves it out.
    """
    share = weights.log()
    positive = (image * text).sum(-1) / temperature
    to_text = torch.logsumexp(image @ pool_text.T / temperature + share, dim=1)
    to_image = torch.logsumexp(text @ pool_image.T / temperature + share, dim=1)
    return positive - (to_text + to_image) / 2
