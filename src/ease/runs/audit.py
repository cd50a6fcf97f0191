"""Auditing an answer to a request: every measure beside retraining and its band, and what was not tested."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from torch import Tensor

from ease.audit.alignment import alignment_residual
from ease.audit.attacks import Attacker, Readings
from ease.audit.band import Band, prediction_band
from ease.audit.caveats import (
    NOT_TESTED,
    band_caveats,
    exposure_caveat,
    pair_caveats,
    sample_caveat,
    settings_caveat,
    threshold_caveats,
)
from ease.audit.config import AuditConfig
from ease.audit.distribution import ks_distance, retrain_yardstick
from ease.audit.evaluate import common_size, recalls
from ease.audit.nearest import near_duplicates, near_forget, nearest_forget
from ease.audit.relearn import Curve, relearn
from ease.audit.retrieval import GalleryRecall, chance_recall
from ease.audit.statistic import Gauge
from ease.audit.verdict import Measure, Verdict
from ease.errors import UserError
from ease.methods.base import Trained, Unlearner
from ease.methods.retrain import Retrain
from ease.params import Params
from ease.requests.request import Request, forget_mask
from ease.runs.answers import StoredAnswer, answer_of, find_answer, trained_of
from ease.runs.attackers import (
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
from ease.runs.attacking import attack_all, attack_canaries, attack_retained
from ease.runs.costs import phase_seconds, prices, training_flops
from ease.runs.evaluation import evaluation_sets, similarities
from ease.runs.records import AttackRecord, AuditRecord, Costs, Gallery, read_record, write_record
from ease.runs.run import Run
from ease.runs.workers import default_processes, spread
from ease.runs.world import World
from ease.seeding import generator
from ease.storage import sha256

MOST_WATCHED = 200
"""Pairs on each side of a relearning curve."""


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
        return trained_of(self.run, self.request)

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
        orders = [
            n
            for n in range(1, self.config.retrains + 1)
            if not all(self.plan.retrain_path(n, share).is_file() for share in (*SHARES, 1.0))
        ]
        return shadows, orders

    def ticks_left(self) -> int:
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
        return min(4, default_processes(self.world.server.device.type))

    # The verdict

    def judge(self) -> AuditRecord:
        """Measure everything, judge it, and keep it as `audit.json` beside the answer."""
        attacker = attacker_of(self.plan, self.subjects, self.config.shadows, self.config.fpr)
        models = self.models
        reads = {name: self.gauge.read(state, self.subjects.positions) for name, state in models.items()}
        similar = {name: similarities(self.world, state, self.sets["forget"]) for name, state in models.items()}
        attacked, attacks, strongest = self._attacks(attacker, reads)
        relearning = self._relearning(models)
        measures = (
            *self._retrieval(models),
            self._alignment(similar),
            *attacked,
            self._distribution(reads),
            *(_came_back(taught, curves, band) for taught, (curves, band) in relearning.items()),
        )
        record = AuditRecord(
            request=self.request,
            method=self.method.model_dump(mode="json"),
            model_sha256=sha256(self.stored.model_path),
            retrain_sha256=sha256(self.reference.model_path),
            settings=self.config.model_copy(update={"workers": None}),
            verdict=Verdict(measures=measures, before=attacks[strongest]["trained"].auc),
            gallery=self._gallery(),
            attack=strongest,
            attacks=attacks,
            relearning={taught: curves for taught, (curves, _) in relearning.items()},
            similarities={
                name: tuple(round(value, 5) for value in similar[name].tolist())
                for name in ("trained", "unlearned", "retrain")
            },
            costs=self._costs(),
            warnings=tuple(self._caveats(attacker, reads, measures)),
            not_tested=NOT_TESTED,
        )
        write_record(self.stored.audit_path, record)
        return record

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
        return nearest_forget(self.world.evaluator.activations, self._plain_sets["forget"], self._plain_sets["retain"])

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
                measures.append(Measure.of(f"{part}/recall@{k}", values, 100 / result.size, note))
        return measures

    def _gallery(self) -> Gallery:
        """The size of every gallery, and what recall a random ranking of it would have."""
        size = common_size(self.sets, self.run.config.gallery)
        chance = chance_recall(size, len(self.world.evaluator.pairs.captions[0]))
        return Gallery(pairs=size, chance={f"recall@{k}": level for k, level in chance.items()})

    def _recalls(self, state: Params) -> dict[str, GalleryRecall]:
        size = common_size(self.sets, self.run.config.gallery)
        return recalls(
            self.world.server.model,
            state,
            self.world.evaluator.activations,
            self.sets,
            size,
            self.world.server.device,
            draws=3,
        )

    def _alignment(self, similar: Mapping[str, Tensor]) -> Measure:
        def residual(name: str) -> float:
            return alignment_residual(similar[name], similar["trained"], similar["retrain"])

        band = prediction_band([residual(name) for name in similar if name.startswith("retrain-")], at_most=True)
        return Measure(
            name="rho",
            value=residual("unlearned"),
            retrain=residual("retrain-1"),
            before=residual("trained"),
            band=band,
            note="beside it, two retrained models against each other",
        )

    def _attacks(
        self, attacker: Attacker, reads: Mapping[str, Readings]
    ) -> tuple[list[Measure], dict[str, dict[str, AttackRecord]], str]:
        """Every attack on every model: its measures, its records, and the attack that the verdict goes by."""
        found = attack_all(attacker, {name: self.subjects.split(read) for name, read in reads.items()}, self.config)
        stayed = attack_retained(
            self.world, self.subjects, self.gauge, self.models, self.trained.initial, reads, self.sets["retain"]
        )
        planted = attack_canaries(self.world, self.request, self.gauge, self.models, self.trained.initial)
        return [*found.measures, *stayed.measures, *planted], {**found.records, **stayed.records}, found.attack

    def _distribution(self, reads: Mapping[str, Readings]) -> Measure:
        """KS distance of the forget pairs' log-odds to retrain's, against that between retrained models."""
        forget = {name: read["log_odds"][: int(self.subjects.candidates.member.sum())] for name, read in reads.items()}
        retrained = [name for name in forget if name.startswith("retrain")]
        yardstick = retrain_yardstick(np.stack([forget[name] for name in retrained], axis=1))
        found = ks_distance(forget["unlearned"], forget["retrain"], generator(self.run.config.seed, "ks"))
        before = ks_distance(forget["trained"], forget["retrain"], generator(self.run.config.seed, "ks"))
        # Only the distances to the one retrained model that answers are compared with: the others share models.
        distances = yardstick.distances[: len(retrained) - 1].tolist()
        interval = f"[{found.distance.low:.3f}, {found.distance.high:.3f}]"
        return Measure(
            name="ks/distance",
            value=found.distance.value,
            retrain=float(np.mean(distances)),
            before=before.distance.value,
            band=prediction_band(distances, at_most=True, resolution=1 / found.counts[0]),
            note=f"{interval}, p {found.p_value:.2g} with n = {found.counts[0]}",
        )

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

    def _costs(self) -> Costs:
        """What the answer and retraining cost, their ratios, and what retraining gives for a share of its cost."""
        ours, theirs = (stored.record().metrics for stored in (self.stored, self.reference))
        matched = {}
        for share in SHARES:
            found = self._recalls(Params.load(self.plan.retrain_path(1, share)))
            matched[f"{share:.0%}"] = {part: result["recall@1"].mean for part, result in found.items()}
        return Costs(
            totals=prices(ours, theirs, training_flops(self.world)),
            phases=phase_seconds(ours),
            compute_matched_retrain=matched,
        )

    def _caveats(
        self, attacker: Attacker, reads: Mapping[str, Readings], measures: tuple[Measure, ...]
    ) -> Iterator[str]:
        """What a careful reader must know before believing the numbers."""
        candidates, odds = self.subjects.candidates, {name: read["log_odds"] for name, read in reads.items()}
        members, others = int(candidates.member.sum()), int((~candidates.member).sum())
        yield sample_caveat(candidates)
        yield from band_caveats(1 + self.config.retrains, measures)
        yield settings_caveat(self.method)
        shown = (stored.record().metrics["cost/pairs_trained"] for stored in (self.stored, self.reference))
        yield exposure_caveat(self._shown_in_training(), *shown)
        yield from threshold_caveats(self.config.fpr, len(attacker.nonmember_scores("lira-online/log_odds")), others)
        scores = attacker.score("lira-online/log_odds", *self.subjects.split(reads["trained"]))
        gap = float(np.abs(odds["trained"] - odds["retrain"])[:members].mean())
        yield from pair_caveats(near_duplicates(self.nearest), gap, int(np.isnan(scores).sum()))

    def _shown_in_training(self) -> int:
        """How often retained pairs were shown to the trained model, all showings together."""
        retained = {shard.client: int((~forget_mask(self.request, shard)).sum()) for shard in self.world.shards}
        training = self.run.config.training
        columns = self.trained.history.columns(training.rounds)
        return training.local_epochs * sum(retained[client] for _, client in columns)


def _came_back(taught: str, curves: Mapping[str, Curve], band: Band | None) -> Measure:
    shares = {name: curves[name].share_back for name in ("unlearned", "retrain")}
    return Measure(
        name=f"relearn/{taught}/share", value=shares["unlearned"], retrain=shares["retrain"], before=None, band=band
    )


def current_audit(stored: StoredAnswer) -> AuditRecord | None:
    """The audit kept beside an answer, unless the model has changed since."""
    if not stored.audit_path.is_file():
        return None
    found = read_record(AuditRecord, stored.audit_path)
    return found if found.model_sha256 == sha256(stored.model_path) else None
