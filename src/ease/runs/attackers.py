"""The attackers of a run: shadow models trained, unlearned, measured and kept, here or in other processes."""

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ease.audit.attacks import Attacker, Readings
from ease.audit.shadows import (
    Candidates,
    ShadowHistory,
    choose_candidates,
    shadow_request,
    shadow_shards,
    train_federations,
    unlearn_shadow,
)
from ease.audit.statistic import STATISTICS, Gauge
from ease.data.partition import Shard
from ease.errors import UserError
from ease.methods.base import Order, Trained, Unlearner
from ease.params import Params
from ease.requests.request import Request, forget_mask, without
from ease.runs.answers import open_world, trained_of
from ease.runs.config import RunConfig
from ease.runs.evaluation import evaluation_sets
from ease.runs.resolve import named_ids
from ease.runs.run import Run
from ease.runs.world import World
from ease.seeding import generator, stream_seed
from ease.storage import LEFTOVER, digest, read_tensors, remove_leftovers, sha256, write_tensors

FORMAT = 2
"""Of the stored shadows; raise it when the same settings give other numbers."""
SHARES = (0.25, 0.5, 0.75)
"""Where the compute-matched retrainings stop."""
SHADOWS_AT_ONCE = 8
"""Shadows whose histories lie on the disk at the same time, for each worker."""


@dataclass(frozen=True)
class Plan:
    """Everything that decides the bytes of a shadow, and where the shadows are kept."""

    config: RunConfig
    request: Request
    method: Unlearner | None
    """What the shadows go through after their training; None: nothing, they are left as trained."""
    gone: tuple[Request, ...]
    """Requests that were closed before: their pairs are in no shadow."""
    start_sha256: str
    data: str
    """Fingerprint of the pairs."""
    pool: int
    folder: Path
    """Of the run."""

    @property
    def key(self) -> str:
        """Hash of all of it: another model, data set, request, method or pool never meets these files."""
        parts = [part and part.model_dump(mode="json") for part in (self.config, self.request, self.method, *self.gone)]
        return digest(FORMAT, self.start_sha256, self.data, self.pool, *parts)

    @property
    def store(self) -> Path:
        return self.folder / "shadows" / self.key

    def shadow_path(self, shadow: int) -> Path:
        return self.store / f"shadow-{shadow:04d}.safetensors"

    def retrain_path(self, order: int, share: float = 1.0) -> Path:
        return self.store / f"retrain-{order}-{share:.0%}.safetensors".replace("%", "")


Share = tuple[Plan, Sequence[int], Sequence[int]]
"""What one process makes: some shadows and some retraining orders of a plan."""


@dataclass(frozen=True)
class Subjects:
    """Which pairs an audit looks at."""

    candidates: Candidates
    population: np.ndarray
    """Further pairs that no model saw, of any class."""
    pool: np.ndarray

    @classmethod
    def of(cls, world: World, request: Request, pool: int) -> "Subjects":
        """Split the pairs of no client into the pool, the matched non-members and the rest."""
        named = len(named_ids(world.server.membership, request))
        there = sum(int(forget_mask(request, shard).sum()) for shard in world.evaluator.shards)
        if there < named:
            raise UserError(
                f"{named - there} of the {named} photographs of this request have vanished: what a model holds of "
                "them cannot be measured any more; audit a request before its data are deleted"
            )
        spare = np.concatenate([world.evaluator.spare, world.evaluator.test])
        if len(spare) < pool + 2:
            raise UserError(
                f"the audit's pool of {pool} pairs and its non-members come from validation and test pairs, and there "
                f"are {len(spare)}: lower --pool or add pairs"
            )
        order = generator(world.config.seed, "audit pool").permutation(spare)
        rest = np.sort(order[pool:])
        shards, others = _comparable(world, request, rest)
        candidates = choose_candidates(
            shards,
            request,
            others,
            world.evaluator.classes_of(others),
            world.evaluator.pairs.ids,
            world.config.seed,
        )
        return cls(candidates, np.setdiff1d(rest, candidates.positions), np.sort(order[:pool]))

    @property
    def positions(self) -> np.ndarray:
        return np.concatenate([self.candidates.positions, self.population])

    def split(self, read: Readings) -> tuple[Readings, Readings]:
        """Readings of the candidates, and of the population."""
        count = len(self.candidates)
        return {k: v[:count] for k, v in read.items()}, {k: v[count:] for k, v in read.items()}


