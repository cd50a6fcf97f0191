"""Statistics of pairs under a model: how well it matches them, compared with a pool of unseen pairs."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ease.data.features import Activations
from ease.errors import Diverged
from ease.measures.evaluate import embed_pairs
from ease.model.dual_encoder import DualEncoder
from ease.params import Params

STATISTICS = ("log_odds", "cosine", "loss")
"""Higher means memorised more strongly, except for the loss."""


@dataclass(frozen=True)
class Gauge:
    """Measures pairs under any state of one model, always against the same pool at the same temperature."""

    model: DualEncoder
    activations: Activations
    pool: np.ndarray
    """Positions of pairs that no target and no shadow is trained on."""
    temperature: float
    device: torch.device

    def read(self, state: Params, positions: np.ndarray) -> dict[str, np.ndarray]:
        """Each statistic of each pair [n], averaged over its captions: the image is the unit of membership."""
        pool = embed_pairs(self.model, state, self.activations, self.pool, self.device, captions=1)
        pairs = embed_pairs(self.model, state, self.activations, positions, self.device)
        return statistics(*pairs, pool[0], pool[1][:, 0], self.temperature)


def statistics(
    image: Tensor, text: Tensor, pool_image: Tensor, pool_text: Tensor, temperature: float
) -> dict[str, np.ndarray]:
    """Two-way log-odds, cosine and InfoNCE loss of pairs, image [n, d] and text [n, captions, d].

    The log-odds are s_ii - logsumexp over the pool, the mean of both directions. Negatives from a training batch would
    not do: whether THEY were members would show in the number.
    """
    positive = (image[:, None] * text).sum(-1) / temperature
    to_text = torch.logsumexp(image @ pool_text.T / temperature, dim=-1)[:, None]
    to_image = torch.logsumexp(text @ pool_image.T / temperature, dim=-1)
    odds = positive - (to_text + to_image) / 2
    loss = (F.softplus(to_text - positive) + F.softplus(to_image - positive)) / 2
    values = {"log_odds": odds, "cosine": positive * temperature, "loss": loss}
    found = {name: value.mean(1).double().cpu().numpy() for name, value in values.items()}
    if not all(np.isfinite(value).all() for value in found.values()):
        raise Diverged("the embeddings are not finite: the model diverged, there is nothing to measure")
    return found


def features(read: Mapping[str, np.ndarray]) -> np.ndarray:
    """All statistics side by side [..., 3], for an attack classifier."""
    return np.stack([read[name] for name in STATISTICS], axis=-1)
