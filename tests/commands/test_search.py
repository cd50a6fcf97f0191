"""`ease search` finds what the model finds, before and after forgetting, and shows it to the user alone."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import ease as package
from ease.measures.evaluate import embed_pairs
from ease.runs.answers import StoredAnswer, open_world
from ease.runs.run import Run
from ease.runs.using import Source, encode_image, encode_text, gallery, search


@pytest.fixture
def run(one_forgotten: Path, tmp_path: Path) -> Path:
    return shutil.copytree(one_forgotten, tmp_path / "run")


def test_the_nearest_pictures_are_found_by_each_model(ease, run: Path) -> None:
    result = ease("search", run, "a green boat", "--request", "client-1/finetune", "-k", 7, "--json")
    assert result.code == 0, result.err
    reported = json.loads(result.out)
    assert list(reported["found"]) == ["before", "after client-1/finetune"]
    opened = Run.load(run)
    world = open_world(opened)
    states = [opened.history.state(2), StoredAnswer(run / "requests" / "client-1" / "finetune").model()]
    places, _ = gallery(world)
    assert len(places) == len(set(places.tolist())) == len(world.evaluator.pairs)
    forgotten = set(world.evaluator.shards[1].train_ids)
    for hits, state in zip(reported["found"].values(), states, strict=True):
        images, _ = embed_pairs(world.server.model, state, world.evaluator.activations, places, "cpu")
        query = encode_text(Source.with_state(opened, None, state), "a green boat")[0]
        scores = {
            world.evaluator.pairs.ids[place]: float(image @ query) for place, image in zip(places, images, strict=True)
        }
        best = sorted(scores, key=lambda each: -scores[each])[:7]
        assert [hit["id"] for hit in hits] == best
        assert [hit["forgotten"] for hit in hits] == [each in forgotten for each in best]
        assert [hit["score"] for hit in hits] == pytest.approx([scores[each] for each in best], abs=1e-5)
    page = Path(reported["page"])
    assert page.parent == run / "searches" and page.stat().st_mode & 0o077 == 0
    text = page.read_text()
    assert text.count("<img") == 14 and "http" not in text.replace("http-equiv", "")


def test_the_searched_pairs_can_be_chosen(run: Path) -> None:
    opened = Run.load(run)
    world, source = open_world(opened), Source.of(opened, None)
    for among, allowed in (("train", {"client 0", "client 1", "client 2"}), ("test", {"test"})):
        hits = search(world, source, "a boat", 100, among=among)
        assert {hit.whose for hit in hits} == allowed
    assert len(search(world, source, "a boat", 3)) == 3


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([" "], "there are no words"),
        (["boat", "-k", "0"], "-k 0: choose 1 to 200"),
        (["boat", "--request", "client-9"], "client-9: no finished request"),
    ],
)
def test_a_search_that_cannot_be_is_one_line(ease, run: Path, arguments: list[str], part: str) -> None:
    result = ease("search", run, *arguments)
    assert result.code == 2 and result.out == "" and result.err.count("\n") == 1 and part in result.err


def test_models_are_used_from_python(run: Path, tmp_path: Path) -> None:
    opened = package.open_run(run)
    assert opened.requests == ["client-1/finetune"]
    assert opened.clients == {str(s.client): len(s.train_ids) for s in open_world(Run.load(run)).shards}
    answer = opened.answer("client-1/finetune")
    held = open_world(Run.load(run)).server.membership.clients[1]
    assert answer.ids == sorted((*held.train_ids, *held.validation_ids)) and len(opened.ids()) == sum(
        opened.clients.values()
    )
    text = answer.encode_text(["a boat", "two hats"])
    assert text.shape == (2, 8) and torch.allclose(text.norm(dim=1), torch.ones(2), atol=1e-5)
    pixels = open_world(Run.load(run)).evaluator.pairs.pixels[:3]
    image = answer.encode_image(list(pixels))
    torch.testing.assert_close(image, encode_image(Source.of(Run.load(run), "client-1/finetune"), list(pixels)))
    chances = answer.classify(list(pixels), ["a boat", "two hats"])
    expected = ((image @ text.T) / 0.07).softmax(-1)
    torch.testing.assert_close(chances, expected)
    found = answer.search("a boat", k=4)
    assert len(found) == 4 and {hit.forgotten for hit in found} <= {True, False}
    assert not torch.allclose(opened.encode_text("a boat")[0], text[0]), "the run's own model is another"
    assert answer.report(tmp_path / "page.html").is_file() and opened.report(tmp_path / "all.html").is_file()
    assert (answer.export(tmp_path / "model") / "load.py").is_file()


@pytest.mark.parametrize(
    ("use", "part"),
    [
        (lambda run: run.encode_text([]), "at least one text"),
        (lambda run: run.encode_text(["a", " "]), "no empty one"),
        (lambda run: run.encode_image("nowhere.jpg"), "nowhere.jpg: cannot be read as a picture"),
        (lambda run: run.encode_image(torch.zeros(2, 4, 4).numpy()), "pixels must be uint8"),
        (lambda run: run.classify("nowhere.jpg", "a dog"), "at least two labels"),
        (lambda run: run.answer("client-7"), "no finished request"),
    ],
)
def test_wrong_use_is_said_in_a_sentence(one_forgotten: Path, use, part: str) -> None:
    with pytest.raises(package.UserError, match=part):
        use(package.open_run(one_forgotten))
