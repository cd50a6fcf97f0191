"""Experiments: what a file means, and the grid that it stands for."""

import json
from pathlib import Path

import pytest

from ease.errors import UserError
from ease.methods import METHODS
from ease.studies import bench
from ease.studies.experiment import Experiment, load_experiment, load_tuned, plan
from ease.studies.records import BenchResults, Varied

EXPERIMENTS = sorted((Path(__file__).parents[2] / "experiments").glob("*.toml"))


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
@pytest.mark.parametrize("quick", [False, True])
def test_shipped_experiments_are_valid(path, quick, tmp_path) -> None:
    experiment = load_experiment(path, quick=quick)
    jobs = plan(experiment, tmp_path)
    assert jobs and (experiment.kind == "subspaces" or all(cell.entrants for job in jobs for cell in job.cells))


MAIN = [path for path in EXPERIMENTS if path.stem.startswith("main")]


@pytest.mark.parametrize("path", MAIN, ids=lambda path: path.stem)
def test_the_main_comparison_has_every_method(path) -> None:
    """Retraining is the reference, and exact forgetting is for another kind of training."""
    main = load_experiment(path)
    comparable = {name for name, method in METHODS.items() if "fedavg" in method.trainers}
    assert {entry.method for entry in main.methods} == comparable - {"retrain"}
    assert main.scenarios == ("client", "class", "sample") and len(main.seeds) == 3


def test_the_main_comparison_has_three_data_sets_with_three_backbones_each(tmp_path) -> None:
    found = set()
    for name in ("flickr30k", "coco", "textcaps"):
        jobs = plan(load_experiment(EXPERIMENTS[0].parent / f"main-{name}.toml"), tmp_path)
        found |= {(job.config.data.path.parts[-2], job.config.model.backbone) for job in jobs}
    assert found == {(d, b) for d in ("flickr30k", "coco", "textcaps") for b in ("clip-b32", "clip-l14", "siglip")}


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_a_quick_experiment_needs_nothing_from_outside(path, tmp_path) -> None:
    for job in plan(load_experiment(path, quick=True), tmp_path):
        assert (job.config.data.name, job.config.data.path, job.config.model.backbone) == ("scenes", None, "tiny")
        assert (job.config.data.train, job.config.training.rounds, job.config.seed) == (600, 8, 0)


def test_quick_on_other_data_is_quick_on_scenes(tmp_path) -> None:
    """The same cells, so that what one has done the other need not."""
    folder = EXPERIMENTS[0].parent
    scenes, photographs = (
        {
            cell.path(job.folder)
            for job in plan(load_experiment(folder / name, quick=True), tmp_path)
            for cell in job.cells
        }
        for name in ("main.toml", "main-flickr8k.toml")
    )
    assert scenes == photographs and len(scenes) == 3


def test_quick_keeps_settings_of_a_run_on_scenes(tmp_path) -> None:
    path = tmp_path / "x.toml"
    path.write_text('title = "x"\n[run.model]\nlora = "off"\n[run.data]\nseed = 7\n')
    quick = load_experiment(path, quick=True).run
    assert (quick.model.lora, quick.data.seed, quick.data.train) == ("off", 7, 600)


def test_quick_comes_before_set_and_spares_what_it_does_not_name(small_experiment) -> None:
    small_experiment.write_text(
        small_experiment.read_text() + "\n[quick]\nband_retrains = 0\n[quick.run.training]\nrounds = 1\n"
    )
    assert load_experiment(small_experiment).run.training.rounds == 2
    quick = load_experiment(small_experiment, ["run.gallery=7"], quick=True)
    assert (quick.seeds, quick.band_retrains, quick.run.training.rounds) == ((0,), 0, 1)
    assert quick.run.gallery == 7 and quick.run.training.batch_size == 8


def test_later_files_override_their_bases_and_paths_are_meant_from_each_file(tmp_path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "d.toml").write_text('[run]\ngallery = 7\n[run.data]\nname = "folder"\npath = "photos"\n')
    (tmp_path / "a.toml").write_text('title = "a"\nseeds = [5]\ntuned = "t.toml"\n[run]\ngallery = 9\n')
    (tmp_path / "b.toml").write_text('title = "b"\nbase = ["a.toml", "data/d.toml"]\nrun.model.backbone = "siglip"\n')
    found = load_experiment(tmp_path / "b.toml")
    assert (found.title, found.seeds, found.run.gallery, found.run.model.backbone) == ("b", (5,), 7, "siglip")
    assert (found.tuned, found.run.data.path) == (tmp_path / "t.toml", tmp_path / "data" / "photos")
    (tmp_path / "c.toml").write_text('base = "b.toml"\n')
    assert load_experiment(tmp_path / "c.toml") == found


@pytest.mark.parametrize(
    ("base", "words"),
    [
        ('"b.toml"', r"b\.toml: base: names itself"),
        ('"gone.toml"', r"gone\.toml: no such file"),
        ("3", r"b\.toml: base: name one TOML file"),
    ],
)
def test_a_base_that_cannot_be_read_is_one_line(tmp_path, base, words) -> None:
    (tmp_path / "b.toml").write_text(f'title = "b"\nbase = {base}\n')
    with pytest.raises(UserError, match=words):
        load_experiment(tmp_path / "b.toml")


