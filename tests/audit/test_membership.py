"""Membership attacks against closed forms, naive loops, and small models that leak on purpose."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
from scipy.stats import kstest, norm
from sklearn.metrics import roc_auc_score, roc_curve

from ease.audit import membership
from ease.audit.membership import (
    auc,
    gaussians,
    leakage,
    lira,
    operating_point,
    proportion,
    rmia,
    roc,
    shadow_classifier,
    share_called_member,
    tpr_at_fpr,
    tune_offline_a,
    unscored,
)
from ease.errors import UserError
from ease.seeding import generator

EFFECT = 1.5


@dataclass(frozen=True)
class Leaky:
    """Log-odds of pairs and of a population, one column a model; a model that trained on a pair holds it higher."""

    statistics: np.ndarray
    members: np.ndarray
    population: np.ndarray

    def held_out(self, model: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The target's statistics, the other models' statistics and membership, and the target's membership."""
        others = np.arange(self.members.shape[1]) != model
        return (
            self.statistics[:, model],
            self.statistics[:, others],
            self.members[:, others],
            self.members[:, model],
        )


def leaky(pairs: int = 1200, models: int = 16, effect: float = EFFECT, seed: int = 0) -> Leaky:
    """Gaussian worlds: pairs differ in hardness, models in noise, and training adds `effect`."""
    rng = generator(seed, "leaky")
    hardness = rng.normal(0, 2, (pairs + 800, 1))
    noise = hardness + rng.normal(0, 1, (pairs + 800, models))
    members = half_in(pairs, models, rng)
    return Leaky(noise[:pairs] + effect * members, members, noise[pairs:])


def half_in(pairs: int, models: int, rng: np.random.Generator) -> np.ndarray:
    """Each pair is IN exactly half the models."""
    return rng.random((pairs, models)).argsort(1) < models // 2


def naive_lira(world: Leaky, model: int, online: bool, shared: bool, tail: str) -> np.ndarray:
    """The definition, one pair and one shadow at a time."""
    target, shadows, members, _ = world.held_out(model)
    sides = [[[float(v) for v, m in zip(*row, strict=True) if m == side] for row in zip(shadows, members, strict=True)]
             for side in (True, False)]  # fmt: skip
    pooled = [
        np.sqrt(sum(np.sum((np.array(v) - np.mean(v)) ** 2) for v in side) / sum(len(v) - 1 for v in side))
        for side in sides
    ]
    scores = []
    for value, inside, outside in zip(target, *sides, strict=True):
        spread_in, spread_out = pooled if shared else (np.std(inside), np.std(outside))
        out_law = norm(np.median(outside), spread_out)
        if online:
            scores.append(norm(np.median(inside), spread_in).logpdf(value) - out_law.logpdf(value))
        elif tail == "reference":
            scores.append(-out_law.logpdf(value))
        else:
            scores.append(-np.log(1 - out_law.cdf(value)))
    return np.array(scores)


@pytest.mark.parametrize("variance", ["pair", "shared"])
@pytest.mark.parametrize(("online", "tail"), [(True, "one-sided"), (False, "one-sided"), (False, "reference")])
def test_lira_is_the_naive_loop(variance, online, tail):
    world = leaky(pairs=60, models=12)
    target, shadows, members, _ = world.held_out(3)
    scores = lira(target, shadows, members, online, variance, tail)
    np.testing.assert_allclose(scores, naive_lira(world, 3, online, variance == "shared", tail), rtol=1e-8)


def test_lira_reaches_the_closed_form_of_gaussians():
    """With known hardness the best attack separates N(effect, 1) from N(0, 1); 63 shadows come close to it."""
    world = leaky(pairs=6000, models=64)
    target, shadows, members, truth = world.held_out(0)
    best = norm.cdf(EFFECT / np.sqrt(2)), norm.sf(norm.isf(0.01) - EFFECT)
    for online in (True, False):
        scores = lira(target, shadows, members, online)
        assert auc(scores[truth], scores[~truth]).value == pytest.approx(best[0], abs=0.02)
        assert tpr_at_fpr(scores[truth], scores[~truth]).tpr.value == pytest.approx(best[1], abs=0.05)
    assert auc(target[truth], target[~truth]).value < best[0] - 0.1  # one threshold for all pairs sees less


def test_one_sided_scores_do_not_tie_far_out_and_do_not_accuse_the_erased():
    shadows, members = np.random.default_rng(0).normal(size=(4, 40)), np.zeros((4, 40), dtype=bool)
    target = np.array([30.0, 20.0, 0.0, -20.0])
    one_sided = lira(target, shadows, members, online=False)
    assert (np.diff(one_sided) < 0).all()
    assert np.isfinite(one_sided).all()
    two_sided = lira(target, shadows, members, online=False, tail="reference")
    assert two_sided[3] > two_sided[2]


