"""A server that is curious or lies, against real nodes: each attack that docs/deploy.md names is tried here."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.federation.on_site import Sites, lasting
from tests.federation.test_node import node_of, refused, task

from ease.data.partition import joint_embedding
from ease.federation.codec import decode_update
from ease.federation.node import Node, Policy
from ease.federation.question_log import question_log
from ease.federation.wire import (
    CENTRES,
    COUNTS,
    NEAR,
    QUERY,
    SUMS,
    Ask,
    Deal,
    Search,
    decode_answer,
    decode_deal_reply,
    decode_search_reply,
    encode,
    numbers_in,
    numbers_of,
)
from ease.model.closed_form import Sums, on_grid
from ease.requests.request import SampleRequest
from ease.runs.run import Run
from ease.runs.world import World
from ease.storage import write_json
from ease.trainers.sums import SUMS as FEATURE_SUMS

DEAL = Deal(classes=2, class_seed=0, seed=0, validation_share=0.3)


@pytest.fixture(scope="module")
def sites(drawn: Path, small: tuple[str, ...], shared_cache: Path, tmp_path_factory) -> Iterator[Sites]:
    with lasting(drawn, tmp_path_factory, small, shared_cache) as made:
        made.trained()
        yield made


@pytest.fixture
def node(sites: Sites, tmp_path: Path) -> Node:
    """The first site's, with an empty folder of its own."""
    return replace(sites.nodes[0], folder=tmp_path / "disk", policy=Policy(), _nonces={}, _ready=None)


def ask(node: Node, kind: str, number: int, blobs: dict[str, bytes], run: str = "ab" * 16, **more: object) -> bytes:
    message = Ask(kind=kind, client=0, nonce=f"{number:032x}", run=run, **more)
    return node.answer(encode(message, blobs))


def joint(node: Node) -> np.ndarray:
    return joint_embedding(node.activations.pooled_image, node.activations.pooled_text)


def test_moving_a_boundary_pair_by_pair_ends_at_the_budget_under_any_name_of_a_run(node: Node) -> None:
    """Sums before and after differ by the one pair that crossed: 65 messages read 34 pairs to 7e-16 each."""
    node.policy = Policy(group_questions=10)
    points, found, asked = joint(node), set[int](), 0
    before = None
    for step in range(60):
        width = points.shape[1]
        centres = np.zeros((2, width))
        centres[0, 0], centres[1, 0] = 10.0, -10.0 + step * 0.3
        blobs = {CENTRES: numbers_of(centres)}
        reported = ask(node, "groups", step, blobs, run=f"{step:032x}", deal=DEAL)
        try:
            _, answer = decode_deal_reply(reported)
        except Exception:
            assert "are used up" in decode_answer(reported)[0].refused
            continue
        asked += 1
        sums = numbers_in(answer[SUMS], "<f8", 2, "sums")
        if before is not None:
            crossed = sums[0] - before
            found |= {
                n for n, point in enumerate(points) if np.allclose(crossed, point) or np.allclose(-crossed, point)
            }
        before = sums[0]
    assert asked == 10 and len(found) < 10
    again = replace(node, _nonces={})
    assert "are used up" in decode_answer(ask(again, "groups", 99, {}, deal=DEAL))[0].refused  # after a restart, too


def test_groups_are_not_reported_once_the_site_takes_part(node: Node, sites: Sites) -> None:
    centres = {CENTRES: numbers_of(joint(node)[:2])}
    assert numbers_in(decode_deal_reply(ask(node, "groups", 1, centres, deal=DEAL))[1][COUNTS], "<i8", 1, "x").sum() > 0
    decode_deal_reply(ask(node, "join", 2, centres, deal=DEAL))
    reported = decode_answer(ask(node, "groups", 3, centres, deal=DEAL))[0].refused
    assert reported == "it takes part in this run already, whose classes are found"


def test_two_named_pairs_are_too_few_to_train_on(world: World, local_job, tmp_path: Path) -> None:
    node = node_of(world, 0, tmp_path / "node", Policy(fewest_pairs=16))
    few = SampleRequest(ids=world.shards[0].train_ids[:2])
    said = refused(node, task(local_job(request=few, data="forget"), world.server.initial()))
    assert said == "its policy asks for 16 pairs in a job, and this one has 2"
    rest = SampleRequest(ids=world.shards[0].train_ids[2:])
    assert "this one has 2" in refused(node, task(local_job(request=rest, data="retain"), world.server.initial()))
    own = len(world.shards[0].train)
    assert own >= 16 and not refused(node, task(local_job(), world.server.initial()))


