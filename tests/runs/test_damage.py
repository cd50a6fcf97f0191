"""Files of a run and of its cache that are damaged, missing, stale or another's: refused by name, or made again."""

import copy
import shutil
from pathlib import Path

import pytest
import torch
from tests.faults import Unplugged, flip

from ease.audit.shadow_runs import plan_of, remove_scratch
from ease.errors import UserError
from ease.federation.history import History
from ease.methods import make_method
from ease.methods.ease.method import Ease
from ease.params import Params
from ease.requests.request import ClientRequest, SampleRequest
from ease.runs.answers import answer_of, release
from ease.runs.forget import forget, train_further
from ease.runs.run import Run
from ease.runs.world import World
from ease.storage import LEFTOVER, read_json, sha256, write_json

CLIENT = ClientRequest(clients=(1,))


@pytest.fixture(scope="module")
def home(small_config, shared_cache, tmp_path_factory) -> tuple[World, Path]:
    """A finished run whose client 1 was forgotten. Copy it before writing into it."""
    config = small_config("partition.validation_share=0.3")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EASE_CACHE", str(shared_cache))
        world = World.open(config)
    run = Run.create(tmp_path_factory.mktemp("home") / "run", config)
    list(run.train(world))
    list(forget(run, world, CLIENT, Ease(), observe=False))
    return world, run.folder


@pytest.fixture
def world(home) -> World:
    return home[0]


@pytest.fixture
def run(home, tmp_path: Path) -> Run:
    return Run.load(shutil.copytree(home[1], tmp_path / "run"))


def words(assignments: tuple[str, ...], *more: str) -> list[str]:
    return [word for assignment in (*assignments, *more) for word in ("--set", assignment)]


# --- answers ---


@pytest.mark.parametrize("name", ["bases.safetensors", "model.safetensors"])
@pytest.mark.parametrize("damage", ["missing", "flipped", "of another"])
def test_a_locked_continuation_needs_every_file_of_the_answer(world, run: Run, name: str, damage: str) -> None:
    """Without its directions it would train free, and say that it had been asked to."""
    path = answer_of(run, CLIENT, Ease()).folder / name
    if damage == "missing":
        path.unlink()
    elif damage == "flipped":
        flip(path, -3)
    else:  # whole, and not what the record tells of
        run.history.state(1).save(path)
    with pytest.raises(UserError, match=f"{path}: (damaged|missing)"):
        list(train_further(run, world, "client-1", 1, True))
    assert not (path.parent / "after-1-locked").exists()


@pytest.mark.parametrize("name", ["bases.safetensors", "model.safetensors"])
def test_more_rounds_after_a_release_need_every_file_of_the_answer(world, run: Run, small_config, name: str) -> None:
    release(run, "client-1")
    path = answer_of(run, CLIENT, Ease()).folder / name
    path.unlink()
    grown = Run.create(run.folder, small_config("partition.validation_share=0.3", "training.rounds=3"))
    before = (run.folder / "run.json").read_bytes()
    with pytest.raises(UserError, match=str(path)):
        list(grown.train(world))
    assert (run.folder / "run.json").read_bytes() == before and run.history.rounds() == 2


def test_a_result_without_a_lock_continues_without_one(world, run: Run) -> None:
    list(forget(run, world, CLIENT, make_method("finetune"), observe=False))
    steps = list(train_further(run, world, "client-1/finetune", 1, True))
    assert len(steps) == 1
    assert not read_json(run.folder / "requests/client-1/finetune/after-1-locked/record.json")["locked"]


def test_a_flipped_request_file_is_named(world, run: Run) -> None:
    stored = answer_of(run, CLIENT, Ease())
    stored.record_path.unlink()
    flip(stored.folder / "request.json", -20)
    with pytest.raises(UserError, match=r"request\.json: damaged"):
        list(forget(run, world, CLIENT, Ease(), observe=False))


# --- the journal ---


def interrupted(run: Run, world: World, request, answers: int) -> Path:
    """The journal of a request that was stopped before its first step."""
    stopped = copy.copy(world)
    object.__setattr__(stopped, "federation", Unplugged(world.federation, answers))
    with pytest.raises(KeyboardInterrupt):
        list(forget(run, stopped, request, Ease(), observe=False))
    folder = answer_of(run, request, Ease()).folder
    assert not (folder / "request.json").exists()
    assert len(list((folder / "journal").glob("*.update"))) == answers
    return folder


@pytest.fixture
def few(world) -> SampleRequest:
    return SampleRequest(ids=tuple(pair_id for shard in world.shards for pair_id in shard.train_ids[:4]))


def test_answers_about_another_model_are_not_taken(world, run: Run, few, small_config) -> None:
    """Killed before its first step; then the run is trained further, and the same request is made again."""
    shutil.rmtree(run.folder / "requests")
    whole = Run.load(shutil.copytree(run.folder, run.folder.parent / "whole"))
    interrupted(run, world, few, 2)
    models = []
    for each in (run, whole):
        grown = Run.create(each.folder, small_config("partition.validation_share=0.3", "training.rounds=3"))
        list(grown.train(world))
        list(forget(grown, world, few, Ease(), observe=False))
        models.append(answer_of(grown, few, Ease()).model_path.read_bytes())
    assert models[0] == models[1]


