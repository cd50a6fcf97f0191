"""`ease bench` and `ease sweep` as a user meets them."""

import json
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ease.commands.bench import BenchSummary
from ease.console import Screen, as_text, show
from ease.runs.records import write_record
from ease.studies.bench import header
from ease.studies.experiment import Experiment, load_tuned
from ease.studies.records import BenchResults, BenchRow, Role

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
TINY = [
    "run.data.train=60",
    "run.data.validation=10",
    "run.data.test=20",
    "run.gallery=20",
    "run.partition.clients=3",
    "run.partition.classes=3",
    "run.partition.scheme=iid",
    "run.partition.validation_share=0.3",
    "run.training.rounds=3",
    "run.training.batch_size=8",
    "run.model.hidden=16",
    "run.model.embedding=8",
    "seeds=[0]",
]


def changed(*assignments: str) -> list[str]:
    return [word for assignment in (*TINY, *assignments) for word in ("--set", assignment)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "figure", "processes"),
    [
        ("compute", "table", 2),
        ("subspaces", "subspaces", 1),
        ("lira", "grid", 1),
        ("bars", "bars", 1),
        ("raincloud", "raincloud", 1),
        ("tradeoff", "tradeoff", 1),
        ("baselines", "baselines", 1),
        ("ablation", "ablation", 1),
        ("backbone-transfer", "curves", 1),
    ],
)
def test_an_experiment_of_each_kind_from_end_to_end(ease, tmp_path, name, figure, processes) -> None:
    command = ["bench", EXPERIMENTS / f"{name}.toml", "--quick", "--out", tmp_path, "--processes", processes]
    result = ease(*command, *changed())
    assert result.code == 0, result.err
    folder = tmp_path / f"{name}-quick"
    assert f"written to {folder}" in result.out.replace("\n", "")
    written = {path.name: path.read_bytes() for path in folder.iterdir()}
    figures = {figure, *({"tpr"} if figure == "grid" else ())} - {""}
    others = {f"{each}.{form}" for each in figures for form in ("svg", "pdf")}
    others |= {"tables.tex", "paper.tex"} if name != "subspaces" else set()
    assert written.keys() == {"results.json", "tables.md", *others}
    found = json.loads(written["results.json"])
    assert found["header"]["command"].startswith(f"ease bench {EXPERIMENTS}")
    assert {row["scenario"] for row in found["rows"]} == (
        set() if name == "subspaces" else {"client", "class", "sample"}
    )

    for path in folder.iterdir():
        if path.name != "results.json":
            path.unlink()
    assert ease("bench", "--tables", folder).code == 0
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == written

    again = ease(*command, *changed(), "--json")
    assert again.code == 0 and again.err == "" and json.loads(again.out)["rows"] == found["rows"]


@pytest.mark.slow
def test_the_main_comparison_on_photographs_with_two_checkpoints(ease, tmp_path, checkpoint) -> None:
    """The grid of a data set as it is shipped, but for its size: noise as photographs, backbones that know nothing."""
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (90, 32, 32, 3), dtype=np.uint8)
    captions = [" ".join(rng.choice(["a", "dog", "on", "the", "beach"], 6)) for _ in noise]
    splits = ["train"] * 60 + ["val"] * 10 + ["test"] * 20
    (tmp_path / "images").mkdir()
    for number, pixels in enumerate(noise):
        Image.fromarray(pixels).save(tmp_path / "images" / f"{number}.png")
    images = [
        {"filename": f"{number}.png", "split": split, "sentences": [{"raw": caption}]}
        for number, (split, caption) in enumerate(zip(splits, captions, strict=True))
    ]
    (tmp_path / "x.json").write_text(json.dumps({"images": images}))
    backbones = [f"hf:{checkpoint(family)}" for family in ("clip", "siglip")]
    small = [
        f'vary={{"model.backbone" = {json.dumps(backbones)}}}',
        "run.device=cpu",
        f"run.data.path={tmp_path / 'x.json'}",
    ]
    small += ['methods=["finetune", "ease"]', 'scenarios=["client"]', "shadows=0", "band_retrains=0"]
    result = ease("bench", EXPERIMENTS / "main-flickr30k.toml", "--out", tmp_path, "--json", *changed(*small))
    assert result.code == 0, result.err
    found = json.loads(result.out)
    assert [row["at"]["value"] for row in found["rows"] if row["label"] == "EASE"] == backbones
    tables = (tmp_path / "main-flickr30k" / "tables.md").read_text()
    assert all(f"## Client request, model.backbone = {name}" in tables for name in backbones)
    assert (tmp_path / "main-flickr30k" / "tables.tex").read_text().count(r"\begin{table*}") == 2


