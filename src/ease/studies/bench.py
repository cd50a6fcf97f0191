"""Running an experiment: every request answered by every method, measured alike, and never done twice."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import ease
from ease.audit.band import prediction_band
from ease.audit.costs import training_flops
from ease.audit.shadow_runs import QuickAttackers, quick_attackers
from ease.data.config import DataConfig
from ease.errors import Diverged, UserError
from ease.measures.alignment import alignment_residual
from ease.methods import make_method
from ease.params import Params
from ease.requests.request import Request
from ease.runs.answers import answer_of, open_world, trained_of
from ease.runs.evaluation import evaluation_sets, measure, similarities
from ease.runs.forget import forget
from ease.runs.records import read_record, write_record
from ease.runs.run import Run
from ease.runs.workers import spread
from ease.runs.world import World
from ease.studies.experiment import Cell, Entrant, Experiment, Job, plan
from ease.studies.overlap import client_overlap
from ease.studies.records import (
    BenchBand,
    BenchExperiment,
    BenchHeader,
    BenchResults,
    BenchRow,
    CellRecord,
    OverlapRecord,
    Role,
    Varied,
)
from ease.studies.scenarios import scenario_request
from ease.trainers import trainer_of

COSTS = ("bytes_up", "bytes_down", "client_steps", "flops", "seconds")
PARTS = ("forget", "retain")
MOST_PAIRS = 400
"""Pairs of a set whose similarities are kept for drawing."""


def finish_job(job: Job) -> Iterator[str]:
    """Do what is missing of a job; a note after training and after each answer."""
    if job.done:
        return
    run = Run.create(job.folder, job.config)
    world = open_world(run)
    for _ in run.train(world):
        pass
    where = f"{job.config.partition.scheme} run, seed {job.config.seed}"
    yield f"{where}: trained"
    if job.overlap:
        overlap = OverlapRecord(seed=job.config.seed, blocks=tuple(client_overlap(trained_of(run))))
        write_record(job.overlap_path, overlap)
    for cell in job.missing:
        yield from _fill(cell, run, world)


def _fill(cell: Cell, run: Run, world: World) -> Iterator[str]:
    """Answer a cell's request with every method, measure all models alike, and keep the rows."""
    seed = run.config.seed
    request = scenario_request(world, cell.scenario, seed)
    retrain = Entrant("Retrain", make_method("retrain"))
    others = [
        Entrant(f"Retrain, order {order}", make_method("retrain", (f"order={order}",)))
        for order in range(1, cell.band_retrains + 1)
    ]
    references = (retrain, *others)
    diverged: dict[Path, str] = {}
    for entrant in (*references, *cell.entrants):
        value = f", {Varied(name=entrant.at[0], value=entrant.at[1]).words}" if entrant.at else ""
        try:
            for _ in forget(run, world, request, entrant.method, observe=False):
                pass
        except UserError as error:
            if entrant in references or not isinstance(error, Diverged):
                raise UserError(f"{cell.scenario} request, seed {seed}, {entrant.label}: {error}") from error
            diverged[answer_of(run, request, entrant.method).folder] = str(error)
            value += ", diverged"
        yield f"{cell.scenario} request, seed {seed}: {entrant.label}{value}"
    yardstick = Yardstick.of(run, world, request, cell.shadows)
    if cell.shadows:
        yield f"{cell.scenario} request, seed {seed}: attackers"

    roles: list[tuple[Role, Sequence[Entrant]]] = [
        ("method", cell.entrants),
        ("band", others),
        ("retrain", [retrain]),
    ]
    models = [(role, entrant) for role, entrants in roles for entrant in entrants]
    recalls = measure(world, yardstick.trained, yardstick.sets)
    rows = [_row(cell, "trained", None, **_figures(cell, yardstick, yardstick.trained, recalls))]
    for role, entrant in models:
        stored = answer_of(run, request, entrant.method)
        if stored.folder in diverged:
            found: dict[str, Any] = {"metrics": {}, "diverged": diverged[stored.folder]}
        else:
            found = _figures(cell, yardstick, stored.model(), stored.record().metrics)
        rows.append(_row(cell, role, entrant, **found))
    write_record(cell.path(run.folder), CellRecord(rows=tuple(rows)))


@dataclass(frozen=True)
class Yardstick:
    """What all answers to one request are measured by."""

    world: World
    sets: dict[str, np.ndarray]
    trained: Params
    before: Tensor
    """Similarities of the forget pairs under the trained model."""
    goal: Tensor
    """And under retraining."""
    budget: Mapping[str, float]
    """What retraining cost."""
    attackers: QuickAttackers | None
    flops_per_pair: float
    """Operations per pair of a training step; 0 if nothing is trained by steps."""

    @classmethod
    def of(cls, run: Run, world: World, request: Request, shadows: int) -> "Yardstick":
        trained, sets = trained_of(run).final, evaluation_sets(world, request)
        retrained = answer_of(run, request, make_method("retrain"))
        before, goal = (similarities(world, state, sets["forget"]) for state in (trained, retrained.model()))
        attackers = quick_attackers(run, world, request, shadows) if shadows else None
        flops = training_flops(world) if trainer_of(world.config.model) == "fedavg" else 0.0
        budget = with_flops(retrained.record().metrics, flops)
        return cls(world, sets, trained, before, goal, budget, attackers, flops)

    def metrics(self, state: Params, recorded: Mapping[str, float]) -> dict[str, float]:
        """Recall as an answer's record has it, alignment and attacks, and the cost if there was one."""
        found = {key: value for key, value in recorded.items() if "/recall@" in key or key == "gallery"}
        found["rho"] = alignment_residual(similarities(self.world, state, self.sets["forget"]), self.before, self.goal)
        if self.attackers is not None:
            found |= self.attackers.metrics(state)
        costs = with_flops(recorded, self.flops_per_pair)
        for key in COSTS:
            if f"cost/{key}" in costs and self.budget.get(f"cost/{key}"):
                cost = costs[f"cost/{key}"]
                found |= {f"cost/{key}": cost, f"ratio/{key}": cost / self.budget[f"cost/{key}"]}
        return found