def test_pairs_without_the_shadows_they_need_are_counted_and_never_scored():
    world = leaky(pairs=20, models=9)
    target, shadows, members, _ = world.held_out(0)
    members = members.copy()
    members[0], members[1] = True, False  # pair 0 has no OUT shadow, pair 1 no IN shadow
    members[2], members[2, 0] = False, True  # one IN shadow: a mean, but no variance of its own
    unscored_at = {
        (True, "shared"): [0, 1],
        (True, "pair"): [0, 1, 2],
        (False, "shared"): [0],
        (False, "pair"): [0],
    }
    for (online, variance), expected in unscored_at.items():
        scores = lira(target, shadows, members, online, variance)
        assert np.flatnonzero(np.isnan(scores)).tolist() == expected
        assert unscored(scores) == len(expected)
    population = world.population[:, 1:]
    assert np.flatnonzero(np.isnan(rmia(target, shadows, members, population[:, 0], population, 0.3))).tolist() == [0]


def test_unscored_pairs_leave_the_rates_and_are_reported():
    members, nonmembers = np.array([3.0, np.nan, 1.0]), np.array([2.0, 0.0, np.nan, np.nan])
    point = tpr_at_fpr(members, nonmembers, 0.5, force=True)
    assert (point.members, point.nonmembers, point.unscored) == (2, 2, 3)
    assert auc(members, nonmembers).value == 0.75
    with pytest.raises(UserError, match=r"no member has a score \(2 pairs"):
        auc(np.full(2, np.nan), nonmembers)


@pytest.mark.parametrize("jitter", [0.0, 1e-8])
def test_the_target_must_not_be_among_the_shadows(jitter):
    world = leaky(pairs=50)
    copied = world.statistics[:, 5] + jitter
    for attack in (
        lambda: lira(copied, world.statistics, world.members),
        lambda: rmia(copied, world.statistics, world.members, world.population[:, 5], world.population, 0.3),
    ):
        with pytest.raises(UserError, match="shadow 5 is the target model itself"):
            attack()


def test_broken_inputs_are_refused():
    world = leaky(pairs=50)
    target, shadows, members, _ = world.held_out(0)
    with pytest.raises(UserError, match="bool membership"):
        lira(target, shadows, members.astype(int))
    with pytest.raises(UserError, match=r"must be \[50\]"):
        lira(target[:49], shadows, members)
    with pytest.raises(UserError, match="1 of 50 target statistics are not finite"):
        lira(np.where(np.arange(50) == 7, np.inf, target), shadows, members)
    with pytest.raises(UserError, match="collapsed or are copies"):
        lira(target, np.ones_like(shadows), members)
    with pytest.raises(UserError, match=r"no pair has 2 shadows on one side \(1 at most\)"):
        lira(target, shadows[:, :2], np.tile([True, False], (50, 1)))
    with pytest.raises(UserError, match="variance must be one of pair, shared, not 'fixed'"):
        lira(target, shadows, members, variance="fixed")
    with pytest.raises(UserError, match="offline_a must be from 0 to 1"):
        rmia(target, shadows, members, world.population[:, 0], world.population[:, 1:], 1.2)
    with pytest.raises(UserError, match=r"\[z\] and \[z, 15\]"):
        rmia(target, shadows, members, world.population[:, 0], world.population, 0.3)
    with pytest.raises(UserError, match="finite numbers"):
        auc(np.array([np.inf, 1.0]), target)


def test_a_spread_of_zero_is_floored():
    values = np.array([[1.0, 1.0, 1.0], [0.0, 1.0, 2.0]])
    centre, spread = gaussians(values, np.ones_like(values, dtype=bool), "pair")
    assert centre.tolist() == [1.0, 1.0]
    assert 0 < spread[0] < 1e-5


def naive_rmia(world: Leaky, model: int, offline_a: float) -> np.ndarray:
    target, shadows, members, _ = world.held_out(model)
    others = np.arange(world.members.shape[1]) != model

    def probability(x):
        return 1 / (1 + np.exp(-x))

    def ratio(value, outside):
        return probability(value) / ((1 + offline_a) / 2 * probability(outside).mean() + (1 - offline_a) / 2)

    population = [ratio(row[model], row[others]) for row in world.population]
    scores = []
    for value, row, inside in zip(target, shadows, members, strict=True):
        own = ratio(value, row[~inside])
        scores.append(np.mean([own / other > 1 for other in population]))
    return np.array(scores)


