"""Pairs that lie at their sites alone: the same bytes as in one place, and the server opens nothing of a client's."""

import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.federation.on_site import SIZES, TESTS, Sites, answered, lasting, serving, states

from ease.data.membership import Holding
from ease.errors import UserError
from ease.federation.enrolment import enrolled
from ease.federation.flower import Flower
from ease.federation.launch import FlowerServer, free_port
from ease.federation.node import Node, Policy, pairs_hash
from ease.federation.remote import Remote, node_socket
from ease.federation.wire import COUNTS, SUMS, Ask, Deal, decode_answer, decode_deal_reply, encode, numbers_of
from ease.operations.ledger.retention import purge_released
from ease.requests.request import ClassRequest, ClientRequest, Request, SampleRequest, held_without
from ease.runs.answers import open_world, release
from ease.runs.concepts import match_concept
from ease.runs.run import Run
from ease.storage import read_json

DEAL = Deal(classes=2, class_seed=0, seed=0, validation_share=0.3)


@pytest.fixture
def sites(drawn: Path, small: tuple[str, ...], tmp_path: Path) -> Iterator[Sites]:
    with serving(drawn, tmp_path / "w", small) as made:
        yield made


@pytest.fixture(scope="module")
def standing(drawn: Path, small: tuple[str, ...], shared_cache: Path, tmp_path_factory) -> Iterator[Sites]:
    """Sites for tests that end in a refusal. Nothing of them is changed."""
    with lasting(drawn, tmp_path_factory, small, shared_cache) as made:
        yield made


def requests_of(run: Run) -> tuple[Request, ...]:
    members = run.known()[0]  # type: ignore[index]
    ids = tuple(sorted(holding.train_ids[0] for holding in members.clients[:2]))
    return SampleRequest(ids=ids), ClassRequest(classes=(1,)), ClientRequest(clients=(1,))


def test_training_and_every_kind_of_request_give_the_bytes_of_one_place(sites: Sites) -> None:
    apart, pooled = sites.trained(), sites.pooled()
    here, there = pooled.known(), apart.known()
    assert here is not None and there is not None
    assert there[0].clients == here[0].clients and there[0].test == here[0].test
    assert np.array_equal(here[1], there[1])
    for request in requests_of(pooled):
        for run in (apart, pooled):
            answered(run, request)
    assert states(apart) == states(pooled) and len(states(apart)) > 8


@pytest.mark.engine
def test_the_same_over_flower(sites: Sites) -> None:
    """Through Flower's simulation: all that nodes are asked beside jobs goes the way that jobs go."""
    with FlowerServer(sites.folder / "fed", "127.0.0.1", free_port(), insecure=True, simulated=3):
        until, nobody = time.monotonic() + 300, dict.fromkeys(range(3), ())
        simulated = Remote(Flower(sites.folder / "fed"), nobody, nobody, "ab" * 16)
        while any(isinstance(each, str) for each in simulated.present().values()) and time.monotonic() < until:
            time.sleep(0.5)  # a busy machine takes its time to begin
        run = Run.plan(sites.folder / "flower", sites.config("engine=flower"))
        world = open_world(run)
        run = Run.create(run.folder, run.config)
        list(run.train(world))
        everything = match_concept(open_world(run), "snow", -1.0).ids
        close(run)
    pooled = sites.pooled()
    held = [each for shard in open_world(pooled).shards for each in shard.train_ids]
    close(pooled)
    assert states(run) == states(pooled) and sorted(everything) == sorted(held)


def close(run: Run) -> None:
    """Forget, release and purge."""
    answered(run, requests_of(run)[0])
    release(run, run.unreleased()[0])
    assert len(list(purge_released(run.folder))) == 1


def test_the_server_opens_only_its_own_pairs(sites: Sites) -> None:
    """What it could not open it cannot leak: while it works, there is nothing of a client's on its disk."""
    run = sites.trained()
    for site in (*SIZES, "all"):
        (sites.folder / site).rename(sites.folder / f"{site}-elsewhere")  # nodes have read theirs
    world = open_world(run)
    assert set(world.evaluator.pairs.ids) == {f"t{number}" for number in range(TESTS)}
    assert sum(len(shard.train) for shard in world.shards) == 0
    assert not any(
        name in world.server.membership.digests
        for holding in world.server.membership.clients
        for name in holding.train_ids
    )  # not even hashes of their content
    metrics = answered(run, requests_of(run)[0])[-1]
    assert "test/recall@1" in metrics and not any(key.startswith(("forget/", "retain/")) for key in metrics)


