"""Experiments: the TOML file, and the grid of runs, requests and methods that it describes."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from ease.config import Config, override, read_toml, validate
from ease.errors import UserError
from ease.methods import METHODS, make_method, unknown_method
from ease.methods.base import Unlearner
from ease.runs.config import RunConfig, anchor_paths
from ease.storage import digest
from ease.studies.scenarios import Scenario, scenario_config

FORMAT = 5
"""Version of a stored cell; raise it when the same settings give other figures."""
QUICK: dict[str, Any] = {
    "seeds": [0],
    "run": {"data": {"train": 600, "validation": 200, "test": 400}, "training": {"rounds": 8}, "gallery": 150},
}
"""What `--quick` changes in every experiment, before the experiment's own `[quick]`."""


Point = tuple[str, Any]
"""A varied setting and its value; of several settings their names with commas and a tuple of values."""


class Entry(Config):
    """A method of a grid."""

    method: str
    label: str = ""
    """Its name in tables and figures; by default its title."""
    settings: dict[str, Any] = Field(default_factory=dict)
    vary: dict[str, tuple[Any, ...]] = Field(default_factory=dict)
    """Settings of it and the values that they take in turn; of several, every combination."""

    @field_validator("method")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in METHODS:
            raise ValueError(f"{name}: {unknown_method(name)}")
        return name


