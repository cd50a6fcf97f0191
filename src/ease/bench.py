"""Experiments: a grid of runs, scenarios, seeds and methods, whose finished cells are kept and never done twice."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field, field_validator

from ease.audit.alignment import alignment_residual
from ease.audit.band import prediction_band
from ease.config import Config, override, read_toml, validate
from ease.errors import UserError
from ease.forget import evaluation_sets, forget, measure, outcome_of, similarities, trained_of
from ease.methods import make_method
from ease.methods.base import Unlearner
from ease.overlap import client_overlap
from ease.params import Params
from ease.run import Run, RunConfig, World, anchor_paths
from ease.scenarios import Scenario, scenario_config, scenario_request
from ease.storage import digest, read_json, write_json
from ease.verdict import quick_attackers
from ease.workers import spread

FORMAT = 1
"""Of a stored cell; raise it when the same settings give other figures."""
COSTS = ("bytes_up", "bytes_down", "seconds")
PARTS = ("forget", "retain", "test")
MEASURED = [f"{part}/recall@{k}" for part in PARTS for k in (1, 5, 10)] + ["gallery"]
MOST_PAIRS = 400
"""Pairs of a set whose similarities are kept for drawing."""
QUICK: dict[str, Any] = {
    "seeds": [0],
    "run": {"data": {"train": 600, "validation": 200, "test": 400}, "training": {"rounds": 8}, "gallery": 150},
}
"""What `--quick` changes in every experiment, before the experiment's own `[quick]`."""


class Entry(Config):
    """A method of a grid."""

    method: str
    label: str = ""
    """Its name in tables and figures; by default its title."""
    settings: dict[str, Any] = Field(default_factory=dict)
    vary: dict[str, tuple[Any, ...]] = Field(default_factory=dict, max_length=1)
    """One of its settings and the values that it takes in turn."""


class Experiment(Config):
    """A grid, and how it is drawn. Retraining is always part of it."""

    title: str
    kind: Literal["table", "curves", "grid", "tradeoff", "bars", "raincloud", "subspaces"] = "table"
    """The figure beside the tables; `subspaces` looks at training alone and has no table."""
    run: RunConfig = RunConfig()
    """Settings of training, as in the file for `ease train`; its seed is not used."""
    scenarios: tuple[Scenario, ...] = Field(("client", "class", "sample"), min_length=1)
    seeds: tuple[int, ...] = Field((0, 1, 2), min_length=1)
    methods: tuple[Entry, ...] = ()
    """Names, or tables with a name, a label, settings and a varied setting."""
    vary: dict[str, tuple[Any, ...]] = Field(default_factory=dict, max_length=1)
    """One setting of the run and the values that it takes in turn."""
    tuned: Path | None = None
    """Settings that `ease sweep` chose; those in `methods` come before them."""
    band_retrains: int = Field(2, ge=0)
    """Further retrainings on the first seed: with the first they make the band."""
    shadows: int = Field(4, ge=0)
    """Shadow models of the membership attacks, an even number from 4; 0: no attacks."""
    quick: dict[str, Any] = Field(default_factory=dict)
    """What `--quick` changes here, in the shape of this file."""

    @field_validator("shadows")
    @classmethod
    def _pairs_of_shadows(cls, count: int) -> int:
        if count % 2 or count == 2:
            raise ValueError("choose an even number from 4, or 0 for no attacks")
        return count

    @field_validator("methods", mode="before")
    @classmethod
    def _names(cls, entries: Any) -> Any:
        named = isinstance(entries, list | tuple)
        return [{"method": entry} if isinstance(entry, str) else entry for entry in entries] if named else entries


class Chosen(Config):
    """What a sweep found for one method and scenario."""

    score: float
    default_score: float
    budget: int
    settings: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True)
class Entrant:
    """A method with the settings that it has in one cell."""

    label: str
    method: Unlearner
    tuned: bool = False
    at: tuple[str, Any] | None = None
    """The varied setting and its value."""


