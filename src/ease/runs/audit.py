"""Auditing an answer to a request: every measure beside retraining and its band, and what was not tested."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
from pydantic import Field, field_validator
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from ease.audit.alignment import alignment_residual
from ease.audit.attacks import Attacker, Readings, Verdicts
from ease.audit.band import Band, prediction_band, reach
from ease.audit.distribution import ks_distance, retrain_yardstick
from ease.audit.evaluate import common_size, recalls
from ease.audit.membership import CONFIDENCE, EXPECTED_FALSE_POSITIVES, attack_strength_note, auc, leakage, roc
from ease.audit.relearn import Curve, relearn
from ease.audit.retrieval import GalleryRecall, chance_recall
from ease.audit.statistic import Gauge
from ease.config import Config
from ease.data.partition import joint_embedding
from ease.errors import UserError
from ease.federation.objectives import embed_states
from ease.methods.base import Trained, Unlearner
from ease.methods.retrain import Retrain
from ease.model.losses import info_nce
from ease.params import Params
from ease.requests.request import Request, forget_mask
from ease.runs.answers import StoredAnswer, answer_of, find_answer, trained_of
from ease.runs.attackers import (
    FORMAT,
    SHARES,
    Plan,
    Subjects,
    attacker_of,
    gauge_of,
    make_shadows,
    plan_of,
    remove_scratch,
    train_share,
)
from ease.runs.evaluation import evaluation_sets, similarities
from ease.runs.run import Run
from ease.runs.workers import default_processes, spread
from ease.runs.world import World
from ease.seeding import generator
from ease.storage import read_json, sha256, write_json

SAME_CONTENT = 0.98
"""Cosine in the joint frozen space from which a retained pair counts as a near-duplicate of a forget pair."""
PAIRS_AT_ONCE = 4096
"""Retained pairs that are compared with all forget pairs at a time: a whole matrix would not fit into memory."""
MOST_WATCHED = 200
"""Pairs on each side of a relearning curve."""
WORDS = "evidence of approximate erasure"
NOT_TESTED = (
    "membership in the backbone's own pretraining",
    "attacks that read gradients or weights, or that reconstruct pictures or captions",
    "attackers that saw the model before AND after and compare the two",
    "planted canaries and other worst-case pairs",
    "other training seeds: one trained model is audited, not the method in general",
    "per-pair attacks on retained pairs (only their distribution is compared)",
)


class AuditConfig(Config):
    """What an audit may spend, and what it promises."""

    shadows: int = Field(16, ge=4)
    """Shadow federations; an even number, since they come in complementary pairs."""
    retrains: int = Field(3, ge=1)
    """Further retrainings, in another order of the data, that make the band."""
    pool: int = Field(512, ge=16)
    """Pairs, seen by no model, that every statistic is measured against."""
    fpr: float = Field(0.01, gt=0, lt=1)
    """False positive rate at which the share of found members is told."""
    relearn_pairs: int = Field(16, ge=2)
    """Forget pairs that are shown again in the relearning test."""
    workers: int | None = Field(None, ge=1)
    """Processes that train shadows; default: one for each core, up to 4, and one on a GPU."""

    @field_validator("shadows")
    @classmethod
    def _even(cls, count: int) -> int:
        if count % 2:
            raise ValueError("shadows come in complementary pairs: choose an even number")
        return count


@dataclass(frozen=True)
class Measure:
    """One line of the verdict."""

    name: str
    value: float
    retrain: float
    before: float | None
    """Of the trained model; None where it is the measure's own zero."""
    band: Band | None
    note: str = ""

    @property
    def inside(self) -> bool | None:
        return None if self.band is None else self.band.contains(self.value)

    def as_json(self) -> dict[str, Any]:
        low, high = (None, None) if self.band is None else (self.band.low, self.band.high)
        fields = {"name": self.name, "value": self.value, "retrain": self.retrain, "before": self.before}
        fields |= {"note": self.note}
        return {**fields, "low": None if low == -np.inf else low, "high": high, "inside": self.inside}


