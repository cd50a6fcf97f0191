"""The attackers of a run: shadow models trained, unlearned, measured and kept, here or in other processes."""

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from ease.audit.attacks import Attacker
from ease.audit.shadows import (
    Ends,
    Shadow,
    on_all_cores,
    scratch_history,
    shadow_request,
    shadow_shards,
    train_federations,
    unlearn_shadows,
)
from ease.audit.statistic import STATISTICS, Gauge
from ease.audit.subjects import Readings, Subjects
from ease.data.partition import Shard
from ease.errors import UserError
from ease.federation.history import History
from ease.methods.base import Order, Trained, Unlearner
from ease.params import Params
from ease.requests.request import Request, without
from ease.runs.answers import open_world, trained_of
from ease.runs.config import RunConfig
from ease.runs.run import Run
from ease.runs.world import World
from ease.seeding import stream_seed
from ease.storage import (
    LEFTOVER,
    digest,
    read_json,
    read_tensors,
    remove_leftovers,
    write_json,
    write_tensors,
)

FORMAT = 4
"""Version of the stored shadows; raise it when the same settings give other numbers."""
SHARES = (0.25, 0.5, 0.75)
"""Shares of training at which the compute-matched retrainings stop."""
SHADOWS_AT_ONCE = 8
"""Shadows of one pass on a CPU: more do not make it faster."""
SCRATCH_BYTES = 5 * 10**9
"""Largest size of histories on the disk at the same time. It limits the number of shadows in one pass on a GPU."""
MOST_AT_ONCE = 64


Pass = tuple[tuple[int, ...], tuple[int, ...]]
"""Shadows and retraining orders that are trained together."""