def test_a_run_continues_without_deleted_photographs(sites: Sites) -> None:
    """A request is released, its photographs are deleted at the site, the node is started again: more requests are
    answered as if nothing were missing. A photograph that no one asked to forget is missed."""
    run = sites.trained()
    request = requests_of(run)[0]
    answered(run, request)
    shutil.copytree(run.folder, sites.folder / "kept")
    shutil.copytree(sites.folder / "disks", sites.folder / "kept-disks")
    found = {}
    for deleted in (False, True):
        shutil.rmtree(run.folder)
        shutil.copytree(sites.folder / "kept", run.folder)
        shutil.rmtree(sites.folder / "disks")
        shutil.copytree(sites.folder / "kept-disks", sites.folder / "disks")
        release(run, run.unreleased()[0])
        list(Run.load(run.folder).hosted(open_world(run)).federation.run(*a_job(run)))  # so nodes learn of it
        if deleted:
            for each in request.ids:  # type: ignore[union-attr]
                (sites.folder / each[0] / f"{each}.png").unlink()
        for client, node in sites.nodes.items():
            again = sites.node(client)
            node.pairs, node.shard, node.activations, node._ready = again.pairs, again.shard, again.activations, None
        answered(run, ClientRequest(clients=(2,)))
        found[deleted] = states(run)
    assert found[True] == found[False]
    (sites.folder / "a" / "a7.png").unlink()
    with pytest.raises(UserError, match="a7"):
        node = sites.node(0)
        node._shard(read_json(run.folder / "name.json")["name"], (request,))


def a_job(run: Run):
    world = open_world(run)
    training = run.config.training.job(1, 0, 0.07)
    return world.server.initial(), training, [0, 1, 2]


