"""One stream of rounds, metrics and artefacts for files, trackers and functions that follow an experiment."""

import csv
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from math import isfinite
from pathlib import Path
from typing import Any, Literal, TextIO

from ease import plug_ins
from ease.errors import UserError, did_you_mean

Kind = Literal["start", "round", "metrics", "artefact"]
FOLDER = "tracking"
"""Folder of the files of this package's sinks, inside of a run."""


@dataclass(frozen=True)
class Event:
    """Something that happened in a run."""

    kind: Kind
    folder: Path
    """Folder of the run, or of an experiment's results."""
    activity: str
    """The activity: `training`, `client-3/ease`, `audit client-3/ease`, `bench main`."""
    step: int = 0
    """Number of the round."""
    values: Mapping[str, float] = field(default_factory=dict)
    """Losses, recalls and costs by name, such as `forget/recall@1`."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """For a start: the configuration."""
    path: Path | None = None
    """For an artefact: its file."""


Tracker = Callable[[Event], None]
_ACTIVE: ContextVar[tuple[Tracker, ...]] = ContextVar("trackers", default=())


def emit(event: Event) -> None:
    """Give an event to every tracker."""
    for tracker in _ACTIVE.get():
        tracker(event)


def emit_start(folder: Path, activity: str, settings: Mapping[str, Any]) -> None:
    emit(Event("start", folder, activity, settings=settings))


def emit_round(folder: Path, activity: str, step: int, values: Mapping[str, float | None]) -> None:
    emit(Event("round", folder, activity, step, _numbers(values)))


def emit_metrics(folder: Path, activity: str, values: Mapping[str, float | None]) -> None:
    emit(Event("metrics", folder, activity, values=_numbers(values)))


def emit_artefact(folder: Path, activity: str, path: Path) -> None:
    emit(Event("artefact", folder, activity, path=path))


def tracked() -> bool:
    """Whether anyone follows, so that figures nobody reads are not computed."""
    return bool(_ACTIVE.get())


def _numbers(values: Mapping[str, float | None]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if value is not None and isfinite(value)}


@contextmanager
def tracking(*trackers: str | Tracker) -> Iterator[None]:
    """Give all events inside to trackers: names (`csv`, `tensorboard`, `mlflow`, `wandb`, plug-ins) or functions.

    What an own function raises ends the work. A named tracker that fails is named on the error stream and left out.
    """
    with ExitStack() as closing:
        token = _ACTIVE.set((*_ACTIVE.get(), *(_opened(each, closing) for each in dict.fromkeys(trackers))))
        try:
            yield
        finally:
            _ACTIVE.reset(token)


def _opened(tracker: str | Tracker, closing: ExitStack) -> Tracker:
    if not isinstance(tracker, str):
        return tracker
    if tracker in SINKS:
        sink = SINKS[tracker]()
    elif tracker in plug_ins.names(plug_ins.TRACKERS):
        return _Guarded(tracker, plug_ins.load(plug_ins.TRACKERS, tracker, "--track")())
    else:
        known = (*SINKS, *plug_ins.names(plug_ins.TRACKERS))
        raise UserError(
            f"--track {tracker}: unknown tracker{did_you_mean(tracker, known)}; choose one of: {', '.join(known)}"
        )
    closing.callback(sink.close)
    return _Guarded(tracker, sink)


class _Guarded:
    """A tracker that ends no training: after its first error it gets nothing more."""

    def __init__(self, name: str, tracker: Tracker):
        self.name, self.tracker, self.failed = name, tracker, False

    def __call__(self, event: Event) -> None:
        if self.failed:
            return
        try:
            self.tracker(event)
        except Exception as error:  # a service may fail in any way
            self.failed = True
            said = " ".join(str(error).split())
            print(
                f"--track {self.name}: stopped tracking ({type(error).__name__}: {said}); the work continues",
                file=sys.stderr,
            )


class Sink:
    """Writes events somewhere."""

    def __call__(self, event: Event) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Finish what is open."""


class CsvSink(Sink):
    """`tracking/events.csv` in the run: one line a number, in the order in which they came."""

    COLUMNS = ("time", "activity", "kind", "step", "name", "value")

    def __init__(self) -> None:
        self._files: dict[Path, TextIO] = {}

    def __call__(self, event: Event) -> None:
        path = event.folder / FOLDER / "events.csv"
        if path not in self._files:
            path.parent.mkdir(parents=True, exist_ok=True)
            fresh = not path.exists() or not path.stat().st_size
            self._files[path] = path.open("a", newline="", encoding="utf-8")
            if fresh:
                csv.writer(self._files[path]).writerow(self.COLUMNS)
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        rows: list[tuple[str, object]] = list(event.values.items())
        rows += [("path", event.path)] if event.path else []
        for name, value in rows or [("", "")]:
            csv.writer(self._files[path]).writerow([now, event.activity, event.kind, event.step, name, value])
        self._files[path].flush()

    def close(self) -> None:
        for file in self._files.values():
            file.close()


