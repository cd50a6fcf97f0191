"""What a run goes on from: stored membership, closed requests, and rounds that never touch forgotten pairs again."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ease.params import Params
from ease.requests.request import ClientRequest, SampleRequest, forget_mask, without
from ease.runs.answers import find_answer, open_world, release, start_hash, trained_of
from ease.runs.run import Run
from ease.storage import sha256, write_json


@pytest.fixture
def photographs(place: Path) -> Path:
    return place / "photos"


@pytest.fixture
def trained(place: Path) -> Path:
    """A run over the photographs."""
    return place / "run"


def answered(ease, run: Path, *options: object) -> dict:
    result = ease("forget", run, *options, "--json")
    assert result.code == 0, result.err
    return json.loads(result.out)


def more_rounds(ease, run: Path, rounds: int):
    config = Run.load(run).config
    settings = [f"--set={key}" for key in _assignments(config.model_dump(mode="json"))]
    return ease("train", "--out", run, *settings, f"--set=training.rounds={rounds}", "--quiet")


def _assignments(table: dict, prefix: str = "") -> list[str]:
    found = []
    for key, value in table.items():
        if isinstance(value, dict):
            found += _assignments(value, f"{prefix}{key}.")
        elif value is not None:
            found.append(f"{prefix}{key}={json.dumps(value)}")
    return found


def ids_of(run: Path, client: int) -> list[str]:
    membership, _ = Run.load(run).known() or pytest.fail("no membership")
    return list(membership.clients[client].train_ids)


# --- membership ---


def test_the_membership_is_stored_and_opens_the_same_world(trained: Path) -> None:
    run = Run.load(trained)
    dealt, again = open_world(Run(trained.parent / "elsewhere", run.config)), open_world(run)
    for one, two in zip(dealt.shards, again.shards, strict=True):
        assert (one.client, one.train_ids) == (two.client, two.train_ids)
        for name in ("train", "validation", "train_classes", "validation_classes"):
            assert np.array_equal(getattr(one, name), getattr(two, name))
    assert np.array_equal(dealt.server.centroids, again.server.centroids)
    assert np.array_equal(dealt.evaluator.test, again.evaluator.test)


def test_pairs_that_come_later_belong_to_no_one(trained: Path, photographs: Path) -> None:
    before = open_world(Run.load(trained))
    Image.new("RGB", (64, 64), (9, 9, 9)).save(photographs / "later.png")
    with (photographs / "captions.jsonl").open("a") as file:
        file.write('\n{"image": "later.png", "captions": ["a later picture"]}')
    after = open_world(Run.load(trained))
    assert [shard.train_ids for shard in before.shards] == [shard.train_ids for shard in after.shards]
    assert [before.evaluator.pairs.ids[n] for n in before.evaluator.test] == [
        after.evaluator.pairs.ids[n] for n in after.evaluator.test
    ]


def test_a_pair_that_no_one_asked_to_forget_may_not_vanish_or_change(ease, trained: Path, photographs: Path) -> None:
    name = ids_of(trained, 0)[0]
    kept = (photographs / f"{name}.png").read_bytes()
    (photographs / f"{name}.png").unlink()
    result = ease("forget", trained, "--client", 1)
    assert result.code == 2 and "missing" in result.err and name in result.err
    Image.new("RGB", (64, 64), (1, 2, 3)).save(photographs / f"{name}.png")
    result = ease("forget", trained, "--client", 1)
    assert result.code == 2 and "changed" in result.err and name in result.err
    (photographs / f"{name}.png").write_bytes(kept)
    answered(ease, trained, "--client", 1)


# --- forgotten photographs vanish ---


def test_forgotten_photographs_may_vanish_and_everything_still_works(ease, trained, photographs, tmp_path) -> None:
    """With and without their files, going on gives the same bytes."""
    answered(ease, trained, "--client", 1)
    twin = Path(shutil.copytree(trained, tmp_path / "twin"))
    arguments = ("--after", "client-1", "--rounds", 2, "--quiet")
    assert ease("train", "--resume", twin, *arguments).code == 0
    for name in ids_of(trained, 1):
        (photographs / f"{name}.png").unlink()
    result = ease("train", "--resume", trained, *arguments)
    assert result.code == 0, result.err
    there, gone = (
        Params.load(run / "requests" / "client-1" / "ease" / "after-2-locked" / "model.safetensors")
        for run in (twin, trained)
    )
    assert all(torch.equal(there[name], gone[name]) for name in there.tensors)
    for command in (
        ("forget", trained, "--client", 2),
        ("forget", trained, "--client", 1),
        ("export", trained, "--request", "client-1"),
        ("report", trained, "--thumbnails"),
        ("release", trained, "--request", "client-1"),
    ):
        result = ease(*command)
        assert result.code == 0, (command, result.err)
    shutil.rmtree(trained / "requests" / "client-2")  # it began from what was there before the release
    assert more_rounds(ease, trained, 3).code == 0


def test_an_audit_without_the_photographs_says_why_it_cannot_be(ease, trained, photographs) -> None:
    answered(ease, trained, "--client", 1)
    for name in ids_of(trained, 1):
        (photographs / f"{name}.png").unlink()
    result = ease("audit", trained, "--request", "client-1", "--pool", 16, "--retrain")
    assert result.code == 2 and "vanished" in result.err and "Traceback" not in result.err


# --- more rounds ---


def test_more_rounds_continue_from_the_answer_and_leave_the_client_out(ease, trained: Path) -> None:
    answered(ease, trained, "--client", 1)
    assert more_rounds(ease, trained, 4).code == 0
    history = Run.load(trained).history
    assert [history.clients(number) for number in (1, 2, 3, 4)] == [[0, 1, 2], [0, 1, 2], [0, 2], [0, 2]]
    assert history.start_path(3) == trained / "requests" / "client-1" / "ease" / "model.safetensors"
    assert history.record(3).start_sha256 == sha256(history.start_path(3))
    assert history.start_path(4) == history.state_path(3)
    history.verify()


def test_more_rounds_leave_single_pairs_out(ease, trained: Path, tmp_path: Path) -> None:
    named = ids_of(trained, 0)[:3]
    (tmp_path / "ids.txt").write_text("\n".join(named))
    answered(ease, trained, "--samples", tmp_path / "ids.txt")
    assert more_rounds(ease, trained, 3).code == 0
    record = Run.load(trained).history.record(3)
    assert record.pairs[0] == len(ids_of(trained, 0)) - 3
    assert record.pairs[1] == len(ids_of(trained, 1))


def test_between_several_answers_someone_has_to_choose(ease, trained: Path) -> None:
    for client in (1, 2):
        answered(ease, trained, "--client", client)
    before = (trained / "run.json").read_bytes()
    result = more_rounds(ease, trained, 4)
    assert result.code == 2 and "ease release" in result.err
    assert (trained / "run.json").read_bytes() == before and Run.load(trained).history.rounds() == 2


# --- releases ---


def test_a_later_request_starts_from_the_release(ease, trained: Path) -> None:
    answered(ease, trained, "--client", 1)
    made = json.loads(ease("release", trained, "--request", "client-1", "--json").out)
    run = Run.load(trained)
    later = trained_of(run)
    assert later.gone == (ClientRequest(clients=(1,)),) and made["answer"] == "client-1/ease"
    assert torch.equal(*(p["image.projector.0.weight"] for p in (later.start, find_answer(run, "client-1")[0].model())))
    assert [shard.client for shard in open_world(run).shards] == [0, 2]
    record = answered(ease, trained, "--client", 2)
    assert record["trained_sha256"] == start_hash(run) == made["model_sha256"]
    assert ease("release", trained, "--request", "client-1").code == 0  # as after a crash
    assert Run.load(trained).head == run.head


def test_an_answer_that_a_release_overtook_says_so_and_what_to_do(ease, trained: Path) -> None:
    """It stands in the way of more rounds until it is answered again from the release, or discarded."""
    for client in (1, 2):
        answered(ease, trained, "--client", client)
    release(Run.load(trained), "client-1")
    overtaken = trained / "requests" / "client-2" / "ease"
    reported = (
        f"{overtaken}: this answer began from the model before client-1/ease was released, and the run continues from "
        "that release; delete the folder, and run `ease forget` again if the request is still open"
    )
    for result in (
        more_rounds(ease, trained, 3),
        ease("release", trained, "--request", "client-2"),
        ease("forget", trained, "--client", 2),
    ):
        assert result.code == 2 and reported in " ".join(result.err.split()) and "trained beyond" not in result.err
    shutil.rmtree(overtaken)
    record = answered(ease, trained, "--client", 2)
    assert record["trained_sha256"] == start_hash(Run.load(trained))
    assert more_rounds(ease, trained, 3).code == 0
    assert Run.load(trained).history.clients(3) == [0]


def test_a_discarded_answer_is_in_no_ones_way(ease, trained: Path) -> None:
    for client in (1, 2):
        answered(ease, trained, "--client", client, "--method", "finetune")
    release(Run.load(trained), "client-1/finetune")
    shutil.rmtree(trained / "requests" / "client-2")
    assert more_rounds(ease, trained, 3).code == 0
    assert Run.load(trained).history.clients(3) == [0, 2]


def test_a_closed_request_can_be_answered_by_another_method_from_where_it_began(ease, trained: Path) -> None:
    first = answered(ease, trained, "--client", 1)
    release(Run.load(trained), "client-1")
    second = answered(ease, trained, "--client", 1, "--method", "finetune")
    assert second["trained_sha256"] == first["trained_sha256"] != start_hash(Run.load(trained))
    assert second["before"] == first["before"]


def test_forgotten_pairs_cannot_be_requested_again(ease, trained: Path, tmp_path: Path) -> None:
    answered(ease, trained, "--client", 1)
    release(Run.load(trained), "client-1")
    (tmp_path / "ids.txt").write_text(ids_of(trained, 1)[0])
    result = ease("forget", trained, "--samples", tmp_path / "ids.txt")
    assert result.code == 2 and "gone already" in result.err


def test_shards_remember_where_their_pairs_stood(world) -> None:
    named = world.shards[0].train_ids[::3]
    request = SampleRequest(ids=named)
    (kept, *_) = without(world.shards, [request])
    mask = forget_mask(request, world.shards[0])
    assert np.array_equal(kept.places, np.flatnonzero(~mask)) and kept.dealt == len(mask)
    assert np.array_equal(kept.train, world.shards[0].train[~mask])
    again = kept.keep(np.arange(len(kept.train)) != 0)
    assert np.array_equal(again.places, kept.places[1:]) and again.dealt == len(mask)


def test_a_lost_or_older_head_is_refused_since_it_would_bring_back_what_is_gone(
    ease, one_forgotten: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(one_forgotten, tmp_path / "run"))
    before = run / "head.json"
    assert not before.exists() and ease("export", run, "--out", tmp_path / "first", "--quiet").code == 0
    name = "client-1/finetune"
    release(Run.load(run), name)
    head = before.read_bytes()
    for older in (None, '{"format": 1, "releases": []}'):
        before.unlink(missing_ok=True)
        if older is not None:
            write_json(before, json.loads(older))
        for command in (("export", run), ("train", "--resume", run, "--until", 3), ("forget", run, "--client", 0)):
            refused = ease(*command)
            assert refused.code == 2 and "names 0 of 1 releases" in " ".join(refused.err.split())
    before.write_bytes(head)
    (run / "releases.json").unlink()  # of a process that was killed before it
    release(Run.load(run), name)
    assert (run / "releases.json").is_file() and Run.load(run).head.gone
