"""The bench of attacks on synthetic models whose leakage is known in closed form."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from scipy.stats import norm

from ease.audit.attacks import FEWEST_POPULATION, Attacker
from ease.audit.bavaria import bavaria
from ease.audit.distribution import ulira
from ease.audit.membership import lira
from ease.audit.statistic import STATISTICS
from ease.audit.subjects import Readings
from ease.errors import UserError
from ease.seeding import generator

U_LIRA = ("u-lira/log_odds", "u-lira/cosine")
INFORMED = ("u-bavaria/log_odds", "u-bavaria/cosine", *U_LIRA)
SOME = ("bavaria-online/log_odds", "bavaria-offline/cosine", "lira-online/log_odds", "lira-offline/cosine", "rmia")


def readings(log_odds: np.ndarray) -> dict[str, np.ndarray]:
    """Three statistics that tell the same; the loss falls as the log-odds rise."""
    return {"log_odds": log_odds, "cosine": np.tanh(log_odds / 20), "loss": np.logaddexp(0, -log_odds)}


@cache
def make(
    pairs: int = 600,
    shadows: int = 32,
    effect: float = 1.5,
    left: float = 0.0,
    population: int = 200,
    fpr: float = 0.05,
) -> tuple[Attacker, Readings, Readings]:
    """Pairs differ in hardness, models in noise of deviation 1; training adds `effect`, unlearning leaves `left` of it.

    Also returns a target that was trained on the first half of the pairs, and its population.
    """
    rng = generator(0, "bench", pairs, shadows)
    hardness = rng.normal(0, 2, (pairs, 1))
    member = np.arange(pairs) < pairs // 2
    halves = [rng.permutation(pairs) < pairs // 2 for _ in range(shadows // 2)]
    included = np.stack([side for half in halves for side in (half, ~half)], axis=1)
    trained, unlearned = (hardness + amount * included + rng.normal(size=(pairs, shadows)) for amount in (effect, left))
    others = rng.normal(0, 2, (population, 1)) + rng.normal(size=(population, shadows + 1))
    bench = Attacker(readings(trained), readings(unlearned), included, member, readings(others[:, 1:]), fpr)
    target = hardness[:, 0] + effect * member + rng.normal(size=pairs)
    return bench, readings(target), readings(others[:, 0])


def without_effect(target: Readings, member: np.ndarray, amount: float) -> Readings:
    return readings(target["log_odds"] - amount * member)


@pytest.mark.slow
def test_likelihood_ratios_reach_the_closed_form() -> None:
    """Two Gaussians of deviation 1 at distance d: AUC = Phi(d / sqrt 2), TPR at FPR a = Phi(d - z(1 - a)).

    The median of 16 shadows is not exactly the mean of a pair, which costs a little: deviation 1.05, not 1.
    """
    bench, target, population = make(pairs=2000, shadows=32, effect=1.5)
    for attack in (f"{family}-{mode}/log_odds" for family in ("bavaria", "lira") for mode in ("online", "offline")):
        found = bench.judge(attack, target, population)
        assert found.auc.value == pytest.approx(norm.cdf(1.5 / 2**0.5), abs=0.025)
        assert found.tpr is not None and found.unscored == 0
        assert found.tpr.tpr.value == pytest.approx(norm.cdf(1.5 - norm.ppf(0.95)), abs=0.06)
        assert found.tpr.fpr.contains(0.05)


@pytest.mark.parametrize("attack", [*make(pairs=60)[0].attacks(), *INFORMED])
@pytest.mark.slow
def test_every_attack_says_higher_for_members_and_lower_for_erased(attack: str) -> None:
    """Who knows the method asks whether a model still shows what unlearning leaves, so there must be something."""
    bench, target, population = make(left=1.5)
    for shift, expected in ((0.0, True), (3.0, False)):  # 3 takes the members as far below as they were above
        found = bench.judge(attack, without_effect(target, bench.member, shift), population).auc
        assert found.low > 0.7 if expected else found.high < 0.5, (attack, found)


@pytest.mark.parametrize("attack", [*SOME, *INFORMED])
def test_a_model_that_never_saw_the_pairs_gives_no_signal(attack: str) -> None:
    bench, target, population = make(left=1.5)
    never = bench.judge(attack, without_effect(target, bench.member, 1.5), population)
    assert never.auc.contains(0.5)
    assert never.tpr is not None and never.tpr.tpr.low <= bench.fpr


def test_the_classifier_finds_members_and_not_those_that_were_never_seen() -> None:
    bench, target, _ = make(effect=4.0)
    never = without_effect(target, bench.member, 4.0)
    assert bench.called_member(target).low > 0.6
    assert bench.called_member(never).high < 0.4


def test_the_threshold_comes_from_the_shadows_own_non_members() -> None:
    """Naively: each shadow in turn is the target, fitted on the others; only pairs it left out are scored."""
    bench, _, _ = make(pairs=200, shadows=8)
    for mode, online in (("online", True), ("offline", False)):
        scores = []
        for shadow in range(8):
            others = np.arange(8) != shadow
            values = bench.shadows["log_odds"]
            found = lira(values[:, shadow], values[:, others], bench.included[:, others], online=online)
            scores += [score for score, seen in zip(found, bench.included[:, shadow], strict=True) if not seen]
        assert len(scores) == 800
        ranked = np.sort(scores)[::-1]
        threshold = bench.threshold(f"lira-{mode}/log_odds")
        assert threshold == pytest.approx(ranked[39])  # 5 % of 800 are 40
        np.testing.assert_allclose(np.sort(bench.nonmember_scores(f"lira-{mode}/log_odds"))[::-1], ranked)


@pytest.mark.parametrize("attack", [*SOME, *INFORMED])
def test_the_targets_scores_do_not_move_the_threshold(attack: str) -> None:
    bench, target, population = make(left=1.5)
    found = [bench.judge(attack, readings(target["log_odds"] + shift), population).tpr for shift in (0.0, 2.0, -2.0)]
    assert len({point.threshold for point in found if point is not None}) == 1
    assert len({point.tpr.value for point in found if point is not None}) > 1


def test_too_few_non_members_give_no_tpr_but_an_auc() -> None:
    """4 shadows leave out 2 x 20 pairs each two: 80 x 0.05 = 4 false positives, fewer than 5; at 0.0625 they are 5."""
    bench, target, population = make(pairs=40, shadows=4, fpr=0.05)
    assert bench.judge("lira-online/log_odds", target, population).tpr is None
    assert bench.judge("lira-online/log_odds", target, population).auc.value > 0.5
    assert replace(bench, fpr=0.0625).judge("lira-online/log_odds", target, population).tpr is not None


def test_only_informed_attacks_read_unlearned_shadows() -> None:
    bench, target, population = make(left=1.0)
    exchanged = replace(bench, shadows=bench.unlearned)
    for attack in U_LIRA:
        scores = bench.score(attack, target, population)
        np.testing.assert_array_equal(scores, exchanged.score(attack, target, population))
        assert attack in bench.informed_attacks()
        values = bench.unlearned[attack.partition("/")[2]]
        sides = [np.where(side, values, np.nan) for side in (bench.included, ~bench.included)]
        expected = ulira(*sides, target[attack.partition("/")[2]], variance="shared")
        np.testing.assert_allclose(scores, expected, rtol=1e-9, atol=1e-12)
    for statistic in ("log_odds", "cosine"):
        expected = bavaria(target[statistic], bench.unlearned[statistic], bench.included)
        scores = exchanged.score(f"u-bavaria/{statistic}", target, population)
        np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-5)
    relearned = replace(bench, unlearned=bench.shadows)
    for attack in bench.attacks():
        np.testing.assert_array_equal(
            bench.score(attack, target, population), relearned.score(attack, target, population)
        )


@pytest.mark.parametrize("attack", [*SOME, *INFORMED])
def test_the_target_among_the_shadows_is_refused(attack: str) -> None:
    bench, _, population = make(left=1.5)
    source = bench.unlearned if attack in INFORMED else bench.shadows
    copy = {name: values[:, 5] for name, values in source.items()}
    with pytest.raises(UserError, match="shadow 5 is the target model itself"):
        bench.score(attack, copy, population)
    assert np.isfinite(bench.score(attack, copy, population, without=5)).all()


@pytest.mark.slow
def test_the_strongest_attack_is_the_one_that_found_members_best_before() -> None:
    bench, target, population = make(left=1.5)
    areas = {attack: bench.judge(attack, target, population).auc.value for attack in bench.attacks()}
    assert bench.strongest(target, population) == max(areas, key=areas.__getitem__)
    bench, target, population = make(pairs=200)
    rng = generator(0, "deaf")
    deaf = replace(bench, shadows={**bench.shadows, "log_odds": rng.normal(size=bench.included.shape)})
    assert deaf.strongest(target, population).endswith("/cosine")


def test_both_models_reveal_a_perfect_erasure_and_nothing_without_a_change() -> None:
    bench, target, _ = make(effect=3.0, left=0.5)
    erased = without_effect(target, bench.member, 3.0)
    found = bench.compare(target, readings(erased["log_odds"] + generator(0, "after").normal(size=600)))
    assert set(found) == {"before-after/change", "before-after/both"}
    assert all(each.auc.low > 0.9 and each.tpr is None and each.unscored == 0 for each in found.values())
    assert bench.compare(target, target)["before-after/change"].auc.value == 0.5


def test_without_a_population_there_is_not_a_rmia() -> None:
    assert "rmia" in make(population=FEWEST_POPULATION)[0].attacks()
    assert "rmia" not in make(population=FEWEST_POPULATION - 1)[0].attacks()


def test_all_statistics_reach_the_classifier() -> None:
    bench, _, _ = make(pairs=60)
    assert bench.classifier.n_features_in_ == len(STATISTICS)