class TensorBoardSink(Sink):
    """Event files of TensorBoard in `tracking/tensorboard`: a folder for each activity."""

    def __init__(self) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise _missing("tensorboard") from error
        self._make: Any = SummaryWriter
        self._writers: dict[tuple[Path, str], Any] = {}

    def __call__(self, event: Event) -> None:
        key = event.folder, event.activity
        if key not in self._writers:
            folder = event.folder / FOLDER / "tensorboard" / event.activity.replace(" ", "-")
            self._writers[key] = self._make(str(folder))
        for name, value in event.values.items():
            self._writers[key].add_scalar(name, value, event.step)
        if event.kind == "start":
            self._writers[key].add_text("settings", "\n".join(f"    {k} = {v}" for k, v in flat(event.settings)))
        self._writers[key].flush()

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()


class MlflowSink(Sink):
    """A run of MLflow for each activity, where MLFLOW_TRACKING_URI says or in `tracking/mlflow.db` of the run."""

    def __init__(self) -> None:
        try:
            import mlflow
        except ImportError as error:
            raise _missing("mlflow") from error
        self._mlflow: Any = mlflow
        self._clients: dict[Path, Any] = {}
        self._runs: dict[tuple[Path, str], str] = {}

    def _client(self, folder: Path) -> Any:
        import os

        if folder not in self._clients:
            (folder / FOLDER).mkdir(parents=True, exist_ok=True)
            own = f"sqlite:///{(folder / FOLDER / 'mlflow.db').resolve()}"
            self._clients[folder] = self._mlflow.MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or own)
        return self._clients[folder]

    def __call__(self, event: Event) -> None:
        client, key = self._client(event.folder), (event.folder, event.activity)
        if key not in self._runs:
            found = client.get_experiment_by_name(event.folder.name)
            number = found.experiment_id if found else client.create_experiment(event.folder.name)
            self._runs[key] = client.create_run(number, run_name=event.activity).info.run_id
        for name, value in flat(event.settings):
            client.log_param(self._runs[key], name, str(value)[:500])
        for name, value in event.values.items():
            client.log_metric(self._runs[key], name.replace("@", "_at_"), value, step=event.step)
        if event.path is not None:
            client.set_tag(self._runs[key], f"artefact.{event.path.name}", str(event.path))

    def close(self) -> None:
        for (folder, _), number in self._runs.items():
            self._client(folder).set_terminated(number)


class WandbSink(Sink):
    """A run of Weights & Biases for each activity; offline in `tracking/wandb` unless WANDB_MODE says otherwise."""

    def __init__(self) -> None:
        try:
            import wandb
        except ImportError as error:
            raise _missing("wandb") from error
        self._wandb: Any = wandb
        self._runs: dict[tuple[Path, str], Any] = {}

    def __call__(self, event: Event) -> None:
        import os

        key = event.folder, event.activity
        if key not in self._runs:
            folder = event.folder / FOLDER
            folder.mkdir(parents=True, exist_ok=True)
            self._runs[key] = self._wandb.init(
                project="ease",
                group=event.folder.name,
                name=event.activity,
                dir=str(folder),
                mode=os.environ.get("WANDB_MODE", "offline"),
                config=dict(flat(event.settings)),
                reinit="create_new",
            )
        run = self._runs[key]
        if event.kind == "round" and event.values:
            run.log(dict(event.values), step=event.step)
        elif event.values:
            run.summary.update(dict(event.values))
        if event.path is not None:
            run.summary[f"artefact/{event.path.name}"] = str(event.path)

    def close(self) -> None:
        for run in self._runs.values():
            run.finish()


SINKS: dict[str, type[Sink]] = {
    "csv": CsvSink,
    "tensorboard": TensorBoardSink,
    "mlflow": MlflowSink,
    "wandb": WandbSink,
}


def flat(settings: Mapping[str, Any], above: str = "") -> Sequence[tuple[str, Any]]:
    """Nested settings as `training.rounds`, value."""
    found: list[tuple[str, Any]] = []
    for name, value in settings.items():
        key = f"{above}{name}"
        found += flat(value, f"{key}.") if isinstance(value, Mapping) else [(key, value)]
    return found


def _missing(name: str) -> UserError:
    return UserError(f"--track {name}: the package is not installed; run: pip install 'ease[track]'")
