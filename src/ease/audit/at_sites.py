"""Audit of pairs that stay at their sites: nodes retrain and report measurements of their own pairs.

There are no shadows, because half of them would train on pairs of others. The verdict is the same test over fewer
measures, and reports how small a trace it would have found.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch

from ease.audit.attack_suite import MOST_RETAINED, Records, attack_record, auc_measure
from ease.audit.attacks import AttackResult
from ease.audit.config import AuditConfig
from ease.audit.few_pairs import RECALLS, OneByOne, standing_measures
from ease.audit.measurements import Measured, References, alignment, distribution, retrieval, shown
from ease.audit.membership import auc
from ease.audit.preflight import holdings_now
from ease.audit.records import Gallery, PairRecord
from ease.audit.relative import relative_test
from ease.audit.retained import beyond_unseen
from ease.audit.shadow_runs import SHARES, ShadowPlan
from ease.audit.site_measures import AUDIT, FEWEST_UNSEEN, KINDS, MOST_UNSEEN, NUMBERS, RETAINED
from ease.audit.strata import strata, stratified
from ease.audit.verdict import Measure, Verdict, judged_together
from ease.data.membership import Holding
from ease.errors import UserError
from ease.federation.middleware import Guarded
from ease.federation.protocol import Engine, Federation, LocalJob
from ease.measures.evaluate import common_size
from ease.measures.ranks import FEW, Standing
from ease.measures.retrieval import GalleryRecall, chance_recall
from ease.methods.base import Trained
from ease.methods.retrain import Retrain
from ease.params import Params
from ease.requests.request import Request, forget_mask, validation_mask
from ease.runs.evaluation import evaluation_sets, recalls_of
from ease.runs.world import World
from ease.seeding import generator

AMONG = "pairs that its own client holds out"
NOT_TESTED_THERE = (
    "membership attacks by shadows, and relearning: they need the clients' pairs in one place",
    "whether sites report their own pairs truthfully: numbers that no model gives are refused, others are believed",
)
JUDGED = {"forget": "held-out/auc", "retain": "retained/auc"}
"""Kind of pairs that an attack separates from held-out ones -> the measure."""


def retrain_at_sites(plan: ShadowPlan, trained: Trained, engine: Engine, orders: Sequence[int]) -> Iterator[int]:
    """Retrain at the nodes in other orders of the data and store the models; yields ticks.

    All clients take part in every round: a retraining that lacks one is none of this federation. Their answers are
    kept until a retraining is whole, so that an interrupted one can resume.
    """
    rounds = trained.training.rounds
    stops = {share: max(1, round(share * rounds)) for share in (*SHARES, 1.0)}
    for order in orders:
        journal = plan.store / f"journal-{order}"
        sound = Guarded(engine, trained.training, journal, plan.key, everyone=True)
        for number, step in enumerate(Retrain(order=order).unlearn(trained, plan.request, sound), 1):
            for share, last in stops.items():
                if number == last:
                    step.state.save(plan.retrain_path(order, share))
            yield 1
        shutil.rmtree(journal, ignore_errors=True)


ClientReadings = Mapping[int, Mapping[str, np.ndarray]]
"""Client -> `KIND/NUMBER` -> values [pairs]."""


@dataclass(frozen=True)
class SiteReadings:
    """The readings of one model: by clients on their pairs, and by the server on test pairs."""

    readings: ClientReadings
    recalls: Mapping[str, GalleryRecall]

    def all(self, kind: str, name: str) -> np.ndarray:
        """One statistic of all pairs of a kind, client after client."""
        return np.concatenate([values[f"{kind}/{name}"] for _, values in sorted(self.readings.items())])

    def standing(self, kind: str) -> Standing:
        return Standing(self.all(kind, "rank"), self.all(kind, "margin"))


def _job(world: World, request: Request, retained: int) -> LocalJob:
    """The measuring job, with at most `retained` retained pairs per client."""
    config = world.config
    return config.training.job(
        0,
        config.seed,
        config.model.temperature,
        "audit",
        request=request,
        objective=AUDIT,
        settings={RETAINED: float(retained)},
    )


def _able(world: World) -> dict[int, Holding]:
    """Clients with enough held-out pairs to measure."""
    return {each.client: each for each in holdings_now(world) if len(each.validation_ids) >= FEWEST_UNSEEN}


def retained_recalls(
    world: World, request: Request, states: Sequence[Params], federation: Federation
) -> tuple[float | None, ...]:
    """Recall@1 of retained pairs in percent under some states, measured by clients among their held-out pairs.

    None if no client can measure any.
    """
    able = sorted(_able(world))
    if not able:
        return (None,) * len(states)
    job = _job(world, request, max(1, MOST_RETAINED // len(able)))
    found = list[float | None]()
    for state in states:
        ranks = [answer.values["retain/rank"] for answer in federation.run(state, job, able) if answer.values]
        readings = torch.cat(ranks) if ranks else torch.zeros(0)
        found.append(100 * float((readings < 1.5).double().mean()) if len(readings) else None)
    return tuple(found)


@dataclass(frozen=True)
class AtSites(References):
    """Instruments for a result whose pairs only the nodes can read."""

    federation: Federation
    """One that everybody answers."""
    config: AuditConfig
    few: ClassVar[bool] = False
    """Whether pairs are looked at one by one."""

    def measure(self, answer: Params) -> Measured:
        """Measure an answer beside the trained, the retrained and the planted models."""
        looks = {**self._known, "unlearned": self._look(answer)}
        odds = {name: look.all("forget", "log_odds") for name, look in looks.items()}
        similar = {name: torch.from_numpy(look.all("forget", "cosine")) for name, look in looks.items()}
        recalls = retrieval({name: look.recalls for name, look in looks.items()}, self._sets)
        held, apart = self._held(looks, odds), [self._attacked(kind, looks) for kind in JUDGED]
        measures = [*held, *(each for each in recalls if not self.few or each.name in RECALLS)]
        if not self.few:
            seed = self.world.config.seed
            measures += [alignment(similar), distribution(odds, seed), *(each for found, _ in apart for each in found)]
        rng = generator(self.world.config.seed, "joint")
        joint = judged_together(measures, rng, self.config.level)
        attacks = {name: shown(found) for _, records in apart for name, found in records.items()}
        return Measured(
            tuple(measures),
            Verdict(measures=tuple(measures), joint=joint, level=self.config.level),
            JUDGED["forget"] if JUDGED["forget"] in attacks else "",
            attacks,
            {},
            similar,
            {name: {"log_odds": each} for name, each in odds.items()},
            self._pairs(shown(looks)) if self.few else (),
            relative_test(odds),
            () if self.few else stratified(odds, self._strata),
        )

    @cached_property
    def _strata(self) -> dict[str, np.ndarray]:
        return strata(self.world.server.membership.clients, [pair_id for _, pair_id in self._named])

    @cached_property
    def _named(self) -> list[tuple[Holding, str]]:
        """Forget pairs in the order in which sites report them."""
        return [
            (holding, pair_id)
            for _, holding in sorted(self._asked.items())
            for pair_id, named in zip(holding.train_ids, forget_mask(self.request, holding), strict=True)
            if named
        ]

    def gallery(self) -> Gallery:
        """The gallery of the test pairs, whose recall the server measures."""
        size = common_size(self._sets, self.world.config.gallery)
        chance = chance_recall(size, len(self.world.evaluator.pairs.captions[0]))
        return Gallery(pairs=size, chance={f"recall@{k}": level for k, level in chance.items()}, among=AMONG)

    def recalls_of(self, state: Params) -> dict[str, GalleryRecall]:
        return recalls_of(self.world, state, self._sets, draws=3)

    # Asking

    @cached_property
    def _known(self) -> dict[str, SiteReadings]:
        """Readings of the models that every result is compared with, taken once."""
        return {name: self._look(state) for name, state in self._models.items()}

    @cached_property
    def _at_start(self) -> SiteReadings:
        """Readings of the start state: how hard pairs are before training."""
        return self._look(self.trained.initial)

    def _look(self, state: Params) -> SiteReadings:
        job = _job(self.world, self.request, self._retained)
        readings = {
            answer.client: {name: values.double().numpy() for name, values in answer.values.items()}
            for answer in self.federation.run(state, job, sorted(self._counts))
        }
        for client, counts in self._counts.items():
            for kind in KINDS:
                for name in NUMBERS:
                    count = len(readings[client][f"{kind}/{name}"])
                    if count != counts[kind]:
                        raise UserError(
                            f"client {client}: reports {count} {kind} pairs, and the run knows of {counts[kind]}; "
                            "give its node the run's data"
                        )
        return SiteReadings(readings, self.recalls_of(state))

    @cached_property
    def _asked(self) -> dict[int, Holding]:
        """Clients with enough held-out pairs to measure."""
        return _able(self.world)

    @property
    def _retained(self) -> int:
        """Largest number of retained pairs that each client measures."""
        return max(1, MOST_RETAINED // len(self._asked))

    @cached_property
    def _counts(self) -> dict[int, dict[str, int]]:
        """Client -> kind -> number of pairs to report."""
        found = {}
        for client, holding in self._asked.items():
            named, alike = forget_mask(self.request, holding), validation_mask(self.request, holding)
            found[client] = {
                "forget": int(named.sum()),
                "held_out": min(int(alike.sum()), MOST_UNSEEN),
                "retain": min(int((~named).sum()), self._retained),
                "unseen": min(int((~alike).sum()), MOST_UNSEEN),
            }
        return found

    @cached_property
    def _sets(self) -> dict[str, np.ndarray]:
        return {"test": evaluation_sets(self.world, self.request)["test"]}

    # Measures

    def _held(self, looks: Mapping[str, SiteReadings], odds: Mapping[str, np.ndarray]) -> list[Measure]:
        """Mean ranks of forget and retained pairs in their galleries."""
        largest = 1 + max(min(len(each.validation_ids), MOST_UNSEEN) for each in self._asked.values())
        standings = {name: look.standing("forget") for name, look in looks.items()}
        temperature = self.world.config.model.temperature
        found = standing_measures(standings, odds, largest, 1, temperature)  # against the mean of a pool
        stayed = {name: look.standing("retain").rank for name, look in looks.items()}
        count = len(stayed["unlearned"])
        if count:
            ranks = {name: float(np.log2(each).mean()) for name, each in stayed.items()}
            note = f"{count} retained pairs, each among what its client holds out"
            found.append(Measure.of("retained/rank", ranks, 0.5 / count, note, (0, float(np.log2(largest)))))
        return found

    def _attacked(self, kind: str, looks: Mapping[str, SiteReadings]) -> tuple[list[Measure], Records]:
        """AUC of pairs of a kind against similar held-out pairs of the same client."""
        start, judged, name = self._at_start.readings, {}, JUDGED[kind]
        like = {client: self._like(kind, counts) for client, counts in self._counts.items()}
        able = [
            client
            for client, counts in self._counts.items()
            if counts[kind] and like[client] and counts[like[client]] > 1
        ]
        members = sum(self._counts[client][kind] for client in able)
        others = sum(self._counts[client][like[client]] for client in able)
        if min(members, others) < 2:
            return [], {}
        for model, look in looks.items():
            scores = [
                beyond_unseen(
                    *(of[client][f"{each}/log_odds"] for each in (kind, like[client]) for of in (look.readings, start))
                )
                for client in able
            ]
            held, unseen = (np.concatenate(side) for side in zip(*scores, strict=True))
            judged[model] = AttackResult(auc(held, unseen), None, 0, np.concatenate([held, unseen]))
        note = f"{members} pairs against {others} that their own clients hold out"
        member = np.arange(members + others) < members
        records = {name: {model: attack_record(found, member) for model, found in judged.items()}}
        return [auc_measure(name, judged, 1 / members, note)], records

    @staticmethod
    def _like(kind: str, counts: Mapping[str, int]) -> str:
        """Which held-out pairs resemble a kind; for class requests retained pairs are of other classes."""
        return "held_out" if kind == "forget" or not counts["unseen"] else "unseen"

    def _pairs(self, looks: Mapping[str, SiteReadings]) -> tuple[PairRecord, ...]:
        """Records of a few pairs under each model."""
        numbers = {name: {each: look.all("forget", each) for each in NUMBERS} for name, look in looks.items()}

        def of(number: str, row: int) -> dict[str, float]:
            return {name: float(values[number][row]) for name, values in numbers.items()}

        return tuple(
            PairRecord(
                id=pair_id,
                gallery=1 + min(len(holding.validation_ids), MOST_UNSEEN),
                rank=of("rank", row),
                margin=of("margin", row),
                log_odds=of("log_odds", row),
            )
            for row, (holding, pair_id) in enumerate(self._named)
        )


@dataclass(frozen=True)
class FewAtSites(AtSites):
    """The instruments for few pairs, measured one by one."""

    few: ClassVar[bool] = True
    kept: ClassVar[tuple[float, ...]] = OneByOne.kept
    planted_into: ClassVar[int] = OneByOne.planted_into


def instruments_for(world: World, request: Request) -> type[AtSites]:
    """The instruments that suit a request: for few pairs or for many."""
    named = sum(int(forget_mask(request, holding).sum()) for holding in holdings_now(world))
    return FewAtSites if named < FEW else AtSites