def test_the_update_of_many_pairs_has_no_small_rank(world: World, local_job, tmp_path: Path) -> None:
    """What two pairs would give away: an update of rank two, whose rows are their features."""
    node = node_of(world, 0, tmp_path / "node", Policy(fewest_pairs=16))
    _, encoded = decode_answer(node.answer(task(local_job(epochs=1, batch_size=64), world.server.initial())))
    assert encoded is not None
    change = decode_update(encoded).change
    weights = [t for name, t in change.tensors.items() if "projector.0.weight" in name]
    assert weights and all(int(torch.linalg.matrix_rank(each)) > 2 for each in weights)


def test_two_updates_that_differ_in_one_pair_do_not_simply_show_it(world: World, local_job, tmp_path: Path) -> None:
    """No policy forbids both, since recovery trains without a few pairs. Their difference has the gradient of the pair
    that was left out, and what its absence and other captions change in the gradients of all the others."""
    node = node_of(world, 0, tmp_path / "node", Policy(fewest_pairs=16))
    places, ids = world.shards[0].train, world.shards[0].train_ids
    pictures = torch.tensor(world.evaluator.activations.pooled_image[places]).double()
    centred = torch.nn.functional.normalize(pictures - pictures.mean(0), dim=1)

    def weights(**changes: object) -> torch.Tensor:
        message = task(local_job(batch_size=64, **changes), world.server.initial())  # one step over all pairs
        _, encoded = decode_answer(node.answer(message))
        assert encoded is not None
        return decode_update(encoded).change["image.projector.0.weight"].double()

    found, tried = 0, 0
    for temperature in (0.07, 1e3):  # at the second one the loss is nearly linear
        whole = weights(temperature=temperature)
        for number in range(0, len(ids), 4):
            left_out = SampleRequest(ids=ids[number : number + 1])
            rest = weights(data="retain", request=left_out, temperature=temperature)
            _, _, right = torch.linalg.svd(len(ids) * whole - (len(ids) - 1) * rest)
            close = (centred @ right[:2].T).norm(dim=1)
            found, tried = found + int(close.argmax() == number), tried + 1
    assert tried >= 8 and found <= tried // 4


def test_sums_over_one_named_pair_are_its_features_and_are_counted(
    small_config, shared_cache, local_job, tmp_path: Path
) -> None:
    """A closed-form head asks for them whenever one pair is forgotten, so they are answered, up to a budget."""
    world = World.open(small_config("model.projector=closed_form", "training.rounds=1"))
    node = node_of(world, 0, tmp_path / "node", Policy(fewest_pairs=16, sums_of_few=2))
    ids, state = world.shards[0].train_ids, world.server.initial()

    def asked(data: str, *pairs: str) -> bytes:
        return task(local_job(objective=FEATURE_SUMS, data=data, request=SampleRequest(ids=pairs)), state)

    def sums(message: bytes) -> Sums:
        _, encoded = decode_answer(node.answer(message))
        assert encoded is not None
        return Sums(decode_update(encoded).values[FEATURE_SUMS])

    whole = sums(task(local_job(objective=FEATURE_SUMS), state))  # of many pairs: not counted
    one, rest = sums(asked("forget", ids[0])), sums(asked("retain", ids[0]))
    assert torch.equal((whole - rest).packed, one.packed)
    own = torch.tensor(world.evaluator.activations.pooled_image[world.shards[0].train[0]])
    read = one.matrix()[-1, : len(own)] / one.count
    assert torch.equal(read, on_grid(own))
    for data in ("forget", "retain"):
        assert "are used up" in refused(node, asked(data, ids[1]))
    assert sums(task(local_job(objective=FEATURE_SUMS), state)) is not None


