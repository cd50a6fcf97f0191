"""Who joins a run after its training: new pairs, new clients, and those who come back, each with a consent."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.operations.ledger.test_work import run_json

from ease.commands.train import train_run
from ease.operations.evidence import read_log, verify
from ease.operations.ledger.store import Ledger
from ease.requests.request import ClientRequest
from ease.requests.tombstones import PREFIX, read_tombstones
from ease.runs.answers import open_world
from ease.runs.config import load_config
from ease.runs.run import Run

CLIENTS = 3
SITES = ("north", "south", "west")


@pytest.fixture(scope="module")
def kept(small, shared_cache, tmp_path_factory) -> Path:
    """A small finished run with twelve pairs that are no one's."""
    folder = tmp_path_factory.mktemp("join") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EASE_CACHE", str(shared_cache))
        train_run(load_config(None, (*small, "data.validation=12", "partition.validation_share=0.2")), folder, True)
    (folder / "policy.toml").write_text("[hold]\nretain_points = 100\n[retrain]\nforgotten_fraction = 1\n")
    return folder


@pytest.fixture
def run(kept: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(kept, tmp_path / "run"))


@pytest.fixture
def spare(run: Path, tmp_path: Path) -> Path:
    """A list of the pairs that are no one's."""
    (tmp_path / "new.txt").write_text("\n".join(members(run).validation))
    return tmp_path / "new.txt"


def members(run: Path):
    found, _ = Run.load(run).known() or pytest.fail("no membership")
    return found


def refused(ease, *arguments: object) -> str:
    result = ease(*arguments)
    assert result.code == 2 and result.err.count("\n") == 1, result.err
    return result.err


JOIN = ("--consent", "the fourth clinic agrees", "--by", "ada")


def test_a_client_joins_with_its_consent_and_further_rounds_train_with_it(ease, run: Path, spare: Path) -> None:
    before = members(run)
    found = run_json(ease, "join", run, "--samples", spare, *JOIN)
    assert (found["client"], found["training_pairs"], found["validation_pairs"]) == (CLIENTS, 10, 2)
    after = members(run)
    assert after.clients[:CLIENTS] == before.clients and after.test == before.test and after.validation == ()
    new = after.clients[CLIENTS]
    assert {*new.train_ids, *new.validation_ids} == set(before.validation)
    world = open_world(Run.load(run))
    assert new.train_classes == tuple(world.evaluator.classes_of(world.shards[CLIENTS].train))
    (consent,) = Ledger(run).consents()
    assert (consent.client, consent.given_by, consent.text, consent.pairs, consent.returned) == (
        CLIENTS,
        "ada",
        "the fourth clinic agrees",
        12,
        0,
    )
    listed = run_json(ease, "request", "list", run)["consents"]
    assert listed == [consent.__dict__] and "fourth clinic" in ease("request", "list", run).out
    run_json(ease, "train", "--resume", run, "--until", 4)
    history = Run.load(run).history
    assert [history.clients(number) for number in (1, 2, 3, 4)] == [[0, 1, 2]] * 2 + [[0, 1, 2, 3]] * 2
    assert history.pairs(3)[3] == 10
    states = [history.state(number)["image.projector.0.weight"].numpy().tobytes() for number in (2, 3, 4)]
    run_json(ease, "train", "--resume", run, "--until", 4)  # the same again changes nothing
    assert history.rounds() == 4
    assert states == [history.state(number)["image.projector.0.weight"].numpy().tobytes() for number in (2, 3, 4)]


def test_a_joined_client_can_leave_and_only_its_rounds_change(ease, run: Path, spare: Path) -> None:
    run_json(ease, "join", run, "--samples", spare, *JOIN)
    shown = run_json(ease, "request", "add", run, "--client", 3, "--id", "early")["impact"]
    assert shown["clients"] == {"3": 10} and shown["rounds"] == []
    run_json(ease, "train", "--resume", run, "--until", 4)
    shown = run_json(ease, "request", "add", run, "--client", 3, "--approve", "--id", "c", "--by", "her")["impact"]
    assert shown["rounds"] == [3, 4]
    assert run_json(ease, "work", run)["finished"][0]["state"] == "done"
    assert [shard.client for shard in open_world(Run.load(run)).shards] == [0, 1, 2]
    run_json(ease, "purge", run)
    history = Run.load(run).history
    history.verify()
    assert [history.clients(number) for number in range(1, 5)] == [[0, 1, 2]] * 4
    run_json(ease, "train", "--resume", run, "--until", 5)
    assert history.clients(5) == [0, 1, 2]


def test_later_pairs_of_a_client_leave_with_it(ease, run: Path, spare: Path) -> None:
    found = run_json(ease, "join", run, "--samples", spare, *JOIN, "--of", 1)
    assert (found["client"], found["owner"]) == (3, 1)
    run_json(ease, "train", "--resume", run, "--until", 3)
    run_json(ease, "request", "add", run, "--client", 1, "--approve", "--id", "c")
    assert Ledger(run).entry("c").request == ClientRequest(clients=(1, 3))
    assert run_json(ease, "work", run)["finished"][0]["state"] == "done"
    assert [shard.client for shard in open_world(Run.load(run)).shards] == [0, 2]


