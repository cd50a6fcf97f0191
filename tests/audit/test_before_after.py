"""Whoever holds both models: by the change alone, and by the discriminant that shadows teach."""

import numpy as np
import pytest
from scipy.stats import norm

from ease.audit.before_after import Discriminant, both, change
from ease.audit.membership import auc
from ease.errors import UserError
from ease.seeding import generator

PAIRS, SHADOWS = 2000, 16


def simulate(effect: float, left: float, noise: float = 1.0) -> dict[str, np.ndarray]:
    """Training adds `effect` to a pair, unlearning leaves `left` of it; each model has noise, and pairs are hard."""
    rng = generator(0, "both")
    hardness = rng.normal(0, 3, (PAIRS, 1))
    halves = [rng.permutation(PAIRS) < PAIRS // 2 for _ in range(SHADOWS // 2)]
    included = np.stack([side for half in halves for side in (half, ~half)], axis=1)
    member = np.arange(PAIRS) < PAIRS // 2
    trained_on = np.column_stack([member, included])
    before, after = (
        hardness + each * trained_on + noise * rng.normal(size=trained_on.shape) for each in (effect, left)
    )
    return {"included": included, "member": member, "before": before, "after": after}


def area(scores: np.ndarray, member: np.ndarray) -> float:
    return auc(scores[member], scores[~member]).value


def scores_of_both(world: dict[str, np.ndarray]) -> np.ndarray:
    before, after = world["before"], world["after"]
    return both(before[:, 1:], after[:, 1:], world["included"], before[:, 0], after[:, 0])


def test_the_change_shows_what_went_and_not_how_hard_a_pair_is() -> None:
    """Two Gaussians of variance 2 at distance 1.5 - 0.5: AUC = Phi(1 / 2)."""
    world = simulate(1.5, 0.5)
    found = area(change(world["before"][:, 0], world["after"][:, 0]), world["member"])
    assert found == pytest.approx(norm.cdf(1 / 2), abs=0.03)


def test_a_perfect_erasure_is_seen_and_no_change_is_not() -> None:
    world = simulate(4.0, 0.0)
    assert area(change(world["before"][:, 0], world["after"][:, 0]), world["member"]) > 0.95
    assert area(change(world["before"][:, 0], world["before"][:, 0]), world["member"]) == 0.5


def test_the_discriminant_reaches_the_closed_form() -> None:
    """Distances 1.5 and 1 in independent noise of variance 1, and 1 / 8 more from the mean of 8 OUT shadows."""
    world = simulate(1.5, 1.0)
    found = area(scores_of_both(world), world["member"])
    distance = np.sqrt((1.5**2 + 1.0**2) / (1 + 1 / 8))
    assert found == pytest.approx(norm.cdf(distance / np.sqrt(2)), abs=0.02)
    assert found > area(change(world["before"][:, 0], world["after"][:, 0]), world["member"]) + 0.1


def test_the_weights_are_fishers_by_a_naive_loop() -> None:
    world = simulate(1.5, -0.5)
    before, after, included = world["before"][:200, 1:], world["after"][:200, 1:], world["included"][:200]
    rows, labels = [], []
    for pair in range(200):
        for shadow in range(SHADOWS):
            others = [s for s in range(SHADOWS) if not included[pair, s] and s != shadow]
            rows.append([values[pair, shadow] - values[pair, others].mean() for values in (before, after)])
            labels.append(included[pair, shadow])
    table, chosen = np.array(rows), np.array(labels)
    within = (
        np.cov(table[chosen].T, ddof=0) * chosen.sum() + np.cov(table[~chosen].T, ddof=0) * (~chosen).sum()
    ) / len(table)
    expected = np.linalg.inv(within) @ (table[chosen].mean(0) - table[~chosen].mean(0))
    found = Discriminant.of(before, after, included)
    np.testing.assert_allclose(found.weights, expected, rtol=1e-6)
    assert found.weights[0] > 0 > found.weights[1]
    np.testing.assert_allclose(
        found.usual[:, 1], [row[~inside].mean() for row, inside in zip(after, included, strict=True)]
    )


def test_a_method_that_does_nothing_leaves_one_direction() -> None:
    world = simulate(1.5, 0.0)
    world["after"] = world["before"]
    scores = scores_of_both(world)
    assert np.isfinite(scores).all() and area(scores, world["member"]) > 0.8


def test_pairs_without_shadows_that_never_saw_them_have_no_score_and_copies_are_refused() -> None:
    world = simulate(1.5, 0.0)
    world["included"] = world["included"].copy()
    world["included"][0] = True
    assert np.flatnonzero(np.isnan(scores_of_both(world))).tolist() == [0]
    world["before"][:, 0] = world["before"][:, 3]
    with pytest.raises(UserError, match="shadow 2 is the target model itself"):
        scores_of_both(world)