def test_a_search_for_an_axis_is_refused_and_answers_are_rounded(node: Node, sites: Sites) -> None:
    run = Run.load(sites.folder / "apart")
    node = replace(node, folder=sites.nodes[0].folder, _nonces={})
    width = node.activations.pooled_text.shape[-1]
    search = Search(words="red", rows=2)
    assert node.embed is not None
    honest = np.stack([node.embed("red"), np.zeros(width)])
    _, blobs = decode_search_reply(ask(node, "search", 11, {QUERY: numbers_of(honest)}, run=run.name, search=search))
    near = numbers_in(blobs[NEAR], "<f8", 1, "near")[0]
    assert np.array_equal(near, near.round(3)) and len(near)
    axis = np.stack([np.eye(width)[0], np.zeros(width)])
    far = np.stack([node.embed("red"), 1e6 * np.eye(width)[0]])
    for number, rows in ((12, axis), (13, far)):
        reported = ask(node, "search", number, {QUERY: numbers_of(rows)}, run=run.name, search=search)
        assert decode_answer(reported)[0].refused == "the numbers of the search are not those of its words"


def test_searches_are_counted_over_all_runs(node: Node, sites: Sites) -> None:
    run = Run.load(sites.folder / "apart")
    place = sites.nodes[0].folder
    node = replace(node, folder=place, policy=Policy(searches=1000), _nonces={})
    spent = json.loads((place / "questions.json").read_text())["counts"].get("search", 0)
    node.policy = Policy(searches=spent + 1)
    assert node.embed is not None
    rows = {QUERY: numbers_of(np.stack([node.embed("red"), np.zeros(node.activations.pooled_text.shape[-1])]))}
    decode_search_reply(ask(node, "search", 21, rows, run=run.name, search=Search(words="red", rows=2)))
    reported = ask(node, "search", 22, rows, run=run.name, search=Search(words="red", rows=2))
    assert "are used up" in decode_answer(reported)[0].refused


def test_the_site_sees_everything_that_it_was_asked(ease, world: World, local_job, tmp_path: Path) -> None:
    node = node_of(world, 0, tmp_path / "node")
    node.answer(task(local_job(), world.server.initial()))
    few = SampleRequest(ids=world.shards[0].train_ids[:1])
    node.answer(task(local_job(objective="exfiltrate", request=few), world.server.initial()))
    lines = question_log(node.folder).lines()
    assert [(each["objective"], bool(each["refused"]), each["named_pairs"]) for each in lines] == [
        ("align", False, None),
        ("exfiltrate", True, 1),
    ]
    assert lines[0]["bytes_out"] > 1000 and world.shards[0].train_ids[0] not in json.dumps(lines)
    shown = ease("node", "--audit", "--folder", node.folder, "--json")
    assert shown.code == 0 and len(json.loads(shown.out)["asked"]) == 2
    assert "exfiltrate" in ease("node", "--audit", "--folder", node.folder).out
    assert ease("node", "--audit", "--folder", tmp_path / "none").code == 2


def test_a_flood_of_questions_hides_none_of_those_before(
    ease, world: World, local_job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server may choose long names and ask often; what it asked first stays counted, and the list stays short."""
    monkeypatch.setattr("ease.federation.question_log.LARGEST", 10_000)
    node = node_of(world, 0, tmp_path / "node")
    node.answer(task(local_job(), world.server.initial()))
    flood = task(local_job(objective="x" * 100_000), world.server.initial())
    for number in range(60):
        node._nonces.clear()  # the same message again
        assert refused(node, flood), number
    assert (node.folder / "questions.jsonl").stat().st_size < 12_000
    shown = json.loads(ease("node", "--audit", "--folder", node.folder, "--json").out)["asked"]
    assert sum(each["times"] for each in shown) == 61
    assert sum(each["times"] for each in shown if not each["refused"]) == 1
    assert sum(each["bytes_out"] for each in shown if not each["refused"]) > 1000
    assert "61 questions" in ease("node", "--audit", "--folder", node.folder).out


def test_a_node_that_cannot_write_down_what_it_is_asked_answers_nothing(
    world: World, local_job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it stays up: a full disk is no fault of the program."""
    node = node_of(world, 0, tmp_path / "node")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("ease.federation.question_log.QuestionLog.note", full)
        assert "cannot write down" in refused(node, task(local_job(), world.server.initial()))
    assert not refused(node, task(local_job(), world.server.initial()))


def test_an_allowance_that_is_used_up_survives_a_damaged_count(node: Node) -> None:
    node.folder.mkdir(parents=True)
    write_json(node.folder / "questions.json", {"counts": {"groups": 120}})
    assert "are used up" in decode_answer(ask(node, "groups", 1, {}, deal=DEAL))[0].refused
    (node.folder / "questions.json").write_text("{")
    assert "questions.json" in decode_answer(ask(node, "groups", 2, {}, deal=DEAL))[0].refused
