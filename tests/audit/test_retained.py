"""Retained pairs are compared with unseen ones that were as hard before training began."""

import numpy as np
import pytest
from scipy.stats import linregress, norm

from ease.audit.membership import auc
from ease.audit.retained import beyond_unseen
from ease.seeding import generator


def test_the_score_is_the_distance_to_the_line_of_unseen_pairs() -> None:
    rng = generator(0, "line")
    held, at_start, unseen, unseen_at_start = rng.normal(size=(4, 50))
    above, above_unseen = beyond_unseen(held, at_start, unseen, unseen_at_start)
    line = linregress(unseen_at_start, unseen)
    np.testing.assert_allclose(above, held - line.intercept - line.slope * at_start, atol=1e-12)
    np.testing.assert_allclose(above_unseen, unseen - line.intercept - line.slope * unseen_at_start, atol=1e-12)


def test_hardness_that_hides_members_is_taken_off() -> None:
    """Noise of deviation 1 at distance 1.5, AUC Phi(1.5 / sqrt 2), under hardness of deviation 5."""
    rng = generator(0, "hard")
    hardness = rng.normal(0, 5, 4000)
    member = np.arange(4000) < 2000
    values = 0.8 * hardness + 1.5 * member + rng.normal(size=4000)
    above, others = beyond_unseen(values[member], hardness[member], values[~member], hardness[~member])
    assert auc(above, others).value == pytest.approx(norm.cdf(1.5 / np.sqrt(2)), abs=0.02)
    assert auc(values[member], values[~member]).value < 0.65
    exposed, others = beyond_unseen(values[member] + 1, hardness[member], values[~member], hardness[~member])
    assert auc(exposed, others).low > auc(above, others).high


def test_a_start_that_holds_all_pairs_alike_leaves_the_plain_log_odds() -> None:
    rng = generator(0, "flat")
    held, unseen = rng.normal(size=(2, 30))
    above, others = beyond_unseen(held, np.zeros(30), unseen, np.zeros(30))
    np.testing.assert_allclose(above - held, -unseen.mean())
    np.testing.assert_allclose(others - unseen, -unseen.mean())
