"""Experiments: what a file means, that finished cells are not done again, and what the rows hold."""

from pathlib import Path

import pytest

import ease.bench
from ease.bench import Experiment, bands, bench, load_experiment, plan, results
from ease.errors import UserError
from ease.methods import METHODS

EXPERIMENTS = sorted((Path(__file__).parents[1] / "experiments").glob("*.toml"))

SMALL = """
title = "Small"
shadows = 0
seeds = [3, 1]
band_retrains = 1
scenarios = ["client", "class"]
methods = ["finetune", { method = "ease", label = "hard", vary = { delta = [0.3, 0.6] } }]

[run]
gallery = 20
data = { train = 60, validation = 0, test = 20 }
partition = { clients = 3, classes = 3, scheme = "iid" }
model = { hidden = 16, embedding = 8 }
training = { rounds = 2, local_epochs = 1, batch_size = 8 }
"""


@pytest.fixture
def small_experiment(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
@pytest.mark.parametrize("quick", [False, True])
def test_shipped_experiments_are_valid(path, quick, tmp_path) -> None:
    experiment = load_experiment(path, quick=quick)
    jobs = plan(experiment, tmp_path)
    assert jobs and (experiment.kind == "subspaces" or all(cell.entrants for job in jobs for cell in job.cells))


def test_the_main_comparison_has_every_method() -> None:
    main = load_experiment(EXPERIMENTS[0].parent / "main.toml")
    assert {entry.method for entry in main.methods} == METHODS.keys() - {"retrain"}
    assert main.scenarios == ("client", "class", "sample") and len(main.seeds) == 3


def test_quick_comes_before_set_and_spares_what_it_does_not_name(small_experiment) -> None:
    small_experiment.write_text(SMALL + "\n[quick]\nband_retrains = 0\n[quick.run.training]\nrounds = 1\n")
    assert load_experiment(small_experiment).run.training.rounds == 2
    quick = load_experiment(small_experiment, ["run.gallery=7"], quick=True)
    assert (quick.seeds, quick.band_retrains, quick.run.training.rounds) == ((0,), 0, 1)
    assert quick.run.gallery == 7 and quick.run.training.batch_size == 8


def test_paths_are_meant_from_the_file(tmp_path) -> None:
    path = tmp_path / "x.toml"
    path.write_text('title = "x"\n[run.data]\nname = "folder"\npath = "photos"\n')
    assert load_experiment(path).run.data.path == tmp_path / "photos"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("shadows = 3", "shadows: choose an even number"),
        ('kind = "pie"', "kind"),
        ("rows = 1", "rows: unknown key"),
        ('methods = ["magic"]', "magic: unknown method"),
        ('methods = [{ method = "ease", settings = { delta = 7 } }]', "delta"),
        ('vary = { "training.epoch" = [1] }', "training.epoch: unknown key"),
    ],
)
def test_mistakes_are_told_before_any_work(tmp_path, line, words) -> None:
    path = tmp_path / "x.toml"
    path.write_text(f'title = "x"\n{line}\n')
    with pytest.raises(UserError, match=words):
        plan(load_experiment(path), tmp_path)
    assert list(tmp_path.iterdir()) == [path]


def test_one_job_for_each_run_directory(small_experiment, tmp_path) -> None:
    """Two seeds, and class requests deal the pairs in another way: four runs, each trained once."""
    jobs = plan(load_experiment(small_experiment), tmp_path)
    assert len({job.folder for job in jobs}) == len(jobs) == 4
    assert sorted(job.config.partition.scheme for job in jobs) == ["iid", "iid", "uniform", "uniform"]
    assert all(cell.config == job.config for job in jobs for cell in job.cells)
    bands_at = {job.config.seed: cell.band_retrains for job in jobs for cell in job.cells}
    assert bands_at == {3: 1, 1: 0}  # on the first seed alone


def test_a_varied_run_setting_makes_a_run_for_each_value(small_experiment, tmp_path) -> None:
    experiment = load_experiment(small_experiment, ['vary={"partition.clients" = [2, 3]}', "seeds=[0]"])
    jobs = plan(experiment, tmp_path)
    assert sorted((job.config.partition.clients, job.config.partition.scheme) for job in jobs) == [
        (2, "iid"), (2, "uniform"), (3, "iid"), (3, "uniform")
    ]  # fmt: skip


def test_tuned_settings_are_used_and_marked(small_experiment, tmp_path) -> None:
    (tmp_path / "tuned.toml").write_text(
        "[finetune.client]\nscore = 0.5\ndefault_score = 1.0\nbudget = 8\nsettings = { share = 0.4 }\n"
        "[ease.client]\nscore = 0.5\ndefault_score = 1.0\nbudget = 8\nsettings = { delta = 0.9, energy = 0.8 }\n"
    )
    small_experiment.write_text('tuned = "tuned.toml"\n' + SMALL)
    cells = [cell for job in plan(load_experiment(small_experiment), tmp_path) for cell in job.cells]
    client = next(cell for cell in cells if cell.scenario == "client").entrants
    assert client[0].tuned and client[0].method.share == 0.4
    assert (client[1].method.delta, client[1].method.energy) == (0.3, 0.8)  # the file's own words come first
    other = next(cell for cell in cells if cell.scenario == "class").entrants
    assert not other[0].tuned and other[0].method.share == 0.2


