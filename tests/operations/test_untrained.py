"""Requests for pairs outside training: held out, for validation and for testing. No model changes, and nothing
measures, shows or finds them afterwards."""

import base64
import json
import shutil
from pathlib import Path

import pytest
from tests.operations.ledger.test_work import listed, run_json, states

from ease.errors import UserError
from ease.operations.ledger.impact import impact_of
from ease.requests.request import ClientRequest, SampleRequest, every_id, remaining, untrained_in
from ease.runs.answers import default_method, open_world, release, trained_of
from ease.runs.evaluation import evaluation_sets
from ease.runs.resolve import check_request
from ease.runs.run import Run
from ease.runs.using import gallery
from ease.runs.world import World
from ease.storage import sha256

LENIENT = "[hold]\nretain_points = 100\n[retrain]\nforgotten_fraction = 1\n"


@pytest.fixture
def here(place: Path) -> Path:
    """Photographs, a run over them and its cache, as they were after the training."""
    (place / "run" / "policy.toml").write_text(LENIENT)
    return place


def members_of(run: Path):
    known = Run.load(run).known()
    assert known is not None
    return known[0]


def one_of_each(run: Path) -> dict[str, str]:
    members = members_of(run)
    return {
        "train": members.clients[0].train_ids[0],
        "held_out": members.clients[1].validation_ids[0],
        "validation": members.validation[0],
        "test": members.test[0],
    }


def seen(world: World) -> set[str]:
    """Ids of all pairs that anything measures, shows or searches."""
    pairs, found = world.evaluator.pairs, set(gallery(world)[0].tolist())
    found |= set(world.evaluator.test.tolist()) | set(world.evaluator.spare.tolist())
    found |= {place for shard in (*world.shards, *world.evaluator.shards) for place in shard.validation.tolist()}
    return {pairs.ids[place] for place in found}


def photograph(here: Path, id: str) -> Path:
    return here / "photos" / f"{id}.png"


def queue(ease, run: Path, ids: Path, id: str) -> None:
    added = run_json(ease, "request", "add", run, "--samples", ids, "--id", id, "--approve")
    assert added["state"] == "approved"
    run_json(ease, "work", run)
    assert states(run)[id] == "done"


@pytest.mark.parametrize("split", ["held_out", "validation", "test"])
def test_a_pair_outside_training_is_erased_without_a_new_model(ease, here: Path, tmp_path: Path, split: str) -> None:
    run = here / "run"
    id, before = one_of_each(run)[split], trained_of(Run.load(run)).final
    assert id in seen(open_world(Run.load(run)))
    queue(ease, run, listed(tmp_path, [id]), "r")
    head = Run.load(run).head
    assert trained_of(Run.load(run)).start == before and len(head.releases) == 1
    assert id not in seen(open_world(Run.load(run)))
    assert id not in seen(open_world(Run.load(run), head.gone[0]))  # nor for whoever looks at the request
    hits = run_json(ease, "search", run, "a picture", "--count", "60")
    found = {each["id"] for each in hits["found"]["the run's model"]}
    assert id not in found and len(found) > 40
    certificate = ease("certificate", run, "--request", head.releases[0].answer.partition("/")[0])
    assert certificate.code == 0, certificate.err


def test_a_mixed_request_forgets_training_pairs_and_erases_the_others(ease, here: Path, tmp_path: Path) -> None:
    run, wanted = here / "run", one_of_each(here / "run")
    touches = run_json(ease, "request", "add", run, "--samples", listed(tmp_path, list(wanted.values())), "--id", "r")
    assert touches["impact"]["untrained"] == {"held_out": 1, "validation": 1, "test": 1}
    assert touches["impact"]["named"] == 1
    run_json(ease, "request", "approve", run, "r")
    run_json(ease, "work", run)
    request = Run.load(run).head.gone[0]
    world = open_world(Run.load(run))
    assert set(wanted.values()).isdisjoint(seen(world))
    assert wanted["train"] not in {each for shard in world.shards for each in shard.train_ids}
    before = open_world(Run.load(run), request)
    assert len(evaluation_sets(before, request)["forget"]) == 1  # what was trained on can still be audited
    name = Run.load(run).head.releases[0].answer
    out = tmp_path / "c.json"
    assert ease("certificate", run, "--request", name, "--out", out).code == 0
    checked = ease("verify", out, "--run", run)
    assert checked.code == 0, checked.out + checked.err
    page = run_json(ease, "request", "show", run, "r")
    assert page["impact"] is None and page["state"] == "done"