def test_a_flipped_bit_in_a_journaled_answer_is_refused(world, run: Run, few) -> None:
    journal = interrupted(run, world, few, 2) / "journal"
    path = sorted(journal.iterdir())[1]
    for place in (3, 80, 150, path.stat().st_size // 2, -1):
        whole = path.read_bytes()
        flip(path, place)
        with pytest.raises(UserError, match=f"{path}: this stored answer is damaged; delete it and run"):
            list(forget(run, world, few, Ease(), observe=False))
        path.write_bytes(whole)
    path.unlink()
    assert list(forget(run, world, few, Ease(), observe=False))


# --- history ---


def test_a_round_that_began_from_another_state_is_refused(run: Run) -> None:
    """Each file is whole and its round says so, but round 2 did not begin from this state."""
    history = run.history
    path = history.state_path(1)
    (Params.load(path) * 2.0).save(path)
    record = history.record(1)
    write_json(
        path.parent / "round.json",
        {**record.model_dump(mode="json"), "sha256": {**record.sha256, path.name: sha256(path)}},
    )
    with pytest.raises(UserError, match=f"{path}: not the state that round 2 began from"):
        History(run.folder).verify()


def test_a_flipped_count_of_pairs_is_refused(world, run: Run) -> None:
    """FedEraser weighs stored updates by it."""
    path = run.history.state_path(1).parent / "round.json"
    flip(path, path.read_bytes().index(b'"pairs"') + 17)
    with pytest.raises(UserError, match=r"00001/round\.json: damaged"):
        list(forget(run, world, CLIENT, make_method("fed_eraser"), observe=False))


def test_a_removed_update_can_be_computed_from_what_is_left(run: Run) -> None:
    """So removing it deletes nothing, and no page may say that it does."""
    history = run.history
    removed, path, place = history.update(2, 1).change, history.update_path(2, 1), history.record(2).updates[1]
    content = bytearray(path.read_bytes())
    content[place.offset : place.offset + place.bytes] = bytes(place.bytes)
    path.write_bytes(content)
    with pytest.raises(UserError, match="damaged"):
        history.update(2, 1)
    pairs = history.pairs(2)
    moved = history.state(2) - history.state(1)
    others = [history.update(2, client).change * pairs[client] for client in pairs if client != 1]
    rest = sum(others[1:], others[0])
    found = (moved * sum(pairs.values()) - rest) * (1 / pairs[1])
    assert (found - removed).norm() < 1e-5 * removed.norm()


# --- commands that are refused ---


def test_a_refused_training_leaves_the_configuration(run: Run, world, small, ease) -> None:
    before = {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()}
    with run.locked():
        shutil.rmtree(run.folder / "requests")
        result = ease(
            "train", "--out", run.folder, *words(small, "partition.validation_share=0.3", "training.rounds=9")
        )
    assert result.code == 2 and "another process is working on this run" in result.err
    after = {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()}
    assert after == {path: content for path, content in before.items() if "requests" not in path.parts}


def test_one_who_loses_the_race_for_a_new_folder_changes_nothing(small_config, world, tmp_path) -> None:
    first, second = (Run.plan(tmp_path / "run", small_config(f"training.rounds={n}")) for n in (1, 9))
    begun = Run.create(first.folder, first.config)
    rounds = begun.train(world)
    next(rounds)
    before = (begun.folder / "run.json").read_bytes()
    with pytest.raises(UserError, match="another process is working on this run"):
        list(Run.create(second.folder, second.config).train(world))
    assert (begun.folder / "run.json").read_bytes() == before
    rounds.close()


# --- the cache ---


def test_a_damaged_cache_is_made_again_and_a_line_reports_it(small_config, tmp_path, monkeypatch, capfd) -> None:
    monkeypatch.setenv("EASE_CACHE", str(tmp_path))
    fewer = ("data.train=12", "data.test=4", "partition.clients=2", "partition.classes=2", "gallery=4")
    config = small_config("data.seed=3", "model.lora=ffa", *fewer)  # with a file of masks
    first = World.open(config)
    expected = {name: array.copy() for name, array in vars(first.evaluator.activations).items()}
    files = [path for path in sorted(tmp_path.rglob("*")) if path.is_file()]
    assert {path.suffix for path in files} == {".npy", ".json", ".safetensors"} and len(files) >= 7
    for path in files:
        flip(path, path.stat().st_size // 2)
        capfd.readouterr()
        again = World.open(config)
        reported = capfd.readouterr().err
        assert (
            path.name in reported and reported.count("\n") == 1 and "this part of the cache is made again" in reported
        )
        for name, array in vars(again.evaluator.activations).items():
            assert (array == expected[name]).all()
        assert (again.evaluator.centroids == first.evaluator.centroids).all()
        assert again.evaluator.pairs.captions == first.evaluator.pairs.captions
    World.open(config)
    assert capfd.readouterr().err == ""


def test_leftovers_of_shadows_go(world, run: Run) -> None:
    plan = plan_of(run, world, CLIENT, None, 8)
    plan.store.mkdir(parents=True)
    (plan.store / f"{LEFTOVER}shadow-0001.safetensors-x").write_bytes(b"half")
    (plan.store / f"{LEFTOVER}folder").mkdir()
    remove_scratch(plan)
    assert not list(plan.store.iterdir())


# --- threads ---


def test_another_number_of_threads_is_said_in_one_line(run: Run, small, ease) -> None:
    shutil.rmtree(run.folder / "requests")
    assert read_json(run.folder / "world.json")["threads"] == torch.get_num_threads() == 1
    more = words(small, "partition.validation_share=0.3", "training.rounds=3")
    torch.set_num_threads(2)
    try:
        trained = ease("train", "--out", run.folder, "--quiet", *more)
        forgotten = ease("forget", run.folder, "--client", 1, "--method", "finetune", "--quiet")
    finally:
        torch.set_num_threads(1)
    for result in (trained, forgotten):
        assert result.code == 0 and result.err.count("\n") == 1
        assert "begun with 1 threads and there are 2 now" in result.err and "OMP_NUM_THREADS=1" in result.err
    assert ease("forget", run.folder, "--client", 2, "--method", "finetune", "--quiet").err == ""
