"""The relative test: shares by hand, chance kept apart from failure, and groups that means would hide."""

import numpy as np
import pytest

from ease.audit.relative import relative_test
from ease.audit.strata import OF_SMALL, RARE, smallest, strata, stratified
from ease.data.membership import Holding


def drawn(share: float, rng: np.random.Generator, pairs: int = 60, models: int = 6, gap: float = 4.0) -> dict:
    """Log-odds of retrained models with noise of their own, a trained model above them, and one between."""
    hard = rng.normal(size=pairs)
    retrained = [hard + rng.normal(scale=0.7, size=pairs) + rng.normal(scale=0.1) for _ in range(models + 1)]
    trained = hard + gap + rng.normal(scale=0.3, size=pairs)
    found = {"retrain": retrained[0], **{f"retrain-{n}": each for n, each in enumerate(retrained[1:-1], 1)}}
    return found | {"trained": trained, "unlearned": retrained[-1] + share * (trained - retrained[-1])}


def test_a_share_of_the_way_by_hand() -> None:
    """Retrained models at 0, 0 and 0, the trained one at 4, the answer at 1 and 3: half of the way on average."""
    zero = np.zeros(2)
    odds = {"retrain": zero, "retrain-1": zero, "retrain-2": zero, "trained": zero + 4, "unlearned": np.array([1.0, 3])}
    found = relative_test(odds)
    assert found is not None and found.share.value == 0.5 and found.closer == "undecided"
    assert (found.pairs, found.retrained) == (2, 3)
    assert relative_test({**odds, "unlearned": zero + 1}).closer == "retrained"  # type: ignore[union-attr]
    assert relative_test({**odds, "unlearned": zero + 4}).closer == "trained"


def test_it_abstains_with_few_models_or_nothing_to_see() -> None:
    odds = drawn(0.0, np.random.default_rng(0))
    assert relative_test({name: odds[name] for name in ("retrain", "retrain-1", "trained", "unlearned")}) is None
    flat = drawn(0.0, np.random.default_rng(0), gap=0.0)
    found = relative_test(flat)
    assert found is None or found.closer == "undecided"


@pytest.mark.parametrize(("share", "closer"), [(0.0, "retrained"), (-0.3, "retrained"), (1.0, "trained")])
def test_retrained_and_trained_models_are_distinguished(share: float, closer: str) -> None:
    """At most one of twenty is called otherwise, and the share has no bias."""
    rng = np.random.default_rng(1)
    found = [relative_test(drawn(share, rng)) for _ in range(100)]
    assert sum(each.closer == closer for each in found) >= 95
    assert np.mean([each.share.value for each in found]) == pytest.approx(share, abs=0.02)


def test_a_group_that_was_not_forgotten_is_found_where_the_mean_hides_it() -> None:
    odds = drawn(0.0, np.random.default_rng(2), pairs=100)
    group = np.arange(100) < 12
    odds["unlearned"] = np.where(group, odds["trained"], odds["unlearned"])
    whole, (found,) = relative_test(odds), stratified(odds, {RARE: group})
    assert whole is not None and whole.closer == "retrained"
    assert found.test is not None and found.test.closer == "trained" and found.pairs == 12
    (few,) = stratified(odds, {RARE: np.arange(100) < 3})
    assert few.test is None and few.pairs == 3


def test_groups_are_the_smallest_that_hold_at_most_a_quarter() -> None:
    """Of 40 pairs: classes of 2, 6 and 32, clients of 8 and 32."""
    assert smallest({0: 32, 1: 6, 2: 2}) == {1, 2} and smallest({0: 20, 1: 20}) == set()
    classes = [0] * 32 + [1] * 6 + [2] * 2
    holdings = tuple(
        Holding(
            client=client,
            train_ids=tuple(f"{number}" for number in range(first, last)),
            train_classes=tuple(classes[first:last]),
            validation_ids=(),
            validation_classes=(),
        )
        for client, (first, last) in enumerate([(0, 32), (32, 40)])
    )
    found = strata(holdings, ["0", "33", "39"])
    assert found[RARE].tolist() == found[OF_SMALL].tolist() == [False, True, True]
    assert strata(holdings, ["0", "1"]) == {}
