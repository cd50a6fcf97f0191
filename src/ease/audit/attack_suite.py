"""All attacks of an audit on all models, as measures with bands and as records."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ease.audit.attacks import Attacker, AttackResult
from ease.audit.config import AuditConfig
from ease.audit.epsilon import guess, lower_bound
from ease.audit.membership import auc, leakage, roc
from ease.audit.records import AttackRecord, RocPoints
from ease.audit.retained import beyond_unseen
from ease.audit.statistic import Gauge
from ease.audit.subjects import Readings, Subjects, match_classes
from ease.audit.verdict import Measure
from ease.data.canaries import toss
from ease.params import Params
from ease.requests.request import ClassRequest, ClientRequest, Request
from ease.runs.resolve import planted_ids
from ease.runs.world import World
from ease.seeding import generator

FEWEST_CANARIES = 16
"""With fewer, even guesses that are all right show little."""
MOST_RETAINED = 500
"""Retained pairs that are attacked."""
REPORTED_MODELS = ("trained", "unlearned", "retrain")
"""Models for which every attack is reported. The others are attacked only by those attacks that the verdict uses."""
ResultsByModel = Mapping[str, AttackResult]
"""Model -> what an attack says of it."""
Records = dict[str, dict[str, AttackRecord]]
"""Attack -> model -> what it says."""


@dataclass(frozen=True)
class Attacked:
    """Results of the attacks on forget pairs."""

    measures: list[Measure]
    records: Records
    attack: str
    """The one that the verdict goes by."""


@dataclass(frozen=True)
class OnRetained:
    """Result of the attack on retained pairs; empty if too few unseen pairs resemble them."""

    measures: list[Measure]
    records: Records


def attack_all(attacker: Attacker, targets: Mapping[str, tuple[Readings, Readings]], config: AuditConfig) -> Attacked:
    """Attack every model, given its readings of the candidates and of the population.

    The verdict takes the classifier, one attack from trained shadows and one from unlearned ones, RMIA, and the attack
    that compares the models before and after. BaVarIA on log-odds is named in advance; the strongest is chosen by
    looking, and looks stronger for that."""
    if config.attack == "bavaria":
        family, attack, informed = "bavaria", "bavaria-online/log_odds", "u-bavaria/log_odds"
        why = attack
    else:
        family, attack = "lira", attacker.strongest(*targets["trained"])
        informed = max(
            attacker.informed_attacks(),
            key=lambda each: leakage(attacker.judge(each, *targets["unlearned"]).auc.value),
        )
        why = f"{attack}, the strongest before unlearning"
    judged = {
        each: {
            name: attacker.judge(each, *of)
            for name, of in targets.items()
            if each in (attack, informed, "rmia") or name in REPORTED_MODELS
        }
        for each in (*attacker.attacks(), *attacker.informed_attacks())
    }
    called = {name: attacker.called_member(target).value for name, (target, _) in targets.items()}
    one = 1 / int(attacker.member.sum())
    measures = [
        Measure.of("mia/share", called, one, "share of the forget pairs"),
        auc_measure(f"{family}/auc", judged[attack], one, why),
        auc_measure(f"u-{family}/auc", judged[informed], one, f"{informed}; shadows unlearned likewise"),
    ]
    if "rmia" in judged:
        measures.append(auc_measure("rmia/auc", judged["rmia"], one))
    measures += _found(f"{family}/tpr", attack, judged[attack], one, config.fpr)
    measures += _found(f"u-{family}/tpr", informed, judged[informed], one, config.fpr)
    compared = _compared(attacker, {name: target for name, (target, _) in targets.items()})
    measures.append(_before_after(compared, one))
    records = {
        name: {model: attack_record(found, attacker.member) for model, found in results.items()}
        for name, results in {**judged, **compared}.items()
    }
    return Attacked(measures, records, attack)


def some_retained(world: World, retained: np.ndarray) -> np.ndarray:
    """The retained pairs that are attacked."""
    return generator(world.config.seed, "retained").permutation(retained)[:MOST_RETAINED]


def attack_retained(
    world: World,
    subjects: Subjects,
    gauge: Gauge,
    start: Params,
    reads: Mapping[str, Readings],
    chosen: np.ndarray,
    held: Mapping[str, np.ndarray],
) -> OnRetained:
    """Attack retained pairs: distinguish them from unseen pairs of the same classes, under each model.

    `reads` are of the subjects and `held` the log-odds of the `chosen` retained pairs.
    """
    never = ~np.pad(subjects.candidates.member, (0, len(subjects.population)))
    never &= ~np.isin(subjects.positions, world.evaluator.canaries)
    unseen = subjects.positions[never]
    like = match_classes(world.evaluator.classes_of(chosen), world.evaluator.classes_of(unseen))
    if min(len(chosen), len(like)) < 2:
        return OnRetained([], {})
    at_start = [gauge.read(start, positions)["log_odds"] for positions in (chosen, unseen)]
    member = np.arange(len(chosen) + len(like)) < len(chosen)
    judged = {}
    for name, read in reads.items():
        others = read["log_odds"][never]
        above, above_others = beyond_unseen(held[name], at_start[0], others, at_start[1])
        scores = np.concatenate([above, above_others[like]])
        judged[name] = AttackResult(auc(above, above_others[like]), None, 0, scores)
    note = f"{len(chosen)} retained pairs against {len(like)} unseen ones of their classes"
    measure = auc_measure("retained/auc", judged, 1 / len(chosen), note)
    return OnRetained([measure], {"retained": {name: attack_record(found, member) for name, found in judged.items()}})


def attack_canaries(
    world: World, request: Request, gauge: Gauge, models: Mapping[str, Params], start: Params
) -> list[Measure]:
    """The lower bound on epsilon from guesses about the canaries that the request concerns.

    A canary that was kept out is concerned if the request would have named it had its coin fallen otherwise, so that
    which ones are looked at says nothing about who was in.
    """
    seen = world.evaluator
    if len(seen.canaries) < FEWEST_CANARIES:
        return []
    ids = [seen.pairs.ids[each] for each in seen.canaries]
    drawn = toss(ids, [shard.client for shard in seen.shards], world.config.seed)
    if isinstance(request, ClientRequest):
        concerned = np.isin(drawn.home, request.clients)
    elif isinstance(request, ClassRequest):
        concerned = np.isin(seen.classes_of(seen.canaries), request.classes)
    else:
        concerned = np.full(len(ids), set(planted_ids(world)) <= set(request.ids))
    if concerned.sum() < FEWEST_CANARIES:
        return []
    chosen = seen.canaries[concerned]
    inside, at_start = drawn.heads[concerned], gauge.read(start, chosen)["log_odds"]
    guesses = {name: guess(gauge.read(state, chosen)["log_odds"] - at_start, inside) for name, state in models.items()}
    ours, made = guesses["unlearned"], guesses["unlearned"].made
    one = lower_bound(made // 2 + 1, made) - lower_bound(made // 2, made)
    note = f"{ours.right} of {made} guesses right about {len(chosen)} canaries; at least this, with 95 % confidence"
    epsilons = {name: each.epsilon for name, each in guesses.items()}
    return [Measure.of("canaries/epsilon", epsilons, one, note, limits=(0, np.inf))]


def auc_measure(name: str, judged: ResultsByModel, resolution: float, note: str = "") -> Measure:
    """The AUC of an attack under each model."""
    area = judged["unlearned"].auc
    interval = f"[{area.low:.3f}, {area.high:.3f}]"
    return Measure.of(
        name,
        {model: found.auc.value for model, found in judged.items()},
        resolution,
        f"{interval}; {note}" if note else interval,
    )


def _found(name: str, attack: str, judged: ResultsByModel, resolution: float, fpr: float) -> list[Measure]:
    """The true-positive rate, if there are enough non-members for a threshold."""
    points = {model: found.tpr for model, found in judged.items() if found.tpr is not None}
    if len(points) < len(judged):
        return []
    point = points["unlearned"]
    note = (
        f"{attack} at {fpr:.1%} FPR; [{point.tpr.low:.3f}, {point.tpr.high:.3f}], "
        f"real FPR [{point.fpr.low:.3f}, {point.fpr.high:.3f}]"
    )
    return [Measure.of(name, {model: each.tpr.value for model, each in points.items()}, resolution, note)]


def _compared(attacker: Attacker, targets: Mapping[str, Readings]) -> dict[str, dict[str, AttackResult]]:
    """Attack -> model -> result for an attacker who also has the trained model."""
    found = {name: attacker.compare(targets["trained"], target) for name, target in targets.items()}
    return {attack: {name: results[attack] for name, results in found.items()} for attack in found["trained"]}


def _before_after(compared: Mapping[str, ResultsByModel], resolution: float) -> Measure:
    both = compared["before-after/both"]
    note = (
        "by the change of log-odds; retraining shows it too, only the difference counts; "
        f"by both readings {both['unlearned'].auc} and {both['retrain'].auc.value:.3f} after retraining"
    )
    return auc_measure("before-after/auc", compared["before-after/change"], resolution, note)


def attack_record(found: AttackResult, member: np.ndarray) -> AttackRecord:
    """The record of an attack on one model."""
    curve = roc(found.scores[member], found.scores[~member])
    points = RocPoints(fpr=tuple(curve.fpr.round(5).tolist()), tpr=tuple(curve.tpr.round(5).tolist()))
    return AttackRecord(
        auc=found.auc, leakage=leakage(found.auc.value), tpr=found.tpr, unscored=found.unscored, roc=points
    )