def with_flops(metrics: Mapping[str, float], flops_per_pair: float) -> dict[str, float]:
    """Recorded metrics with the operations of the passed pairs."""
    passed = metrics.get("cost/pairs_passed", metrics.get("cost/pairs_trained"))
    if passed is None or not flops_per_pair:
        return dict(metrics)
    return {**metrics, "cost/flops": passed * flops_per_pair}


def _row(cell: Cell, role: Role, entrant: Entrant | None, **found: Any) -> BenchRow:
    """The row of one model: its role and its figures. The trained model has no entrant."""
    at = cell.at or (entrant.at if entrant else None)
    return BenchRow(
        scenario=cell.scenario,
        seed=cell.config.seed,
        role=role,
        method=entrant.method.name if entrant else "trained",
        label=entrant.label if entrant else "Trained",
        settings=entrant.method.model_dump(mode="json", exclude_defaults=True) if entrant else {},
        tuned=entrant.tuned if entrant else False,
        at=Varied(name=at[0], value=at[1]) if at else None,
        **found,
    )


def _figures(cell: Cell, yardstick: Yardstick, state: Params, recorded: Mapping[str, float]) -> dict[str, Any]:
    """The figures of a model."""
    found: dict[str, Any] = {"metrics": yardstick.metrics(state, recorded)}
    if cell.pairs:
        found["pairs"] = {part: _similarities(yardstick.world, state, yardstick.sets[part]) for part in PARTS}
    return found


def _similarities(world: World, state: Params, positions: np.ndarray) -> tuple[float, ...]:
    """Similarities of some pairs, evenly from all clients."""
    some = np.linspace(0, len(positions) - 1, min(MOST_PAIRS, len(positions))).round().astype(int)
    return tuple(round(value, 4) for value in similarities(world, state, positions[some]).tolist())


def bench(experiment: Experiment, folder: Path, processes: int) -> Iterator[str]:
    """Do everything that is missing in a folder, in several processes; a note after each part."""
    jobs = [job for job in plan(experiment, folder) if not job.done]
    for job in jobs:
        check_data(job.config.data)
    yield from spread(finish_job, jobs, processes)


def check_data(data: DataConfig) -> None:
    """Refuse files that are not there before anything is written."""
    for name in ("path", "test_path", "images"):
        path = getattr(data, name)
        if path is not None and not path.exists():
            raise UserError(f"{path}: no such file or folder; name your copy with --set run.data.{name}=...")


def results(experiment: Experiment, folder: Path) -> BenchResults:
    """The results of a finished grid: a header that says where it comes from, and a row for each model."""
    jobs = plan(experiment, folder)
    order = {seed: number for number, seed in enumerate(experiment.seeds)}
    places = {str(scenario): number for number, scenario in enumerate(experiment.scenarios)}
    cells = [read_record(CellRecord, cell.path(job.folder)) for job in jobs for cell in job.cells]
    rows = [row for cell in cells for row in cell.rows]
    rows.sort(key=lambda row: (places[row.scenario], order[row.seed]))
    overlaps = [read_record(OverlapRecord, job.overlap_path) for job in jobs if job.overlap]
    return BenchResults(header=header(experiment), bands=bands(rows), rows=tuple(rows), subspaces=tuple(overlaps))


def bands(rows: Sequence[BenchRow]) -> tuple[BenchBand, ...]:
    """For each scenario (and value of a varied run setting) the band of every metric, where there are retrainings."""
    retrained: dict[str, list[BenchRow]] = {}
    repeated = {_run_of(row) for row in rows if row.role == "band"}
    for row in rows:
        if row.role in ("band", "retrain") and _run_of(row) in repeated:
            retrained.setdefault(_run_of(row), []).append(row)
    return tuple(_band(group) for group in retrained.values())


def _run_of(row: BenchRow) -> str:
    """What models of the same request and run have in common."""
    return json.dumps(row.model_dump(mode="json", include={"scenario", "seed", "at"}))


def _band(group: Sequence[BenchRow]) -> BenchBand:
    first, found = group[0], {}
    for key in first.metrics:
        # Retraining's own rho is 0 by its definition and says nothing about how much retrainings differ.
        band = prediction_band([row.metrics[key] for row in group if key != "rho" or row.role != "retrain"])
        if band is not None:
            found[key] = band
    return BenchBand(scenario=first.scenario, seed=first.seed, at=first.at, metrics=found)


def header(experiment: Experiment) -> BenchHeader:
    return BenchHeader(
        experiment=BenchExperiment(**experiment.model_dump(mode="json", exclude={"quick", "requests"})),
        command=" ".join(["ease", *sys.argv[1:]]),
        date=datetime.now().astimezone().isoformat(timespec="seconds"),
        commit=_commit(),
        versions={
            "ease": ease.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        machine={"system": f"{platform.system()} {platform.machine()}", "cores": os.cpu_count()},
    )


def _commit() -> str | None:
    """The commit of the source, with a mark if files have changed since; none where git does not track it.

    An installed package may be inside another project's folder, whose commit says nothing about it.
    """
    source = Path(__file__)
    try:
        _git(source.parent, "ls-files", "--error-unmatch", source.name)
        return _git(source.parent, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
