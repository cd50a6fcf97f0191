"""Membership attacks on arrays of statistics, and what their scores are worth; a higher score means member.

scipy and scikit-learn take most of a second to import, so the attacks that need them import them.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
from scipy.special import betaincinv, expit, logit, ndtri

from ease.errors import UserError

if TYPE_CHECKING:
    from sklearn.pipeline import Pipeline

Variance = Literal["pair", "shared"]
Tail = Literal["one-sided", "reference"]

CONFIDENCE = 0.95
Z = float(ndtri((1 + CONFIDENCE) / 2))
EXPECTED_FALSE_POSITIVES = 5  # with fewer expected below the threshold, the false positive rate is a guess
SPREAD_FLOOR = 1e-6  # of the shared spread, where the few shadows of a pair happen to agree
COPY_TOLERANCE = 1e-6  # of the target's spread: the same model measured on another device is still the same model
TINY_PROBABILITY = 1e-300
OFFLINE_A_GRID = np.linspace(0, 1, 11)


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval."""

    value: float
    low: float
    high: float

    def contains(self, value: float) -> bool:
        return self.low <= value <= self.high

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class Roc:
    """The points of a ROC curve from (0, 0) to (1, 1): a pair is called member when its score is >= the threshold."""

    fpr: np.ndarray
    tpr: np.ndarray
    thresholds: np.ndarray


@dataclass(frozen=True)
class OperatingPoint:
    """What one threshold does: the share of members it finds and of non-members it accuses, with exact intervals."""

    threshold: float
    tpr: Estimate
    fpr: Estimate
    members: int
    nonmembers: int
    unscored: int  # pairs left out because the attack had no shadows to judge them by


def lira(
    target: np.ndarray,
    shadows: np.ndarray,
    members: np.ndarray,
    online: bool = True,
    variance: Variance = "shared",
    tail: Tail = "one-sided",
) -> np.ndarray:
    """Likelihood ratio attack: scores [n] of a target's statistics [n], from shadows' [n, m] that trained on `members`.

    Online compares the Gaussians of the shadows that trained on a pair (IN) and that did not (OUT). Offline knows OUT
    only, and scores minus the log p-value of a statistic this high. `tail` matters offline only: "reference" is the
    published code's -logpdf, which also calls a pair member when its statistic is far too LOW, as unlearning leaves it.

    A pair without the shadows that its Gaussians need (one, or two for a variance of its own) gets NaN, never a
    neutral score; `unscored` counts them.

    Differs from the published code: the shared spread is measured around each pair's own mean and once for each side,
    where the code takes the spread of all IN scores, hard and easy pairs together, for both.
    """
    from scipy.stats import norm

    _known("variance", variance, Variance)
    _known("tail", tail, Tail)
    target, shadows, members = attack_inputs(target, shadows, members)
    out_centre, out_spread = gaussians(shadows, ~members, variance)
    if online:
        in_centre, in_spread = gaussians(shadows, members, variance)
        return norm.logpdf(target, in_centre, in_spread) - norm.logpdf(target, out_centre, out_spread)
    if tail == "reference":
        return -norm.logpdf(target, out_centre, out_spread)
    # Not the CDF itself: it rounds to 1 from 8 spreads on, and the most certain members would tie.
    return -norm.logsf(target, out_centre, out_spread)


def gaussians(values: np.ndarray, present: np.ndarray, variance: Variance) -> tuple[np.ndarray, np.ndarray]:
    """Centre [n] (the median, as in LiRA's code) and spread [n] of the present values [n, m] of each pair.

    Both are NaN where a pair has too few.
    """
    counts = present.sum(1)
    enough = counts >= (2 if variance == "pair" else 1)
    centre, spread = np.full((2, len(values)), np.nan)
    if not enough.any():
        return centre, spread
    shared = shared_spread(values, present)
    table = np.where(present, values, np.nan)[enough]
    centre[enough] = np.nanmedian(table, 1)
    spread[enough] = np.maximum(np.nanstd(table, 1), SPREAD_FLOOR * shared) if variance == "pair" else shared
    return centre, spread


def rmia(
    target: np.ndarray,
    shadows: np.ndarray,
    members: np.ndarray,
    population_target: np.ndarray,
    population_shadows: np.ndarray,
    offline_a: float,
) -> np.ndarray:
    """Relative attack, offline: the share of population pairs that a pair beats in p_target / p_reference, [n].

    Statistics are log-odds: of the pairs, target [n] and shadows [n, m], and of population pairs that no model trained
    on, [z] and [z, m]. A pair without an OUT shadow gets NaN. Take `offline_a` from `tune_offline_a`.
    """
    target, shadows, members = attack_inputs(target, shadows, members)
    population_target, population_shadows = _population(population_target, population_shadows, shadows.shape[1])
    if not 0 <= offline_a <= 1:
        raise UserError(f"offline_a must be from 0 to 1, not {offline_a}")
    out = _mean_probability(shadows, ~members)
    population_out = _probability(population_shadows).mean(1)
    return _relative_rank(_probability(target), out, _probability(population_target), population_out, offline_a)