def test_the_same_wish_again_is_the_client_that_is_there(ease, run: Path, spare: Path) -> None:
    first = run_json(ease, "join", run, "--samples", spare, *JOIN)
    again = run_json(ease, "join", run, "--samples", spare, *JOIN)
    assert first["added"] and not again["added"] and again["consent"] == first["consent"]
    assert len(members(run).clients) == CLIENTS + 1 and len(Ledger(run).consents()) == 1
    assert [each.kind for each in read_log(Run.load(run)).records] == ["begun", "joined"]
    assert "holds it already" in refused(ease, "join", run, "--samples", spare, "--consent", "another", "--by", "bo")


@pytest.mark.parametrize("written", ["ledger", "tombstones", "membership"])
def test_killed_before_any_file_the_same_command_ends_the_same(ease, run, spare, monkeypatch, written: str) -> None:
    """Nobody is there without a consent, and a consent that came to nothing is replaced by the one that counts."""

    class Killed(BaseException):
        pass

    def dies(*_: object) -> None:
        raise Killed

    target = {"ledger": "Ledger.record_consent", "tombstones": "write_json", "membership": "write_json"}[written]
    with monkeypatch.context() as patch:
        patch.setattr(f"ease.operations.joining.{target}", dies)
        with pytest.raises(Killed):
            ease("join", run, "--samples", spare, "--consent", "first words", "--by", "ada")
    assert len(members(run).clients) == CLIENTS
    run_json(ease, "join", run, "--samples", spare, "--consent", "the words that count", "--by", "ada")
    assert [each.text for each in Ledger(run).consents()] == ["the words that count"]
    assert members(run).clients[-1].joined.consent == Ledger(run).consents()[0].content_hash


def test_a_reworded_consent_is_distinguished_from_the_given_one(ease, run: Path, spare: Path) -> None:
    run_json(ease, "join", run, "--samples", spare, *JOIN)
    (given,) = Ledger(run).consents()
    Ledger(run).record_consent(given.model_copy(update={"text": "agrees to everything"}))
    assert Ledger(run).consents()[0].content_hash != members(run).clients[-1].joined.consent


def test_pairs_that_cannot_join_are_refused_with_the_reason(ease, run: Path, spare: Path, tmp_path: Path) -> None:
    def listed(*ids: str) -> Path:
        (tmp_path / "ids.txt").write_text("\n".join(ids))
        return tmp_path / "ids.txt"

    found = members(run)
    free = found.validation[:2]
    for ids, said in (
        ((*free, "nobody"), "nobody: no such pair"),
        ((*free, found.clients[1].train_ids[0]), "client 1 holds it already"),
        ((*free, found.clients[1].validation_ids[0]), "client 1 holds it already"),
        ((*free, found.test[0]), "is for testing"),
        ((free[0],), "1 pairs could join, and a client needs 2"),
    ):
        assert said in refused(ease, "join", run, "--samples", listed(*ids), *JOIN)
    assert "nobody joins without one" in refused(ease, "join", run, "--samples", spare, "--consent", " ")
    assert "has not left" in refused(ease, "join", run, "--samples", spare, *JOIN, "--again-after", 1)
    assert "no such client" in refused(ease, "join", run, "--samples", spare, *JOIN, "--of", "clinic")
    assert "0 pairs could join" in refused(ease, "join", run, *JOIN)
    run_json(ease, "forget", run, "--client", 1)
    assert "ease release" in refused(ease, "join", run, "--samples", spare, *JOIN)
    assert members(run) == found and not Ledger(run).consents()


def test_a_class_that_was_forgotten_stays_out(ease, run: Path, spare: Path) -> None:
    world = open_world(Run.load(run))
    classes = world.evaluator.classes_of(world.evaluator.spare)
    label = int(np.bincount(classes).argmax())
    count = int((classes == label).sum())
    run_json(ease, "request", "add", run, "--class", label, "--approve", "--id", "class")
    run_json(ease, "work", run)
    found = run_json(ease, "join", run, "--samples", spare, *JOIN)
    assert found["left_out"] == count and found["training_pairs"] + found["validation_pairs"] == 12 - count
    assert label not in members(run).clients[-1].train_classes


def test_certificates_from_before_still_hold_when_someone_has_joined(ease, run: Path, spare: Path, tmp_path) -> None:
    run_json(ease, "request", "add", run, "--client", 1, "--approve", "--id", "c")
    run_json(ease, "work", run)
    path = tmp_path / "certificate.json"
    assert ease("certificate", run, "--request", "client-1", "--out", path).code == 0
    run_json(ease, "join", run, "--samples", spare, *JOIN)
    run_json(ease, "train", "--resume", run, "--until", 3)
    found = verify(path, Run.load(run))
    assert found.holds and "recalls measured again" in {c.name: c.words for c in found.checks}["measured figures"]