@dataclass(frozen=True)
class Cell:
    """One request of one run, answered by every method."""

    config: RunConfig
    scenario: Scenario
    entrants: tuple[Entrant, ...]
    band_retrains: int
    shadows: int
    pairs: bool
    """Keep pair similarities."""
    at: tuple[str, Any] | None = None
    """The varied setting of the run and its value."""

    def path(self, folder: Path) -> Path:
        return (
            folder
            / "cells"
            / f"{self.scenario}-{digest(FORMAT, self.config.model_dump(mode='json'), *self._parts)}.json"
        )

    @property
    def _parts(self) -> list[Any]:
        methods = [(e.label, e.method.model_dump(mode="json"), e.tuned, e.at) for e in self.entrants]
        return [methods, self.band_retrains, self.shadows, self.pairs, self.at]

    @property
    def answers(self) -> int:
        return len(self.entrants) + 1 + self.band_retrains


@dataclass(frozen=True)
class Job:
    """What one run directory has to do: train, then its cells. One process works on a run at a time."""

    folder: Path
    config: RunConfig
    cells: tuple[Cell, ...]
    overlap: bool = False
    """Compare the clients' update subspaces."""

    @property
    def overlap_path(self) -> Path:
        return self.folder / "cells" / "overlap.json"

    @property
    def missing(self) -> list[Cell]:
        return [cell for cell in self.cells if not cell.path(self.folder).is_file()]

    @property
    def done(self) -> bool:
        return not self.missing and (not self.overlap or self.overlap_path.is_file())

    @property
    def notes(self) -> int:
        """How many notes `work` yields: one for training and one for each answer."""
        return 0 if self.done else 1 + sum(cell.answers for cell in self.missing)


def load_experiment(path: Path, assignments: Sequence[str] = (), quick: bool = False) -> Experiment:
    """Read an experiment; `--quick` shrinks it first, then `--set` has the last word."""
    table = _anchor(read_toml(path), path.parent)
    if quick:
        table = _merge(_merge(table, QUICK), table.get("quick", {}))
    table = _anchor(override(table, assignments), Path.cwd())
    return validate(Experiment, table, " with ".join([str(path), *(["--set"] if assignments else [])]))