def tune_offline_a(shadows: np.ndarray, members: np.ndarray, population_shadows: np.ndarray) -> float:
    """The `offline_a` of best mean AUC when each shadow in turn replaces the target, which is never used.

    Differs from the published code, which attacks one paired model, and ranks it against the target's population.
    """
    shadows, members = _shadow_inputs(shadows, members)
    models = shadows.shape[1]
    _, population = _population(population_shadows[:, 0], population_shadows, models)
    values, population = _probability(shadows), _probability(population)
    aucs = []
    for model in range(models):
        others = np.arange(models) != model
        out = _mean_probability(shadows[:, others], ~members[:, others])
        known, trained_on = ~np.isnan(out), members[:, model]
        if not (known & trained_on).any() or not (known & ~trained_on).any():
            continue
        population_out = population[:, others].mean(1)
        ranks = [
            _relative_rank(values[known, model], out[known], population[:, model], population_out, a)
            for a in OFFLINE_A_GRID
        ]
        aucs.append([_mann_whitney(rank[trained_on[known]], rank[~trained_on[known]]) for rank in ranks])
    if not aucs:
        raise UserError(
            f"offline_a cannot be tuned on {models} shadows: none has both members and non-members that other shadows "
            "left out; train at least 4 shadows, each pair IN half of them, or name an offline_a"
        )
    return float(OFFLINE_A_GRID[np.argmax(np.mean(aucs, 0))])


def shadow_classifier(features: np.ndarray, members: np.ndarray) -> "Pipeline":
    """Shokri-style attack: logistic regression on shadows' features [..., f] (loss, logit, cosine), members [...].

    Its `decision_function` scores pairs, higher meaning member.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    features, members = np.asarray(features, dtype=float), np.asarray(members)
    if members.dtype != bool or features.ndim < 2 or features.shape[:-1] != members.shape:
        raise UserError(
            f"the attack classifier needs features [..., f] and a bool membership [...], not {list(features.shape)} "
            f"and {members.dtype} {list(members.shape)}"
        )
    _refuse_non_finite("shadow features", features)
    if members.all() or not members.any():
        raise UserError(f"the attack classifier needs members and non-members, not {members.sum()} of {members.size}")
    # Balanced, so that the share called member does not echo how many pairs the shadows happened to train on.
    classifier = make_pipeline(StandardScaler(), LogisticRegression(class_weight="balanced", max_iter=1000))
    return classifier.fit(features.reshape(-1, features.shape[-1]), members.ravel())


def share_called_member(classifier: "Pipeline", features: np.ndarray) -> Estimate:
    """Share of pairs with features [n, f] that the attack calls member; it means something only beside retrain's."""
    _refuse_non_finite("features", features)
    called = classifier.predict(features)
    return proportion(int(called.sum()), len(called))


def refuse_copy(target: np.ndarray, shadows: np.ndarray) -> None:
    """An attack that is fitted to its own target, statistics [n] among the shadows' [n, m], knows the answer."""
    copies = np.flatnonzero(np.abs(shadows - target[:, None]).max(0) <= COPY_TOLERANCE * target.std())
    if len(copies):
        raise UserError(f"shadow {copies[0]} is the target model itself: leave it out, or the attack fits its answer")


def unscored(scores: np.ndarray) -> int:
    """Number of pairs without a score."""
    return int(np.isnan(scores).sum())


def roc(members: np.ndarray, nonmembers: np.ndarray) -> Roc:
    """The ROC curve of the scores of members and non-members; equal scores share a point, unscored pairs have none."""
    members, nonmembers = _scored(members, nonmembers)
    thresholds = np.unique(np.concatenate([members, nonmembers]))[::-1]
    true, false = (
        (len(scores) - np.searchsorted(np.sort(scores), thresholds)) / len(scores) for scores in (members, nonmembers)
    )
    return Roc(np.append(0.0, false), np.append(0.0, true), np.append(np.inf, thresholds))