@pytest.mark.slow
def test_a_sweep_feeds_an_experiment(ease, tmp_path) -> None:
    path = tmp_path / "x.toml"
    path.write_text('title = "x"\nscenarios = ["client"]\nshadows = 0\nband_retrains = 0\nmethods = ["finetune"]\n')
    tuned = tmp_path / "tuned.toml"
    result = ease("sweep", path, "--out", tuned, "--budget", 2, "--work", tmp_path / "results", *changed())
    assert result.code == 0, result.err
    assert load_tuned(tuned)["finetune"]["client"].budget == 2

    result = ease("bench", path, "--out", tmp_path / "results", *changed(f"tuned={tuned}"), "--json")
    assert result.code == 0, result.err
    rows = {row["label"]: row for row in json.loads(result.out)["rows"]}
    assert rows["Fine-tune"]["tuned"] and "Fine-tune†" in (tmp_path / "results" / "x" / "tables.md").read_text()
    assert len(list((tmp_path / "results" / "runs").iterdir())) == 1  # both worked on one run


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "name an experiment's TOML file"),
        (["none.toml"], "none.toml: no such file"),
        (["--tables", "nowhere"], "nowhere/results.json: no such file"),
        ([EXPERIMENTS / "main.toml", "--set", "shadows=3"], "shadows: choose an even number"),
        ([EXPERIMENTS / "main.toml", "--set", "tuned=gone.toml"], "gone.toml: no such file"),
        (
            [EXPERIMENTS / "main-flickr30k.toml", "--set", "run.data.path=mine/x.json"],
            "mine/x.json: no such file or folder; name your copy with --set run.data.path=",
        ),
        (
            [EXPERIMENTS / "main.toml", "--set", 'run.data={name = "folder", path = "/", images = "gone"}'],
            "/gone: no such",
        ),
    ],
)
def test_user_errors_are_one_line(ease, tmp_path, monkeypatch, arguments, words) -> None:
    monkeypatch.chdir(tmp_path)
    result = ease("bench", *arguments)
    assert result.code == 2 and result.out == "" and result.err.startswith("error: ") and words in result.err
    assert result.err.count("\n") == 1 and list(tmp_path.iterdir()) == []


def test_results_of_something_else_are_refused(ease, tmp_path) -> None:
    (tmp_path / "results.json").write_text("[]")
    result = ease("bench", "--tables", tmp_path)
    assert (
        result.code == 2
        and "results.json: damaged, or" in result.err
        and result.err.endswith("; run `ease bench` again\n")
    )


def test_a_sweep_of_nothing_is_refused(ease, tmp_path) -> None:
    result = ease("sweep", tmp_path, "--out", tmp_path / "tuned.toml")
    assert result.code == 2 and "no run here" in result.err


@pytest.mark.parametrize("option", [("--set", "seeds=[1]"), ("--work", "elsewhere")])
def test_a_sweep_on_a_run_takes_no_settings_and_no_place(ease, tmp_path, option) -> None:
    result = ease("sweep", tmp_path, "--out", tmp_path / "tuned.toml", *option)
    assert result.code == 2 and result.err.startswith(f"error: {option[0]}: {tmp_path} is a run")


def test_a_sweep_of_an_unknown_method_is_refused_in_one_line(ease, tmp_path) -> None:
    (tmp_path / "x.toml").write_text('title = "x"\nmethods = ["eese"]\n')
    result = ease("sweep", tmp_path / "x.toml", "--out", tmp_path / "tuned.toml")
    assert (
        result.code == 2
        and result.err.count("\n") == 1
        and "eese: unknown method (did you mean ease?); choose one of: ease" in result.err
    )


