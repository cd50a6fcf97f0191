"""`ease bench`."""

from pathlib import Path
from typing import Annotated

import typer

from ease.cli.options import Processes, Quiet, Result, Settings, tracked
from ease.errors import UserError


@tracked
def bench(
    experiment: Annotated[
        Path | None, typer.Argument(help="TOML file of an experiment, such as those in experiments/.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of runs and results. Finished parts are not repeated.")] = Path(
        "results"
    ),
    quick: Annotated[
        bool, typer.Option("--quick", help="A small version that takes minutes. Its figures prove nothing.")
    ] = False,
    processes: Processes = None,
    tables: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Only write the tables and figures of DIR/results.json again.")
    ] = None,
    compare: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help="Write a leaderboard of DIR and others to --out. Repeatable."),
    ] = None,
    settings: Settings = None,
    quiet: Quiet = False,
) -> Result:
    """Run an experiment: methods, requests and seeds in a grid.

    It writes tables and figures next to those of retraining. An experiment with `requests = 20` gives every method the
    same stream of requests and writes a leaderboard.

    Examples: `ease bench experiments/main.toml --quick`, `ease bench experiments/main.toml --set seeds=[0]`,
    `ease bench --tables results/main`, `ease bench --compare results/main --compare results/mine --out results`
    """
    from ease.commands.bench import bench_run, compare_results, write_tables
    from ease.studies.experiment import load_experiment

    if compare:
        return compare_results([*compare, *([experiment] if experiment else [])], out)
    if experiment is not None and tables is None:
        name = experiment.stem + ("-quick" if quick else "")
        loaded = load_experiment(experiment, tuple(settings or ()), quick)
        if loaded.requests:
            from ease.commands.streams import stream_run

            return stream_run(loaded, name, out, processes, quiet)
        return bench_run(loaded, name, out, processes, quiet)
    if experiment is None and tables is not None:
        return write_tables(tables)
    raise UserError("name an experiment's TOML file, or a folder of results with --tables")