@dataclass(frozen=True)
class ShadowPlan:
    """Everything that decides the bytes of retrainings and shadows, and where they are kept.

    What one request's audits have in common is stored once, whatever the method: retrainings, which know of no pool
    either, and the trained shadows with what was read of them. Readings after unlearning belong to each method.

    A method that reads the history cannot begin from a stored shadow, whose end alone is kept: the histories of a few
    shadows are larger than all else in a run. It has its shadows trained again, to the same models up to rounding,
    unless it is audited `beside` the others.
    """

    config: RunConfig
    request: Request
    method: Unlearner | None
    """Applied to the shadows after their training; None leaves them as trained."""
    gone: tuple[Request, ...]
    """Requests that were closed before: their pairs are in no shadow."""
    start_sha256: str
    data: str
    """Fingerprint of the pairs."""
    pool: int
    folder: Path
    """Clients that left the run earlier."""
    other_methods: tuple[Unlearner, ...] = ()
    """Further methods that are audited with it: the shadows go through each, from one training."""
    many: tuple[int, int] | None = None
    """Bytes of a state and number of clients, on a device that takes as many shadows in one pass as the disk does."""

    @property
    def each(self) -> tuple["ShadowPlan", ...]:
        """The plan of every method."""
        return tuple(replace(self, method=method, other_methods=()) for method in (self.method, *self.other_methods))

    @property
    def key(self) -> str:
        """Hash of what decides a retraining: another model, data set or request never meets these files."""
        parts = [part.model_dump(mode="json") for part in (self.config, self.request, *self.gone)]
        return digest(FORMAT, self.start_sha256, self.data, *parts)

    @property
    def store(self) -> Path:
        return self.folder / "shadows" / self.key

    @property
    def shadow_store(self) -> Path:
        """The pool decides which pairs are left to be shadows' members, and what is read of them."""
        return self.store / f"pool-{self.pool}"

    @property
    def unlearned_store(self) -> Path:
        assert self.method is not None  # without one nothing is unlearned
        return self.shadow_store / f"{self.method.name}-{digest(self.method.model_dump(mode='json'))[:16]}"

    def retrain_path(self, order: int, share: float = 1.0) -> Path:
        return self.store / f"retrain-{order}-{share:.0%}.safetensors".replace("%", "")

    def state_path(self, shadow: int) -> Path:
        """A shadow as it was trained."""
        return self.shadow_store / f"shadow-{shadow:04d}-state.safetensors"

    def shadow_path(self, shadow: int) -> Path:
        """Readings of a shadow after its training. It is written last and makes the shadow count."""
        return self.shadow_store / f"shadow-{shadow:04d}.safetensors"

    def unlearned_path(self, shadow: int) -> Path:
        """Readings of the shadow after unlearning."""
        return self.unlearned_store / f"shadow-{shadow:04d}.safetensors"

    # Work to do

    def untrained(self, shadow: int) -> bool:
        return not (self.shadow_path(shadow).is_file() and self.state_path(shadow).is_file())

    def not_unlearned(self, shadow: int) -> bool:
        """By its own method."""
        return self.method is not None and not self.unlearned_path(shadow).is_file()

    @property
    def reads_history(self) -> bool:
        return self.method is not None and "history" in self.method.needs

    def to_train(self, shadow: int) -> bool:
        """Whether a shadow has to be trained: it is not there, or its history is needed once more."""
        return self.untrained(shadow) or any(one.reads_history and one.not_unlearned(shadow) for one in self.each)

    def missing_shadows(self, count: int) -> list[int]:
        """Those of the first `count` of which something is missing."""
        return [n for n in range(count) if self.untrained(n) or any(one.not_unlearned(n) for one in self.each)]

    def missing_orders(self, count: int) -> list[int]:
        """Retrainings that are not whole, of the first `count`."""
        whole = (*SHARES, 1.0)
        orders = range(1, count + 1)
        return [n for n in orders if not all(self.retrain_path(n, share).is_file() for share in whole)]

    def ticks(self, shadows: Sequence[int], orders: Sequence[int]) -> int:
        """One for each round of each model that is trained, and one for each unlearning."""
        passes = self.passes(shadows, orders)
        trained = sum(len(some) + len(also) for some, also in passes if also or any(map(self.to_train, some)))
        return trained * self.config.training.rounds + sum(one.not_unlearned(n) for one in self.each for n in shadows)

    # Training in one pass

    @property
    def at_once(self) -> int:
        """Shadows of one pass; their histories are on the disk at the same time."""
        if self.many is None:
            return SHADOWS_AT_ONCE
        (state, clients), training = self.many, self.config.training
        methods = [one.method for one in self.each if one.method is not None and one.reads_history]
        read = [method.reads_updates_of(self.request, training, clients) for method in methods]
        kept = 1 + max((clients if some is None else len(some) for some in read), default=0)
        return max(SHADOWS_AT_ONCE, min(MOST_AT_ONCE, SCRATCH_BYTES // (state * training.rounds * kept)))

    @property
    def _passes_path(self) -> Path:
        return self.store / f"passes-{self.pool}.json"

    def passes(self, shadows: Sequence[int], orders: Sequence[int], workers: int = 1) -> list[Pass]:
        """Shadows and orders that are trained and unlearned together. A pass that was interrupted is done once more as
        it was: in other company the same model rounds otherwise."""
        stored = read_json(self._passes_path)["passes"] if self._passes_path.is_file() else []
        wanted, left = set(shadows), set(orders)
        begun = [(tuple(some), tuple(also)) for some, also in stored if wanted & {*some} or left & {*also}]
        known = {each for some, _ in begun for each in some}
        others = [each for each in orders if not any(each in also for _, also in begun)]
        missing = [each for each in shadows if each not in known]
        trained = [each for each in missing if self.to_train(each)]
        for worker in range(workers):
            mine, also = trained[worker::workers], others[worker::workers]
            for first in range(0, max(len(mine), 1), self.at_once):
                some = mine[first : first + self.at_once], also if first == 0 else []
                begun += [(tuple(some[0]), tuple(some[1]))] if any(some) else []
            ready = [each for each in missing if each not in trained][worker::workers]
            begun += [(tuple(ready[first : first + self.at_once]), ()) for first in range(0, len(ready), self.at_once)]
        return begun

    def begin(self, passes: Sequence[Pass]) -> None:
        if passes:
            write_json(self._passes_path, {"passes": [[list(part) for part in each] for each in passes]})

    def end(self) -> None:
        self._passes_path.unlink(missing_ok=True)


Share = tuple[ShadowPlan, Sequence[int], Sequence[int]]
"""What one process makes: some shadows and some retraining orders of a plan."""


def plan_of(run: Run, world: World, request: Request, method: Unlearner | None, pool: int) -> ShadowPlan:
    trained = trained_of(run, request)
    start = trained.history.record(1).start_sha256
    config = run.config.model_copy(update={"training": trained.training})
    data, many = world.evaluator.pairs.fingerprint, None
    if world.server.device.type != "cpu":
        many = trained.history.initial_path.stat().st_size, len(world.shards)
    return ShadowPlan(config, request, method, trained.gone, start, data, pool, run.folder, many=many)


def gauge_of(world: World, subjects: Subjects) -> Gauge:
    seen = world.evaluator
    return Gauge(seen.model, seen.activations, subjects.pool, world.config.model.temperature, seen.device)


def remove_scratch(plan: ShadowPlan) -> None:
    """Delete what a killed process left behind, the clients' updates above all."""
    for scratch in plan.store.glob(f"{LEFTOVER}*/"):
        shutil.rmtree(scratch)
    for folder in (plan.store, *plan.store.glob("pool-*/"), *plan.store.glob("pool-*/*/")):
        remove_leftovers(folder)


def make_shadows(
    plan: ShadowPlan, world: World, subjects: Subjects, shadows: Sequence[int], orders: Sequence[int]
) -> Iterator[int]:
    """Make what is missing of the named shadows and retrainings, and store it; yields ticks.

    Missing models are trained together; existing shadows are only unlearned.
    """
    passes = plan.passes(shadows, orders)
    plan.begin(passes)
    for some, also in passes:
        yield from make_pass(plan, world, subjects, some, also)
    plan.end()


def make_pass(
    plan: ShadowPlan, world: World, subjects: Subjects, shadows: Sequence[int], orders: Sequence[int]
) -> Iterator[int]:
    """Train what has to be trained of one pass, and let its shadows go through every method that they lack."""
    if orders or any(map(plan.to_train, shadows)):
        yield from _train_group(plan, world, subjects, shadows, orders)
    ends = {n: _end_of(plan, world, n) for n in shadows}
    for one in plan.each:
        yield from _unlearn(one, world, subjects, ends)


def _end_of(plan: ShadowPlan, world: World, shadow: int) -> Ends:
    last = Params.load(plan.state_path(shadow))
    return Ends(plan.shadow_store, updates=False, first=world.server.initial(), last=last)


def _train_group(
    plan: ShadowPlan, world: World, subjects: Subjects, shadows: Sequence[int], orders: Sequence[int]
) -> Iterator[int]:
    """Train shadows and retrainings in one pass; where a method reads the history, unlearn before it is gone."""
    config, start, seen = plan.config, world.server.initial(), world.evaluator
    federations = [_shadow_shards(plan, world, subjects, shadow) for shadow in shadows]
    federations += [without(world.shards, [plan.request])] * len(orders)
    streams = [f"shadow-{shadow}" for shadow in shadows] + [f"retrain-{order}" for order in orders]
    stops = {share: max(1, round(share * config.training.rounds)) for share in (*SHARES, 1.0)}
    gauge = gauge_of(world, subjects)
    readers = [one for one in plan.each if one.reads_history and any(map(one.not_unlearned, shadows))]
    methods = [one.method for one in readers if one.method is not None]
    plan.store.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=LEFTOVER, dir=plan.store) as scratch:
        histories = {
            shadow: scratch_history(Path(scratch) / str(shadow), start, shards, methods, plan.request, config.training)
            for shadow, shards in zip(shadows, federations, strict=False)
            if readers
        }
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
            kept = zip(histories.values(), rounds, strict=False)  # retrainings keep none
            on_all_cores(lambda history, finished: history.append(finished), kept, seen.device)
            for order, finished in zip(orders, rounds[len(shadows) :], strict=True):
                for share, last in stops.items():
                    if finished.number == last:
                        finished.state.save(plan.retrain_path(order, share))
            yield len(federations)
        for shadow, finished in zip(shadows, rounds, strict=False):
            if plan.untrained(shadow):
                finished.state.save(plan.state_path(shadow))
                _store_readings(plan.shadow_path(shadow), gauge, finished.state, subjects)
        for one in readers:
            yield from _unlearn(one, world, subjects, histories)


def _unlearn(plan: ShadowPlan, world: World, subjects: Subjects, histories: Mapping[int, History]) -> Iterator[int]:
    """Let trained shadows go through the method, and store what is read of them then.

    All do, though some may have been stored before the process was killed: in other company they would round otherwise.
    """
    missing = [shadow for shadow in histories if plan.not_unlearned(shadow)]
    if plan.method is None or not missing:
        return
    seen, gauge = world.evaluator, gauge_of(world, subjects)
    trained = [_trained_shadow(plan, world, subjects, *each) for each in histories.items()]
    states = unlearn_shadows(seen.model, seen.activations, seen.device, trained, plan.method)
    for shadow, state in zip(histories, states, strict=True):
        if shadow in missing:
            _store_readings(plan.unlearned_path(shadow), gauge, state, subjects)
            yield 1


def _trained_shadow(plan: ShadowPlan, world: World, subjects: Subjects, shadow: int, history: History) -> Shadow:
    config = plan.config
    # Its own random numbers: with the target's, a method that starts afresh would end in the target itself.
    seed = stream_seed(config.seed, "shadow", shadow)
    order = Order(config.seed, f"shadow-{shadow}")
    trained = Trained(history, config.training, config.model.temperature, seed, order)
    inside = subjects.candidates.included(shadow, config.seed)
    request = shadow_request(plan.request, subjects.candidates, inside)
    return Shadow(_shadow_shards(plan, world, subjects, shadow), trained, request)


def _shadow_shards(plan: ShadowPlan, world: World, subjects: Subjects, shadow: int) -> tuple[Shard, ...]:
    inside = subjects.candidates.included(shadow, plan.config.seed)
    return shadow_shards(world.shards, plan.request, subjects.candidates, inside)


def _store_readings(path: Path, gauge: Gauge, state: Params, subjects: Subjects) -> None:
    read = gauge.read(state, subjects.positions)
    write_shadow(path, {name: torch.from_numpy(values) for name, values in read.items()})


def write_shadow(path: Path, values: dict[str, torch.Tensor]) -> None:
    write_tensors(path, values)


def read_shadow(path: Path) -> dict[str, torch.Tensor]:
    """A shadow's stored statistics; a flipped bit would bend every attack and be seen by nobody."""
    try:
        return read_tensors(path)
    except UserError as error:
        raise UserError(f"{path}: this stored shadow is damaged; delete it and run the same command again") from error


def train_share(share: Share) -> Iterator[str]:
    """One pass, in a process of its own, for `spread`."""
    plan, shadows, orders = share
    world = open_world(Run.load(plan.folder), plan.request)
    yield from map(str, make_pass(plan, world, Subjects.of(world, plan.request, plan.pool), shadows, orders))


def attacker_of(plan: ShadowPlan, subjects: Subjects, shadows: int, fpr: float) -> Attacker:
    """The stored shadows' statistics as the attacks take them."""

    def table(paths: Sequence[Path]) -> tuple[Readings, Readings]:
        stored = [read_shadow(path) for path in paths]
        return subjects.split({name: np.stack([each[name].numpy() for each in stored], 1) for name in STATISTICS})

    numbers = range(shadows)
    trained, population = table([plan.shadow_path(n) for n in numbers])
    unlearned = {} if plan.method is None else table([plan.unlearned_path(n) for n in numbers])[0]
    included = np.stack([subjects.candidates.included(n, plan.config.seed) for n in numbers], axis=1)
    return Attacker(trained, unlearned, included, subjects.candidates.member, population, fpr)


@dataclass(frozen=True)
class QuickAttackers:
    """Attacks by a few shadows that were never unlearned: enough to compare many answers to one request."""

    subjects: Subjects
    gauge: Gauge
    attacker: Attacker

    def metrics(self, state: Params) -> dict[str, float]:
        """Share of the forget pairs that the shadow classifier calls members; AUC of offline LiRA and, if there are
        enough non-members to set a threshold, its true-positive rate at a false-positive rate of 1 %."""
        target, population = self.subjects.split(self.gauge.read(state, self.subjects.positions))
        judged = self.attacker.judge("lira-offline/log_odds", target, population)
        found = {"mia": self.attacker.called_member(target).value, "lira/auc": judged.auc.value}
        return found | ({"lira/tpr": judged.tpr.tpr.value} if judged.tpr else {})


def quick_attackers(run: Run, world: World, request: Request, shadows: int = 4, pool: int = 512) -> QuickAttackers:
    """Train the shadows once for each run and request; they are kept in the run."""
    spare = len(world.evaluator.spare) + len(world.evaluator.test)
    plan = plan_of(run, world, request, None, min(pool, spare // 2))
    subjects = Subjects.of(world, request, plan.pool)
    missing = subjects.candidates.why_no_attack(fewest=2)
    if missing:
        raise UserError(f"{missing}; choose another request, or no shadows")
    remove_scratch(plan)
    for _ in make_shadows(plan, world, subjects, plan.missing_shadows(shadows), ()):
        pass
    return QuickAttackers(subjects, gauge_of(world, subjects), attacker_of(plan, subjects, shadows, 0.01))
