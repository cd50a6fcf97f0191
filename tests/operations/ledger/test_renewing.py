"""Training from the start once much is gone: the queue decides, later requests go on from it, purge ends the old."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.operations.ledger.test_work import add, ids_of, listed, run_json
from tests.operations.test_purge import holds, implied

from ease.audit.config import AuditConfig
from ease.audit.runner import Audit
from ease.commands.train import train_run
from ease.errors import UserError
from ease.federation.fedavg import fedavg
from ease.federation.history import History
from ease.federation.protocol import Replay
from ease.methods import make_method
from ease.methods.ease.replay import REPLAY, read_sum
from ease.methods.unlearning_base import UnlearningBase
from ease.operations.evidence import read_log
from ease.operations.ledger.retention import purge_released
from ease.operations.ledger.store import Ledger
from ease.operations.purge import purge
from ease.requests.request import ClientRequest, SampleRequest, forget_mask, redealt, without
from ease.runs.answers import answer_of, find_answer, open_world, release, trained_of
from ease.runs.config import load_config
from ease.runs.forget import forget
from ease.runs.head import ReleaseChain
from ease.runs.run import Run
from ease.runs.world import World

ROUNDS, CLIENTS, BOUND = 2, 4, 0.3
NOTHING = SampleRequest(ids=())


@pytest.fixture(scope="module")
def kept(small, shared_cache, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("renewing") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EASE_CACHE", str(shared_cache))
        settings = (*small, f"partition.clients={CLIENTS}", f"training.rounds={ROUNDS}")
        train_run(load_config(None, settings), folder, quiet=True)
    (folder / "policy.toml").write_text(f"[hold]\nretain_points = 100\n[retrain]\nforgotten_fraction = {BOUND}\n")
    return folder


@pytest.fixture(scope="module")
def renewed(kept: Path, tmp_path_factory, shared_cache) -> Path:
    """A client left, and with pairs of another more than the bound is gone."""
    folder = Path(shutil.copytree(kept, tmp_path_factory.mktemp("renewed") / "run"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EASE_CACHE", str(shared_cache))
        run = Run.load(folder)
        for request in (ClientRequest(clients=(1,)), SampleRequest(ids=tuple(sorted(ids_of(folder, 0, 6))))):
            method = make_method("ease") if not run.head.gone else make_method("retrain", ("keep=true",))
            list(forget(run, open_world(run), request, method))
            release(run, answer_of(run, request, method).folder.relative_to(folder / "requests").as_posix())
    return folder


@pytest.fixture
def folder(renewed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(renewed, tmp_path / "run"))


# --- the queue ---


def test_the_queue_trains_from_the_start_beyond_the_bound(ease, kept: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(kept, tmp_path / "run"))
    singles = ids_of(run, 0, 6)
    add(ease, run, "--client", 1, id="client")
    add(ease, run, "--samples", listed(tmp_path, singles), id="pairs")
    total = sum(len(holding.train_ids) for holding in Run.load(run).known()[0].clients)
    gone = len(ids_of(run, 1))
    assert gone / total <= BOUND < (gone + len(singles)) / total  # what the test is about
    finished = run_json(ease, "work", run)["finished"]
    assert [each["state"] for each in finished] == ["done", "done"]
    assert [each["outcome"]["trained_again"] for each in finished] == [False, True]
    head = Run.load(run).head
    assert [bool(each.rounds) for each in head.releases] == [False, True] and head.renewed == 2
    record = json.loads((run / "requests" / head.releases[1].answer / "record.json").read_text())
    assert record["method"]["method"] == "retrain" and record["method"]["keep"] and len(record["rounds"]) == ROUNDS
    found, *_ = find_answer(Run.load(run), head.releases[1].answer.partition("/")[0])
    assert found.folder == run / "requests" / head.releases[1].answer  # by the request's name alone
    lines = read_log(Run.load(run)).of_kind("released")
    assert [each.payload.get("trained_again") for each in lines] == [None, True]
    assert Ledger(run).entry("pairs").method["method"] == "ease"  # what was asked for stays as it was

    # What was gone before does not count again: the next is subtracted, and its impact says so.
    add(ease, run, "--client", 2, id="next", approve=False)
    touches = run_json(ease, "request", "show", run, "next")["impact"]
    left = total - gone - len(singles)
    assert touches["forgotten_fraction"] == pytest.approx(len(ids_of(run, 2)) / left) and touches["method"] == "retrain"
    run_json(ease, "request", "approve", run, "next")
    (last,) = run_json(ease, "work", run, "--set", "retrain.forgotten_fraction=0.9")["finished"]
    assert last["state"] == "done" and last["outcome"]["answer"] == "client-2/ease"


def test_a_bound_of_one_never_trains_from_the_start(ease, kept: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(kept, tmp_path / "run"))
    add(ease, run, "--client", 0, "--client", 1, "--client", 2, id="most")
    assert run_json(ease, "request", "show", run, "most")["impact"]["method"] == "retrain"
    (done,) = run_json(ease, "work", run, "--set", "retrain.forgotten_fraction=1")["finished"]
    assert done["outcome"]["answer"] == "client-0-1-2/ease"


def test_only_a_whole_training_at_the_server_can_be_kept(small_config) -> None:
    training = small_config().training
    with pytest.raises(UserError, match="whole training"):
        make_method("retrain", ("keep=true", "share=0.5")).check(training)
    with pytest.raises(UserError, match="overwrite"):
        make_method("retrain", ("keep=true",)).check(training.model_copy(update={"history": "client"}))


# --- what later requests go on from ---


def test_the_model_is_the_training_without_forgotten_pairs(folder: Path) -> None:
    run = Run.load(folder)
    trained, gone = trained_of(run), run.head.gone
    world = World(open_world(run).server, open_world(run).evaluator).without(*gone)
    *_, last = fedavg(trained.initial, world.federation, trained.training, trained.seed, trained.temperature)
    for name, tensor in last.state.tensors.items():
        torch.testing.assert_close(trained.start[name], tensor, rtol=0, atol=0)
        torch.testing.assert_close(trained.final[name], tensor, rtol=0, atol=0)
    run.history.verify()
    assert trained.history.place == run.head.releases[1].rounds and not trained.locked and trained.base is None
    assert History(folder).rounds() == ROUNDS  # the first training is there until someone purges it


def test_replays_repeat_the_new_rounds_batch_for_batch(folder: Path) -> None:
    run = Run.load(folder)
    trained, world = trained_of(run), open_world(run)
    for number in range(1, ROUNDS + 1):
        replays = tuple(Replay(number, trained.history.start(number), 1.0, 0, (c,)) for c in (0, 2, 3))
        job = trained.training_job(0, request=NOTHING, objective=REPLAY, replays=replays)
        for answer in world.federation.run(trained.start, job, [0, 2, 3]):
            stored = trained.history.update(number, answer.client).change
            again = read_sum(answer.values, 0, stored)
            for name, tensor in stored.tensors.items():  # it travels in half precision
                bound = 1e-3 * float(tensor.abs().max())
                torch.testing.assert_close(again[name].float(), tensor, rtol=0, atol=bound)


def test_the_next_request_subtracts_what_its_client_wrote_into_the_new_rounds(ease, folder: Path) -> None:
    run = Run.load(folder)
    history, start = run.history, trained_of(run).start
    written = {name: np.zeros(tuple(tensor.shape)) for name, tensor in start.tensors.items()}
    for number in range(1, ROUNDS + 1):
        for sign, left in ((1, {0, 2, 3}), (-1, {0, 3})):
            updates = [history.update(number, client) for client in sorted(left)]
            for update in updates:
                for name, tensor in update.change.tensors.items():
                    share = sign * update.pairs / sum(each.pairs for each in updates)
                    written[name] += share * tensor.double().numpy()
    run_json(ease, "forget", folder, "--client", 2, "--set", "share=1.0")
    (answer,) = (folder / "requests" / "client-2").glob("ease*")
    base = UnlearningBase.load(answer / "base.safetensors").state
    for name, tensor in start.tensors.items():
        expected = tensor.double().numpy() - written[name]
        np.testing.assert_allclose(base[name].numpy(), expected, rtol=0, atol=1e-6)


def test_places_count_what_the_new_training_had(world) -> None:
    """By listing: whoever was there when it was made, in order."""
    shards, first = world.shards, SampleRequest(ids=world.shards[0].train_ids[::3])
    later = SampleRequest(ids=world.shards[0].train_ids[1::4])
    dealt = {shard.client: shard for shard in shards}
    for shard in redealt(without(shards, [first, later]), dealt, [first]):
        had = [each for each in dealt[shard.client].train_ids if each not in first.ids]
        assert shard.dealt == len(had)
        assert [had[place] for place in shard.places] == list(shard.train_ids)


def test_more_rounds_continue_from_the_new_training(ease, folder: Path) -> None:
    run_json(ease, "train", "--resume", folder, "--until", ROUNDS + 1)
    run = Run.load(folder)
    assert run.history.rounds() == ROUNDS + 1 and History(folder).rounds() == ROUNDS
    run.history.verify()
    assert run.history.start_path(ROUNDS + 1) == run.model_path(run.head.releases[-1])


def test_missing_rounds_cannot_be_continued(ease, kept: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(kept, tmp_path / "run"))
    run_json(ease, "forget", folder, "--client", 1, "--method", "retrain", "--set", "keep=true")
    (answer,) = (folder / "requests" / "client-1").glob("retrain-*")
    shutil.rmtree(answer / "rounds" / f"{ROUNDS:05d}")
    with pytest.raises(UserError, match="rounds of this training are missing"):
        release(Run.load(folder), f"client-1/{answer.name}")


# --- audits ---


def test_an_audit_counts_showings_in_the_training_that_its_request_began_from(folder: Path) -> None:
    """A client had left before the second request, and the third began from other rounds."""
    run = Run.load(folder)
    for place, request in enumerate(run.head.gone):
        world = open_world(run, request)
        method = make_method("retrain", ("keep=true",)) if place else make_method("ease")
        audit = Audit(run, world, answer_of(run, request, method), request, method, AuditConfig())
        left = [shard.keep(~forget_mask(request, shard)) for shard in world.shards]
        epochs = run.config.training.local_epochs
        assert audit._shown_in_training() == ROUNDS * epochs * sum(len(shard.train) for shard in left)


# --- purge ---


def test_a_purge_ends_the_training_that_was_made_again(ease, folder: Path) -> None:
    run = Run.load(folder)
    first = History(folder)
    lost = [first.update(1, client).change["image.projector.0.weight"].numpy().tobytes() for client in (0, 1)]
    rounds = {path: path.read_bytes() for path in (folder / run.head.releases[1].rounds).rglob("*") if path.is_file()}
    certificate = run_json(ease, "certificate", folder, "--request", run.head.releases[1].answer)
    one, two = purge_released(folder)
    assert "rounds" in [line.what for line in one.removed] and not (folder / "rounds").exists()
    assert not any(line.what.startswith("rounds/") for each in (one, two) for line in each.rederived)
    assert not any(holds(folder, each) for each in lost)
    assert rounds and all(path.read_bytes() == data for path, data in rounds.items())
    run = Run.load(folder)
    run.history.verify()
    assert all(each.purged for each in run.head.releases) and run.head.renewed == 2
    assert (
        ease("verify", folder / "requests" / run.head.releases[1].answer / "certificate.json", "--run", folder).code
        == 0
    )
    assert certificate

    # Later requests and their purges work in the new rounds.
    ids = tuple(sorted(ids_of(folder, 3, 3)))
    (folder.parent / "ids.txt").write_text("\n".join(ids))
    name = run_json(ease, "forget", folder, "--samples", folder.parent / "ids.txt")["id"]
    release(Run.load(folder), name)
    (three,) = purge_released(folder)
    assert next(line.what for line in three.rederived) == f"{run.head.releases[1].rounds}/00001"
    history = Run.load(folder).history
    history.verify()
    now = {shard.client: len(shard.train) for shard in open_world(Run.load(folder)).shards}
    assert history.pairs(1) == now
    assert max(implied(folder, number) for number in range(1, ROUNDS + 1)) < 1e-6


def test_only_an_earlier_release_is_purged_from_its_rounds(folder: Path) -> None:
    run = Run.load(folder)
    lost = History(folder).update(1, 1).change["image.projector.0.weight"].numpy().tobytes()
    rounds = {path: path.read_bytes() for path in (folder / run.head.releases[1].rounds).rglob("*") if path.is_file()}
    (done,) = purge(folder, until=1)
    assert [line.what for line in done.rederived][:ROUNDS] == [f"rounds/{n:05d}" for n in range(1, ROUNDS + 1)]
    assert not holds(folder, lost) and History(folder).clients(1) == [0, 2, 3]
    History(folder).verify()
    assert all(path.read_bytes() == data for path, data in rounds.items())


def test_a_head_names_no_rounds_outside_its_answers() -> None:
    reported = {"request": {"scope": "client", "clients": [1]}, "answer": "a/b", "model_sha256": "", "after_round": 1}
    for path in ("../rounds", "requests/../../rounds", "/rounds", "requests/a/rounds"):
        with pytest.raises(ValueError, match="rounds"):
            ReleaseChain.model_validate({"releases": [{**reported, "rounds": path}]})


@pytest.mark.slow
def test_requests_before_and_after_a_training_from_the_start_are_audited(ease, folder: Path) -> None:
    name = run_json(ease, "forget", folder, "--client", 2)["id"]
    release(Run.load(folder), name)
    for request in ("client-1", "client-2"):
        result = ease("audit", folder, "--request", request, "--retrain", "--shadows", 4, "--pool", 16, "--json")
        assert result.code == 0, result.err
        assert run_json(ease, "certificate", folder, "--request", request)
        certificate = folder / "requests" / request / "ease" / "certificate.json"
        assert ease("verify", certificate, "--run", folder).code == 0
