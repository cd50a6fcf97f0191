"""How crowded the neighbourhood of a pair is in the frozen space: it predicts how well an unseen pair is held."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ease.data.examples import Examples

NEIGHBOURS = (1, 5, 20, 100)


def densities(queries: Examples, base: Examples) -> Tensor:
    """Mean similarity to the nearest 1, 5, 20 and 100 base pairs, by image, by text and by both: [queries, 12]."""
    if len(queries) == 0 or len(base) == 0:
        return torch.zeros(len(queries), 3 * len(NEIGHBOURS), device=queries.device)
    image = queries.pooled_image @ base.pooled_image.T
    text = queries.pooled_text @ base.pooled_text.T
    columns = []
    for similarity in (image, text, image + text):
        nearest = similarity.sort(dim=1, descending=True).values
        columns += [nearest[:, : min(count, len(base))].mean(dim=1) for count in NEIGHBOURS]
    return torch.stack(columns, dim=1)


@dataclass(frozen=True)
class Ridge:
    """Ridge regression on standardised features; it never extrapolates beyond the features it was fitted on."""

    centre: Tensor
    scale: Tensor
    weights: Tensor
    intercept: float
    low: Tensor
    high: Tensor

    def predict(self, features: Tensor) -> Tensor:
        inside = features.double().clamp(self.low, self.high)
        return (inside - self.centre) / self.scale @ self.weights + self.intercept


def fit_ridge(features: Tensor, values: Tensor, strength: float = 1.0) -> Ridge:
    """Fit on [n, features] and [n]."""
    features, values = features.double(), values.double()
    centre, scale = features.mean(0), features.std(0).clamp_min(1e-6)
    standard = (features - centre) / scale
    identity = torch.eye(standard.shape[1], dtype=torch.float64)
    weights = torch.linalg.solve(standard.T @ standard + strength * identity, standard.T @ (values - values.mean()))
    low, high = (features.quantile(share, dim=0) for share in (0.02, 0.98))
    return Ridge(centre, scale, weights, float(values.mean()), low, high)
