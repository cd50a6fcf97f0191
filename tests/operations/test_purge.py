"""Purge: what a closed request left is gone or made again, nothing gives it back, and the run goes on as before."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.operations.ledger.test_work import ids_of, run_json
from tests.photographs import FOLDER, draw_photographs
from tests.runs.test_head import more_rounds

from ease.commands.train import train_run
from ease.methods.ease.contribution import contribution_of
from ease.operations.ledger.retention import purge_released
from ease.operations.ledger.store import Ledger
from ease.operations.purge import read_purges
from ease.params import Params
from ease.requests.request import ClassRequest, ClientRequest, Request, SampleRequest
from ease.requests.tombstones import PREFIX, Tombstones, read_tombstones
from ease.runs.answers import open_world, release, trained_of
from ease.runs.config import load_config
from ease.runs.run import Run

CLIENTS = 4
ROUNDING = 1e-6
"""Of a state in single precision; what one client moves a round by is thousands of times as much."""


@pytest.fixture(scope="module")
def kept(small, shared_cache, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("purge") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EASE_CACHE", str(shared_cache))
        train_run(load_config(None, (*small, f"partition.clients={CLIENTS}", "training.rounds=3")), folder, quiet=True)
    (folder / "policy.toml").write_text("[hold]\nretain_points = 100\n[retrain]\nforgotten_fraction = 1\n")
    return folder


@pytest.fixture
def folder(kept: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(kept, tmp_path / "run"))


def closed(ease, folder: Path, *options: object) -> None:
    """Forget and release."""
    name = run_json(ease, "forget", folder, *options)["id"]
    release(Run.load(folder), name)


def implied(folder: Path, number: int) -> float:
    """What is missing from a round: how far its mean lies from that of the updates it is said to be made of."""
    history = Run.load(folder).history
    weights = {client: float(count) for client, count in history.pairs(number).items()}
    moved = history.moved(number)
    mean = {name: np.zeros(tuple(tensor.shape)) for name, tensor in moved.tensors.items()}
    for client, weight in weights.items():
        for name, tensor in history.update(number, int(client)).change.tensors.items():
            mean[name] += weight / sum(weights.values()) * tensor.double().numpy()
    return max(float(np.abs(mean[name] - moved[name].numpy()).max()) for name in mean)


def holds(folder: Path, needle: bytes) -> list[str]:
    return [str(path) for path in folder.rglob("*") if path.is_file() and needle in path.read_bytes()]


# --- history ---


def test_a_clients_updates_go_and_nothing_gives_them_back(ease, folder: Path) -> None:
    run = Run.load(folder)
    lost = run.history.update(2, 1).change["image.projector.0.weight"].numpy().tobytes()
    old = [run.history.state(number)["image.projector.0.weight"].numpy().tobytes() for number in (1, 2, 3)]
    trained, world = trained_of(run), open_world(run)
    found = contribution_of(trained, ClientRequest(clients=(1,)), world.federation)
    closed(ease, folder, "--client", 1)
    assert holds(folder, lost) and implied(folder, 1) < ROUNDING
    (done,) = purge_released(folder)
    assert not holds(folder, lost) and not any(holds(folder, state) for state in old)
    history = Run.load(folder).history
    history.verify()
    for number in (1, 2, 3):
        assert history.clients(number) == [0, 2, 3] and implied(folder, number) < ROUNDING
        assert 1 not in history.record(number).updates
    # What is left is the model without the client's contribution.
    expected = trained.final - found.total
    for name, tensor in history.state(3).tensors.items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-6, rtol=0)
    assert [line.what for line in done.rederived][:3] == ["rounds/00001", "rounds/00002", "rounds/00003"]
    assert read_purges(folder).passes == (done,) and done.stayed and all(line.why for line in done.stayed)


@pytest.mark.parametrize("kind", ["samples", "class"])
def test_updates_that_forgotten_pairs_were_in_are_made_again_without_them(ease, folder: Path, tmp_path, kind) -> None:
    (tmp_path / "ids.txt").write_text("\n".join(ids_of(folder, 0, 4)))
    request: Request = SampleRequest(ids=tuple(sorted(ids_of(folder, 0, 4))))
    options: tuple[object, ...] = ("--samples", tmp_path / "ids.txt")
    if kind == "class":
        request, options = ClassRequest(classes=(1,)), ("--class", 1)
    run, world = Run.load(folder), open_world(Run.load(folder))
    trained = trained_of(run)
    found = contribution_of(trained, request, world.federation)
    holders = {0} if kind == "samples" else set(range(CLIENTS))
    stale = [run.history.update(2, c).change["image.projector.0.weight"].numpy().tobytes() for c in holders]
    closed(ease, folder, *options)
    list(purge_released(folder))
    assert not any(holds(folder, each) for each in stale)
    history = Run.load(folder).history
    history.verify()
    expected, far = trained.final - found.total, found.total.norm()
    left = sum(float((history.state(3)[name] - expected[name]).double().square().sum()) for name in expected.tensors)
    assert left**0.5 < 2e-3 * far  # replays travel in half precision
    now = {shard.client: len(shard.train) for shard in open_world(Run.load(folder)).shards}
    assert history.pairs(1) == now
    assert max(implied(folder, number) for number in (1, 2, 3)) < ROUNDING


def test_later_requests_and_rounds_work_after_a_purge(ease, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "first.txt").write_text("\n".join(ids_of(folder, 0, 3)))
    (tmp_path / "later.txt").write_text("\n".join([*ids_of(folder, 0, 5)[3:], *ids_of(folder, 2, 2)]))
    for number, options in enumerate((("--client", 1), ("--samples", tmp_path / "first.txt"))):
        run_json(ease, "request", "add", folder, *options, "--approve", "--id", f"first-{number}")
    run_json(ease, "work", folder)
    assert len(run_json(ease, "purge", folder)["purged"]) == 2
    for id, options in {
        "samples": ("--samples", tmp_path / "later.txt"),
        "class": ("--class", 2),
        "client": ("--client", 3),
    }.items():
        run_json(ease, "request", "add", folder, *options, "--approve", "--id", id)
    finished = run_json(ease, "work", folder)["finished"]
    assert [(each["ids"], each["state"]) for each in finished] == [
        (["samples"], "done"),
        (["class"], "done"),
        (["client"], "done"),
    ]
    assert more_rounds(ease, folder, 5).code == 0
    history = Run.load(folder).history
    assert history.clients(5) == [0, 2]
    assert len(run_json(ease, "purge", folder)["purged"]) == 3  # rounds 4 and 5 began from the last release and stay
    history.verify()
    assert more_rounds(ease, folder, 6).code == 0 and ease("export", folder).code == 0


def test_a_release_between_rounds_moves_by_what_is_purged_before_it(ease, folder: Path) -> None:
    """Rounds 4 and 5 began from the release of client 1; once client 2 is purged, that model may not stay."""
    closed(ease, folder, "--client", 1)
    assert more_rounds(ease, folder, 5).code == 0
    between = Run.load(folder).history.start(4)
    closed(ease, folder, "--client", 2)
    passes = list(purge_released(folder))
    assert len(passes) == 2
    history = Run.load(folder).history
    history.verify()
    assert history.clients(4) == [0, 3] and max(implied(folder, number) for number in range(1, 6)) < ROUNDING
    assert history.start_path(4) == folder / "starts" / "00004.safetensors"
    moved = history.start(4) - between
    assert moved.norm() > 0 and not holds(folder, between["image.projector.0.weight"].numpy().tobytes())
    assert not (folder / "requests" / "client-1" / "ease" / "model.safetensors").exists()
    assert more_rounds(ease, folder, 6).code == 0


def test_the_leaving_clients_own_history_is_deleted(small, ease, tmp_path: Path) -> None:
    config = load_config(None, (*small, 'training.history="client"'))
    train_run(config, tmp_path / "run", quiet=True)
    closed(ease, tmp_path / "run", "--client", 1)
    (done,) = purge_released(tmp_path / "run")
    assert not (tmp_path / "run" / "clients" / "00001").exists() and (tmp_path / "run" / "clients" / "00002").exists()
    assert any(line.what == "rounds" for line in done.stayed)
    assert run_json(ease, "forget", tmp_path / "run", "--client", 2)["id"] == "client-2"


# --- what a purged run still answers ---


def test_commands_that_need_the_earlier_model_are_refused_in_one_line(ease, folder: Path) -> None:
    closed(ease, folder, "--client", 1)
    list(purge_released(folder))
    for command, said in (
        (("forget", folder, "--client", 1, "--method", "finetune"), "purged"),
        (("audit", folder, "--request", "client-1", "--retrain", "--pool", 16), "have vanished"),
    ):
        result = ease(*command)
        assert result.code == 2 and said in result.err and "Traceback" not in result.err, result.err
    assert ease("export", folder, "--request", "client-1").code == 0
    assert ease("report", folder).code in (0, 2)


def test_only_what_is_old_enough_is_purged(ease, folder: Path) -> None:
    run_json(ease, "request", "add", folder, "--client", 1, "--approve")
    run_json(ease, "work", folder, "--set", "purge.after_days=30")
    assert not read_purges(folder).passes and not list(purge_released(folder, 30))
    summary = run_json(ease, "work", folder, "--set", "purge.after_days=0")
    assert len(summary["purged"]) == 1 and not list(purge_released(folder))


# --- ids ---


@pytest.fixture
def place(small, tmp_path: Path, monkeypatch) -> Path:
    """Photographs in a folder, a run over them, and its cache."""
    draw_photographs(tmp_path / "photos")
    monkeypatch.setenv("EASE_CACHE", str(tmp_path / "cache"))
    train_run(load_config(None, (*small, *FOLDER, f'data.path="{tmp_path / "photos"}"')), tmp_path / "run", quiet=True)
    return tmp_path


def test_forgotten_ids_and_pictures_are_nowhere_and_do_not_return(ease, place: Path) -> None:
    run = place / "run"
    names = ids_of(run, 0, 3)
    membership, _ = Run.load(run).known()
    leaving = [*membership.clients[1].train_ids, *membership.clients[1].validation_ids]
    content = [membership.digests[each] for each in (*names, *leaving)]
    (place / "ids.txt").write_text("\n".join(names))
    (run / "policy.toml").write_text("[hold]\nretain_points = 100\n[retrain]\nforgotten_fraction = 1\n")
    run_json(ease, "request", "add", run, "--samples", place / "ids.txt", "--approve", "--id", "s")
    run_json(ease, "request", "add", run, "--client", 1, "--approve", "--id", "c")
    run_json(ease, "work", run)
    cached = list((place / "cache").rglob("*.npy"))
    run_json(ease, "purge", run)
    assert not any(path.exists() for path in cached)
    assert not any(holds(run, each.encode()) for each in content)
    after, _ = Run.load(run).known()
    known = {each for holding in after.clients for each in (*holding.train_ids, *holding.validation_ids)}
    assert not known & {*names, *leaving} and len([each for each in known if each.startswith(PREFIX)]) >= len(names)
    spelt = "".join(entry.model_dump_json() for entry in Ledger(run).entries()) + (run / "head.json").read_text()
    assert all(f'"{name}"' not in spelt for name in (*names, *leaving))
    # The folder still holds every photograph; none of the forgotten ones is read again.
    world = open_world(Run.load(run))
    assert not {*names, *leaving} & set(world.evaluator.pairs.ids)
    assert more_rounds(ease, run, 4).code == 0
    assert Run.load(run).history.pairs(4)[0] == len(membership.clients[0].train_ids) - 3
    result = run_json(ease, "request", "add", run, "--samples", place / "ids.txt", "--approve", "--id", "again")
    assert all(each.startswith(PREFIX) for each in result["request"]["ids"])
    assert "nothing left to forget" in run_json(ease, "work", run)["finished"][0]["why"]


def test_marks_are_salted_and_stay_what_they_are() -> None:
    one, two = Tombstones(salt="00" * 16), Tombstones(salt="01" * 16)
    assert one.mark("a") != two.mark("a") and one.mark("a") == one.mark("a") != one.mark("b")
    assert one.mark("a").startswith(PREFIX) and "a" not in one.mark("a").removeprefix(PREFIX)[24:]


def test_a_salt_is_drawn_once(ease, folder: Path) -> None:
    closed(ease, folder, "--client", 1)
    list(purge_released(folder))
    first = read_tombstones(folder)
    closed(ease, folder, "--client", 2)
    list(purge_released(folder))
    assert read_tombstones(folder).salt == first.salt and first.ids < read_tombstones(folder).ids


def test_a_state_that_purge_left_can_be_read_as_any_other(ease, folder: Path) -> None:
    closed(ease, folder, "--client", 1)
    start = Params.load(Run.load(folder).model_path(Run.load(folder).head.releases[-1]))
    list(purge_released(folder))
    after = trained_of(Run.load(folder)).start
    assert all(torch.equal(start[name], after[name]) for name in start.tensors)