def auc(members: np.ndarray, nonmembers: np.ndarray) -> Estimate:
    """Chance that a member scores above a non-member, ties counting half, with DeLong's interval on the logit scale.

    If DeLong sees no variance (perfect separation, or all scores equal), the interval is Newcombe's, which does not
    shrink to a point however few the pairs.
    """
    from scipy.stats import rankdata

    members, nonmembers = _scored(members, nonmembers)
    value = _mann_whitney(members, nonmembers)
    if min(len(members), len(nonmembers)) < 2:
        raise UserError(f"an AUC needs 2 members and 2 non-members, not {len(members)} and {len(nonmembers)}")
    ranks = rankdata(np.concatenate([members, nonmembers]))
    beaten = (ranks[: len(members)] - rankdata(members)) / len(nonmembers)
    beaten_by = (ranks[len(members) :] - rankdata(nonmembers)) / len(members)
    variance = beaten.var(ddof=1) / len(members) + beaten_by.var(ddof=1) / len(nonmembers)
    if not 0 < value < 1 or variance == 0:
        return _newcombe(value, len(members), len(nonmembers))
    reach = Z * math.sqrt(variance) / (value * (1 - value))
    return Estimate(value, float(expit(logit(value) - reach)), float(expit(logit(value) + reach)))


def leakage(auc: float) -> float:
    """max(AUC, 1 - AUC): pairs pushed far below the non-members are as conspicuous as members."""
    return max(auc, 1 - auc)


def tpr_at_fpr(members: np.ndarray, nonmembers: np.ndarray, fpr: float = 0.01, force: bool = False) -> OperatingPoint:
    """The last ROC point whose false positive rate is at most `fpr`; refused where that rate would be a guess."""
    if not 0 < fpr < 1:
        raise UserError(f"the false positive rate must be between 0 and 1, not {fpr}")
    count = len(nonmembers) - unscored(nonmembers)
    needed = math.ceil(EXPECTED_FALSE_POSITIVES / fpr - 1e-9)
    if count < needed and not force:
        raise UserError(_too_few(count, needed, fpr))
    curve = roc(members, nonmembers)
    last = np.flatnonzero(curve.fpr <= fpr)[-1]
    threshold = float(curve.thresholds[last])
    if threshold == math.inf:  # too many non-members tie for the highest score; a record has to be finite
        threshold = float(np.nextafter(curve.thresholds[1], math.inf))
    return operating_point(members, nonmembers, threshold)


def operating_point(members: np.ndarray, nonmembers: np.ndarray, threshold: float) -> OperatingPoint:
    """Rates at a threshold, with Clopper-Pearson intervals, which take the threshold as given.

    For a threshold that never saw the evaluated pairs, take it from `tpr_at_fpr` on other non-members.
    """
    dropped = unscored(members) + unscored(nonmembers)
    members, nonmembers = _scored(members, nonmembers)
    true, false = (proportion(int((scores >= threshold).sum()), len(scores)) for scores in (members, nonmembers))
    return OperatingPoint(threshold, true, false, len(members), len(nonmembers), dropped)


def proportion(hits: int, count: int) -> Estimate:
    """A share with its exact (Clopper-Pearson) interval."""
    if count < 1:
        raise UserError("a share of no pairs at all is not defined")
    tail = (1 - CONFIDENCE) / 2
    low = betaincinv(hits, count - hits + 1, tail) if hits else 0.0
    high = betaincinv(hits + 1, count - hits, 1 - tail) if hits < count else 1.0
    return Estimate(hits / count, float(low), float(high))