def _anchor(table: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Make the paths of an experiment absolute; relative ones are meant from `folder`."""
    anchored = dict(table)
    if isinstance(table.get("run"), dict):
        anchored["run"] = anchor_paths(table["run"], folder)
    if isinstance(table.get("tuned"), str):
        anchored["tuned"] = str((folder / table["tuned"]).resolve())
    return anchored


def _merge(table: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(table)
    for key, value in changes.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def load_tuned(path: Path) -> dict[str, dict[str, Chosen]]:
    """Method -> scenario -> what a sweep chose."""
    return {
        method: {
            scenario: validate(Chosen, chosen, f"{path}: {method}.{scenario}") for scenario, chosen in found.items()
        }
        for method, found in read_toml(path).items()
    }


def run_folder(folder: Path, config: RunConfig) -> Path:
    """Where the run of a configuration lives; experiments in one folder share their runs."""
    return folder / "runs" / f"{config.partition.scheme}-{config.seed}-{digest(config.model_dump(mode='json'))[:8]}"


def plan(experiment: Experiment, folder: Path) -> list[Job]:
    """The grid as one job for each run directory, the longest first, so that processes end together."""
    tuned = load_tuned(experiment.tuned) if experiment.tuned else {}
    cells: dict[Path, list[Cell]] = {}
    for at in _varied(experiment.vary):
        for seed in experiment.seeds:
            for scenario in experiment.scenarios:
                config = scenario_config(_run_config(experiment, at, seed), scenario)
                first = seed == experiment.seeds[0]
                cell = Cell(
                    config=config,
                    scenario=scenario,
                    entrants=tuple(_entrants(experiment.methods, scenario, tuned)),
                    band_retrains=experiment.band_retrains if first else 0,
                    shadows=experiment.shadows,
                    pairs=experiment.kind == "raincloud",
                    at=at,
                )
                cells.setdefault(run_folder(folder, config), []).append(cell)
    if experiment.kind == "subspaces":
        return [Job(place, found[0].config, (), overlap=True) for place, found in cells.items()]
    jobs = [Job(place, found[0].config, tuple(found)) for place, found in cells.items()]
    return sorted(jobs, key=lambda job: -job.notes)


def _varied(vary: Mapping[str, Sequence[Any]]) -> list[tuple[str, Any] | None]:
    return [(name, value) for name, values in vary.items() for value in values] or [None]


def _run_config(experiment: Experiment, at: tuple[str, Any] | None, seed: int) -> RunConfig:
    changes = [f"seed={seed}"] + ([f"{at[0]}={json.dumps(at[1])}"] if at else [])
    return validate(RunConfig, override(experiment.run.model_dump(mode="json"), changes), "vary")


def _entrants(
    entries: Sequence[Entry], scenario: Scenario, tuned: Mapping[str, Mapping[str, Chosen]]
) -> Iterator[Entrant]:
    for entry in entries:
        chosen = tuned.get(entry.method, {}).get(scenario)
        for at in _varied(entry.vary):
            settings = {**(chosen.settings if chosen else {}), **entry.settings, **(dict([at]) if at else {})}
            method = make_method(entry.method, table=settings)
            yield Entrant(entry.label or method.title, method, chosen is not None, at)


def work(job: Job) -> Iterator[str]:
    """Do what is missing of a job; a note after training and after each answer."""
    if job.done:
        return
    run = Run.create(job.folder, job.config)
    world = World.open(job.config)
    for _ in run.train(world):
        pass
    where = f"{job.config.partition.scheme} run, seed {job.config.seed}"
    yield f"{where}: trained"
    if job.overlap:
        write_json(job.overlap_path, [asdict(found) for found in client_overlap(trained_of(run))])
    for cell in job.missing:
        yield from _fill(cell, run, world)


def _fill(cell: Cell, run: Run, world: World) -> Iterator[str]:
    """Answer a cell's request with every method, measure all models alike, and keep the rows."""
    seed = run.config.seed
    request = scenario_request(world, cell.scenario, seed)
    retrained = [Entrant("Retrain", make_method("retrain"))]
    retrained += [
        Entrant(f"Retrain, order {order}", make_method("retrain", (f"order={order}",)))
        for order in range(1, cell.band_retrains + 1)
    ]
    for entrant in (*retrained, *cell.entrants):
        try:
            for _ in forget(run, world, request, entrant.method, observe=False):
                pass
        except UserError as error:
            raise UserError(f"{cell.scenario} request, seed {seed}, {entrant.label}: {error}") from error
        yield f"{cell.scenario} request, seed {seed}: {entrant.label}"

    trained, sets = trained_of(run).final, evaluation_sets(world, request)
    attackers = quick_attackers(run, world, request, cell.shadows) if cell.shadows else None
    reference = outcome_of(run, request, retrained[0].method)
    before = similarities(world, trained, sets["forget"])
    goal = similarities(world, reference.model(), sets["forget"])
    budget = reference.record()["metrics"]

    def row(role: str, entrant: Entrant | None, state: Params, metrics: Mapping[str, float]) -> dict[str, Any]:
        found = {key: metrics[key] for key in MEASURED}
        found["rho"] = alignment_residual(similarities(world, state, sets["forget"]), before, goal)
        if attackers is not None:
            found |= {"mia": attackers.share_called_member(state), "lira/auc": attackers.auc(state)}
        if entrant is not None:
            found |= {f"cost/{key}": metrics[f"cost/{key}"] for key in COSTS}
            found |= {f"ratio/{key}": metrics[f"cost/{key}"] / budget[f"cost/{key}"] for key in COSTS}
        at = cell.at or (entrant.at if entrant else None)
        return {
            "scenario": cell.scenario,
            "seed": seed,
            "role": role,
            "method": entrant.method.name if entrant else "trained",
            "label": entrant.label if entrant else "Trained",
            "settings": entrant.method.model_dump(mode="json", exclude_defaults=True) if entrant else {},
            "tuned": entrant.tuned if entrant else False,
            **({"at": {"name": at[0], "value": at[1]}} if at else {}),
            "metrics": found,
            **({"pairs": {part: _similarities(world, state, sets[part]) for part in PARTS}} if cell.pairs else {}),
        }

    rows = [row("trained", None, trained, measure(world, trained, sets))]
    for role, entrants in (("method", cell.entrants), ("band", retrained[1:]), ("retrain", retrained[:1])):
        for entrant in entrants:
            outcome = outcome_of(run, request, entrant.method)
            rows.append(row(role, entrant, outcome.model(), outcome.record()["metrics"]))
    write_json(cell.path(run.folder), rows)


def _similarities(world: World, state: Params, positions: np.ndarray) -> list[float]:
    """Similarities of some pairs, evenly from all clients."""
    some = np.linspace(0, len(positions) - 1, min(MOST_PAIRS, len(positions))).round().astype(int)
    return [round(value, 4) for value in similarities(world, state, positions[some]).tolist()]


def bench(experiment: Experiment, folder: Path, processes: int) -> Iterator[str]:
    """Do everything that is missing in a folder, in several processes; a note after each part."""
    yield from spread(work, [job for job in plan(experiment, folder) if not job.done], processes)


def results(experiment: Experiment, folder: Path) -> dict[str, Any]:
    """What a finished grid found: a header that says where it comes from, and a row for each model."""
    jobs = plan(experiment, folder)
    order = {seed: number for number, seed in enumerate(experiment.seeds)}
    rows = [row for job in jobs for cell in job.cells for row in read_json(cell.path(job.folder))]
    rows.sort(key=lambda row: (experiment.scenarios.index(row["scenario"]), order[row["seed"]]))
    found: dict[str, Any] = {"header": header(experiment), "bands": bands(rows), "rows": rows}
    if experiment.kind == "subspaces":
        found["subspaces"] = [{"seed": job.config.seed, "overlap": read_json(job.overlap_path)} for job in jobs]
    return found


def bands(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each scenario (and value of a varied run setting) the band of every metric, where there are retrainings."""
    retrained: dict[str, list[Mapping[str, Any]]] = {}
    ordered = [row for row in rows if row["role"] == "band"]
    for row in rows:
        if any(_same_run(row, other) for other in ordered) and row["role"] in ("band", "retrain"):
            retrained.setdefault(json.dumps([row["scenario"], row["seed"], row.get("at")]), []).append(row)
    return [_band(group) for group in retrained.values()]


def _same_run(row: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(row.get(key) == other.get(key) for key in ("scenario", "seed", "at"))


def _band(group: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    found = {}
    for key in group[0]["metrics"]:
        band = prediction_band([row["metrics"][key] for row in group])
        if band is not None:
            found[key] = [band.low, band.high]
    first = {key: group[0][key] for key in ("scenario", "seed", "at") if key in group[0]}
    return {**first, "models": len(group), "metrics": found}


def header(experiment: Experiment) -> dict[str, Any]:
    """Enough to know what was run, on what, and when."""
    return {
        "title": experiment.title,
        "kind": experiment.kind,
        "experiment": experiment.model_dump(mode="json", exclude={"quick"}),
        "command": " ".join(["ease", *sys.argv[1:]]),
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "commit": _commit(),
        "versions": {
            "ease": version("ease-unlearning"),
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "machine": {"system": platform.platform(), "cores": os.cpu_count()},
    }


def _commit() -> str | None:
    """The commit of the source, with a mark if files have changed since; none outside of git."""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()
