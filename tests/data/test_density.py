"""Densities against brute force, and a ridge regression that does not extrapolate."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge as Oracle

from ease.data.density import NEIGHBOURS, densities, fit_ridge
from ease.data.examples import Examples


def examples(count: int, seed: int, width: int = 6) -> Examples:
    rng = torch.Generator().manual_seed(seed)
    pooled = [torch.nn.functional.normalize(torch.randn(count, width, generator=rng), dim=1) for _ in range(2)]
    return Examples(torch.zeros(count, 1), torch.zeros(count, 1, 1), None, *pooled)


@pytest.mark.parametrize("base_size", [1, 3, 30, 150])
def test_densities_equal_brute_force(base_size: int) -> None:
    queries, base = examples(7, 0), examples(base_size, 1)
    found = densities(queries, base)
    assert found.shape == (7, 3 * len(NEIGHBOURS))
    for q in range(7):
        image = [float(queries.pooled_image[q] @ other) for other in base.pooled_image]
        text = [float(queries.pooled_text[q] @ other) for other in base.pooled_text]
        both = [one + other for one, other in zip(image, text, strict=True)]
        expected = [
            float(np.mean(sorted(values, reverse=True)[:count]))
            for values in (image, text, both)
            for count in NEIGHBOURS
        ]
        np.testing.assert_allclose(found[q], expected, atol=1e-5)


@pytest.mark.parametrize(("queries", "base"), [(0, 5), (5, 0), (0, 0)])
def test_without_queries_or_neighbours_densities_are_zero(queries: int, base: int) -> None:
    found = densities(examples(queries, 0), examples(base, 1))
    assert found.shape == (queries, 3 * len(NEIGHBOURS)) and not found.any()


def test_ridge_equals_sklearn_inside_the_range() -> None:
    rng = np.random.default_rng(0)
    features = rng.normal(size=(80, 4)) * [1, 10, 0.1, 3] + [5, 0, -2, 1]
    values = features @ [1.0, -0.2, 4.0, 0.0] + rng.normal(size=80)
    ridge = fit_ridge(torch.from_numpy(features), torch.from_numpy(values), strength=2.0)
    centre, scale = features.mean(0), features.std(0, ddof=1)
    oracle = Oracle(alpha=2.0).fit((features - centre) / scale, values)
    low, high = np.quantile(features, [0.02, 0.98], axis=0)
    inside = features[((features >= low) & (features <= high)).all(1)]
    assert len(inside) > 50
    predicted = ridge.predict(torch.from_numpy(inside))
    np.testing.assert_allclose(predicted, oracle.predict((inside - centre) / scale), atol=1e-9)


def test_ridge_does_not_extrapolate() -> None:
    features = torch.linspace(0, 1, 101)[:, None]
    ridge = fit_ridge(features, 3 * features[:, 0])
    edges = ridge.predict(torch.tensor([[0.02], [0.98]]))
    far = ridge.predict(torch.tensor([[-50.0], [50.0]]))
    torch.testing.assert_close(far, edges, atol=1e-6, rtol=0)


def test_a_feature_that_never_varies_counts_for_nothing() -> None:
    features = torch.cat([torch.randn(30, 1), torch.full((30, 1), 0.7)], dim=1)
    values = torch.randn(30)
    alone = fit_ridge(features[:, :1], values).predict(features[:, :1])
    torch.testing.assert_close(fit_ridge(features, values).predict(features), alone)