def test_certificates_say_what_was_removed_from_which_split(ease, here: Path, tmp_path: Path) -> None:
    run, wanted = here / "run", one_of_each(here / "run")
    queue(ease, run, listed(tmp_path, list(wanted.values())), "r")
    name, out = Run.load(run).head.releases[0].answer, tmp_path / "c.json"
    assert ease("certificate", run, "--request", name, "--out", out).code == 0
    shown = json.loads(base64.b64decode(json.loads(out.read_text())["payload"]))["predicate"]
    assert shown["request"]["splits"] == {"train": 1, "held_out": 1, "validation": 1, "test": 1}
    assert "1 held-out, 1 validation, 1 test" in shown["asked"]


def test_the_files_may_be_deleted_and_the_run_stays_usable(ease, here: Path, tmp_path: Path) -> None:
    run, wanted = here / "run", one_of_each(here / "run")
    photograph(here, wanted["test"]).unlink()
    refused = ease("search", run, "a picture")
    assert refused.code == 2 and "ask for them to be forgotten first" in refused.err
    (here / "photos").rename(here / "elsewhere")
    shutil.copytree(here.parent / "kept" / "photos", here / "photos")
    queue(ease, run, listed(tmp_path, list(wanted.values())), "r")
    for id in wanted.values():
        photograph(here, id).unlink()
    assert ease("search", run, "a picture").code == 0
    assert ease("purge", run).code == 0
    assert ease("search", run, "a picture").code == 0
    marked = members_of(run)
    assert set(wanted.values()).isdisjoint({*marked.test, *marked.validation, *marked.clients[1].validation_ids})
    assert run_json(ease, "forget", run, "--client", 2)["metrics"]["test/recall@1"] >= 0


def test_later_requests_continue_from_the_same_model(ease, here: Path, tmp_path: Path) -> None:
    """An erasure outside training changes no byte of the next answer."""
    run, wanted = here / "run", one_of_each(here / "run")
    plain = run_json(ease, "forget", run, "--client", 2)
    expected = sha256(Path(plain["folder"]) / "model.safetensors")
    shutil.rmtree(run / "requests")
    queue(ease, run, listed(tmp_path, [wanted["test"]]), "r")
    again = run_json(ease, "forget", run, "--client", 2)
    assert sha256(Path(again["folder"]) / "model.safetensors") == expected


def test_it_can_be_named_once_and_nothing_unknown_with_it(ease, here: Path, tmp_path: Path) -> None:
    run, wanted = here / "run", one_of_each(here / "run")
    refused = ease("request", "add", run, "--samples", listed(tmp_path, [wanted["test"], "nobody.png"]))
    assert refused.code == 2 and "nobody.png" in refused.err
    queue(ease, run, listed(tmp_path, [wanted["test"]]), "r")
    refused = ease("forget", run, "--samples", listed(tmp_path, [wanted["test"]]), "--method", "retrain")
    assert refused.code == 0  # another answer to the closed request, from the model before it
    run_json(ease, "request", "add", run, "--samples", listed(tmp_path, [wanted["test"]]), "--id", "again", "--approve")
    run_json(ease, "work", run)
    page = run_json(ease, "request", "show", run, "again")
    assert page["state"] == "done" and "nothing left" in page["why"]


def test_the_held_out_files_of_a_client_that_left_may_vanish(ease, here: Path) -> None:
    run = here / "run"
    name = run_json(ease, "forget", run, "--client", 1)["id"]
    release(Run.load(run), name)
    holding = members_of(run).clients[1]
    for id in (*holding.train_ids, *holding.validation_ids):
        photograph(here, id).unlink()
    assert ease("search", run, "a picture").code == 0


def test_an_audit_of_untrained_pairs_is_refused_in_one_line(ease, here: Path, tmp_path: Path) -> None:
    run = here / "run"
    name = run_json(ease, "forget", run, "--samples", listed(tmp_path, [one_of_each(run)["test"]]))["id"]
    refused = ease("audit", run, "--request", name)
    assert refused.code == 2 and "nothing to audit" in refused.err


def test_splits_and_what_is_left_of_a_request(here: Path) -> None:
    run, wanted = Run.load(here / "run"), one_of_each(here / "run")
    members = members_of(run.folder)
    request = SampleRequest(ids=tuple(sorted(wanted.values())))
    outside = {split: (id,) for split, id in wanted.items() if split != "train"}
    assert untrained_in(request, members) == outside and every_id(request, members) == set(wanted.values())
    leaving = ClientRequest(clients=(1,))
    assert untrained_in(leaving, members) == {"held_out": tuple(sorted(members.clients[1].validation_ids))}
    left = remaining(request, members.clients, (leaving,))
    assert isinstance(left, SampleRequest) and set(left.ids) == {
        wanted[each] for each in ("train", "validation", "test")
    }
    assert remaining(request, members.clients, (request,)).ids == ()
    assert impact_of(run, request, default_method(run)).to_forget == 1
    with pytest.raises(UserError, match="not pairs of this run"):
        check_request(open_world(run), SampleRequest(ids=("x",)))