class Experiment(Config):
    """A grid, and how it is drawn. Retraining is always part of it."""

    title: str
    """Title of its tables."""
    kind: Literal["table", "ablation", "curves", "grid", "baselines", "tradeoff", "bars", "raincloud", "subspaces"] = (
        "table"
    )
    """The figure beside the tables. `table` and `ablation` rank the methods, and `paper.tex` of an ablation reports rho
    where others report bytes. `subspaces` looks at training only and has no table."""
    run: RunConfig = RunConfig()
    """Settings of training, as in the file for `ease train`; its seed is not used."""
    scenarios: tuple[Scenario, ...] = Field(("client", "class", "sample"), min_length=1)
    """Kinds of requests; each is drawn from every seed."""
    seeds: tuple[int, ...] = Field((0, 1, 2), min_length=1)
    """Seeds of training; figures are means over them."""
    methods: tuple[Entry, ...] = ()
    """Names, or tables with a name, a label, settings and a varied setting."""
    vary: dict[str, tuple[Any, ...]] = Field(default_factory=dict)
    """Settings of the run and the values that they take in turn; of several, every combination."""
    tuned: Path | None = None
    """Settings that `ease sweep` chose; those in `methods` come before them."""
    requests: int = Field(0, ge=0)
    """Answer so many requests one after the other, each released before the next, on the first seed; 0: single ones."""
    band_retrains: int = Field(2, ge=0)
    """Further retrainings on the first seed: with the first they make the band."""
    shadows: int = Field(4, ge=0)
    """Shadow models of the membership attacks, an even number from 4; 0: no attacks."""
    quick: dict[str, Any] = Field(default_factory=dict)
    """What `--quick` changes here, in the shape of this file."""
    reduced: bool = False
    """Whether `--quick` made it smaller; tables then carry a caveat."""

    @field_validator("shadows")
    @classmethod
    def _pairs_of_shadows(cls, count: int) -> int:
        if count % 2 or count == 2:
            raise ValueError("choose an even number from 4, or 0 for no attacks")
        return count

    @field_validator("vary")
    @classmethod
    def _no_seeds(cls, vary: dict[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
        if "seed" in vary:
            raise ValueError("seed: write it as `seeds`, over which figures are averaged")
        return vary

    @model_validator(mode="after")
    def _one_axis(self) -> "Experiment":
        of_methods = max((len(entry.vary) for entry in self.methods), default=0)
        if self.kind in ("curves", "tradeoff") and len(self.vary) + of_methods > 1:
            raise ValueError(f'kind = "{self.kind}" draws one varied setting; vary one, or choose kind = "table"')
        return self

    @field_validator("methods", mode="before")
    @classmethod
    def _names(cls, entries: Any) -> Any:
        named = isinstance(entries, list | tuple)
        return [{"method": entry} if isinstance(entry, str) else entry for entry in entries] if named else entries


class Chosen(Config):
    """The settings that a sweep found for one method and scenario."""

    score: float
    error: float = 0.0
    """Standard error of the score; better by no more than this, other settings do not replace the defaults."""
    default_score: float | None = None
    """Absent where the defaults diverged."""
    budget: int
    settings: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True)
class Entrant:
    """A method with the settings that it has in one cell."""

    label: str
    method: Unlearner
    tuned: bool = False
    at: Point | None = None
    """The varied settings and their values."""


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
    at: Point | None = None
    """The varied settings of the run and their values."""

    def path(self, folder: Path) -> Path:
        """The file of the rows. Another configuration of the cell has another place."""
        methods = [(e.label, e.method.model_dump(mode="json"), e.tuned, e.at) for e in self.entrants]
        asked = (methods, self.band_retrains, self.shadows, self.pairs, self.at)
        return folder / "cells" / f"{self.scenario}-{digest(FORMAT, self.config.model_dump(mode='json'), asked)}.json"

    @property
    def answers(self) -> int:
        """Models that are made: those of the methods, of retraining and, counted as one, of the attackers."""
        return len(self.entrants) + 1 + self.band_retrains + (self.shadows > 0)


@dataclass(frozen=True)
class Job:
    """What one run directory has to do: train, then its cells. Only one process may work on a run."""

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
        """How many notes `finish_job` yields: one for training and one for each answer."""
        return 0 if self.done else 1 + sum(cell.answers for cell in self.missing)


def load_experiment(path: Path, assignments: Sequence[str] | Mapping[str, Any] = (), quick: bool = False) -> Experiment:
    """Read an experiment; `--quick` shrinks it first, then `--set` has the last word."""
    table = _with_bases(path)
    if quick:
        table = _merge(_merge(_at_hand(table, path), QUICK), table.get("quick", {})) | {"reduced": True}
    table = _anchor(override(table, assignments), Path.cwd())
    return validate(Experiment, table, " with ".join([str(path), *(["--set"] if assignments else [])]))


def _with_bases(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The tables of the files that `base` names, one after the other, then the file's own; later ones override."""
    if path.resolve() in above:
        raise UserError(f"{path}: base: names itself")
    own = _anchor(read_toml(path), path.parent)
    named = own.pop("base", [])
    names = [named] if isinstance(named, str) else named
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"{path}: base: name one TOML file or a list of them")
    merged: dict[str, Any] = {}
    for name in names:
        merged = _merge(merged, _with_bases(path.parent / name, (*above, path.resolve())))
    return _merge(merged, own)


def _at_hand(table: dict[str, Any], path: Path) -> dict[str, Any]:
    """The same on generated scenes with the tiny backbone: other data and weights are not on every machine."""
    run = validate(RunConfig, table.get("run", {}), f"{path}: run")
    return table if (run.data.name, run.model.backbone) == ("scenes", "tiny") else {**table, "run": {}}


def _anchor(table: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Make the paths of an experiment absolute; relative ones are meant from `folder`."""
    anchored = dict(table)
    if isinstance(table.get("run"), dict):
        anchored["run"] = anchor_paths(table["run"], folder)
    if isinstance(table.get("vary"), dict):
        anchored["vary"] = {name: _anchor_values(name, values, folder) for name, values in table["vary"].items()}
    if isinstance(table.get("tuned"), str):
        anchored["tuned"] = str((folder / table["tuned"]).resolve())
    return anchored


def _anchor_values(name: str, values: Any, folder: Path) -> Any:
    """The values of a varied setting, where they are paths as absolute as those of the run."""
    section, _, key = name.partition(".")
    if not key or not isinstance(values, list):
        return values
    return [anchor_paths({section: {key: value}}, folder)[section][key] for value in values]


def _merge(table: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(table)
    for key, value in changes.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def load_tuned(path: Path) -> dict[str, dict[str, Chosen]]:
    """Method -> scenario -> what a sweep chose."""
    chosen: dict[str, dict[str, Chosen]] = {}
    for method, found in read_toml(path).items():
        if method not in METHODS or not isinstance(found, dict):
            raise UserError(f"{path}: {method}: not a method's table; write the file with `ease sweep`")
        chosen[method] = {name: validate(Chosen, table, f"{path}: {method}.{name}") for name, table in found.items()}
    return chosen


def run_folder(folder: Path, config: RunConfig) -> Path:
    """The folder of the run of a configuration; experiments in one folder share their runs."""
    return folder / "runs" / f"{config.partition.scheme}-{config.seed}-{digest(config.model_dump(mode='json'))[:8]}"


def plan(experiment: Experiment, folder: Path) -> list[Job]:
    """The grid as one job for each run directory, the longest first, so that processes end together."""
    tuned = load_tuned(experiment.tuned) if experiment.tuned else {}
    cells: dict[Path, list[Cell]] = {}
    for settings in varied(experiment.vary):
        for seed in experiment.seeds:
            for scenario in experiment.scenarios:
                config = scenario_config(_run_config(experiment, settings, seed), scenario)
                first = seed == experiment.seeds[0]
                cell = Cell(
                    config=config,
                    scenario=scenario,
                    entrants=tuple(entrants(experiment.methods, scenario, tuned, named=bool(experiment.vary))),
                    band_retrains=experiment.band_retrains if first else 0,
                    shadows=experiment.shadows,
                    pairs=experiment.kind == "raincloud",
                    at=point(settings),
                )
                cells.setdefault(run_folder(folder, config), []).append(cell)
    if experiment.kind == "subspaces":
        return [Job(place, found[0].config, (), overlap=True) for place, found in cells.items()]
    jobs = [Job(place, found[0].config, tuple(found)) for place, found in cells.items()]
    return sorted(jobs, key=lambda job: -job.notes)


def varied(vary: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Every combination of the values of some settings; one without any if nothing varies."""
    return [dict(zip(vary, values, strict=True)) for values in product(*vary.values())]


def point(settings: Mapping[str, Any]) -> Point | None:
    """A combination as tables and figures name it; None: nothing varies."""
    if len(settings) > 1:  # sorted, because results sort their keys
        names = sorted(settings)
        return ", ".join(names), tuple(settings[name] for name in names)
    return next(iter(settings.items()), None)


def _run_config(experiment: Experiment, settings: Mapping[str, Any], seed: int) -> RunConfig:
    changes = [f"seed={seed}", *(f"{name}={json.dumps(value)}" for name, value in settings.items())]
    return validate(RunConfig, override(experiment.run.model_dump(mode="json"), changes), "vary")


def entrants(
    entries: Sequence[Entry], scenario: Scenario, tuned: Mapping[str, Mapping[str, Chosen]], named: bool
) -> Iterator[Entrant]:
    """Every method with each combination of its varied settings; `named`: in its label, as the run's own are varied."""
    for entry in entries:
        chosen = tuned.get(entry.method, {}).get(scenario)
        for changed in varied(entry.vary):
            settings = {**(chosen.settings if chosen else {}), **entry.settings, **changed}
            method = make_method(entry.method, table=settings)
            label = entry.label or method.title
            if named:
                label = ", ".join([label, *(f"{name} = {value}" for name, value in changed.items())])
            yield Entrant(label, method, chosen is not None, None if named else point(changed))
