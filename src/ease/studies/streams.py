"""Streams of requests: every method answers the same requests one after the other, each released before the next.

Measurements at the end: how far forgotten and retained pairs are from retraining without all of them, how much
is relearned after a request was closed, what it cost, and whether the model is closer to retrained models or to the
trained one.
"""

import dataclasses
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import numpy as np

from ease.audit.preflight import fitted_pool
from ease.audit.relative import RelativeTest, relative_test
from ease.audit.shadow_runs import gauge_of
from ease.audit.subjects import Subjects
from ease.data.partition import Shard
from ease.errors import UserError
from ease.methods import make_method
from ease.params import Params
from ease.requests.request import ClassRequest, ClientRequest, Request, SampleRequest, forget_mask, without
from ease.runs.answers import StoredAnswer, answer_of, check_method, open_world, release, trained_of
from ease.runs.config import RunConfig
from ease.runs.evaluation import measure
from ease.runs.forget import forget
from ease.runs.records import read_record, write_record
from ease.runs.run import Run
from ease.runs.workers import spread
from ease.runs.world import World
from ease.seeding import generator
from ease.storage import digest
from ease.studies.experiment import Entrant, Experiment, entrants, load_tuned, run_folder
from ease.studies.records import StreamRecord, StreamReference, StreamResults, StreamStep

TURNS = ("sample", "client", "sample", "class")
"""Kinds of requests, in turn."""
SAMPLE_SHARE = 0.01
"""Share of all pairs that a request for single pairs names."""
FEWEST_RETRAINED = 4
"""Retrainings at the end, at least, so that their spread can be estimated."""


@dataclass(frozen=True)
class StreamJob:
    """One method's stream, or the references that all are measured by."""

    folder: Path
    """Totals of the whole study."""
    config: RunConfig
    count: int
    entrant: Entrant | None = None
    """None: the training and the retrainings."""
    retrains: int = FEWEST_RETRAINED

    @property
    def name(self) -> str:
        """Files of its own folder."""
        assert self.entrant is not None
        return f"{self.entrant.method.name}-{digest(self.entrant.method.model_dump(mode='json'))[:8]}"

    @property
    def base(self) -> Path:
        """The run that all methods start from."""
        return run_folder(self.folder, self.config)

    @property
    def path(self) -> Path:
        """Its record."""
        kind = "reference" if self.entrant is None else self.name
        asked = digest(self.config.model_dump(mode="json"), self.count, self.retrains)[:8]
        return self.folder / "streams" / f"{kind}-{asked}.json"

    @property
    def notes(self) -> int:
        """How many notes `finish_stream` yields."""
        if self.path.is_file():
            return 0
        return self.retrains + 1 if self.entrant is None else self.count


def jobs_of(experiment: Experiment, folder: Path) -> tuple[StreamJob, list[StreamJob]]:
    """The references, then every method with its settings, on the first seed."""
    config = experiment.run.model_copy(update={"seed": experiment.seeds[0]})
    retrains = max(FEWEST_RETRAINED, experiment.band_retrains + 1)
    first = StreamJob(folder, config, experiment.requests, None, retrains)
    tuned = load_tuned(experiment.tuned) if experiment.tuned else {}
    found = entrants(experiment.methods, "client", tuned, named=True)
    return first, [dataclasses.replace(first, entrant=entrant) for entrant in found]


def streams(experiment: Experiment, folder: Path, processes: int) -> Iterator[str]:
    """Do what is missing; a note after every training and request."""
    first, methods = jobs_of(experiment, folder)
    yield from finish_stream(first)
    yield from spread(finish_stream, [job for job in methods if not job.path.is_file()], processes)


def stream_results(experiment: Experiment, folder: Path) -> StreamResults:
    """Results of a finished study."""
    first, methods = jobs_of(experiment, folder)
    records = tuple(read_record(StreamRecord, job.path) for job in methods)
    reference = read_record(StreamReference, first.path)
    return StreamResults(title=experiment.title, reduced=experiment.reduced, reference=reference, streams=records)