def _comparable(world: World, request: Request, unseen: np.ndarray) -> tuple[Sequence[Shard], np.ndarray]:
    """Whose membership can be tested, and the pairs of no client to compare with: data with data, canaries with
    canaries, since a mismatched pair is told from others at a glance."""
    canaries = world.evaluator.canaries
    if not len(canaries):
        return world.shards, unseen
    if np.isin(evaluation_sets(world, request)["forget"], canaries).all():
        return world.shards, np.setdiff1d(canaries, np.concatenate([shard.train for shard in world.evaluator.shards]))
    return [shard.keep(~np.isin(shard.train, canaries)) for shard in world.shards], unseen


def plan_of(run: Run, world: World, request: Request, method: Unlearner | None, pool: int) -> Plan:
    trained = trained_of(run, request)
    trained.history.verify_state(0)
    start = sha256(trained.history.initial_path)
    config = run.config.model_copy(update={"training": trained.training})
    return Plan(config, request, method, trained.gone, start, world.evaluator.pairs.fingerprint, pool, run.folder)


def gauge_of(world: World, subjects: Subjects) -> Gauge:
    seen = world.evaluator
    return Gauge(seen.model, seen.activations, subjects.pool, world.config.model.temperature, seen.device)


def remove_scratch(plan: Plan) -> None:
    """Delete what a killed process left behind, the clients' updates above all."""
    for scratch in plan.store.glob(f"{LEFTOVER}*/"):
        shutil.rmtree(scratch)
    remove_leftovers(plan.store)


def make_shadows(
    plan: Plan, world: World, subjects: Subjects, shadows: Sequence[int], orders: Sequence[int]
) -> Iterator[int]:
    """Train the named shadows and retrainings together, unlearn, measure and store; yields ticks."""
    for first in range(0, max(len(shadows), 1), SHADOWS_AT_ONCE):
        some = shadows[first : first + SHADOWS_AT_ONCE]
        yield from _make_group(plan, world, subjects, some, orders if first == 0 else ())


def _make_group(
    plan: Plan, world: World, subjects: Subjects, shadows: Sequence[int], orders: Sequence[int]
) -> Iterator[int]:
    config, start, seen = plan.config, world.server.initial(), world.evaluator
    included = [subjects.candidates.included(shadow, config.seed) for shadow in shadows]
    federations = [shadow_shards(world.shards, plan.request, subjects.candidates, inside) for inside in included]
    federations += [without(world.shards, [plan.request])] * len(orders)
    streams = [f"shadow-{shadow}" for shadow in shadows] + [f"retrain-{order}" for order in orders]
    if not federations:
        return
    stops = {share: max(1, round(share * config.training.rounds)) for share in (*SHARES, 1.0)}
    gauge = gauge_of(world, subjects)
    plan.store.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=LEFTOVER, dir=plan.store) as scratch:
        keep = plan.method is not None and "history" in plan.method.needs
        histories = [ShadowHistory.begin(Path(scratch) / str(n), start, keep) for n in shadows]
        for rounds in train_federations(
            seen.model,
            seen.activations,
            seen.device,
            federations,
            streams,
            start,
            config.training,
            config.seed,
            config.model.temperature,
        ):
            for history, finished in zip(histories, rounds, strict=False):  # retrainings keep none
                history.append(finished)
            for order, finished in zip(orders, rounds[len(shadows) :], strict=True):
                for share, last in stops.items():
                    if finished.number == last:
                        finished.state.save(plan.retrain_path(order, share))
            yield len(federations)
        for shadow, shards, inside, history in zip(shadows, federations, included, histories, strict=False):
            # Its own random numbers: with the target's, a method that starts afresh would end in the target itself.
            seed = stream_seed(config.seed, "shadow", shadow)
            recipe = (config.training, config.model.temperature, seed, Order(config.seed, f"shadow-{shadow}"))
            trained = Trained(history.history, *recipe)
            phases = {"trained": trained.final}
            if plan.method is not None:
                request = shadow_request(plan.request, subjects.candidates, inside)
                world_of = (seen.model, seen.activations, seen.device)
                phases["unlearned"] = unlearn_shadow(*world_of, shards, trained, request, plan.method)
            stored = {
                f"{phase}/{name}": torch.from_numpy(values)
                for phase, params in phases.items()
                for name, values in gauge.read(params, subjects.positions).items()
            }
            write_shadow(plan.shadow_path(shadow), stored)
            yield 1


