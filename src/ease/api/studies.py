"""Experiments from Python: bench, sweep, compare and leaderboard, with results as data frames.

Examples:
    >>> import ease
    >>> table = {"title": "Two methods", "methods": ["finetune", "not"], "scenarios": ["client"], "seeds": [0],
    ...          "shadows": 0, "band_retrains": 0, "run": small}
    >>> results = ease.bench(table, name="two", out="results", quiet=True)
    >>> results
    <Results results/two: 4 models, 1 seed>
    >>> sorted(results.to_frame()["method"])
    ['finetune', 'not', 'retrain', 'trained']

`small` means settings of the runs, such as `{"training": {"rounds": 2}}`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

from ease.api import checked_settings
from ease.commands.bench import BenchSummary, LeaderboardSummary, bench_run, compare_results, write_tables
from ease.commands.compare import CompareSummary, compare_run
from ease.commands.streams import StreamSummary, stream_run
from ease.commands.sweep import SweepSummary, sweep_run
from ease.config import assign, validate
from ease.errors import UserError
from ease.runs.config import RunConfig, anchor_paths, load_config
from ease.show.leaderboard import Standing
from ease.show.notebook import Shows
from ease.show.stream_board import StreamStanding
from ease.studies.experiment import Chosen, Experiment, load_experiment
from ease.studies.scenarios import Scenario
from ease.studies.sweep import Sampler

if TYPE_CHECKING:
    import pandas


def _frame(rows: list[dict[str, Any]]) -> "pandas.DataFrame":
    try:
        import pandas
    except ImportError as error:
        raise UserError("to_frame: pandas is not installed; run: pip install 'ease-unlearning[frames]'") from error
    return pandas.DataFrame(rows)


@dataclass(frozen=True, repr=False)
class Results(Shows):
    """The results of an experiment. `print` shows what `ease bench` ends with, a notebook its tables."""

    summary: BenchSummary = field(compare=False)

    @property
    def folder(self) -> Path:
        """Folder of tables and figures."""
        return self.summary.folder

    @property
    def line(self) -> str:
        """Folder, models and seeds."""
        seeds = self.summary.seeds
        return f"{self.folder}: {len(self.summary.rows)} models, {seeds} seed{'s' if seeds > 1 else ''}"

    def to_frame(self) -> "pandas.DataFrame":
        """One row for each model of each request and seed: settings, varied settings and metrics as columns."""
        rows = []
        for row in self.summary.rows:
            kept = row.model_dump(mode="json", include={"scenario", "seed", "role", "method", "label", "tuned"})
            settings = {f"settings/{name}": value for name, value in row.settings.items()}
            changed = row.at.settings if row.at else {}
            rows.append({**kept, **settings, **changed, "diverged": row.diverged, **row.metrics})
        return _frame(rows)


@dataclass(frozen=True, repr=False)
class Leaderboard(Shows):
    """Several experiments side by side."""

    summary: LeaderboardSummary = field(compare=False)

    @property
    def line(self) -> str:
        """Rows and files."""
        return f"{len(self.standings)} rows in {', '.join(map(str, self.summary.files))}"

    @property
    def standings(self) -> tuple[Standing, ...]:
        """Every method of every experiment, the nearest to retraining first."""
        return self.summary.standings

    def to_frame(self) -> "pandas.DataFrame":
        """One row for each method, experiment and kind of request."""
        return _frame([each.model_dump(mode="json") for each in self.standings])


@dataclass(frozen=True, repr=False)
class Stream(Shows):
    """Methods on the same stream of requests."""

    summary: StreamSummary = field(compare=False)

    @property
    def folder(self) -> Path:
        """File of the leaderboard."""
        return self.summary.folder

    @property
    def line(self) -> str:
        """Folder, methods and requests."""
        return f"{self.folder}: {len(self.standings)} methods, {len(self.summary.reference.kinds)} requests"

    @property
    def standings(self) -> tuple[StreamStanding, ...]:
        """Every method, the nearest to retraining first."""
        return self.summary.standings

    def to_frame(self) -> "pandas.DataFrame":
        """One row for each method."""
        return _frame([each.model_dump(mode="json") for each in self.standings])


@dataclass(frozen=True, repr=False)
class Sweep(Shows):
    """The settings that a sweep chose."""

    summary: SweepSummary = field(compare=False)

    @property
    def line(self) -> str:
        """File and number of methods."""
        return f"{self.summary.file}: settings of {len(self.chosen)} methods"

    @property
    def chosen(self) -> dict[str, dict[str, Chosen]]:
        """Method -> kind of request -> settings and scores."""
        return self.summary.chosen


@dataclass(frozen=True, repr=False)
class Comparison(Shows):
    """A closed-form head next to the configured model."""

    summary: CompareSummary = field(compare=False)

    @property
    def line(self) -> str:
        """Which model to train."""
        return self.advice

    @property
    def advice(self) -> str:
        """Which model to train, in a sentence."""
        return self.summary.advice

    @property
    def gap(self) -> float:
        """Test R@1 of the closed form minus that of the other model, in points."""
        return self.summary.gap


def bench(
    experiment: str | Path | Mapping[str, Any],
    out: str | Path = "results",
    settings: Mapping[str, Any] | None = None,
    quick: bool = False,
    name: str = "",
    processes: int = 1,
    quiet: bool = False,
) -> Results | Stream:
    """Run an experiment from its TOML file, or from a mapping of the same shape and a `name`.

    An experiment with `requests` gives a `Stream`, any other `Results`.

    `settings` such as {"run.training.rounds": 5} change it. Finished cells are not computed again. One process by
    default, because more of them run a script without `if __name__ == "__main__"` once each.
    """
    changes = checked_settings(settings)
    if isinstance(experiment, Mapping):
        if not name:
            raise UserError('name: an experiment without a file needs a name for its folder, such as name="mine"')
        table = {**experiment, "run": anchor_paths(dict(experiment.get("run", {})), Path.cwd())}
        found = validate(Experiment, assign(table, changes), name)
        if quick:
            raise UserError("quick=True: only for an experiment in a TOML file; make the mapping smaller instead")
    elif isinstance(experiment, str | Path):
        found = load_experiment(Path(experiment), changes, quick)
        name = name or Path(experiment).stem + ("-quick" if quick else "")
    else:
        raise UserError(f"experiment={experiment!r}: name a TOML file, or give a mapping of the same shape")
    if found.requests:
        return Stream(stream_run(found, name, Path(out), processes, quiet))
    return Results(bench_run(found, name, Path(out), processes, quiet))


def open_results(folder: str | Path) -> Results:
    """Results that were computed before; tables and figures are written again.

    Examples:
        >>> ease.open_results("results/two")
        <Results results/two: 4 models, 1 seed>
    """
    return Results(write_tables(Path(folder)))


def leaderboard(*folders: str | Path, out: str | Path = "results") -> Leaderboard:
    """Several results side by side; writes `leaderboard.csv` and `leaderboard.html` to `out`.

    Examples:
        >>> ease.leaderboard("results/two").standings[0].rank
        1
    """
    if not folders:
        raise UserError('leaderboard: name at least one folder of results, such as "results/main"')
    return Leaderboard(compare_results([Path(folder) for folder in folders], Path(out)))


def sweep(
    source: str | Path,
    out: str | Path,
    budget: int = 8,
    sampler: Sampler = "halton",
    work: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    processes: int = 1,
    quiet: bool = False,
) -> Sweep:
    """Choose the settings of every method with the same budget, on a run or on the first seed of an experiment.

    `sampler="optuna"` learns from the scores so far and needs the extra `tune`.
    """
    folder = None if work is None else Path(work)
    return Sweep(
        sweep_run(Path(source), Path(out), budget, sampler, folder, processes, checked_settings(settings), quiet)
    )


def compare(
    config: str | Path | None = None,
    scenario: Scenario = "client",
    pairs: int = 2000,
    out: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    quiet: bool = False,
) -> Comparison:
    """Train a closed-form head and the configured model on the same images, and forget with both."""
    loaded = load_config(None if config is None else Path(config))
    table = anchor_paths(assign(loaded.model_dump(mode="json"), checked_settings(settings)), Path.cwd())
    folder = Path(out) if out is not None else Path(mkdtemp(prefix="ease-compare-"))
    return Comparison(compare_run(validate(RunConfig, table, "settings"), scenario, folder, pairs, quiet))
