"""Running experiments: what the rows hold, and that finished cells are not done again."""

import subprocess
from dataclasses import replace

import pytest

import ease.studies.bench
from ease.errors import UserError
from ease.methods.base import fine_tuning
from ease.methods.finetune import Finetune
from ease.methods.retrain import Retrain
from ease.studies.bench import bands, bench, results
from ease.studies.experiment import load_experiment, plan
from ease.studies.records import BenchRow, Role


@pytest.mark.slow
def test_rows_of_a_grid_and_resuming(small_experiment, tmp_path, monkeypatch) -> None:
    experiment = load_experiment(small_experiment, ["seeds=[3]"])
    notes = list(bench(experiment, tmp_path, 1))
    # Each of two runs: trained, retrain, one more order, fine-tune and EASE twice.
    assert len(notes) == 2 * 6 == len(set(notes))
    found = results(experiment, tmp_path)
    client = [row for row in found.rows if row.scenario == "client"]
    assert [row.role for row in client] == ["trained", "method", "method", "method", "band", "retrain"]
    assert [row.label for row in client] == ["Trained", "Fine-tune", "hard", "hard", "Retrain, order 1", "Retrain"]
    assert [row.at and row.at.value for row in client] == [None, None, 0.3, 0.6, None, None]
    retrain, trained = client[-1].metrics, client[0].metrics
    assert (retrain["rho"], retrain["ratio/seconds"], retrain["ratio/bytes_up"]) == (0, 1, 1)
    assert trained["rho"] == pytest.approx(1, abs=0.5) and "cost/seconds" not in trained
    assert client[1].metrics["ratio/bytes_up"] == pytest.approx(0.5)  # one round of two
    assert {band.scenario for band in found.bands} == {"client", "class"}
    assert found.title == "Small" and found.header.experiment.seeds == (3,)

    monkeypatch.setattr(
        ease.studies.bench.World, "open", lambda config: pytest.fail("a finished cell was opened again")
    )
    assert list(bench(experiment, tmp_path, 1)) == []
    assert results(experiment, tmp_path).rows == found.rows
    monkeypatch.undo()

    (job,) = [job for job in plan(experiment, tmp_path) if job.config.partition.scheme == "iid"]
    job.cells[0].path(job.folder).unlink()
    before = {path: path.stat().st_mtime_ns for path in job.folder.rglob("model.safetensors")}
    assert len(list(bench(experiment, tmp_path, 1))) == 6
    assert results(experiment, tmp_path).rows == found.rows
    assert {path: path.stat().st_mtime_ns for path in before} == before  # measured again, not answered again


def test_a_band_needs_retrainings_of_one_run() -> None:
    """Of 10 and 14 the mean is 12, the deviation 2.83; t(0.975, 1) = 12.71, times sqrt(1.5): 12 ± 44.0."""

    def row(role: Role, seed: int, value: float) -> BenchRow:
        return BenchRow(role=role, scenario="client", seed=seed, method="x", label="x", metrics={"mia": value})

    (band,) = bands([row("retrain", 0, 10), row("band", 0, 14), row("retrain", 1, 99), row("method", 0, 50)])
    found = band.metrics["mia"]
    assert [found.low, found.high] == pytest.approx([12 - 44.01, 12 + 44.01], abs=0.01) and found.models == 2


def test_a_method_that_refuses_is_named(small_experiment, tmp_path) -> None:
    changes = [
        'methods=[{ method = "ease_paper", settings = { alpha = 2 } }]',
        "seeds=[0]",
        'scenarios=["client"]',
    ]
    with pytest.raises(UserError, match=r"client request, seed 0, EASE \(paper\): alpha = 2"):
        list(bench(load_experiment(small_experiment, changes), tmp_path, 1))


def test_a_band_of_rho_leaves_out_the_reference() -> None:
    """Retraining lies at 0 from itself by definition: of 1 and 3 alone, 2 ± 12.71 * 1.414 * sqrt(1.5) = 2 ± 22.0."""

    def row(role: Role, value: float) -> BenchRow:
        metrics = {"rho": value, "mia": value}
        return BenchRow(role=role, scenario="client", seed=0, method="x", label="x", metrics=metrics)

    (band,) = bands([row("retrain", 0), row("band", 1), row("band", 3)])
    rho = band.metrics["rho"]
    assert [rho.low, rho.high] == pytest.approx([2 - 22.0, 2 + 22.0], abs=0.02)
    assert band.metrics["mia"] != rho


def test_a_method_that_diverges_gets_a_row_and_stops_no_other(small_experiment, tmp_path) -> None:
    """Fine-tuning whose every update is refused."""
    wild = '{ method = "finetune", label = "wild" }'
    experiment = load_experiment(
        small_experiment,
        [f"methods=[{wild}, 'not']", "seeds=[0]", 'scenarios=["client"]', "band_retrains=0"],
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Finetune, "unlearn", exploding)
        notes = list(bench(experiment, tmp_path, 1))
    assert "client request, seed 0: wild, diverged" in notes
    found = {row.label: row for row in results(experiment, tmp_path).rows}
    assert found["wild"].metrics == {} and "every update was rejected" in found["wild"].diverged
    assert "rho" in found["NoT"].metrics and not found["NoT"].diverged
    assert list(bench(experiment, tmp_path, 1)) == []


def exploding(self, trained, request, federation):
    """Fine-tuning whose steps are so long that no update is made of numbers."""
    wild = trained.training.model_copy(update={"learning_rate": 1e30})
    yield from fine_tuning(replace(trained, training=wild), trained.final, request, federation, 1, "finetune")


def test_a_reference_that_diverges_stops_the_grid(small_experiment, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(Retrain, "unlearn", exploding)
    with pytest.raises(UserError, match="client request, seed 0, Retrain: round 1: every update was rejected"):
        list(bench(load_experiment(small_experiment, ["seeds=[0]", 'scenarios=["client"]']), tmp_path, 1))


def test_only_a_tracked_source_has_a_commit(tmp_path, monkeypatch) -> None:
    """A package installed inside another project must not record that project's commit."""
    name = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    for command in (("init", "-q"), (*name, "commit", "-q", "--allow-empty", "-m", "x")):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    source = tmp_path / "bench.py"
    source.touch()
    monkeypatch.setattr(ease.studies.bench, "__file__", str(source))
    assert ease.studies.bench._commit() is None
    subprocess.run(["git", "add", "bench.py"], cwd=tmp_path, check=True)
    assert ease.studies.bench._commit().endswith("-dirty")


def test_subspaces_use_only_training(small_experiment, tmp_path) -> None:
    experiment = load_experiment(small_experiment, ["kind=subspaces", "seeds=[0]", 'scenarios=["client"]'])
    assert len(list(bench(experiment, tmp_path, 1))) == 1
    found = results(experiment, tmp_path)
    assert found.rows == () and found.subspaces[0].blocks[0].clients == (0, 1, 2)
    assert not list(tmp_path.glob("runs/*/requests"))
    assert list(bench(experiment, tmp_path, 1)) == []


def test_raincloud_keeps_similarities(small_experiment, tmp_path) -> None:
    experiment = load_experiment(
        small_experiment, ["kind=raincloud", "seeds=[0]", 'scenarios=["client"]', "methods=[]"]
    )
    list(bench(experiment, tmp_path, 1))
    for row in results(experiment, tmp_path).rows:
        assert len(row.pairs["forget"]) == 18  # what the client of middle size trains on
        assert all(-1 <= value <= 1 for values in row.pairs.values() for value in values)