@pytest.mark.slow
def test_rows_of_a_grid_and_resuming(small_experiment, tmp_path, monkeypatch) -> None:
    experiment = load_experiment(small_experiment, ["seeds=[3]"])
    notes = list(bench(experiment, tmp_path, 1))
    # Each of two runs: trained, retrain, one more order, fine-tune and EASE twice.
    assert len(notes) == 2 * 6 == len(set(notes)) + 2  # EASE's two values have one label
    found = results(experiment, tmp_path)
    client = [row for row in found["rows"] if row["scenario"] == "client"]
    assert [row["role"] for row in client] == ["trained", "method", "method", "method", "band", "retrain"]
    assert [row["label"] for row in client] == ["Trained", "Fine-tune", "hard", "hard", "Retrain, order 1", "Retrain"]
    assert [row.get("at", {}).get("value") for row in client] == [None, None, 0.3, 0.6, None, None]
    retrain, trained = client[-1]["metrics"], client[0]["metrics"]
    assert (retrain["rho"], retrain["ratio/seconds"], retrain["ratio/bytes_up"]) == (0, 1, 1)
    assert trained["rho"] == pytest.approx(1, abs=0.5) and "cost/seconds" not in trained
    assert client[1]["metrics"]["ratio/bytes_up"] == pytest.approx(0.5)  # one round of two
    assert {band["scenario"] for band in found["bands"]} == {"client", "class"}
    assert found["header"]["title"] == "Small" and found["header"]["experiment"]["seeds"] == [3]

    monkeypatch.setattr(ease.bench.World, "open", lambda config: pytest.fail("a finished cell was opened again"))
    assert list(bench(experiment, tmp_path, 1)) == []
    assert results(experiment, tmp_path)["rows"] == found["rows"]
    monkeypatch.undo()

    (job,) = [job for job in plan(experiment, tmp_path) if job.config.partition.scheme == "iid"]
    job.cells[0].path(job.folder).unlink()
    before = {path: path.stat().st_mtime_ns for path in job.folder.rglob("model.safetensors")}
    assert len(list(bench(experiment, tmp_path, 1))) == 6
    assert results(experiment, tmp_path)["rows"] == found["rows"]
    assert {path: path.stat().st_mtime_ns for path in before} == before  # measured again, not answered again


def test_a_band_needs_retrainings_of_one_run() -> None:
    """Of 10 and 14 the mean is 12, the deviation 2.83; t(0.975, 1) = 12.71, times sqrt(1.5): 12 ± 44.0."""

    def row(role: str, seed: int, value: float) -> dict:
        return {"role": role, "scenario": "client", "seed": seed, "metrics": {"mia": value}}

    (band,) = bands([row("retrain", 0, 10), row("band", 0, 14), row("retrain", 1, 99), row("method", 0, 50)])
    assert band["metrics"]["mia"] == pytest.approx([12 - 44.01, 12 + 44.01], abs=0.01) and band["models"] == 2


def test_a_method_that_refuses_is_named(small_experiment, tmp_path) -> None:
    changes = ['methods=[{ method = "ease", settings = { lock_strength = 2 } }]', "seeds=[0]", 'scenarios=["client"]']
    with pytest.raises(UserError, match="client request, seed 0, EASE: lock_strength = 2"):
        list(bench(load_experiment(small_experiment, changes), tmp_path, 1))


def test_subspaces_look_at_training_alone(small_experiment, tmp_path) -> None:
    experiment = load_experiment(small_experiment, ["kind=subspaces", "seeds=[0]", 'scenarios=["client"]'])
    assert len(list(bench(experiment, tmp_path, 1))) == 1
    found = results(experiment, tmp_path)
    assert found["rows"] == [] and found["subspaces"][0]["overlap"][0]["clients"] == [0, 1, 2]
    assert not list(tmp_path.glob("runs/*/requests"))
    assert list(bench(experiment, tmp_path, 1)) == []


def test_raincloud_keeps_similarities(small_experiment, tmp_path) -> None:
    experiment = load_experiment(
        small_experiment, ["kind=raincloud", "seeds=[0]", 'scenarios=["client"]', "methods=[]"]
    )
    list(bench(experiment, tmp_path, 1))
    for row in results(experiment, tmp_path)["rows"]:
        assert len(row["pairs"]["forget"]) == row["metrics"]["gallery"]
        assert all(-1 <= value <= 1 for values in row["pairs"].values() for value in values)


def test_an_experiment_needs_no_more_than_a_title() -> None:
    assert Experiment(title="x").scenarios == ("client", "class", "sample")
