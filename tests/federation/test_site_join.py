"""A site that comes to a run whose pairs lie apart: as if all were in one place, and nothing is kept of one refused."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.federation.on_site import Sites, answered, close, draw, lasting, states

from ease.commands.federation import make_node
from ease.data.scenes import load_scenes
from ease.errors import UserError
from ease.federation.node import Node, Policy, listen, serve
from ease.federation.remote import node_socket
from ease.federation.wire import decode_deal_reply, encode
from ease.operations.joining import JoinRequest, join
from ease.operations.ledger.retention import purge_released
from ease.operations.ledger.store import Ledger
from ease.requests.request import ClassRequest, ClientRequest, SampleRequest
from ease.runs.run import Run

WISH = JoinRequest("the fourth clinic agrees", "ada")
NEW = 3


@pytest.fixture(scope="module")
def sites(drawn: Path, small: tuple[str, ...], shared_cache: Path, tmp_path_factory) -> Iterator[Sites]:
    """With a fourth site, whose pairs are in no run yet."""
    with lasting(drawn, tmp_path_factory, small, shared_cache) as made:
        made.pooled()
        folder, pairs = made.folder, load_scenes(5, 16, 0, 2)
        for where in ("d", "all"):
            draw(folder / where, pairs, {f"d{each}": each for each in range(16)}, site="d", split="train")
        node = make_node(made.config(f"data.path={folder / 'd'}"), NEW, folder / "disks" / "d", quiet=True)
        made.nodes[NEW], line = node, listen(node_socket(folder / "fed", NEW))
        threading.Thread(target=serve, args=(node, line), daemon=True).start()
        yield made
        line.close()


@pytest.mark.parametrize("closed", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["at once", "class closed"])
def test_a_site_joins_as_if_all_pairs_lay_in_one_place(ease, apart: Run, pooled: Run, closed: bool) -> None:
    """Further rounds train with it, and a later request for it is answered from the same history."""
    for run in (apart, pooled):
        if closed:
            close(run, ClassRequest(classes=(1,)))
    came = [join(apart, WISH), join(pooled, JoinRequest(WISH.consent, WISH.by, site="d"))]
    assert came[0].holding.model_copy(update={"joined": None}) == came[1].holding.model_copy(update={"joined": None})
    assert came[0].holding.client == NEW and came[0].consent.pairs == came[1].consent.pairs
    assert not closed or (came[1].left_out and 1 not in came[0].holding.train_classes)
    assert not join(apart, WISH).added and len(Ledger(apart.folder).consents()) == 1
    for run in (apart, pooled):
        assert ease("train", "--resume", run.folder, "--until", 5, "--quiet").code == 0
        ids = Run.load(run.folder).known()[0].clients[NEW].train_ids[:2]  # type: ignore[index]
        answered(Run.load(run.folder), SampleRequest(ids=ids))
    assert states(apart) == states(pooled)
    assert NEW in Run.load(apart.folder).history.clients(5)


def kept(sites: Sites, run: Run) -> Path:
    return sites.folder / "disks" / "d" / "runs" / run.name / "membership.json"


def test_a_site_that_is_not_there_is_named(sites: Sites, apart: Run) -> None:
    socket, away = node_socket(sites.folder / "fed", NEW), sites.folder / "fed" / "away"
    socket.rename(away)
    try:
        with pytest.raises(UserError, match=r"client 3: no node answers at .*start it with `ease node`"):
            join(apart, WISH)
    finally:
        away.rename(socket)
    assert len(apart.known()[0].clients) == 3 and not Ledger(apart.folder).consents()  # type: ignore[index]


def test_a_site_may_refuse(sites: Sites, apart: Run, monkeypatch) -> None:
    monkeypatch.setattr(sites.nodes[NEW], "policy", Policy(objectives=("align",)))
    with pytest.raises(UserError, match="does not allow the objective 'classes'"):
        join(apart, WISH)


LIES: dict[str, tuple[Callable[[dict], dict], str]] = {
    "another's pair": (lambda held: held | {"train_ids": ("a3", *held["train_ids"][1:])}, "both use it"),
    "a test pair": (lambda held: held | {"train_ids": ("t3", *held["train_ids"][1:])}, "is for testing"),
    "an unknown class": (lambda held: held | {"train_classes": (9, *held["train_classes"][1:])}, "does not add up"),
    "another's number": (lambda held: held | {"client": 1}, "does not add up"),
}


@pytest.fixture(scope="module")
def unjoined(sites: Sites) -> Run:
    """A run that no one manages to join."""
    return sites.trained("unjoined")


@pytest.mark.parametrize("kind", LIES)
def test_invalid_joins_are_refused_and_nothing_is_stored(sites: Sites, unjoined: Run, monkeypatch, kind: str) -> None:
    (change, problem), node = LIES[kind], sites.nodes[NEW]
    dealt = Node._dealt

    def lying(self: Node, *asked: object) -> bytes:
        answer, blobs = decode_deal_reply(dealt(self, *asked))  # type: ignore[arg-type]
        assert answer.holding is not None
        holding = type(answer.holding)(**change(dict(answer.holding)))
        return encode(answer.model_copy(update={"holding": holding}), blobs)

    monkeypatch.setattr(node, "_dealt", lying.__get__(node))
    with pytest.raises(UserError, match=problem):
        join(unjoined, WISH)
    assert not kept(sites, unjoined).exists() and not Ledger(unjoined.folder).consents()


def test_a_site_joins_with_all_that_it_has(unjoined: Run) -> None:
    for wish in (
        JoinRequest("x", "y", site="d"),
        JoinRequest("x", "y", ids=frozenset({"d1"})),
        JoinRequest("x", "y", owner="a"),
    ):
        with pytest.raises(UserError, match="joins with all that its node opens"):
            join(unjoined, wish)


@pytest.mark.slow
def test_forgotten_pairs_return_only_with_a_consent_for_them(sites: Sites, apart: Run, monkeypatch) -> None:
    """Client 2 leaves; its photographs come back at the new site under their old ids."""
    close(apart, ClientRequest(clients=(2,)))
    old, node = sites.nodes[2], sites.nodes[NEW]
    for name in ("pairs", "activations"):
        monkeypatch.setattr(node, name, getattr(old, name))
    monkeypatch.setattr(node, "shard", type(old.shard)(**{**old.shard.__dict__, "client": NEW, "name": "c again"}))
    with pytest.raises(UserError, match="not purged yet; first run: ease purge"):
        join(apart, WISH)
    list(purge_released(apart.folder))
    with pytest.raises(UserError, match="can return only as a new client's pair, with --again-after"):
        join(apart, WISH)
    assert not kept(sites, apart).exists()
    came = join(Run.load(apart.folder), JoinRequest(WISH.consent, WISH.by, again_after="c"))
    assert came.consent.returned == came.consent.pairs == len(old.pairs or ())
