"""`ease sweep`: tries settings of every method with the same budget and writes the best as TOML."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from ease.config import Config
from ease.console import rounds_bar, table
from ease.errors import UserError
from ease.methods import METHODS
from ease.runs.workers import default_processes
from ease.storage import write_atomic
from ease.studies.experiment import Chosen, load_experiment
from ease.studies.sweep import FORMULA, Sampler, Search, choose, chosen_toml, searches_for, searches_in, sweep

RESULTS = Path("results")
"""The folder of the runs, shared with `ease bench`."""


class SweepSummary(Config):
    """`ease sweep`: the chosen settings of every method."""

    file: Path
    chosen: dict[str, dict[str, Chosen]]
    """Method -> kind of request -> settings."""
    diverged: tuple[str, ...]
    """Methods and requests without a choice, because all their trials diverged."""

    def render(self) -> Iterator[RenderableType]:
        rows = [
            [
                METHODS[name].title,
                scenario,
                ", ".join(f"{key} = {value}" for key, value in found.settings.items()) or "defaults",
                "diverged" if found.default_score is None else f"{found.default_score:.2f}",
                f"{found.score:.2f}",
            ]
            for name, scenarios in sorted(self.chosen.items())
            for scenario, found in scenarios.items()
        ]
        columns = ["method", "request", "chosen", "defaults' score", "score"]
        yield table("Chosen settings", columns, rows, caption=FORMULA, text_columns=3)
        yield from (f"{what}: every trial diverged, so there is no choice" for what in self.diverged)
        yield f'written to {self.file}; use it with tuned = "..." in an experiment'


def sweep_run(
    source: Path,
    out: Path,
    budget: int,
    sampler: Sampler,
    work: Path | None,
    processes: int | None,
    assignments: Sequence[str] | Mapping[str, Any],
    quiet: bool,
) -> SweepSummary:
    """Search on a run directory, or on the first seed of an experiment."""
    searches = _searches(source, budget, sampler, work, assignments)
    total = sum(search.notes for search in searches)
    with rounds_bar("sweep", total, quiet=quiet) as bar:
        for note in sweep(searches, processes or default_processes(searches[0].config.device)):
            bar.step(done=note)
    chosen = choose(searches)
    write_atomic(out, chosen_toml(chosen, source.as_posix()).encode())
    tried = [(name, scenario) for search in searches for name in search.methods for scenario in search.scenarios]
    lost = [
        f"{METHODS[name].title}, {scenario} request" for name, scenario in tried if scenario not in chosen.get(name, {})
    ]
    return SweepSummary(file=out, chosen=chosen, diverged=tuple(lost))


def _searches(
    source: Path, budget: int, sampler: Sampler, work: Path | None, assignments: Sequence[str] | Mapping[str, Any]
) -> list[Search]:
    if source.is_dir():
        if assignments or work is not None:
            option = "--set" if assignments else "--work"
            raise UserError(f"{option}: {source} is a run, which has its settings and its place; leave {option} out")
        return searches_in(source, [name for name, kind in METHODS.items() if kind.tuned], budget, sampler)
    experiment = load_experiment(source, assignments)
    named = dict.fromkeys(entry.method for entry in experiment.methods)
    config = experiment.run.model_copy(update={"seed": experiment.seeds[0]})
    tuned = [name for name in named if METHODS[name].tuned]
    return searches_for(config, experiment.scenarios, tuned, budget, work or RESULTS, sampler)