@dataclass(frozen=True)
class Audit:
    """One audit: first the shadows, which take long and are kept, then the verdict."""

    run: Run
    world: World
    stored: StoredAnswer
    request: Request
    method: Unlearner
    config: AuditConfig

    @classmethod
    def of(cls, run: Run, world: World, name: str, config: AuditConfig) -> "Audit":
        """Audit the finished answer `REQUEST` or `REQUEST/METHOD`; retraining must have been done too."""
        stored, request, method = find_answer(run, name)
        if isinstance(method, Retrain) and method.share == 1:
            raise UserError(f"{name}: retraining is what others are measured against; audit another method's answer")
        audit = cls(run, world, stored, request, method, config)
        if not audit.reference.done:
            raise UserError(
                f"{audit.reference.folder}: retraining for this request is missing, and nothing can be judged without "
                "it; add --retrain to run it now, or run `ease forget` with --method retrain"
            )
        return audit

    @property
    def reference(self) -> StoredAnswer:
        return answer_of(self.run, self.request, Retrain())

    @cached_property
    def trained(self) -> Trained:
        return trained_of(self.run)

    @cached_property
    def plan(self) -> Plan:
        return plan_of(self.run, self.world, self.request, self.method, self.config.pool)

    @cached_property
    def subjects(self) -> Subjects:
        return Subjects.of(self.world, self.request, self.config.pool)

    @cached_property
    def gauge(self) -> Gauge:
        return gauge_of(self.world, self.subjects)

    # The long part

    def missing(self) -> tuple[list[int], list[int]]:
        """Shadows and retraining orders that are not stored yet."""
        shadows = [n for n in range(self.config.shadows) if not self.plan.shadow_path(n).is_file()]
        orders = [n for n in range(1, self.config.retrains + 1) if not self.plan.retrain_path(n).is_file()]
        return shadows, orders

    def work(self) -> int:
        """How many ticks `shadows` will give: one for each round of each missing model, and one for each unlearning."""
        shadows, orders = self.missing()
        return (len(shadows) + len(orders)) * self.run.config.training.rounds + len(shadows)

    def shadows(self) -> Iterator[int]:
        """Train, unlearn and store what is missing; yields ticks as they happen."""
        remove_scratch(self.plan)
        shadows, orders = self.missing()
        workers = min(self.workers, max(1, len(shadows) // 2 + len(orders)))
        if workers == 1:
            yield from make_shadows(self.plan, self.world, self.subjects, shadows, orders)
        else:
            shares = [(self.plan, shadows[n::workers], orders[n::workers]) for n in range(workers)]
            yield from map(int, spread(train_share, shares, workers))

    @property
    def workers(self) -> int:
        if self.config.workers is not None:
            return self.config.workers
        return min(4, default_processes(self.world.device.type))

    # The verdict

    def verdict(self) -> dict[str, Any]:
        """Measure everything, judge it, and keep it as `audit.json` beside the answer."""
        attacker = attacker_of(self.plan, self.subjects, self.config.shadows, self.config.fpr)
        models = self.models
        reads = {name: self.gauge.read(state, self.subjects.positions) for name, state in models.items()}
        similar = {name: similarities(self.world, state, self.sets["forget"]) for name, state in models.items()}
        measures = [*self._retrieval(models), *self._alignment(similar)]
        attacked, attacks, strongest = self._attacks(attacker, reads)
        measures += attacked + self._distribution(reads)
        relearning = self._relearning(models)
        measures += [
            Measure(f"relearn/{taught}/share", curves["unlearned"].share_back, curves["retrain"].share_back, None, band)
            for taught, (curves, band) in relearning.items()
        ]
        outside = [measure.name for measure in measures if measure.inside is False]
        judged = sum(measure.inside is not None for measure in measures)
        result = {
            "format": FORMAT,
            "request": self.request.model_dump(mode="json"),
            "method": self.method.model_dump(mode="json"),
            "model_sha256": sha256(self.stored.model_path),
            "retrain_sha256": sha256(self.reference.model_path),
            "settings": {**self.config.model_dump(mode="json"), "workers": None},
            "words": WORDS,
            "verdict": _words(outside, judged, attacks[strongest]["trained"]["note"]),
            "outside": outside,
            "measures": [measure.as_json() for measure in measures],
            "gallery": self._gallery(),
            "attack": strongest,
            "attacks": attacks,
            "relearning": {
                taught: {name: asdict(curve) | {"steps_back": curve.steps_back} for name, curve in curves.items()}
                for taught, (curves, _) in relearning.items()
            },
            "similarities": {
                name: [round(value, 5) for value in similar[name].tolist()]
                for name in ("trained", "unlearned", "retrain")
            },
            "costs": self._costs(),
            "warnings": self._warnings(attacker, reads, measures),
            "not_tested": list(NOT_TESTED),
        }
        write_json(self.stored.folder / "audit.json", result)
        return result

    @cached_property
    def models(self) -> dict[str, Params]:
        """The trained, the unlearned and the retrained models."""
        further = {
            f"retrain-{order}": Params.load(self.plan.retrain_path(order))
            for order in range(1, self.config.retrains + 1)
        }
        return {
            "trained": self.trained.final,
            "unlearned": self.stored.model(),
            "retrain": self.reference.model(),
            **further,
        }

    @cached_property
    def sets(self) -> dict[str, np.ndarray]:
        """Forget, retained and test pairs, and the retained ones nearest to forget pairs."""
        return {
            **self._plain_sets,
            "near": near_forget(self.nearest, self._plain_sets["forget"], self._plain_sets["retain"]),
        }

    @cached_property
    def nearest(self) -> np.ndarray:
        return nearest_forget(self.world, self._plain_sets["forget"], self._plain_sets["retain"])

    @cached_property
    def _plain_sets(self) -> dict[str, np.ndarray]:
        return evaluation_sets(self.world, self.request)

    def _retrieval(self, models: Mapping[str, Params]) -> list[Measure]:
        """Recall on forget, near-forget, retained and test pairs, all on galleries of one size."""
        measures = []
        found = {name: self._recalls(state) for name, state in models.items()}
        for part in ("forget", "near", "retain", "test"):
            for k in (1, 5, 10):
                result = found["unlearned"][part]
                interval = result[f"recall@{k}"]
                note = f"[{interval.low:.1f}, {interval.high:.1f}]"
                values = {name: recall[part][f"recall@{k}"].mean for name, recall in found.items()}
                measures.append(_measure(f"{part}/recall@{k}", values, 100 / result.size, note))
        return measures

    def _gallery(self) -> dict[str, Any]:
        """The size of every gallery, and what recall a random ranking of it would have."""
        size = common_size(self.sets, self.run.config.gallery)
        chance = chance_recall(size, len(self.world.pairs.captions[0]))
        return {"pairs": size, "chance": {f"recall@{k}": level for k, level in chance.items()}}

    def _recalls(self, state: Params) -> dict[str, GalleryRecall]:
        size = common_size(self.sets, self.run.config.gallery)
        return recalls(self.world.model, state, self.world.activations, self.sets, size, self.world.device, draws=3)

    def _alignment(self, similar: Mapping[str, Tensor]) -> list[Measure]:
        def residual(name: str) -> float:
            return alignment_residual(similar[name], similar["trained"], similar["retrain"])

        band = prediction_band([residual(name) for name in similar if name.startswith("retrain-")], at_most=True)
        note = "beside it, two retrained models against each other"
        return [Measure("rho", residual("unlearned"), residual("retrain-1"), residual("trained"), band, note)]

    def _attacks(
        self, attacker: Attacker, reads: Mapping[str, Readings]
    ) -> tuple[list[Measure], dict[str, dict[str, Any]], str]:
        """Every attack on every model; the verdict takes the classifier, the strongest, and U-LiRA."""
        targets = {name: self.subjects.split(read) for name, read in reads.items()}
        strongest = attacker.strongest(*targets["trained"])
        names = [*attacker.attacks(), "u-lira/log_odds", "u-lira/cosine"]
        table: dict[str, dict[str, Any]] = {}
        judged: dict[str, dict[str, Verdicts]] = {}
        for attack in names:
            judged[attack] = {name: attacker.judge(attack, *target) for name, target in targets.items()}
            table[attack] = {name: _attack_json(found, attacker.member) for name, found in judged[attack].items()}
        unlearning = max(names[-2:], key=lambda attack: leakage(judged[attack]["unlearned"].auc.value))
        called = {name: attacker.called_member(target).value for name, (target, _) in targets.items()}
        one = 1 / int(attacker.member.sum())
        measures = [
            _measure("mia/share", called, one, "share of the forget pairs"),
            _measure("lira/auc", _aucs(judged[strongest]), one, f"{strongest}, the strongest before unlearning"),
            _measure("u-lira/auc", _aucs(judged[unlearning]), one, f"{unlearning}; shadows unlearned likewise"),
        ]
        if "rmia" in judged:
            measures.append(_measure("rmia/auc", _aucs(judged["rmia"]), one))
        for attack, name in ((strongest, "lira/tpr"), (unlearning, "u-lira/tpr")):
            points = {model: found.tpr for model, found in judged[attack].items()}
            if all(point is not None for point in points.values()):
                shares = {model: point.tpr.value for model, point in points.items() if point is not None}
                point = points["unlearned"]
                assert point is not None
                note = (
                    f"{attack} at {self.config.fpr:.1%} FPR; [{point.tpr.low:.3f}, {point.tpr.high:.3f}], "
                    f"real FPR [{point.fpr.low:.3f}, {point.fpr.high:.3f}]"
                )
                measures.append(_measure(name, shares, one, note))
        return measures, table, strongest

    def _distribution(self, reads: Mapping[str, Readings]) -> list[Measure]:
        """KS distance of the forget pairs' log-odds to retrain's, against that between retrained models."""
        forget = {name: read["log_odds"][: int(self.subjects.candidates.member.sum())] for name, read in reads.items()}
        retrained = [name for name in forget if name.startswith("retrain")]
        yardstick = retrain_yardstick(np.stack([forget[name] for name in retrained], axis=1))
        found = ks_distance(forget["unlearned"], forget["retrain"], generator(self.run.config.seed, "ks"))
        before = ks_distance(forget["trained"], forget["retrain"], generator(self.run.config.seed, "ks"))
        note = (
            f"[{found.distance.low:.3f}, {found.distance.high:.3f}], p {found.p_value:.2g} with n = {found.counts[0]}"
        )
        # Only the distances to the one retrained model that answers are compared with: the others share models.
        distances = yardstick.distances[: len(retrained) - 1].tolist()
        band = prediction_band(distances, at_most=True, resolution=1 / found.counts[0])
        beside = float(np.mean(distances))
        return [Measure("ks/distance", found.distance.value, beside, before.distance.value, band, note)]

    def _relearning(self, models: Mapping[str, Params]) -> dict[str, tuple[dict[str, Curve], Band | None]]:
        """How much of the lost margin comes back in the same steps, from the unlearned and from retrained models."""
        rng = generator(self.run.config.seed, "relearn")
        forget = rng.permutation(self.sets["forget"])
        few, watched = forget[: self.config.relearn_pairs], forget[self.config.relearn_pairs :][:MOST_WATCHED]
        candidates = self.subjects.candidates
        unseen = candidates.positions[~candidates.member][:MOST_WATCHED]
        if len(watched) < 2:
            return {}
        names = [name for name in models if name != "trained"]
        job = self.run.config.training.job(0, self.run.config.seed, self.run.config.model.temperature, "relearn")
        found = {}
        for taught, positions in (("forget", few), ("retain", self.sets["retain"])):
            states = [models[name] for name in names]
            curves = relearn(self.gauge, states, models["trained"], positions, watched, unseen, job, rng)
            named = dict(zip(names, curves, strict=True))
            shares = [curve.share_back for name, curve in named.items() if name.startswith("retrain")]
            found[taught] = (named, prediction_band(shares, at_most=True))
        return found

    def _costs(self) -> dict[str, Any]:
        """What the answer and retraining cost, their ratios, and what retraining gives for a share of its cost."""
        per_pair = training_flops(self.world)
        ours, theirs = (stored.record()["metrics"] for stored in (self.stored, self.reference))
        costs: dict[str, dict[str, float]] = {}
        for key in sorted(ours):
            if key.startswith("cost/") and "seconds/" not in key:
                costs[key.removeprefix("cost/")] = {"answer": ours[key], "retrain": theirs.get(key, 0.0)}
        costs["flops"] = {
            "answer": ours.get("cost/pairs_passed", ours["cost/pairs_trained"]) * per_pair,
            "retrain": theirs.get("cost/pairs_passed", theirs["cost/pairs_trained"]) * per_pair,
        }
        for entry in costs.values():
            entry["ratio"] = entry["answer"] / entry["retrain"] if entry["retrain"] else 0.0
        phases = {key.removeprefix("cost/seconds/"): value for key, value in ours.items() if "seconds/" in key}
        matched = {}
        for share in SHARES:
            found = self._recalls(Params.load(self.plan.retrain_path(1, share)))
            matched[f"{share:.0%}"] = {part: result["recall@1"].mean for part, result in found.items()}
        return {"totals": costs, "phases": phases, "compute_matched_retrain": matched}

    def _warnings(self, attacker: Attacker, reads: Mapping[str, Readings], measures: Sequence[Measure]) -> list[str]:
        """What a careful reader must know before believing the numbers."""
        candidates = self.subjects.candidates
        members, others = int(candidates.member.sum()), int((~candidates.member).sum())
        retrained = 1 + self.config.retrains
        unjudged = [measure.name for measure in measures if measure.band is None]
        judged = len(measures) - len(unjudged)
        found = [
            f"{members} members and {others} non-members; their class mixes differ by {candidates.mismatch:.2f} "
            "(total variation)",
            f"band: 95 % prediction interval from {retrained} retrained models of one seed, which reaches "
            f"{reach(retrained):.1f} of their standard deviations to either side; of {judged} measures, a retrained "
            f"model itself falls outside on about {(1 - CONFIDENCE) * judged:.0f}",
            self._settings_note(),
            self._exposure_note(),
        ]
        if unjudged:
            found.append(f"no band, so not judged: {', '.join(unjudged)}; raise --retrains")
        outside = len(attacker.nonmember_scores("lira-online/log_odds"))
        if outside * self.config.fpr < EXPECTED_FALSE_POSITIVES:
            needed = EXPECTED_FALSE_POSITIVES / self.config.fpr
            found.append(
                f"TPR at {self.config.fpr:.2%} FPR is not given: it takes {needed:.0f} non-member scores "
                f"to set the threshold by, and the shadows give {outside}; use more shadows or a higher --fpr"
            )
        if others * self.config.fpr < EXPECTED_FALSE_POSITIVES:
            found.append(
                f"the threshold comes from {outside} non-members of the shadows; on the audited model itself only "
                f"{others} non-members can check it"
            )
        twins = near_duplicates(self.nearest)
        if twins:
            found.append(
                f"{twins} retained pairs are near-duplicates of forget pairs: no method can forget what is kept"
            )
        spread = {name: read["log_odds"] for name, read in reads.items()}
        gap = float(np.abs(spread["trained"] - spread["retrain"])[:members].mean())
        if gap < 0.1:
            found.append(
                f"no signal: the trained model holds the forget pairs as retrain does (log-odds differ by {gap:.2f})"
            )
        dropped = int(np.isnan(attacker.score("lira-online/log_odds", *self.subjects.split(reads["trained"]))).sum())
        if dropped:
            found.append(f"{dropped} pairs have no shadow on one side and are left out")
        kept = self._retained_leakage(reads)
        found.append(
            f"retained pairs against non-members, AUC of the log-odds: {kept['unlearned']:.3f} unlearned, "
            f"{kept['retrain']:.3f} retrain, {kept['trained']:.3f} before"
        )
        return found

    def _settings_note(self) -> str:
        """Settings that were chosen by looking at these very measures would flatter the method."""
        usual = type(self.method)().model_dump(mode="json")
        changed = [
            f"{key} = {value}" for key, value in self.method.model_dump(mode="json").items() if value != usual[key]
        ]
        return (
            f"{self.method.name} with {', '.join(changed) or 'its default settings'}: not a fair test if chosen by "
            "these measures or against retrain, nor beside a method that was tuned less"
        )

    def _exposure_note(self) -> str:
        """A model that was shown the retained pairs more often than retrain knows them better for that alone."""
        retained = {shard.client: int((~forget_mask(self.request, shard)).sum()) for shard in self.world.shards}
        training = self.run.config.training
        columns = self.trained.history.columns(training.rounds)
        before = training.local_epochs * sum(retained[client] for _, client in columns)
        ours, theirs = (stored.record()["metrics"]["cost/pairs_trained"] for stored in (self.stored, self.reference))
        return (
            f"retained pairs shown in all: {before + ours:,.0f} to the answer ({before:,} in training), "
            f"{theirs:,.0f} to retrain; more showings alone raise the recall of retained pairs"
        )

    def _retained_leakage(self, reads: Mapping[str, Readings]) -> dict[str, float]:
        retained = generator(self.run.config.seed, "retained").permutation(self.sets["retain"])[:500]
        outside = ~self.subjects.candidates.member
        return {
            name: auc(
                self.gauge.read(self.models[name], retained)["log_odds"],
                reads[name]["log_odds"][: len(outside)][outside],
            ).value
            for name in ("unlearned", "retrain", "trained")
        }


def _measure(name: str, values: Mapping[str, float], resolution: float, note: str = "") -> Measure:
    """A line whose band comes from the retrained models' values of the same measure."""
    retrained = [value for model, value in values.items() if model.startswith("retrain")]
    band = prediction_band(retrained, resolution=resolution)
    return Measure(name, values["unlearned"], values["retrain"], values["trained"], band, note)


def _aucs(judged: Mapping[str, Verdicts]) -> dict[str, float]:
    return {name: found.auc.value for name, found in judged.items()}


def _attack_json(found: Verdicts, member: np.ndarray) -> dict[str, Any]:
    curve = roc(found.scores[member], found.scores[~member])
    tpr = None if found.tpr is None else asdict(found.tpr)
    points = {"fpr": curve.fpr.round(5).tolist(), "tpr": curve.tpr.round(5).tolist()}
    return {
        "auc": asdict(found.auc),
        "leakage": leakage(found.auc.value),
        "tpr": tpr,
        "unscored": found.unscored,
        "roc": points,
        "note": attack_strength_note(found.auc),
    }


def _words(outside: Sequence[str], judged: int, strength: str) -> str:
    """The verdict in a sentence. It lets nothing pass: how much chance would explain is said, not forgiven."""
    if strength.startswith(("no signal", "inverted")):
        return f"no verdict: {strength}"
    if not outside:
        return f"{WORDS}: every judged measure lies where a retrained model's would"
    expected = (1 - CONFIDENCE) * judged
    return (
        f"not enough {WORDS}: {len(outside)} of {judged} measures lie outside the retrain band (by chance alone about "
        f"{expected:.0f} would): {', '.join(outside)}"
    )


# Pairs and prices


def nearest_forget(world: World, forget: np.ndarray, retain: np.ndarray) -> np.ndarray:
    """Cosine of each retained pair to the forget pair that is nearest to it in the joint frozen space."""
    some = _joint(world, forget).T
    starts = range(0, len(retain), PAIRS_AT_ONCE)
    return np.concatenate([(_joint(world, retain[n : n + PAIRS_AT_ONCE]) @ some).max(axis=1) for n in starts])


def near_forget(nearest: np.ndarray, forget: np.ndarray, retain: np.ndarray) -> np.ndarray:
    """The retained pairs nearest to forget pairs, as many as there are forget pairs."""
    return np.sort(retain[nearest.argsort(kind="stable")[::-1][: len(forget)]])


def near_duplicates(nearest: np.ndarray) -> int:
    """How many retained pairs show and say nearly what a forget pair does."""
    return int((nearest >= SAME_CONTENT).sum())


def _joint(world: World, positions: np.ndarray) -> np.ndarray:
    joint = joint_embedding(world.activations.pooled_image[positions], world.activations.pooled_text[positions])
    return (joint / np.linalg.norm(joint, axis=1, keepdims=True)).astype(np.float32)


def training_flops(world: World) -> float:
    """Floating-point operations for each pair of a training step, forward and backward, counted by torch."""
    client = next(iter(world.federation.data.values()))
    training = world.config.training
    positions = np.arange(min(len(client.train), training.batch_size))
    job = training.job(0, world.config.seed, world.config.model.temperature)
    tensors = {name: tensor.to(world.device).requires_grad_() for name, tensor in world.initial().tensors.items()}
    states = client.train.batch(positions, np.zeros_like(positions))
    with FlopCounterMode(display=False) as counter:
        info_nce(*embed_states(world.model, tensors, states), job.temperature).backward()
    return counter.get_total_flops() / len(positions)


def stored_verdict(stored: StoredAnswer) -> dict[str, Any] | None:
    """The audit kept beside an answer, unless the model has changed since."""
    path = stored.folder / "audit.json"
    if not path.is_file():
        return None
    found = read_json(path)
    return found if found.get("model_sha256") == sha256(stored.model_path) else None