def test_varied_paths_are_meant_from_the_file_too(tmp_path) -> None:
    """A checkpoint in a folder and a data set are paths; a known name and a number are not."""
    (tmp_path / "clip").mkdir()
    path = tmp_path / "x.toml"

    def varied(line: str) -> dict:
        path.write_text(f'title = "x"\nvary = {{ {line} }}\n')
        return load_experiment(path).vary

    assert varied('"model.backbone" = ["hf:clip", "siglip"]') == {
        "model.backbone": (f"hf:{tmp_path / 'clip'}", "siglip")
    }
    assert varied('"data.path" = ["a.json"]') == {"data.path": (str(tmp_path / "a.json"),)}
    assert varied('"partition.clients" = [2, 3]') == {"partition.clients": (2, 3)}
    assert varied("gallery = [7]") == {"gallery": (7,)}


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
        ('methods = [{ method = "ease_paper", settings = { delta = 7 } }]', "delta"),
        ('vary = { "training.epoch" = [1] }', "training.epoch: unknown key"),
        ("vary = { seed = [1] }", "vary: seed: write it as `seeds`"),
        (
            'kind = "curves"\nvary = { "training.rounds" = [1] }\n'
            'methods = [{ method = "ease_paper", vary = { delta = [1] } }]',
            "draws one varied setting",
        ),
    ],
)
def test_user_errors_are_reported_before_any_work(tmp_path, line, words) -> None:
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
    experiment = load_experiment(
        small_experiment, ['vary={"partition.clients" = [2, 3]}', "seeds=[0]", 'methods=["ease"]']
    )
    jobs = plan(experiment, tmp_path)
    assert sorted((job.config.partition.clients, job.config.partition.scheme) for job in jobs) == [
        (2, "iid"), (2, "uniform"), (3, "iid"), (3, "uniform")
    ]  # fmt: skip


def test_several_varied_settings_make_a_grid(small_experiment, tmp_path) -> None:
    """Of the run and of methods at once; labels name the methods' values, points those of the run."""
    changes = [
        'vary={"training.rounds" = [1, 2], "partition.clients" = [2, 3]}',
        "seeds=[0]",
        'scenarios=["client"]',
        'methods=[{method = "ease_paper", vary = {delta = [0.3, 0.6], energy = [0.8]}}]',
    ]
    cells = [cell for job in plan(load_experiment(small_experiment, changes), tmp_path) for cell in job.cells]
    found = {(cell.config.partition.clients, cell.config.training.rounds): cell for cell in cells}
    assert set(found) == {(2, 1), (2, 2), (3, 1), (3, 2)} and len(cells) == 4
    assert found[2, 1].at == ("partition.clients, training.rounds", (2, 1))
    labels = [entrant.label for entrant in found[2, 1].entrants]
    assert labels == ["EASE (paper), delta = 0.3, energy = 0.8", "EASE (paper), delta = 0.6, energy = 0.8"]
    header = bench.header(load_experiment(small_experiment, changes))
    stored = BenchResults.model_validate_json(
        json.dumps(BenchResults(header=header, bands=(), rows=()).model_dump(mode="json"), sort_keys=True)
    )
    assert stored.run_setting == found[2, 1].at[0]  # by which tables group the rows
    words = Varied(name="partition.clients, training.rounds", value=[2, 1]).words
    assert words == "partition.clients = 2, training.rounds = 1"


def test_tuned_settings_are_used_and_marked(small_experiment, tmp_path) -> None:
    (tmp_path / "tuned.toml").write_text(
        "[finetune.client]\nscore = 0.5\ndefault_score = 1.0\nbudget = 8\nsettings = { share = 0.4 }\n"
        "[ease_paper.client]\nscore = 0.5\ndefault_score = 1.0\nbudget = 8\nsettings = { delta = 0.9, energy = 0.8 }\n"
    )
    small_experiment.write_text('tuned = "tuned.toml"\n' + small_experiment.read_text())
    cells = [cell for job in plan(load_experiment(small_experiment), tmp_path) for cell in job.cells]
    client = next(cell for cell in cells if cell.scenario == "client").entrants
    assert client[0].tuned and client[0].method.share == 0.4
    assert (client[1].method.delta, client[1].method.energy) == (0.3, 0.8)  # the file's own words come first
    other = next(cell for cell in cells if cell.scenario == "class").entrants
    assert not other[0].tuned and other[0].method.share == 0.2


@pytest.mark.parametrize("text", ["[magic.client]\nscore = 1", "ease = 1", "[ease.client]\nscore = 1"])
def test_a_file_of_no_sweep_is_refused(tmp_path, text) -> None:
    (tmp_path / "tuned.toml").write_text(text)
    with pytest.raises(UserError, match=r"tuned\.toml: (magic|ease)"):
        load_tuned(tmp_path / "tuned.toml")


def test_an_experiment_needs_no_more_than_a_title() -> None:
    assert Experiment(title="x").scenarios == ("client", "class", "sample")


def test_an_unknown_method_is_refused_when_the_file_is_read(small_experiment) -> None:
    """Whoever reads it: `ease sweep` makes no plan."""
    with pytest.raises(
        UserError, match=r"methods\.0\.method: eese: unknown method \(did you mean ease\?\); choose one of"
    ):
        load_experiment(small_experiment, ['methods=["eese"]'])