def test_a_label_in_brackets_is_shown() -> None:
    recalls = {f"{part}/recall@1": 20.0 for part in ("forget", "retain", "test")}
    costs = {f"{kind}/{what}": 1.0 for kind in ("cost", "ratio") for what in ("bytes_up", "bytes_down", "seconds")}
    models: list[tuple[Role, str]] = [("method", "EASE [ours]"), ("retrain", "Retrain")]
    rows = [
        BenchRow(scenario="client", seed=0, role=role, method="x", label=label, metrics=recalls | costs)
        for role, label in models
    ]
    found = BenchResults(header=header(Experiment(title="x")), bands=(), rows=tuple(rows))
    shown = as_text(BenchSummary(**dict(found), folder=Path("out/[x]"), files=(Path("out/[x]/results.json"),)))
    assert "EASE [ours]" in shown and "written to out/[x]: results.json" in shown and "[bold]" not in shown


LONG = "FedRecovery with recovery and the sum of all residuals"


@pytest.mark.parametrize("width", [80, 100])
def test_tables_fit_a_screen_of_80_columns_without_cutting_a_number(width: int) -> None:
    """Labels are broken instead; what a pipe gets is 80 columns wide too."""
    recalls = {f"{part}/recall@1": 88.88 for part in ("forget", "retain", "test")}
    costs = {f"ratio/{what}": 1.2345 for what in ("bytes_up", "bytes_down", "seconds", "flops", "client_steps")}
    costs |= {key.replace("ratio/", "cost/"): 123456.7 for key in costs}
    attacks = {"mia": 0.123, "lira/auc": 0.567, "lira/tpr": 0.01, "rho": 0.5}
    models: list[tuple[Role, str]] = [("method", "EASE"), ("method", LONG), ("retrain", "Retrain")]
    rows = [
        BenchRow(
            scenario=scenario,
            seed=seed,
            role=role,
            method="x",
            label=label,
            metrics={key: value + place + 3 * seed for key, value in (recalls | costs | attacks).items()},
        )
        for scenario in ("client", "class", "sample")
        for seed in (0, 1)
        for place, (role, label) in enumerate(models)
    ]
    experiment = Experiment(title="x", seeds=(0, 1), reduced=True)
    found = BenchResults(header=header(experiment), bands=(), rows=tuple(rows))
    screen = Screen(width=width, record=True, file=StringIO(), force_jupyter=False)
    show(BenchSummary(**dict(found), folder=Path("out"), files=(Path("out/results.json"),)), screen)
    shown = screen.export_text()
    lines = [line for line in shown.splitlines() if not line.startswith(("caveat", "written"))]
    assert max(map(len, lines)) <= width and "…" not in shown
    assert shown.count("91.4 -1.0") == 9, "the mean of 89.88 and 92.88 in every row of recalls"
    assert "Paired differences" in shown and "+3.0 [+3.0, +3.0]" not in shown
    assert "Made smaller by --quick" in shown and "2 seeds: differences" in shown


def test_folders_of_results_are_compared(ease, tmp_path: Path) -> None:
    recalls = {f"{part}/recall@1": 20.0 for part in ("forget", "retain", "test")}
    for name, gap in (("a", 3.0), ("b", 1.0)):
        models: list[tuple[Role, str, float]] = [("method", "EASE", gap), ("retrain", "Retrain", 0.0)]
        rows = [
            BenchRow(
                scenario="client",
                seed=0,
                role=role,
                method="x",
                label=label,
                metrics={key: value + own for key, value in recalls.items()},
            )
            for role, label, own in models
        ]
        found = BenchResults(header=header(Experiment(title="x")), bands=(), rows=tuple(rows))
        (tmp_path / name).mkdir()
        write_record(tmp_path / name / "results.json", found)
    options = [word for name in "ab" for word in ("--compare", tmp_path / name)]
    result = ease("bench", *options, "--out", tmp_path)
    assert result.code == 0, result.err
    assert result.out.index("EASE (b)") < result.out.index("EASE (a)")
    assert (tmp_path / "leaderboard.csv").is_file() and (tmp_path / "leaderboard.html").is_file()
    gone = ease("bench", "--compare", tmp_path / "c")
    assert gone.code == 2 and "c/results.json: no such file" in gone.err
