"""Run audits: train shadows, measure, judge and write the record."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from ease.audit.at_sites import NOT_TESTED_THERE, AtSites, instruments_for, retrain_at_sites
from ease.audit.attacks import Attacker
from ease.audit.caveats import (
    NO_ATTACKS,
    NOT_TESTED,
    band_caveat,
    exposure_caveat,
    pair_caveats,
    sample_caveat,
    settings_caveat,
    threshold_caveats,
)
from ease.audit.config import AuditConfig
from ease.audit.costs import phase_seconds, prices, training_flops
from ease.audit.few_pairs import OneByOne
from ease.audit.measurements import Instruments, Measured
from ease.audit.preflight import check_sites, fitted_pool
from ease.audit.records import AuditRecord, Costs
from ease.audit.shadow_runs import SHARES, ShadowPlan, attacker_of, make_shadows, plan_of, remove_scratch, train_share
from ease.audit.subjects import Subjects
from ease.errors import UserError
from ease.federation.middleware import Guarded
from ease.federation.protocol import Engine
from ease.measures.nearest import near_duplicates
from ease.measures.ranks import FEW
from ease.methods.base import Trained, Unlearner
from ease.methods.retrain import Retrain
from ease.params import Params
from ease.requests.request import Request, held_without, named_in
from ease.runs.answers import StoredAnswer, answer_of, find_answer, trained_of
from ease.runs.records import write_record
from ease.runs.run import Run, check_answer_file
from ease.runs.workers import default_processes, spread
from ease.runs.world import World
from ease.storage import remove_leftovers

WORKER_BYTES = 4 * 2**30
"""Room on a GPU for one process that trains shadows of a small model."""


@dataclass(frozen=True)
class Audit:
    """The audit of one result: first the shadows, which are stored, then the verdict."""

    run: Run
    world: World
    stored: StoredAnswer
    request: Request
    method: Unlearner
    config: AuditConfig

    @classmethod
    def of(cls, run: Run, world: World, name: str, config: AuditConfig) -> "Audit":
        """The audit of the finished result `REQUEST` or `REQUEST/METHOD`; retraining must be finished too."""
        stored, request, method = find_answer(run, name)
        check_audited(name, method)
        audit = cls(run, world, stored, request, method, config)
        check_answer_file(stored.record(), stored.model_path)  # before the long work begins
        if not audit.reference.done:
            raise UserError(
                f"{audit.reference.folder}: retraining for this request is missing, and nothing can be judged without "
                "it; add --retrain to run it now, or run `ease forget` with --method retrain"
            )
        check_answer_file(audit.reference.record(), audit.reference.model_path)
        return audit

    @property
    def reference(self) -> StoredAnswer:
        return answer_of(self.run, self.request, Retrain())

    @cached_property
    def trained(self) -> Trained:
        return trained_of(self.run, self.request)

    @cached_property
    def pool(self) -> int:
        """Number of pairs that every statistic is measured against."""
        return fitted_pool(self.world, self.request, self.config.pool)

    @cached_property
    def plan(self) -> ShadowPlan:
        return plan_of(self.run, self.world, self.request, self.method, self.pool)

    @cached_property
    def subjects(self) -> Subjects:
        return Subjects.of(self.world, self.request, self.pool)

    # The long part

    @property
    def on_site(self) -> bool:
        """Whether pairs stay at their sites, where nodes retrain and measure."""
        return self.world.config.partition.on_site

    @property
    def why_no_attack(self) -> str:
        """Why there are no shadow attacks; empty if there are."""
        if self.on_site:
            return "the clients' pairs stay at their sites"
        return self.subjects.candidates.why_no_attack()

    @property
    def attackable(self) -> int:
        """Number of shadows; none without attacks."""
        return 0 if self.why_no_attack else self.config.shadows

    def missing(self) -> tuple[list[int], list[int]]:
        """Shadows and retraining orders that are not stored yet."""
        return AuditBatch((self,)).missing()

    def ticks_left(self) -> int:
        """Number of ticks that `shadows` will yield."""
        return AuditBatch((self,)).ticks_left()

    def shadows(self) -> Iterator[int]:
        """Train, unlearn and store what is missing; yields ticks as they happen."""
        return AuditBatch((self,)).shadows()

    @property
    def workers(self) -> int:
        if self.config.workers is not None:
            return self.config.workers
        server, cores = self.world.server, default_processes("cpu")
        if server.device.type != "cpu" and server.model.passes_are_short:
            room = torch.cuda.mem_get_info(server.device)[0] // WORKER_BYTES
            return max(1, min(8, cores // 2, room))  # the host bounds them, and the device has time for several
        return min(4, default_processes(server.device.type))

    # The verdict

    def judge(self) -> AuditRecord:
        """Measure and judge the result and write `audit.json` beside it."""
        found = self.instruments.measure(self.stored.model())
        record = AuditRecord(
            request=self.request,
            method=self.method.model_dump(mode="json"),
            model_sha256=self.stored.model_sha256,
            retrain_sha256=self.reference.model_sha256,
            settings=self.config.model_copy(update={"workers": None, "pool": self.pool}),
            verdict=found.verdict,
            gallery=self.instruments.gallery(),
            attack=found.attack,
            attacks=found.attacks,
            relearning=found.relearning,
            similarities={
                name: tuple(round(value, 5) for value in found.similar[name].tolist())
                for name in ("trained", "unlearned", "retrain")
            },
            pairs=found.pairs,
            relative=found.relative,
            strata=found.strata,
            neighbours=found.neighbours,
            costs=self._costs(),
            warnings=tuple(self._caveats(found)),
            not_tested=(*self._gaps(), *NOT_TESTED),
        )
        write_record(self.stored.audit_path, record)
        return record

    def _gaps(self) -> tuple[str, ...]:
        """What this audit could not test."""
        if self.on_site:
            return NOT_TESTED_THERE
        return () if self.attacker else (NO_ATTACKS,)

    @cached_property
    def instruments(self) -> Instruments | AtSites:
        if self.on_site:
            sound = Guarded(self.engine, self.trained.training, everyone=True)
            there = instruments_for(self.world, self.request)
            return there(self.world, self.request, self.trained, self.retrained, sound, self.config)
        kind = OneByOne if self.subjects.candidates.members < FEW else Instruments
        return kind(self.world, self.request, self.trained, self.retrained, self.subjects, self.attacker, self.config)

    @property
    def engine(self) -> Engine:
        """The clients themselves."""
        return self.run.hosted(self.world).federation

    @cached_property
    def attacker(self) -> Attacker | None:
        if self.why_no_attack:
            return None
        return attacker_of(self.plan, self.subjects, self.config.shadows, self.config.fpr)

    def lend(self, other: "Audit") -> None:
        """Share the readings of retrained models with an audit of another result."""
        mine = self.instruments
        other.__dict__["instruments"] = mine if isinstance(mine, AtSites) else mine.with_attacker(other.attacker)

    @cached_property
    def retrained(self) -> dict[str, Params]:
        """The retrained models: the reference and those in other orders of the data."""
        orders = range(1, self.config.retrains + 1)
        further = {f"retrain-{order}": Params.load(self.plan.retrain_path(order)) for order in orders}
        return {"retrain": self.reference.model(), **further}

    def _costs(self) -> Costs:
        """Costs of the result and of retraining, and recalls of retraining stopped early."""
        record = self.stored.record()
        ours, theirs = record.metrics, self.reference.record().metrics
        matched = {}
        for share in SHARES:
            found = self.instruments.recalls_of(Params.load(self.plan.retrain_path(1, share)))
            matched[f"{share:.0%}"] = {part: result["recall@1"].mean for part, result in found.items()}
        return Costs(
            totals=prices(ours, theirs, training_flops(self.world)),
            phases=phase_seconds(ours),
            compute_matched_retrain=matched,
            training_rounds=self.trained.training.rounds,
            replayed_rounds=record.contribution.replayed_rounds if record.contribution else 0,
        )

    def _caveats(self, found: Measured) -> Iterator[str]:
        """Caveats in sentences."""
        missing = self.why_no_attack
        yield f"no attacks were made: {missing}" if missing else sample_caveat(self.subjects.candidates)
        yield band_caveat(len(self.retrained), found.measures)
        yield settings_caveat(self.method)
        shown = (stored.record().metrics["cost/pairs_trained"] for stored in (self.stored, self.reference))
        yield exposure_caveat(self._shown_in_training(), *shown)
        unscored = 0
        if self.attacker is not None:
            outside = len(self.attacker.nonmember_scores("lira-online/log_odds"))
            yield from threshold_caveats(self.config.fpr, outside, self.subjects.candidates.others)
            scores = self.attacker.score("lira-online/log_odds", *self.subjects.split(found.reads["trained"]))
            unscored = int(np.isnan(scores).sum())
        members = len(found.similar["trained"])
        held = {name: found.reads[name]["log_odds"][:members] for name in ("trained", "retrain")}
        gap = float(np.abs(held["trained"] - held["retrain"]).mean())
        copies = 0 if isinstance(self.instruments, AtSites) else near_duplicates(self.instruments.nearest)
        yield from pair_caveats(copies, gap, unscored)

    def _shown_in_training(self) -> int:
        """Number of times that retained pairs were shown to the trained model, in total."""
        closed = (*self.world.gone, self.request)
        left = held_without(self.world.server.membership.clients, closed)
        training = self.trained.training
        columns = self.trained.history.columns(training.rounds)
        # Clients that left before are in the history, and retain nothing.
        return training.local_epochs * sum(len(left.get(client, ())) for _, client in columns)


@dataclass(frozen=True)
class AuditBatch:
    """Audits of several results of one request, which share their trained shadows."""

    audits: tuple[Audit, ...]

    @property
    def first(self) -> Audit:
        return self.audits[0]

    @cached_property
    def plan(self) -> ShadowPlan:
        return replace(self.first.plan, other_methods=tuple(audit.method for audit in self.audits[1:]))

    def missing(self) -> tuple[list[int], list[int]]:
        """Shadows that some method lacks, and missing retraining orders."""
        return self.plan.missing_shadows(self.first.attackable), self.plan.missing_orders(self.first.config.retrains)

    def ticks_left(self) -> int:
        return self.plan.ticks(*self.missing())

    def processes(self) -> int:
        """Number of worker processes."""
        shadows, orders = self.missing()
        if self.first.on_site:
            return 1
        return min(self.first.workers, max(1, len(shadows) // 2 + len(orders)))

    def shadows(self) -> Iterator[int]:
        """Train, unlearn and store what is missing; yields ticks as they happen."""
        remove_scratch(self.plan)
        for audit in self.audits:
            remove_leftovers(audit.stored.folder)
        (shadows, orders), workers = self.missing(), self.processes()
        if self.first.on_site:
            yield from retrain_at_sites(self.plan, self.first.trained, self.first.engine, orders)
            return
        if workers == 1:
            yield from make_shadows(self.plan, self.first.world, self.first.subjects, shadows, orders)
            return
        passes = self.plan.passes(shadows, orders, workers)
        self.plan.begin(passes)
        yield from map(int, spread(train_share, [(self.plan, *each) for each in passes], workers))
        self.plan.end()

    def judge(self) -> Iterator[AuditRecord]:
        """Judge all audits in order."""
        for place, audit in enumerate(self.audits):
            if place:
                self.first.lend(audit)
            yield audit.judge()


def check_audited(name: str, method: Unlearner) -> None:
    """Refuse to audit the reference itself."""
    if isinstance(method, Retrain) and method.share == 1:
        raise UserError(f"{name}: retraining is what others are measured against; audit another method's answer")


def check_possible(run: Run, world: World, request: Request, config: AuditConfig) -> None:
    """Refuse impossible audits: too few pairs, too large a pool, or pairs that nobody can measure any more."""
    if not named_in(request, world.server.membership.clients):
        raise UserError("no model was trained on what the request names, so that there is nothing to audit")
    if world.config.partition.on_site:
        check_sites(world, request, request in run.head.gone)
    else:
        Subjects.of(world, request, fitted_pool(world, request, config.pool))