def finish_stream(job: StreamJob) -> Iterator[str]:
    """Do one job if it is missing."""
    if job.path.is_file():
        return
    run = Run.create(job.base, job.config)
    world = open_world(run)
    if job.entrant is None:
        yield from _reference(job, run, world)
    else:
        yield from _stream(job, job.entrant, run, world)


def _reference(job: StreamJob, run: Run, world: World) -> Iterator[str]:
    for _ in run.train(world):
        pass
    yield "trained"
    asked = requests_in_turn(world, job.count, job.config.seed)
    sets, retrained = sets_of(world, asked), []
    for order in range(job.retrains):
        retrained.append(measure(world, retrained_without(job, run, world, asked, order), sets))
        yield f"retrained without all requests, order {order}"
    record = StreamReference(
        kinds=tuple(each.scope for each in asked),
        pairs={name: len(positions) for name, positions in sets.items()},
        trained=measure(world, trained_of(run).final, sets),
        retrained=tuple(retrained),
    )
    write_record(job.path, record)


def retrained_without(job: StreamJob, run: Run, world: World, asked: Sequence[Request], order: int) -> Params:
    """A training without all forgotten pairs, stored; another order has other random numbers."""
    stem = digest(job.config.model_dump(mode="json"), job.count)[:8]
    path = job.folder / "streams" / f"retrain-{stem}-{order}.safetensors"
    if not path.is_file():
        trained = trained_of(run)
        seeded = dataclasses.replace(trained, seed=trained.seed + 1000 * order)
        end = World(world.server, world.evaluator).without(*asked)
        *_, last = make_method("retrain").unlearn(seeded, SampleRequest(ids=()), end.federation)
        path.parent.mkdir(parents=True, exist_ok=True)
        last.state.save(path)
    return Params.load(path)


def _stream(job: StreamJob, entrant: Entrant, run: Run, world: World) -> Iterator[str]:
    """Answer all requests on a copy of the trained run; a method that cannot continue reports why."""
    folder = job.folder / "streams" / f"{job.path.stem}-run"
    if not folder.is_dir():
        part = folder.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        shutil.copytree(run.folder, part, ignore=shutil.ignore_patterns("requests", "cells", "trials", ".lock"))
        part.rename(folder)
    asked = requests_in_turn(world, job.count, job.config.seed)
    sets, steps, stopped, state = sets_of(world, asked), list[StreamStep](), "", trained_of(run).final
    spent, whole = np.zeros(3), np.zeros(3)
    for number, request in enumerate(asked):
        own = Run.load(folder)
        try:
            if len(own.head.releases) <= number:
                check_method(own, entrant.method)
                for _ in forget(own, open_world(own), request, entrant.method, observe=False):
                    pass
                stored = answer_of(own, request, entrant.method)
                release(own, f"{stored.folder.parent.name}/{stored.folder.name}")
        except UserError as error:
            stopped = f"request {number + 1} ({request.scope}): {error}"
            yield f"{entrant.label}: stopped at request {number + 1}"
            break
        own = Run.load(folder)
        stored_folder = folder / "requests" / own.head.releases[number].answer
        state = Params.load(stored_folder / "model.safetensors")
        found = read_cost(stored_folder)
        spent += found
        whole += retraining_cost(run, without(world.evaluator.shards, asked[: number + 1]))
        metrics = measure(world, state, sets)
        shares = dict(zip(("pairs", "bytes", "rounds"), (spent / whole).tolist(), strict=True))
        steps.append(StreamStep(kind=request.scope, metrics=metrics, shares=shares))
        yield f"{entrant.label}: request {number + 1}"
    relative = None if stopped else closeness(job, run, world, asked, state)
    record = StreamRecord(
        method=entrant.method.name,
        label=entrant.label,
        settings=entrant.method.model_dump(mode="json", exclude_defaults=True),
        steps=tuple(steps),
        stopped=stopped,
        relative=relative,
    )
    write_record(job.path, record)
    shutil.rmtree(folder)


