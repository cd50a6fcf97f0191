"""`ease sweep`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ease.cli.options import Processes, Quiet, Result, Settings, command


class Sampler(StrEnum):
    halton = "halton"
    optuna = "optuna"


@command
def sweep(
    source: Annotated[Path, typer.Argument(help="A run directory, or an experiment's TOML file.")],
    out: Annotated[Path, typer.Option(help="TOML file for the chosen settings.")],
    budget: Annotated[int, typer.Option(min=1, help="Settings to try per method. The first are its defaults.")] = 8,
    sampler: Annotated[
        Sampler, typer.Option(help="halton spreads the trials evenly; optuna learns from the scores so far.")
    ] = Sampler.halton,
    work: Annotated[
        Path | None,
        typer.Option(help="Folder of an experiment's runs, as --out of `ease bench`. By default results."),
    ] = None,
    processes: Processes = None,
    settings: Settings = None,
    quiet: Quiet = False,
) -> Result:
    """Choose the settings of every method with the same budget.

    Settings are chosen on a request that is not reported, and without retraining.

    Example: `ease sweep experiments/main.toml --out experiments/tuned/scenes.toml`
    """
    from ease.commands.sweep import sweep_run

    return sweep_run(source, out, budget, sampler.value, work, processes, tuple(settings or ()), quiet)