def write_shadow(path: Path, values: dict[str, torch.Tensor]) -> None:
    write_tensors(path, values)


def read_shadow(path: Path) -> dict[str, torch.Tensor]:
    """A shadow's stored statistics; a flipped bit would bend every attack and be seen by nobody."""
    try:
        return read_tensors(path)
    except UserError as error:
        raise UserError(f"{path}: this stored shadow is damaged; delete it and run the same command again") from error


def train_share(share: Share) -> Iterator[str]:
    """A process's part of the work, for `spread`."""
    plan, shadows, orders = share
    world = open_world(Run.load(plan.folder), plan.request)
    subjects = Subjects.of(world, plan.request, plan.pool)
    yield from map(str, make_shadows(plan, world, subjects, shadows, orders))


def attacker_of(plan: Plan, subjects: Subjects, shadows: int, fpr: float) -> Attacker:
    """The stored shadows' statistics as the attacks take them."""
    stored = [read_shadow(plan.shadow_path(number)) for number in range(shadows)]

    def table(phase: str) -> tuple[Readings, Readings]:
        if f"{phase}/{STATISTICS[0]}" not in stored[0]:
            return {}, {}
        columns = {n: np.stack([tensors[f"{phase}/{n}"].numpy() for tensors in stored], 1) for n in STATISTICS}
        return subjects.split(columns)

    trained, population = table("trained")
    included = np.stack([subjects.candidates.included(n, plan.config.seed) for n in range(shadows)], axis=1)
    return Attacker(trained, table("unlearned")[0], included, subjects.candidates.member, population, fpr)


@dataclass(frozen=True)
class QuickAttackers:
    """Attacks by a few shadows that were never unlearned: enough to compare many answers to one request."""

    subjects: Subjects
    gauge: Gauge
    attacker: Attacker

    def share_called_member(self, state: Params) -> float:
        """Share of the forget pairs that the shadow classifier calls members."""
        return self.attacker.called_member(self._read(state)[0]).value

    def auc(self, state: Params) -> float:
        """AUC of offline LiRA."""
        return self.attacker.judge("lira-offline/log_odds", *self._read(state)).auc.value

    def _read(self, state: Params) -> tuple[Readings, Readings]:
        return self.subjects.split(self.gauge.read(state, self.subjects.positions))


def quick_attackers(run: Run, world: World, request: Request, shadows: int = 4, pool: int = 512) -> QuickAttackers:
    """Train the shadows once for each run and request; they are kept in the run."""
    spare = len(world.evaluator.spare) + len(world.evaluator.test)
    plan = plan_of(run, world, request, None, min(pool, spare // 2))
    subjects = Subjects.of(world, request, plan.pool)
    missing = [number for number in range(shadows) if not plan.shadow_path(number).is_file()]
    remove_scratch(plan)
    for _ in make_shadows(plan, world, subjects, missing, ()):
        pass
    return QuickAttackers(subjects, gauge_of(world, subjects), attacker_of(plan, subjects, shadows, 0.01))
