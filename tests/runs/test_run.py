"""A run: the same bytes every time, resumed or not, and never anything half done in its folder."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tests.runs.histories import trained_run

from ease.commands.train import recall_sets, train_run
from ease.config import to_toml
from ease.errors import UserError
from ease.federation.sequential import Sequential
from ease.measures.evaluate import LEAST_GALLERY
from ease.runs.config import RunConfig, load_config
from ease.runs.run import Run
from ease.runs.world import World
from ease.storage import LEFTOVER, read_json, write_json
from ease.testing import Faulty

Configs = Callable[..., RunConfig]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file but the lock, by name."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, small_config: Configs, world: World) -> Path:
    """An uninterrupted run."""
    return trained_run(tmp_path_factory.mktemp("reference") / "run", small_config(), world).folder


# --- configuration ---


def test_the_defaults_are_a_configuration_and_survive_toml(tmp_path: Path) -> None:
    config = load_config(None, ("training.rounds=3", "training.lora_learning_rate=0.1", 'model.lora_targets=["key"]'))
    (tmp_path / "c.toml").write_text(to_toml(config))
    assert load_config(tmp_path / "c.toml") == config


def test_paths_are_meant_from_the_file_or_from_where_the_user_stands(tmp_path, monkeypatch) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    file = tmp_path / "configs" / "c.toml"
    file.write_text('[data]\nname = "karpathy"\npath = "../photos/d.json"\nimages = "pictures"\n')
    from_file = load_config(file).data
    assert (from_file.path, from_file.images) == (tmp_path / "photos/d.json", tmp_path / "configs/pictures")
    assert load_config(file, ("data.path=mine.json",)).data.path == tmp_path / "here/mine.json"
    assert load_config(None, ("data.name=folder", "data.path=mine")).data.path == tmp_path / "here/mine"
    assert load_config(None, ("data.name=folder", "data.path=/else/where")).data.path == Path("/else/where")


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        (
            ("trainin.rounds=2",),
            r"--set: trainin: unknown key \(did you mean training\?\); known keys here: data, device",
        ),
        (
            ("training.round=2",),
            r"--set: training.round: unknown key \(did you mean rounds\?\); known keys here: aggregation, batch_size",
        ),
        (("training.rounds=many",), "--set: training.rounds: input should be a valid integer.*got 'many'"),
        (
            ("partition.scheme=random",),
            "--set: partition.scheme: input should be 'iid', 'dirichlet', 'uniform', 'sites' or 'on_site'",
        ),
        (("model.lora_rank=0",), r"--set: model.lora_rank: input should be greater than or equal to 1 \(got 0\)"),
        (("data.name=folder",), '--set: data: data.path is needed when data.name = "folder"'),
        (("training.learning_rate=inf",), "--set: training.learning_rate: input should be a finite number"),
        (("seed=-1",), "--set: seed: input should be greater"),
    ],
)
def test_unknown_keys_and_values_are_named(assignments, message) -> None:
    with pytest.raises(UserError, match=message):
        load_config(None, assignments)


def test_the_file_is_named_too(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("[training]\nrounds = 0\n")
    with pytest.raises(UserError, match=rf"{tmp_path}/c\.toml: training\.rounds: "):
        load_config(tmp_path / "c.toml")
    with pytest.raises(UserError, match=r"c\.toml with --set: training\.epochs: unknown key"):
        load_config(tmp_path / "c.toml", ("training.epochs=1", "training.rounds=1"))


def test_identity_leaves_out_only_the_rounds(small_config: Configs) -> None:
    one = small_config()
    assert small_config("training.rounds=9").identity() == one.identity()
    for change in ("seed=1", "training.learning_rate=0.1", "model.lora=full", "data.seed=4", "partition.beta=2"):
        assert small_config(change).identity() != one.identity()


# --- worlds ---


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("partition.clients=31", "partition.clients = 31: 60 pairs cannot give every client 2"),
        ("partition.classes=61", "partition.classes = 61: more pseudo-classes than the 60 training pairs"),
        ("model.lora_rank=129", "model.lora_rank = 129: .* choose 1..128"),
        ("model.lora_blocks=9", "model.lora_blocks = 9: the tower has 4 blocks"),
        ("model.backbone=huge", "model.backbone: unknown backbone 'huge'; choose one of: tiny, photos"),
        ("data.seed=-1", "data.seed: must be a whole number of 0 or more"),
    ],
)
def test_impossible_runs_are_refused_and_leave_nothing(small_config, tmp_path, assignment, message) -> None:
    with pytest.raises(UserError, match=message):
        train_run(small_config("model.lora=ffa", assignment), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_mended_configuration_may_use_the_same_place(small_config: Configs, tmp_path: Path) -> None:
    with pytest.raises(UserError):
        train_run(small_config("partition.classes=61"), tmp_path / "run", quiet=True)
    assert train_run(small_config("training.rounds=1"), tmp_path / "run", quiet=True).rounds == 1


@pytest.mark.parametrize(
    ("splits", "message"), [("train", "1 of the 3 pairs are in the test"), ("test", "in the train")]
)
def test_data_that_cannot_be_measured_is_refused_before_training(small_config, tmp_path, splits, message) -> None:
    """Two of one split, one of the other: a gallery needs two."""
    other = "test" if splits == "train" else "train"
    for number in range(3):
        Image.new("RGB", (20, 20), (90 * number, 0, 0)).save(tmp_path / f"{number}.png")
    lines = [{"image": f"{n}.png", "caption": "x", "split": other if n == 2 else splits} for n in range(3)]
    (tmp_path / "captions.jsonl").write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(UserError, match=rf"{re.escape(str(tmp_path))}: .*{message} split, at least 2 are needed"):
        World.open(small_config("data.name=folder", f"data.path={tmp_path}"))


def test_shards_cover_the_training_pairs_and_no_others(world: World) -> None:
    held = np.concatenate([part for shard in world.shards for part in (shard.train, shard.validation)])
    np.testing.assert_array_equal(np.sort(held), world.evaluator.pairs.indices("train"))
    assert world.federation.clients == [0, 1, 2] and world.federation is world.federation


def test_classes_of_training_pairs_are_the_classes_they_were_dealt_by(world: World) -> None:
    for shard in world.shards:
        np.testing.assert_array_equal(world.evaluator.classes_of(shard.train), shard.train_classes)


# --- training ---


def test_the_same_seed_gives_the_same_bytes(reference: Path, small_config: Configs, tmp_path: Path) -> None:
    again = trained_run(tmp_path / "run", small_config(), World.open(small_config()))
    assert contents(again.folder) == contents(reference)
    other = trained_run(tmp_path / "other", small_config("seed=1"), World.open(small_config("seed=1")))
    name = "rounds/00002/state.safetensors"
    assert contents(other.folder)[name] != contents(reference)[name]


def test_a_fresh_cache_gives_the_same_bytes(reference, small_config, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("EASE_CACHE", str(tmp_path / "cache"))
    again = trained_run(tmp_path / "run", small_config(), World.open(small_config()))
    assert contents(again.folder) == contents(reference)


def test_a_stopped_run_continues_and_ends_with_the_same_bytes(reference, small_config, world, tmp_path) -> None:
    run = Run.create(tmp_path / "run", small_config())
    rounds = run.train(world)
    assert next(rounds).number == 1
    rounds.close()
    assert run.history.rounds() == 1
    (run.folder / f"{LEFTOVER}initial.safetensors-x1").write_bytes(b"part")
    half = run.folder / "rounds" / "00002"
    half.mkdir()
    (half / f"{LEFTOVER}state.safetensors-x1").write_bytes(b"part")
    records = list(Run.create(tmp_path / "run", small_config()).train(world))
    assert [each.number for each in records] == [2]
    assert contents(run.folder) == contents(reference)
    assert list(run.train(world)) == []


@pytest.mark.parametrize("left", [(), (f"{LEFTOVER}run.json-abc",), ("run.json",), ("run.json", "initial.safetensors")])
def test_a_run_killed_at_its_very_start_continues(reference, small_config, world, tmp_path, left) -> None:
    (tmp_path / "run").mkdir()
    for name in left:
        (tmp_path / "run" / name).write_bytes((reference / name).read_bytes() if not name.startswith(".") else b"{")
    assert contents(trained_run(tmp_path / "run", small_config(), world).folder) == contents(reference)


def test_more_rounds_continue_a_finished_run(reference, small_config, world, tmp_path) -> None:
    trained_run(tmp_path / "run", small_config("training.rounds=1"), world)
    grown = trained_run(tmp_path / "run", small_config(), world)
    assert contents(grown.folder) == contents(reference)
    fewer = Run.create(tmp_path / "run", small_config("training.rounds=1"))
    assert fewer.config.training.rounds == 2


def test_partial_participation_and_rejections_are_recorded(small_config, world, tmp_path) -> None:
    config = small_config("training.participation=0.34", "training.rounds=3")
    run = trained_run(tmp_path / "run", config, World.open(config))
    assert [len(run.history.clients(number)) for number in (1, 2, 3)] == [1, 1, 1]


@pytest.mark.parametrize("fault", ["raise", "drop", "repeat", "nan", "shape", "pairs", "mask"])
def test_training_continues_without_a_faulty_client_and_names_it(small_config, world, tmp_path, fault) -> None:
    faulty = replace(world)
    faulty.__dict__["federation"] = Faulty(world.federation, fault, client=2)
    run = trained_run(tmp_path / "run", small_config(), faulty)
    without = replace(world)
    without.__dict__["federation"] = Sequential(world.server.model, {c: world.federation.data[c] for c in (0, 1)})
    assert run.history.state(2) == trained_run(tmp_path / "without", small_config(), without).history.state(2)
    assert all(list(run.history.record(number).rejected) == [2] for number in (1, 2))


def test_with_too_few_answers_a_round_is_not_written_and_a_patient_rerun_works(small_config, world, tmp_path) -> None:
    faulty = replace(world)
    faulty.__dict__["federation"] = Faulty(world.federation, "raise", client=2)
    with pytest.raises(UserError, match=r"2 of 3 clients .* 3 are needed \(client 2: .*training\.quorum"):
        trained_run(tmp_path / "run", small_config("training.quorum=1.0"), faulty)
    assert Run.load(tmp_path / "run").history.rounds() == 0
    again = trained_run(tmp_path / "run", small_config("training.quorum=0.6", "training.deadline=30"), faulty)
    assert again.history.rounds() == 2 and Run.load(again.folder).config.training.quorum == 0.6


def test_a_recipe_that_diverges_reports_it(small_config: Configs, tmp_path: Path) -> None:
    """Gradients of the order of 1e15 times the largest rate: weights whose squares single precision cannot hold."""
    recipe = small_config("model.temperature=1e-15", "training.learning_rate=1e6")
    with pytest.raises(UserError, match=r"round 1: every update was rejected .* lower training.learning_rate"):
        train_run(recipe, tmp_path / "run", quiet=True)


# --- a folder that is not what it should be ---


def test_a_run_of_another_configuration_is_refused_and_kept(reference, small_config, world) -> None:
    before = contents(reference)
    with pytest.raises(UserError, match=r"training.learning_rate is 1.0 there and 0.5 here.*choose another --out"):
        Run.create(reference, small_config("training.learning_rate=0.5"))
    with pytest.raises(UserError, match=r"seed is 0 there and 3 here"):
        train_run(small_config("seed=3"), reference, quiet=True)
    assert contents(reference) == before


def test_a_folder_that_is_not_a_run_is_refused_and_kept(small_config: Configs, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="is not empty and holds no run; choose another --out"):
        Run.create(tmp_path, small_config())
    with pytest.raises(UserError, match="is a file; choose a folder"):
        Run.create(tmp_path / "thesis.tex", small_config())
    assert contents(tmp_path) == {"thesis.tex": b"years of work"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "damaged JSON"),
        ("[]", "it has no seal"),
        ('{"format": 2}', "it has no seal"),
        ({}, "not a run that this version knows"),
        ({"format": 99}, "not a run that this version knows"),
        ({"format": 1, "config": {}}, "not a run that this version knows"),
        ({"format": 2, "config": {"sed": 1}}, "sed: unknown key"),
    ],
)
def test_a_damaged_run_file_is_named(tmp_path: Path, content: str | dict, message: str) -> None:
    if isinstance(content, str):
        (tmp_path / "run.json").write_text(content)
    else:
        write_json(tmp_path / "run.json", content)
    with pytest.raises(UserError, match=rf"run\.json: .*{message}|run\.json: {message}"):
        Run.load(tmp_path)


def test_a_missing_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"no run here, and no such folder; .*; check the path, or make a run with: ease"
    ):
        Run.load(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"no run here \(run.json is missing\); make one with: ease train"):
        Run.load(tmp_path)


@pytest.mark.parametrize("name", ["initial.safetensors", "rounds/00001/state.safetensors", "rounds/00001/updates.bin"])
def test_a_truncated_history_is_refused_before_anything_is_written(small_config, world, tmp_path, name) -> None:
    run = trained_run(tmp_path / "run", small_config("training.rounds=1"), world)
    path = run.folder / name
    path.write_bytes(path.read_bytes()[:-100])
    run = Run.create(tmp_path / "run", small_config())
    before = contents(run.folder)
    with pytest.raises(UserError, match=rf"{path}: damaged"):
        list(run.train(world))
    assert contents(run.folder) == before


def test_a_checkpoint_of_another_model_is_refused(small_config, world, tmp_path) -> None:
    """Even when it was put in place together with its record."""
    other = small_config("model.hidden=24", "training.rounds=1")
    stranger = trained_run(tmp_path / "stranger", other, World.open(other))
    run = Run.create(tmp_path / "run", small_config())
    parts = ("state.safetensors", "updates.bin", "round.json")
    for name in ("initial.safetensors", *(f"rounds/00001/{part}" for part in parts)):
        (run.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (run.folder / name).write_bytes((stranger.folder / name).read_bytes())
    with pytest.raises(UserError, match=r"00001/state.safetensors: made by another model than config.toml names"):
        list(run.train(world))


def test_two_processes_do_not_train_in_one_folder(small_config, world, tmp_path) -> None:
    run = Run.create(tmp_path / "run", small_config())
    rounds = run.train(world)
    next(rounds)
    with pytest.raises(UserError, match="another process is working on this run; wait for it"):
        next(run.train(world))
    assert [each.number for each in rounds] == [2]
    assert list(run.train(world)) == []


def test_a_disk_that_fills_up_keeps_every_complete_round(reference, small_config, world, tmp_path, small_disk) -> None:
    complete = contents(reference)
    size = sum(len(content) for name, content in complete.items() if not name.startswith("rounds/00002"))
    disk = small_disk(size // 1024 + 60)
    run = Run.create(disk / "run", small_config())
    with pytest.raises(UserError, match=r"rounds/00002/.*: cannot write .No space left on device.; free some space"):
        list(run.train(world))
    kept = contents(run.folder)
    assert kept == {name: complete[name] for name in kept} and run.history.rounds() == 1
    assert not any(name.startswith("rounds/00002") for name in kept)
    roomy = tmp_path / "roomy"
    for name, content in kept.items():
        (roomy / name).parent.mkdir(parents=True, exist_ok=True)
        (roomy / name).write_bytes(content)
    assert contents(trained_run(roomy, small_config(), world).folder) == complete


# --- what it reports ---


def test_the_summary_is_written_and_is_json(world: World, small_config: Configs, tmp_path: Path) -> None:
    summary = train_run(small_config(), tmp_path / "run", quiet=True)
    stored = read_json(tmp_path / "run" / "summary.json")
    assert stored == json.loads(summary.model_dump_json()) and stored["rounds"] == 2
    found = recall_sets(world, Run.load(tmp_path / "run").history.state(2))
    for name in ("seen", "unseen", "test"):
        assert stored["metrics"][f"{name}/recall@1"] == found[name]["recall@1"].mean
    assert stored["metrics"]["cost/bytes_up"] > 0


def test_recall_is_compared_on_galleries_of_one_size(world: World) -> None:
    results = recall_sets(world, world.server.initial())
    test = len(world.evaluator.pairs.indices("test"))
    assert 6 < test < LEAST_GALLERY  # the smallest set, 10 % of 60 pairs, is filled up with test pairs
    assert {result.size for result in results.values()} == {test}


def test_sets_that_are_absent_are_left_out(small_config: Configs, tmp_path: Path) -> None:
    summary = train_run(small_config("partition.validation_share=0", "training.rounds=1"), tmp_path / "run", quiet=True)
    sets = {name.partition("/")[0] for name in summary.metrics} - {"initial", "cost"}
    assert sets == {"seen", "test"} and list(summary.render())


@pytest.mark.slow
def test_one_thread_or_two_give_the_same_recall(small_config: Configs, tmp_path: Path, monkeypatch) -> None:
    config = small_config(
        "data.train=600", "data.test=300", "training.rounds=4", "training.batch_size=32", "gallery=300",
        "model.hidden=64", "model.embedding=64", "partition.validation_share=0.5",
    )  # fmt: skip
    results = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            monkeypatch.setenv("EASE_CACHE", str(tmp_path / f"cache{threads}"))
            results.append(train_run(config, tmp_path / f"run{threads}", quiet=True).metrics)
    finally:
        torch.set_num_threads(1)
    for name in ("seen/recall@1", "unseen/recall@1", "test/recall@1", "test/recall@10"):
        assert abs(results[0][name] - results[1][name]) <= 0.5


@pytest.mark.slow
def test_the_default_model_has_something_to_forget(tmp_path: Path) -> None:
    metrics = train_run(load_config(None), tmp_path / "run", quiet=True).metrics
    assert metrics["seen/recall@1"] >= metrics["unseen/recall@1"] + 25
    assert metrics["unseen/recall@1"] >= 10 * metrics["unseen/recall@1/chance"]