def test_rmia_is_the_naive_loop():
    world = leaky(pairs=50, models=8)
    target, shadows, members, _ = world.held_out(2)
    others = np.arange(8) != 2
    scores = rmia(target, shadows, members, world.population[:, 2], world.population[:, others], 0.4)
    np.testing.assert_allclose(scores, naive_rmia(world, 2, 0.4), atol=1 / 800 + 1e-12)


def test_rmia_reaches_the_closed_form_of_gaussians():
    """Far below 0 a probability is exp(log-odds), so that with a = 1 the score ranks what a model adds to a pair.

    Noise of 0.5 in members and the population alike, and an effect of 0.8: the AUC is Phi(0.8 / (0.5 sqrt 2)), whatever
    the pairs' hardness, and non-members beat as much of the population as chance gives.
    """
    rng = generator(0, "rmia")
    pairs, population, models = 3000, 4000, 101
    values = rng.normal(-20, 2, (pairs + population, 1)) + rng.normal(0, 0.5, (pairs + population, models))
    inside = np.arange(pairs) < pairs // 2
    target = values[:pairs, 0] + 0.8 * inside
    nowhere = np.zeros((pairs, models - 1), dtype=bool)
    scores = rmia(target, values[:pairs, 1:], nowhere, values[pairs:, 0], values[pairs:, 1:], 1.0)
    found = auc(scores[inside], scores[~inside])
    assert found.value == pytest.approx(norm.cdf(0.8 / (0.5 * np.sqrt(2))), abs=0.02)
    assert kstest(scores[~inside], "uniform").statistic < 0.05
    assert auc(target[inside], target[~inside]).value < 0.65, "without the shadows hardness hides it"


def test_offline_a_is_tuned_on_shadows_and_serves_the_target():
    world = leaky()
    target, shadows, members, truth = world.held_out(0)
    population, population_shadows = world.population[:, 0], world.population[:, 1:]
    tuned = tune_offline_a(shadows, members, population_shadows)
    aucs = {}
    for a in membership.OFFLINE_A_GRID:
        scores = rmia(target, shadows, members, population, population_shadows, a)
        aucs[float(a)] = auc(scores[truth], scores[~truth]).value
    assert tuned in aucs
    assert aucs[tuned] > max(aucs.values()) - 0.01
    assert aucs[tuned] > min(aucs.values()) + 0.02  # the choice matters
    with pytest.raises(UserError, match="cannot be tuned on 2 shadows"):
        tune_offline_a(shadows[:, :2], np.column_stack([members[:, 0], ~members[:, 0]]), population_shadows[:, :2])


@pytest.mark.parametrize("effect", [EFFECT, -EFFECT])
def test_every_attack_says_higher_for_members(effect):
    """And lower when training lowers the statistic, for those attacks that take its sign from the statistic."""
    world = leaky(effect=effect)
    target, shadows, members, truth = world.held_out(0)
    population, population_shadows = world.population[:, 0], world.population[:, 1:]
    classifier = shadow_classifier(shadows[..., None], members)
    signed = {
        "offline lira": lira(target, shadows, members, online=False),
        "offline lira, own variance": lira(target, shadows, members, online=False, variance="pair"),
        "rmia": rmia(target, shadows, members, population, population_shadows, 0.3),
    }
    learned = {
        "online lira": lira(target, shadows, members),
        "online lira, own variance": lira(target, shadows, members, variance="pair"),
        "classifier": classifier.decision_function(target[:, None]),
    }
    for name, scores in (signed | learned).items():
        strength = auc(scores[truth], scores[~truth])
        if effect < 0 and name in signed:
            assert strength.high < 0.4, name
        else:
            assert strength.low > 0.6, name


def test_identical_distributions_give_no_signal():
    world = leaky(effect=0.0)
    target, shadows, members, truth = world.held_out(0)
    population, population_shadows = world.population[:, 0], world.population[:, 1:]
    for scores in (
        lira(target, shadows, members),
        lira(target, shadows, members, online=False),
        rmia(target, shadows, members, population, population_shadows, 0.3),
    ):
        strength = auc(scores[truth], scores[~truth])
        assert strength.contains(0.5)
    called = share_called_member(shadow_classifier(shadows[..., None], members), target[:, None])
    assert called.value == pytest.approx(0.5, abs=0.1)