def attack_inputs(
    target: np.ndarray, shadows: np.ndarray, members: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    shadows, members = _shadow_inputs(shadows, members)
    target = np.asarray(target, dtype=float)
    if target.shape != shadows.shape[:1]:
        raise UserError(f"the target's statistics must be [{len(shadows)}] like the shadows', not {list(target.shape)}")
    _refuse_non_finite("target statistics", target)
    refuse_copy(target, shadows)
    return target, shadows, members


def _shadow_inputs(shadows: np.ndarray, members: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    shadows, members = np.asarray(shadows, dtype=float), np.asarray(members)
    if shadows.ndim != 2 or 0 in shadows.shape or members.shape != shadows.shape or members.dtype != bool:
        raise UserError(
            f"an attack needs shadow statistics [n, m] and a bool membership [n, m], not {list(shadows.shape)} and "
            f"{members.dtype} {list(members.shape)}"
        )
    _refuse_non_finite("shadow statistics", shadows)
    return shadows, members


def _population(target: np.ndarray, shadows: np.ndarray, models: int) -> tuple[np.ndarray, np.ndarray]:
    target, shadows = np.asarray(target, dtype=float), np.asarray(shadows, dtype=float)
    if target.shape != shadows.shape[:1] or shadows.ndim != 2 or shadows.shape[1] != models or not len(target):
        shapes = f"{list(target.shape)} and {list(shadows.shape)}"
        raise UserError(f"the population's statistics must be [z] and [z, {models}], one column a shadow, not {shapes}")
    _refuse_non_finite("population statistics", np.column_stack([target, shadows]))
    return target, shadows


def _refuse_non_finite(name: str, values: np.ndarray) -> None:
    broken = int((~np.isfinite(values)).sum())
    if broken:
        raise UserError(f"{broken} of {np.size(values)} {name} are not finite: a model diverged, no attack")


def _known(name: str, value: str, choices: object) -> None:
    if value not in get_args(choices):
        raise UserError(f"{name} must be one of {', '.join(get_args(choices))}, not {value!r}")


def shared_spread(values: np.ndarray, present: np.ndarray) -> float:
    """The common spread of all pairs: root of the pooled variance around each pair's mean."""
    counts = present.sum(1)
    freedom = int((counts - 1).clip(min=0).sum())
    if not freedom:
        raise UserError(f"no pair has 2 shadows on one side ({counts.max()} at most): no spread can be measured")
    means = np.where(present, values, 0).sum(1) / np.maximum(counts, 1)
    deviations = np.where(present, values - means[:, None], 0)
    spread = math.sqrt((deviations**2).sum() / freedom)
    if spread <= np.finfo(float).eps * np.abs(values[present]).max():
        raise UserError("all shadows give every pair the same statistic: they collapsed or are copies of one model")
    return spread


def _probability(log_odds: np.ndarray) -> np.ndarray:
    return np.maximum(expit(log_odds), TINY_PROBABILITY)


def _mean_probability(log_odds: np.ndarray, present: np.ndarray) -> np.ndarray:
    """Mean probability [n] over the present models, NaN where there is none; a mask, since 0 is also a probability."""
    counts = present.sum(1)
    means = np.where(present, _probability(log_odds), 0).sum(1) / np.maximum(counts, 1)
    return np.where(counts > 0, means, np.nan)


def _relative_rank(
    target: np.ndarray, out: np.ndarray, population_target: np.ndarray, population_out: np.ndarray, offline_a: float
) -> np.ndarray:
    """Share of the population that each pair beats strictly; IN is guessed from OUT as a * OUT + 1 - a."""
    ratio, population = (
        values / ((1 + offline_a) / 2 * reference + (1 - offline_a) / 2)
        for values, reference in ((target, out), (population_target, population_out))
    )
    rank = np.searchsorted(np.sort(population), ratio, side="left") / len(population)
    return np.where(np.isnan(ratio), np.nan, rank)


def _scored(members: np.ndarray, nonmembers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    kept = []
    for name, scores in (("member", members), ("non-member", nonmembers)):
        scores = np.asarray(scores, dtype=float)
        if scores.ndim != 1 or np.isinf(scores).any():
            raise UserError(f"{name} scores must be finite numbers [n], or NaN where there is no score")
        kept.append(scores[~np.isnan(scores)])
        if not len(kept[-1]):
            raise UserError(f"no {name} has a score ({len(scores)} pairs, all without the shadows they need)")
    return kept[0], kept[1]


def _mann_whitney(members: np.ndarray, nonmembers: np.ndarray) -> float:
    """AUC without its interval, from mid-ranks."""
    from scipy.stats import rankdata

    ranks = rankdata(np.concatenate([members, nonmembers]))[: len(members)]
    return float((ranks.mean() - (len(members) + 1) / 2) / len(nonmembers))


def _newcombe(value: float, members: int, nonmembers: int) -> Estimate:
    """Newcombe's (2006) method 5: the AUCs whose own variance, by Hanley and McNeil, leaves the value within reach."""
    from scipy.optimize import brentq

    def excess(theta: float) -> float:
        half = (members + nonmembers) / 2 - 1
        shape = 1 + half * (1 - theta) / (2 - theta) + half * theta / (1 + theta)
        return (value - theta) ** 2 - Z**2 * theta * (1 - theta) / (members * nonmembers) * shape

    low = 0.0 if value == 0 else brentq(excess, 0, value - 1e-12)
    high = 1.0 if value == 1 else brentq(excess, value + 1e-12, 1)
    return Estimate(value, float(low), float(high))


def _too_few(count: int, needed: int, fpr: float) -> str:
    guess = proportion(int(fpr * count + 1e-9), count) if count else Estimate(0, 0, 1)
    possible = f", ask for {EXPECTED_FALSE_POSITIVES / count:.2%} or more" if count > EXPECTED_FALSE_POSITIVES else ""
    return (
        f"TPR at {fpr:.2%} FPR needs at least {needed} non-members, not {count}: with {count} the real rate may be "
        f"anywhere from {guess.low:.2%} to {guess.high:.2%}; add non-members{possible}, or force it"
    )