# --- photographs that come to a folder ---


def draw(folder: Path, first: int, count: int, site: str) -> None:
    """So many more pictures of a site; every fifth is for testing."""
    folder.mkdir(exist_ok=True)
    lines = []
    for number in range(first, first + count):
        pixels = np.random.default_rng(number).integers(0, 255, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((64, 64)).save(folder / f"{number}.png")
        split = "test" if number % 5 == 4 else "train"
        reported = {
            "image": f"{number}.png",
            "captions": [f"a picture of number {number}", f"the {number}"],
            "split": split,
            "site": site,
        }
        lines.append(json.dumps(reported))
    path = folder / "captions.jsonl"
    path.write_text("\n".join([*(path.read_text().splitlines() if path.exists() else []), *lines]))


@pytest.fixture
def place(small, tmp_path: Path, monkeypatch) -> Path:
    """Three sites with photographs in one folder, and a run over them."""
    monkeypatch.setenv("EASE_CACHE", str(tmp_path / "cache"))
    for number, site in enumerate(SITES):
        draw(tmp_path / "photos", 20 * number, 20, site)
    data = ("data.name=folder", "partition.scheme=sites", f'data.path="{tmp_path / "photos"}"', "gallery=8")
    train_run(load_config(None, (*small, *data)), tmp_path / "run", quiet=True)
    (tmp_path / "run" / "policy.toml").write_text("[hold]\nretain_points = 100\n[retrain]\nforgotten_fraction = 1\n")
    return tmp_path


def test_new_photographs_of_sites_old_and_new(ease, place: Path) -> None:
    run = place / "run"
    draw(place / "photos", 100, 10, "east")
    draw(place / "photos", 110, 5, "north")
    first = run_json(ease, "join", run, "--site", "east", "--consent", "east agrees", "--by", "e")
    assert (first["client"], first["name"], first["training_pairs"] + first["validation_pairs"]) == (3, "east", 8)
    second = run_json(ease, "join", run, "--site", "north", "--consent", "north has more", "--by", "n")
    assert (second["client"], second["name"], second["owner"]) == (4, "north (4)", 0)
    run_json(ease, "train", "--resume", run, "--until", 3)
    assert Run.load(run).history.clients(3) == [0, 1, 2, 3, 4]
    run_json(ease, "request", "add", run, "--client", "north", "--id", "n")
    assert Ledger(run).entry("n").request == ClientRequest(clients=(0, 4))


def test_a_returning_client_is_new_and_needs_a_consent(ease, place: Path) -> None:
    run, photos = place / "run", place / "photos"
    south = members(run).clients[1]
    own = sorted([*south.train_ids, *south.validation_ids])
    run_json(ease, "request", "add", run, "--client", "south", "--approve", "--id", "c")
    run_json(ease, "work", run)
    (place / "ids.txt").write_text("\n".join(own))
    again = ("--samples", place / "ids.txt", "--consent", "south is back", "--by", "s")
    assert "not purged yet" in refused(ease, "join", run, *again)
    run_json(ease, "purge", run)
    assert "--again-after" in refused(ease, "join", run, *again)
    assert "0 pairs could join" in refused(ease, "join", run, "--consent", "all that is there", "--by", "s")
    # The same picture and words under another name are known by what they show.
    rows = [json.loads(line) for line in (photos / "captions.jsonl").read_text().splitlines()]
    row = next(each for each in rows if each["image"] == own[0] or each["image"].startswith(f"{own[0]}."))
    shutil.copyfile(photos / row["image"], photos / "other.png")
    text = (photos / "captions.jsonl").read_text()
    (photos / "captions.jsonl").write_text(f"{text}\n{json.dumps({**row, 'image': 'other.png'})}")
    assert "under another id" in refused(ease, "join", run, "--site", "south", "--consent", "x", "--by", "s")
    (photos / "captions.jsonl").write_text(text)
    before = read_tombstones(run)
    found = run_json(ease, "join", run, *again, "--again-after", "south")
    assert (found["client"], found["consent"]["returned"], found["owner"]) == (3, len(own), None)
    after = members(run)
    assert all(each.startswith(PREFIX) for each in after.clients[1].train_ids)
    assert sorted([*after.clients[3].train_ids, *after.clients[3].validation_ids]) == own
    assert read_tombstones(run).ids == before.ids - {before.mark(each) for each in own}
    run_json(ease, "train", "--resume", run, "--until", 4)
    assert Run.load(run).history.clients(4) == [0, 2, 3]
    # And leaves again: as the client it is now, not as the one it was.
    run_json(ease, "request", "add", run, "--client", 3, "--approve", "--id", "again")
    assert run_json(ease, "work", run)["finished"][0]["state"] == "done"
    run_json(ease, "purge", run)
    assert not {*own} & set(open_world(Run.load(run)).evaluator.pairs.ids)