def test_share_called_member_is_the_threshold_of_equal_gaussians():
    """Members at +1, the rest at -1, unit noise: the fair threshold is 0, whatever share the shadows trained on."""
    rng = generator(0, "classifier")
    members = rng.random((3000, 8)) < 0.2
    features = rng.normal(np.where(members, 1.0, -1.0), 1)[..., None]
    classifier = shadow_classifier(features, members)
    for centre, expected in ((1.0, norm.cdf(1)), (-1.0, norm.cdf(-1))):
        share = share_called_member(classifier, rng.normal(centre, 1, (2000, 1)))
        assert share.value == pytest.approx(expected, abs=0.03)
        assert share.low < share.value < share.high
    with pytest.raises(UserError, match="members and non-members, not 0 of 24000"):
        shadow_classifier(features, np.zeros_like(members))
    with pytest.raises(UserError, match="bool membership"):
        shadow_classifier(features[..., 0], members)


def test_roc_and_auc_agree_with_sklearn_under_ties():
    rng = generator(1, "ties")
    members, nonmembers = rng.integers(0, 12, 90).astype(float), rng.integers(-3, 9, 140).astype(float)
    scores, truth = np.concatenate([members, nonmembers]), np.repeat([1, 0], [90, 140])
    curve = roc(members, nonmembers)
    fpr, tpr, thresholds = roc_curve(truth, scores, drop_intermediate=False)
    np.testing.assert_allclose(curve.fpr, fpr)
    np.testing.assert_allclose(curve.tpr, tpr)
    np.testing.assert_array_equal(curve.thresholds, thresholds)
    assert auc(members, nonmembers).value == pytest.approx(roc_auc_score(truth, scores))


@pytest.mark.parametrize(("members", "nonmembers", "shift"), [(40, 40, 0.0), (60, 300, 1.0), (30, 30, 2.0)])
def test_the_interval_of_the_auc_covers_the_closed_form(members, nonmembers, shift):
    truth = norm.cdf(shift / np.sqrt(2))
    covered = 0
    for trial in range(300):
        rng = generator(trial, "coverage")
        covered += auc(rng.normal(shift, 1, members), rng.normal(0, 1, nonmembers)).contains(truth)
    assert 0.91 < covered / 300 <= 0.99


def test_the_interval_does_not_vanish_at_the_ends():
    apart = auc(np.arange(10) + 100.0, np.arange(10.0))
    assert apart.value == apart.high == 1
    assert 0.6 < apart.low < 0.9
    below = auc(np.arange(10.0), np.arange(10) + 100.0)
    assert (below.value, below.high) == pytest.approx((0, 1 - apart.low))
    constant = auc(np.ones(10), np.ones(10))
    assert constant.value == 0.5
    assert constant.low < 0.3
    with pytest.raises(UserError, match="not 1 and 2"):
        auc(np.ones(1), np.ones(2))


def test_a_threshold_without_members_is_finite():
    """RMIA's scores have a largest value, which more non-members may share than the false positive rate allows."""
    point = tpr_at_fpr(np.ones(600), np.ones(600))
    assert math.isfinite(point.threshold) and point.threshold > 1 and (point.tpr.value, point.fpr.value) == (0, 0)


def test_tpr_at_fpr_is_the_last_point_at_or_below():
    nonmembers = np.arange(1000.0)
    members = np.array([2000.0, 995.0, 990.0, 989.5, 989.0, 0.0])
    point = tpr_at_fpr(members, nonmembers)
    assert (point.fpr.value, point.tpr.value) == (0.01, 4 / 6)  # 10 of 1000 exactly, and 989.5 still above the eleventh
    tied = tpr_at_fpr(members, np.where(nonmembers >= 980, 980, nonmembers))
    assert (tied.fpr.value, tied.tpr.value) == (0.0, 5 / 6)  # 20 tied non-members would make 2 %


@pytest.mark.parametrize(("nonmembers", "fpr"), [(500, 0.01), (2000, 0.1), (5000, 0.001)])
def test_tpr_at_fpr_of_gaussians(nonmembers, fpr):
    """The threshold lies between two order statistics, so its expected real FPR is k / (n + 1) to (k + 1) / (n + 1).

    Both intervals cover the rates that the closed form gives the threshold, though it was chosen on these scores.
    """
    trials, allowed = 120, round(fpr * nonmembers)
    covered, real = np.zeros(2), []
    for trial in range(trials):
        rng = generator(trial, "tpr", nonmembers)
        point = tpr_at_fpr(rng.normal(2, 1, 300), rng.normal(0, 1, nonmembers), fpr)
        assert point.fpr.value == allowed / nonmembers
        real.append(norm.sf(point.threshold))
        covered += point.fpr.contains(real[-1]), point.tpr.contains(norm.sf(point.threshold - 2))
    noise = 3 * np.sqrt((allowed + 1) / trials)
    assert allowed - noise < np.mean(real) * (nonmembers + 1) < allowed + 1 + noise
    assert (covered / trials >= 0.9).all()


