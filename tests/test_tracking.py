"""The stream of events: everything arrives once and in order, and only one's own function can end a training."""

import csv
import json
from pathlib import Path

import pytest

import ease
from ease import plug_ins
from ease.errors import UserError
from ease.events import Event, emit_metrics, emit_round, emit_start, tracking
from ease.runs.answers import StoredAnswer

SMALL = {
    "data.train": 60,
    "data.validation": 0,
    "data.test": 20,
    "partition.clients": 3,
    "partition.classes": 3,
    "partition.scheme": "iid",
    "training.rounds": 2,
    "training.batch_size": 8,
    "model.hidden": 16,
    "model.embedding": 8,
    "gallery": 20,
}


def test_training_and_forgetting_are_one_stream(tmp_path: Path) -> None:
    """Two rounds of training and the rounds of fine-tuning, each with its loss; artefacts are files that are there."""
    events: list[Event] = []
    with ease.tracking("csv", events.append):
        run = ease.train(out=tmp_path / "run", settings=SMALL, quiet=True)
        answer = run.forget(client=1, method="finetune", quiet=True)
    assert not (tmp_path / "elsewhere").exists()
    kinds = [(event.activity, event.kind) for event in events]
    assert kinds[:3] == [("training", "start"), ("training", "round"), ("training", "round")]
    assert ("client-1/finetune", "start") in kinds and kinds[-1] == ("client-1/finetune", "artefact")
    rounds = [event for event in events if event.kind == "round"]
    assert [event.step for event in rounds[:2]] == [1, 2] and all("loss" in event.values for event in rounds)
    assert events[0].settings["training"]["rounds"] == 2
    assert all(event.path.is_file() for event in events if event.path is not None)
    metrics = {name: value for event in events if event.kind == "metrics" for name, value in event.values.items()}
    assert metrics["test/recall@1"] == StoredAnswer(answer.summary.folder).record().metrics["test/recall@1"]
    with (run.folder / "tracking" / "events.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len([each for each in lines if each["kind"] == "round" and each["name"] == "loss"]) == len(rounds)
    written = {(each["activity"], each["step"], each["name"]): each["value"] for each in lines}
    assert float(written["training", "1", "loss"]) == rounds[0].values["loss"]


def test_an_untracked_run_leaves_nothing(tmp_path: Path) -> None:
    run = ease.train(out=tmp_path / "run", settings=SMALL, quiet=True)
    assert not (run.folder / "tracking").exists()


def test_a_command_sends_its_rounds(ease, small, tmp_path: Path) -> None:
    changes = [word for assignment in small for word in ("--set", assignment)]
    assert ease("train", "--out", tmp_path / "run", "--track", "csv", *changes).code == 0
    assert (tmp_path / "run" / "tracking" / "events.csv").is_file()
    result = ease("train", "--out", tmp_path / "run", "--track", "tensorbord", *changes)
    assert result.code == 2 and result.err.startswith("error: --track tensorbord: unknown tracker (did you mean")


def test_a_tracker_that_fails_is_left_out_and_an_own_function_ends_the_work(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    seen = []

    def broken(event: Event) -> None:
        seen.append(event)
        raise OSError("no\nroom")

    monkeypatch.setattr(plug_ins, "names", lambda group: ["broken"])
    monkeypatch.setattr(plug_ins, "load", lambda *_: lambda: broken)
    with tracking("broken"):
        emit_round(tmp_path, "training", 1, {"loss": 1.0})
        emit_round(tmp_path, "training", 2, {"loss": 1.0})
    assert len(seen) == 1
    assert capsys.readouterr().err == "--track broken: stopped tracking (OSError: no room); the work continues\n"
    with tracking(broken), pytest.raises(OSError, match="room"):
        emit_round(tmp_path, "training", 1, {"loss": 1.0})


def test_nan_is_not_sent(tmp_path: Path) -> None:
    seen: list[Event] = []
    with tracking(seen.append):
        emit_metrics(tmp_path, "training", {"loss": None, "nan": float("nan"), "recall": 1})
    assert seen[0].values == {"recall": 1.0}
    emit_metrics(tmp_path, "training", {"recall": 2})
    assert len(seen) == 1, "outside nobody listens"


def emit_all(folder: Path) -> None:
    emit_start(folder, "training", {"training": {"rounds": 2}})
    emit_round(folder, "training", 1, {"loss": 2.0, "forget/recall@1": 10.0})
    emit_round(folder, "training", 2, {"loss": 1.0, "forget/recall@1": 20.0})
    emit_metrics(folder, "training", {"test/recall@1": 30.0})


@pytest.mark.filterwarnings("ignore")  # of packages that are not ours
def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with tracking("tensorboard"):
        emit_all(tmp_path)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(tmp_path / "tracking" / "tensorboard" / "training"))
    found.Reload()
    assert [(each.step, each.value) for each in found.Scalars("loss")] == [(1, 2.0), (2, 1.0)]


@pytest.mark.filterwarnings("ignore")  # of packages that are not ours
def test_mlflow_reads_what_was_written(tmp_path: Path, monkeypatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with tracking("mlflow"):
        emit_all(tmp_path)
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'tracking' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name(tmp_path.name)
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED" and run.data.params == {"training.rounds": "2"}
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(each.step, each.value) for each in history] == [(1, 2.0), (2, 1.0)]


@pytest.mark.filterwarnings("ignore")  # of packages that are not ours
def test_wandb_writes_offline(tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    with tracking("wandb"):
        emit_all(tmp_path)
    (folder,) = (tmp_path / "tracking" / "wandb").glob("offline-run-*")
    summary = folder / "files" / "wandb-summary.json"
    assert list(folder.glob("*.wandb")) and (not summary.is_file() or json.loads(summary.read_text())["loss"] == 1.0)


@pytest.mark.parametrize("name", ["tensorboard", "mlflow", "wandb"])
def test_a_missing_package_is_named(name: str, monkeypatch) -> None:
    import sys

    for module in (name, "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=rf"--track {name}: .* pip install 'ease\[track\]'"), tracking(name):
        pass