def test_held_ids_are_those_of_the_shards(world) -> None:
    for request in (
        SampleRequest(ids=(world.shards[0].train_ids[0],)),
        ClassRequest(classes=(0,)),
        ClientRequest(clients=(1,)),
    ):
        left = {shard.client: frozenset(shard.train_ids) for shard in world.without(request).shards}
        assert held_without(world.server.membership.clients, (request,)) == left


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (("engine=sequential",), "has none; set engine"),
        (("data.name=scenes",), "are at no site"),
        (("data.canaries=5",), "no one can plant them"),
        (("partition.clustering=pooled",), "would collect pairs"),
    ],
)
def test_impossible_settings_are_refused(standing: Sites, changes: tuple[str, ...], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        open_world(Run.plan(standing.folder / "x", standing.config(*changes)))


def test_a_run_begins_with_all_its_clients_and_leaves_nothing_behind(sites: Sites) -> None:
    node_socket(sites.folder / "fed", 1).unlink()
    with pytest.raises(UserError, match=r"client 1: no node answers at .*; start it with `ease node`"):
        sites.trained("never")
    assert not (sites.folder / "never").exists()


def test_a_policy_may_forbid_the_search_for_classes(sites: Sites) -> None:
    sites.nodes[2].policy = Policy(objectives=("align",))
    with pytest.raises(
        UserError, match="client 2: its node refuses: its policy does not allow the objective 'classes'"
    ):
        sites.trained("never")


def test_the_same_id_at_two_sites_is_refused(sites: Sites) -> None:
    node = sites.nodes[1]
    assert node.pairs is not None
    node.pairs = replace(node.pairs, ids=("a3", *node.pairs.ids[1:]))
    with pytest.raises(UserError, match=r"id 'a3': clients 0 and 1 both use it"):
        sites.trained("never")


def test_a_client_joins_a_run_once(sites: Sites) -> None:
    holdings, centres = enrolled(
        sites.remote(),
        DEAL,
        0 + sites.nodes[0].activations.pooled_image.shape[1] + (sites.nodes[0].activations.pooled_text.shape[2]),
    )
    blobs = {"centres": numbers_of(centres)}
    asked = Ask(kind="join", client=0, nonce="1" * 32, run="ab" * 16, deal=DEAL)
    assert (
        decode_deal_reply(sites.nodes[0].answer(encode(asked, blobs)))[0].holding == holdings[0]
    )  # the same once more
    asked = Ask(kind="join", client=0, nonce="2" * 32, run="ab" * 16, deal=DEAL.model_copy(update={"seed": 1}))
    assert "already, with other pairs" in decode_answer(sites.nodes[0].answer(encode(asked, blobs)))[0].refused
    assert pairs_hash(holdings[0].train_ids) == sites.remote().present()[0].pairs  # type: ignore[union-attr]


def test_a_node_that_was_given_its_pairs_deals_none(sites: Sites) -> None:
    sites.nodes[0].pairs = None
    reported = sites.nodes[0].answer(encode(Ask(kind="groups", client=0, nonce="1" * 32, run="ab" * 16, deal=DEAL)))
    assert "deals none" in decode_answer(reported)[0].refused


LIES: dict[str, tuple[Callable[[Node, bytes], bytes], str]] = {}


def lie(name: str, problem: str):
    def known(change):
        LIES[name] = change, problem
        return change

    return known


def groups_with(data: bytes, **changes: np.ndarray) -> bytes:
    reported, blobs = decode_deal_reply(data)
    return encode(reported, {**blobs, **{name: numbers_of(array) for name, array in changes.items()}})


@lie("not numbers", "its groups are none")
def _(node: Node, data: bytes) -> bytes:
    counts = np.frombuffer(decode_deal_reply(data)[1][COUNTS], "<i8")
    return groups_with(
        data, sums=np.full((len(counts), len(decode_deal_reply(data)[1][SUMS]) // 8 // len(counts)), np.nan)
    )


@lie("longer than so many pairs can be", "its groups are none")
def _(node: Node, data: bytes) -> bytes:
    return groups_with(data, sums=np.frombuffer(decode_deal_reply(data)[1][SUMS], "<f8") * 3)


@lie("counts below nothing", "its groups are none")
def _(node: Node, data: bytes) -> bytes:
    return groups_with(data, counts=-np.frombuffer(decode_deal_reply(data)[1][COUNTS], "<i8"))


@lie("another width", "its groups are none|do not fill")
def _(node: Node, data: bytes) -> bytes:
    return groups_with(data, sums=np.zeros(7))


@lie("in another's name", "answered as client 2")
def _(node: Node, data: bytes) -> bytes:
    reported, blobs = decode_deal_reply(data)
    return encode(reported.model_copy(update={"client": 2}), blobs)


@lie("an answer to something else", "another message")
def _(node: Node, data: bytes) -> bytes:
    reported, blobs = decode_deal_reply(data)
    return encode(reported.model_copy(update={"nonce": "0" * 32}), blobs)


@lie("garbled", "altered or cut")
def _(node: Node, data: bytes) -> bytes:
    return data[:-40] + bytes(40)


def holding_with(**changes: object) -> Callable[[Node, bytes], bytes]:
    def changed(node: Node, data: bytes) -> bytes:
        reported, blobs = decode_deal_reply(data)
        if reported.holding is None:
            return data
        return encode(reported.model_copy(update={"holding": Holding(**{**dict(reported.holding), **changes})}), blobs)

    return changed


LIES["another client's holding"] = holding_with(client=2), "does not add up"
LIES["no class for a pair"] = holding_with(train_classes=(0,)), "does not add up"
LIES["an unknown class"] = holding_with(train_ids=("x", "y"), train_classes=(0, 9)), "does not add up"
LIES["an id twice"] = holding_with(train_ids=("x", "x"), train_classes=(0, 0)), "does not add up"
LIES["nearly nothing"] = holding_with(train_ids=("x",), train_classes=(0,)), "has 1 training pairs"


@pytest.mark.parametrize("kind", LIES)
def test_a_node_with_false_pairs_is_named(standing: Sites, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, problem = LIES[kind]
    node = standing.nodes[1]
    respond = node.respond

    def lying(ask: Ask, *rest: object) -> bytes:
        data = respond(ask, *rest)  # type: ignore[arg-type]
        return data if ask.kind == "hello" else change(node, data)

    monkeypatch.setattr(node, "respond", lying)
    with pytest.raises(UserError, match=problem) as refused:
        standing.trained(kind)
    assert "client 1" in str(refused.value) and not (standing.folder / kind).exists()
