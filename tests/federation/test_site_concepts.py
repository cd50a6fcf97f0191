"""Requests by words where captions lie at their sites: nodes find what one place would, and tell two numbers a pair."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.federation.on_site import Sites, answered, lasting

from ease.commands.preview import preview_run
from ease.data.words import content, says_all
from ease.errors import UserError
from ease.federation.node import Policy
from ease.federation.remote import node_socket
from ease.federation.wire import NEAR, QUERY, SAYS, Ask, Search, decode_answer, decode_search_reply, encode, numbers_of
from ease.methods import make_method
from ease.requests.request import ClientRequest
from ease.runs.answers import open_world, release
from ease.runs.concepts import frozen_text, match_concept
from ease.runs.resolve import RequestOptions, parse_request
from ease.runs.run import Run
from ease.runs.world import World


@pytest.fixture(scope="module")
def sites(drawn: Path, small: tuple[str, ...], shared_cache: Path, tmp_path_factory) -> Iterator[Sites]:
    with lasting(drawn, tmp_path_factory, small, shared_cache) as made:
        made.pooled()
        made.trained()
        yield made


@pytest.fixture
def there(sites: Sites) -> World:
    return open_world(Run.load(sites.folder / "apart"))


@pytest.fixture
def pooled(sites: Sites) -> World:
    return open_world(Run.load(sites.folder / "pooled"))


def common_word(world: World) -> str:
    """One that some pairs say and others do not."""
    captions = [world.evaluator.pairs.captions[place] for shard in world.shards for place in shard.train]
    words = sorted({word for each in captions for text in each for word in text.lower().split() if content(word)})
    counts = {word: sum(any(says_all(text, (word,)) for text in each) for each in captions) for word in words}
    return next(word for word, count in counts.items() if 8 <= count <= len(captions) // 2)


def test_nodes_find_what_one_place_finds(there: World, pooled: World) -> None:
    word = common_word(pooled)
    found, wanted = match_concept(there, word), match_concept(pooled, word)
    assert found.saying == wanted.saying and len(found.saying) >= 8
    assert found.captions == {}
    # The same cosines from a centre that everybody knows: the mean of the class centres.
    labels = np.concatenate([shard.train_classes for shard in pooled.shards])
    centres = pooled.server.centroids[labels].mean(axis=0)
    query = frozen_text(pooled, word)
    centre = centres[-len(query) :]
    places = {pooled.evaluator.pairs.ids[place]: place for shard in pooled.shards for place in shard.train}
    for pair_id, score in found.scores.items():
        points = pooled.evaluator.activations.pooled_text[places[pair_id]].astype(float)
        units = [each / np.linalg.norm(each) - centre for each in points]
        target = query / np.linalg.norm(query) - centre
        cosines = [each @ target / np.linalg.norm(each) / np.linalg.norm(target) for each in units]
        assert score == pytest.approx(max(cosines), abs=6e-4)  # rounded at the site
    given = match_concept(there, word, 0.3)
    assert set(given.ids) == set(given.saying) | {each for each, score in given.scores.items() if score >= 0.3}


def test_a_dry_run_counts_by_site_and_shows_no_caption(sites: Sites, pooled: World) -> None:
    word = common_word(pooled)
    seen = preview_run(sites.folder / "apart", RequestOptions(concepts=(word,)), make_method("ease"), quiet=True)
    holders = {pair_id: pair_id[0] for pair_id in seen.ids}
    counts = {seen.names[client]: count for client, count in seen.impact.clients.items()}
    assert counts == {site: list(holders.values()).count(site) for site in set(holders.values())}
    assert seen.examples == () and seen.captions == {} and list(seen.render())
    assert set(
        parse_request(open_world(Run.load(sites.folder / "apart")), RequestOptions(concepts=(word,))).request.ids
    ) == set(seen.ids)  # type: ignore[union-attr]
    listed = (sites.folder / "apart" / "previews").rglob("ids.txt")
    assert all(word not in line.partition("\t")[2] for path in listed for line in path.read_text().splitlines())


def test_words_that_no_caption_has_are_refused_with_what_to_do(there: World) -> None:
    with pytest.raises(UserError, match=r"no site has a caption with these words .* --threshold -?0\.\d\d --dry-run"):
        match_concept(there, "zeppelin")


def test_closed_pairs_are_not_searched(sites: Sites, pooled: World) -> None:
    run, word = sites.trained("closed"), common_word(pooled)
    before = set(match_concept(open_world(run), word).saying)
    answered(run, ClientRequest(clients=(1,)))
    release(run, run.unreleased()[0])
    assert (
        set(match_concept(open_world(run), word).saying)
        == {each for each in before if not each.startswith("b")}
        != before
    )
    query = np.stack([frozen_text(pooled, word)] * 2)
    list(open_world(run).federation.run(open_world(run).server.initial(), run.config.training.job(1, 0, 0.07), [0]))
    asked = Ask(kind="search", client=0, nonce="3" * 32, run=run.name, search=Search(words=word, rows=2))
    spoilt = sites.nodes[0].answer(encode(asked, {QUERY: numbers_of(query)}))
    assert "closed request took away" in decode_answer(spoilt)[0].refused
    shutil.rmtree(run.folder)


def test_a_missing_site_is_named(sites: Sites, there: World) -> None:
    socket, away = node_socket(sites.folder / "fed", 2), sites.folder / "fed" / "away"
    socket.rename(away)
    try:
        with pytest.raises(UserError, match=r"every site must be asked, and some .*client 2: no node answers"):
            match_concept(there, "snow")
    finally:
        away.rename(socket)


def test_a_site_may_refuse_to_be_searched(sites: Sites, there: World, monkeypatch) -> None:
    monkeypatch.setattr(sites.nodes[0], "policy", Policy(objectives=("align",)))
    with pytest.raises(
        UserError, match="client 0: its node refuses: its policy does not allow the objective 'concepts'"
    ):
        match_concept(there, "snow")


def spoilt(
    says: Callable[[np.ndarray], np.ndarray], near: Callable[[np.ndarray], np.ndarray]
) -> Callable[[bytes], bytes]:
    def changed(data: bytes) -> bytes:
        answer, blobs = decode_search_reply(data)
        both = says(np.frombuffer(blobs[SAYS], "<i8")), near(np.frombuffer(blobs[NEAR], "<f8"))
        return encode(answer, {SAYS: numbers_of(both[0]), NEAR: numbers_of(both[1])})

    return changed


def same(values: np.ndarray) -> np.ndarray:
    return values


NONSENSE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "a pair too few": (spoilt(lambda v: v[1:], same), "does not fit"),
    "neither yes nor no": (spoilt(lambda v: v + 2, same), "does not fit"),
    "beyond a cosine": (spoilt(same, lambda v: v + 3), "does not fit"),
    "no number": (spoilt(same, lambda v: v * np.nan), "does not fit"),
    "garbled": (lambda data: data[:-40] + bytes(40), "altered or cut"),
}


@pytest.mark.parametrize("kind", NONSENSE)
def test_a_node_that_answers_nonsense_is_named(sites: Sites, there: World, monkeypatch, kind: str) -> None:
    (lie, problem), node = NONSENSE[kind], sites.nodes[1]
    matched = node._matched
    monkeypatch.setattr(node, "_matched", lambda *asked: lie(matched(*asked)))
    with pytest.raises(UserError, match=problem) as refused:
        match_concept(there, "snow")
    assert "client 1" in str(refused.value)


def test_a_query_of_another_backbone_is_refused(sites: Sites, there: World) -> None:
    asked = Ask(kind="search", client=0, nonce="4" * 32, run=there.run_name, search=Search(words="snow", rows=2))
    answer = sites.nodes[0].answer(encode(asked, {QUERY: numbers_of(np.zeros((2, 3)))}))
    assert "none of this client's backbone" in decode_answer(answer)[0].refused
    given = replace(sites.nodes[0], pairs=None)
    assert (
        "its pairs were dealt by the server"
        in decode_answer(given.answer(encode(asked.model_copy(update={"nonce": "5" * 32}))))[0].refused
    )