def read_cost(folder: Path) -> np.ndarray:
    """Pairs passed, bytes and rounds of an answer."""
    record = StoredAnswer(folder).record()
    sent = record.metrics["cost/bytes_up"] + record.metrics["cost/bytes_down"]
    return np.array([record.metrics["cost/pairs_passed"], sent, len(record.rounds)])


def retraining_cost(run: Run, left: Sequence[Shard]) -> np.ndarray:
    """The same of a retraining with what is left: every pair in each epoch of each round."""
    training, history = run.config.training, run.history
    records = [history.record(number) for number in range(1, history.rounds() + 1)]
    sent = sum(record.bytes_up + record.bytes_down for record in records)
    there = mean(len(record.pairs) for record in records)
    pairs = sum(len(shard.train) for shard in left)
    clients = sum(bool(len(shard.train)) for shard in left)
    return np.array([pairs * len(records) * training.local_epochs, sent * min(1.0, clients / there), len(records)])


def closeness(job: StreamJob, run: Run, world: World, asked: Sequence[Request], state: Params) -> RelativeTest | None:
    """The relative test over all forgotten pairs; None if it sees nothing."""
    shards = world.evaluator.shards
    masks = [np.any([forget_mask(each, shard) for each in asked], axis=0) for shard in shards]
    positions = np.concatenate([shard.train[mask] for shard, mask in zip(shards, masks, strict=True)])
    union = SampleRequest(ids=tuple(sorted(str(world.evaluator.pairs.ids[position]) for position in positions)))
    gauge = gauge_of(world, Subjects.of(world, union, fitted_pool(world, union, None)))
    models = {"unlearned": state, "trained": trained_of(run).final}
    models |= {f"retrain-{n}": retrained_without(job, run, world, asked, n) for n in range(job.retrains)}
    return relative_test({name: gauge.read(model, positions)["log_odds"] for name, model in models.items()})


def requests_in_turn(world: World, count: int, seed: int, share: float = SAMPLE_SHARE) -> list[Request]:
    """Requests one after the other, each drawn from what those before it leave."""
    asked: list[Request] = []
    for number in range(count):
        asked.append(request_in_turn(world, asked, number, share, seed))
    return asked


def request_in_turn(world: World, gone: Sequence[Request], number: int, share: float, seed: int) -> Request:
    """The next request, drawn from what is left; at least three clients and classes stay."""
    here = [shard for shard in without(world.evaluator.shards, gone) if len(shard.train)]
    rng = generator(seed, "stream", number)
    kind = TURNS[number % len(TURNS)]
    classes = sorted({int(label) for shard in here for label in shard.train_classes})
    if kind == "client" and len(here) > 3:
        return ClientRequest(clients=(int(rng.choice([shard.client for shard in here])),))
    if kind == "class" and len(classes) > 3:
        return ClassRequest(classes=(int(rng.choice(classes)),))
    ids = sorted(here[int(rng.integers(len(here)))].train_ids)
    total = sum(len(shard.train) for shard in world.evaluator.shards)
    chosen = rng.choice(ids, min(max(1, round(share * total)), len(ids) // 2), replace=False)
    return SampleRequest(ids=tuple(sorted(map(str, chosen))))


def sets_of(world: World, gone: Sequence[Request]) -> dict[str, np.ndarray]:
    """Pairs that each request took, those that are left at the end, and test pairs of classes that are left."""
    sets, test = {}, world.evaluator.test
    for number, request in enumerate(gone):
        shards = without(world.evaluator.shards, gone[:number])
        sets[f"forget/{number}"] = np.concatenate([shard.train[forget_mask(request, shard)] for shard in shards])
        if isinstance(request, ClassRequest):
            test = test[~np.isin(world.evaluator.classes_of(test), request.classes)]
    left = without(world.evaluator.shards, gone)
    return {**sets, "retain": np.concatenate([shard.train for shard in left]), "test": test}