def test_a_threshold_from_other_nonmembers_is_applied_as_it_is():
    rng = generator(3, "calibration")
    threshold = tpr_at_fpr(rng.normal(1, 1, 10), rng.normal(0, 1, 5000)).threshold
    point = operating_point(rng.normal(1, 1, 300), rng.normal(0, 1, 4000), threshold)
    assert point.threshold == threshold
    assert point.fpr.contains(0.01)


@pytest.mark.parametrize(("count", "low", "high"), [(200, 0.0012, 0.036), (1000, 0.0048, 0.018), (5000, 0.0074, 0.013)])
def test_clopper_pearson_at_one_percent(count, low, high):
    share = proportion(count // 100, count)
    assert (share.low, share.high) == (pytest.approx(low, rel=0.02), pytest.approx(high, rel=0.03))


def test_proportion_at_the_ends():
    assert proportion(0, 10).low == 0
    assert proportion(0, 10).high == pytest.approx(1 - 0.025**0.1)
    assert proportion(10, 10).high == 1
    with pytest.raises(UserError, match="no pairs"):
        proportion(0, 0)


def test_too_few_nonmembers_are_refused_with_the_numbers():
    members, nonmembers = np.arange(50.0), np.arange(200.0)
    message = (
        r"TPR at 1\.00% FPR needs at least 500 non-members, not 200: with 200 the real rate may be anywhere from "
        r"0\.12% to 3\.57%; add non-members, ask for 2\.50% or more, or force it"
    )
    with pytest.raises(UserError, match=message):
        tpr_at_fpr(members, nonmembers)
    assert tpr_at_fpr(members, nonmembers, force=True).nonmembers == 200
    assert tpr_at_fpr(members, nonmembers, fpr=0.025).nonmembers == 200
    assert tpr_at_fpr(members, np.arange(500.0)).nonmembers == 500
    with pytest.raises(UserError, match="at least 500 non-members, not 499"):
        tpr_at_fpr(members, np.append(np.arange(499.0), np.nan))  # a pair without a score does not help
    with pytest.raises(UserError, match="at least 5000 non-members"):
        tpr_at_fpr(members, np.arange(4999.0), fpr=0.001)
    with pytest.raises(UserError, match=r"not 0: with 0 the real rate may be anywhere from 0\.00% to 100\.00%"):
        tpr_at_fpr(members, np.array([]))
    with pytest.raises(UserError, match="between 0 and 1"):
        tpr_at_fpr(members, nonmembers, fpr=0)


def test_far_below_a_half_is_leakage_too():
    assert leakage(0.1) == 0.9
    assert leakage(0.7) == 0.7


def fixed_scores(pairs: int, models: int, phase: float) -> np.ndarray:
    """Scores that every machine computes alike."""
    pair, model = np.meshgrid(np.arange(pairs), np.arange(models), indexing="ij")
    return 2 * np.sin(1.7 * pair + phase) + np.cos(3.1 * pair * model + 2.3 * model + phase)


def test_scores_are_those_of_the_published_implementations() -> None:
    """Numbers that the public code gave for these scores, the first column being the target.

    LiRA: `generate_ours` and `generate_ours_offline` of tensorflow/privacy, research/mi_lira_2021/plot.py at 3d499e6,
    with the sign turned, since there lower means member. RMIA: `run_rmia` of privacytrustlab/ml_privacy_meter,
    attacks.py at a555fce, with eight references that saw no pair and offline_a = 0.3.
    """
    inside = (3 * np.arange(8)[:, None] + np.arange(9)) % 2 == 0
    scores, population = fixed_scores(8, 9, 0.0) + 1.5 * inside, fixed_scores(12, 9, 0.5)
    target, shadows, members = scores[:, 0], scores[:, 1:], inside[:, 1:]
    online = [5.402228, 0.253595, 6.215754, 0.815137, 7.33192, 1.480104, 7.302713, 1.632154]
    offline = [6.787898, 1.283381, 7.750928, 2.102204, 10.024794, 3.13509, 10.14372, 2.657502]
    relative = [12, 5, 12, 0, 12, 5, 12, 2]  # of 12 population pairs
    np.testing.assert_allclose(lira(target, shadows, members, True, "pair"), online, atol=1e-6)
    np.testing.assert_allclose(lira(target, shadows, members, False, "pair", "reference"), offline, atol=1e-6)
    nowhere = np.zeros_like(members)
    found = rmia(target, shadows, nowhere, population[:, 0], population[:, 1:], 0.3)
    assert (12 * found).round(9).tolist() == relative
