"""Purges over nodes: the rounds that one process makes, no id at a site, and nothing done while a node is missing."""

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tests.federation.on_site import SIZES, Sites, answered, close, lasting, serving, states

from ease.errors import UserError
from ease.federation.codec import encode_job
from ease.federation.node import Policy
from ease.federation.remote import node_socket
from ease.federation.wire import JOB, Ask, PurgeReply, decode_answer, decode_purge_reply, encode
from ease.operations.evidence import issue, read_certificate
from ease.operations.ledger.retention import purge_released
from ease.operations.lost_sites import read_lost_sites
from ease.operations.purge import read_purges
from ease.requests.request import ClientRequest, SampleRequest
from ease.requests.tombstones import PREFIX
from ease.runs.answers import open_world
from ease.runs.run import Run


@pytest.fixture(scope="module")
def sites(drawn: Path, small: tuple[str, ...], shared_cache: Path, tmp_path_factory) -> Iterator[Sites]:
    with lasting(drawn, tmp_path_factory, small, shared_cache) as made:
        made.pooled()
        yield made


def two_pairs(run: Run) -> SampleRequest:
    members = run.known()[0]  # type: ignore[index]
    return SampleRequest(ids=tuple(sorted(holding.train_ids[0] for holding in members.clients[:2])))


def kept(sites: Sites, run: Run) -> Iterator[Path]:
    """What nodes keep of a run."""
    for site in SIZES:
        yield from sorted((sites.folder / "disks" / site / "runs" / run.name).rglob("*.json"))


def on_disk(folder: Path, pair_id: str) -> list[Path]:
    spelt = json.dumps(pair_id).encode()
    return [path for path in folder.rglob("*") if path.is_file() and spelt in path.read_bytes()]


def test_a_purge_leaves_the_rounds_of_one_process_and_no_id_at_a_site(sites: Sites, apart: Run, pooled: Run) -> None:
    request = two_pairs(apart)
    for run in (pooled, apart):
        close(run, request)
        (reported,) = purge_released(run.folder)
    assert states(apart) == states(pooled)
    for pair_id, site in zip(request.ids, "ab", strict=True):
        there = sites.folder / "disks" / site / "runs" / apart.name
        assert not on_disk(there, pair_id) and not on_disk(apart.folder, pair_id)
        held = json.loads((there / "membership.json").read_text())
        assert held["clients"][0]["train_ids"][0].startswith(PREFIX) and pair_id not in held["digests"]
    assert read_purges(apart.folder).passes == (reported,)
    removed, stayed = ({line.what for line in lines} for lines in (reported.removed, reported.stayed))
    for client in range(3):
        assert any(line.startswith(f"client {client}: ") and "parts of jobs" in line for line in removed)
        assert {f"client {client}: tombstones.json", f"client {client}: photographs in its folder"} <= stayed
    assert not any(node.blobs for node in sites.nodes.values())
    # The run goes on, and nodes still know what is closed.
    for run in (apart, pooled):
        close(Run.load(run.folder), ClientRequest(clients=(1,)))
    assert states(apart) == states(pooled)
    world = open_world(apart)
    job, parts = encode_job(apart.config.training.job(1, 0, 0.07), world.server.initial())
    asked = Ask(kind="task", client=0, nonce="1" * 32, run=apart.name, parts=tuple(sorted(parts)))
    assert (
        "closed request took away"
        in decode_answer(sites.nodes[0].answer(encode(asked, {JOB: job, **parts})))[0].refused
    )


@pytest.mark.slow
def test_releases_that_wait_are_purged_together(apart: Run, pooled: Run) -> None:
    """A client that held a forgotten pair has left since: its node repeats nothing any more, and need not."""
    for run in (apart, pooled):
        close(run, two_pairs(run))
        close(run, ClientRequest(clients=(1,)))
        assert len(list(purge_released(run.folder))) == 2
    assert states(apart) == states(pooled)
    for run in (apart, pooled):
        answered(Run.load(run.folder), ClientRequest(clients=(2,)))
    assert states(apart) == states(pooled)


@pytest.mark.slow
def test_photographs_may_vanish_after_a_purge(drawn: Path, small: tuple[str, ...], tmp_path: Path) -> None:
    with serving(drawn, tmp_path / "w", small) as sites:
        run = sites.trained()
        request = two_pairs(run)
        close(run, request)
        list(purge_released(run.folder))
        for pair_id in request.ids:
            (sites.folder / pair_id[0] / f"{pair_id}.png").unlink()
        for client, node in sites.nodes.items():
            again = sites.node(client)
            node.pairs, node.shard, node.activations, node._ready = again.pairs, again.shard, again.activations, None
        answered(Run.load(run.folder), ClientRequest(clients=(2,)))


def test_a_missing_node_leaves_the_purge_pending_and_the_run_as_it_was(sites: Sites, apart: Run) -> None:
    close(apart, two_pairs(apart))
    before, away = states(apart), sites.folder / "fed" / "away"
    files = {path: path.read_bytes() for path in kept(sites, apart)}
    socket = node_socket(sites.folder / "fed", 2)
    socket.rename(away)
    with pytest.raises(UserError, match=r"\(client 2: no node answers at .*\); nothing was purged: run it again"):
        list(purge_released(apart.folder))
    away.rename(socket)
    assert states(apart) == before and not read_purges(apart.folder).passes
    assert files == {path: path.read_bytes() for path in kept(sites, apart)} and len(files) == 3
    answered(Run.load(apart.folder), ClientRequest(clients=(2,)))  # others go on meanwhile
    assert len(list(purge_released(apart.folder))) == 1


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_node_that_goes_away_in_between_is_asked_again(
    sites: Sites, apart: Run, pooled: Run, monkeypatch, victim: int
) -> None:
    run = apart
    for each in (run, pooled):
        close(each, two_pairs(each))
    list(purge_released(pooled.folder))
    node = sites.nodes[victim]
    buried = node._purge

    def dying(ask: Ask) -> bytes:
        if ask.purge is not None and not ask.purge.dry_run:
            raise UserError("killed")
        return buried(ask)

    monkeypatch.setattr(node, "_purge", dying)
    with pytest.raises(UserError, match=f"client {victim}: its node refuses: killed.*the purge has begun"):
        list(purge_released(run.folder))
    with pytest.raises(UserError, match="finish it first with: ease purge"):
        Run.load(run.folder)
    monkeypatch.undo()
    (reported,) = purge_released(run.folder)
    assert states(run) == states(pooled)
    assert read_purges(run.folder).passes == (reported,)
    assert {f"client {client}: tombstones.json" for client in range(3)} <= {line.what for line in reported.stayed}


def changed(**changes: object) -> Callable[[bytes], bytes]:
    def lie(data: bytes) -> bytes:
        return encode(PurgeReply.model_construct(**{**dict(decode_purge_reply(data)), **changes}))

    return lie


NONSENSE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "in another's name": (changed(client=0), "answered as client 0"),
    "to another message": (changed(nonce="0" * 32), "another message"),
    "letters that move a cursor": (changed(stayed=(("\x1b[2J", "x"),)), "stayed"),
    "more than anyone reads": (changed(removed=(("x", "y"),) * 65), "removed"),
    "garbled": (lambda data: data[:-40] + bytes(40), "altered or cut"),
}


@pytest.fixture(scope="module")
def closed(sites: Sites) -> Run:
    """A run that no one manages to purge."""
    run = sites.trained("closed")
    close(run, ClientRequest(clients=(2,)))
    return run


@pytest.mark.parametrize("kind", NONSENSE)
def test_a_node_that_answers_nonsense_is_named(closed: Run, sites: Sites, monkeypatch, kind: str) -> None:
    run, (lie, problem), node = closed, NONSENSE[kind], sites.nodes[1]
    buried = node._purge
    monkeypatch.setattr(node, "_purge", lambda ask: lie(buried(ask)))
    with pytest.raises(UserError, match=problem) as refused:
        list(purge_released(run.folder))
    assert "client 1" in str(refused.value) and not read_purges(run.folder).passes


def test_a_site_may_refuse_to_purge(closed: Run, sites: Sites, monkeypatch) -> None:
    run = closed
    monkeypatch.setattr(sites.nodes[0], "policy", Policy(objectives=("align", "membership scores", "replay")))
    with pytest.raises(UserError, match="client 0: its node refuses: its policy does not allow the objective 'purge'"):
        list(purge_released(run.folder))


@pytest.mark.slow
def test_another_salt_is_refused(sites: Sites, apart: Run) -> None:
    run = apart
    close(run, two_pairs(run))
    list(purge_released(run.folder))
    purge: dict[str, Any] = {"salt": "0" * 32, "marks": (), "leaves": False}
    gone = SampleRequest(ids=())
    asked = Ask(kind="purge", client=2, nonce="2" * 32, run=run.name, gone=(gone,), purge=purge)
    assert "another salt" in decode_answer(sites.nodes[2].answer(encode(asked)))[0].refused


def test_a_lost_site_is_recorded_and_blocks_no_purge(ease, sites: Sites, apart: Run) -> None:
    first, later = (
        SampleRequest(ids=tuple(sorted(holding.train_ids[place] for holding in apart.known()[0].clients)))
        for place in (0, 1)
    )
    close(apart, first)
    socket, away = node_socket(sites.folder / "fed", 2), sites.folder / "fed" / "away"
    socket.rename(away)
    try:
        waiting = ease("purge", apart.folder, "--quiet")
        assert waiting.code == 2 and "--lost-site" in waiting.err
        assert ease("purge", apart.folder, "--lost-site", 2, "--quiet").code == 2  # without a reason
        assert ease("purge", apart.folder, "--lost-site", 7, "--reason", "gone", "--quiet").code == 2
        words = ("--reason", "burnt down", "--by", "dpo")
        purged = ease("purge", apart.folder, "--lost-site", 2, *words, "--quiet")
        assert purged.code == 0, purged.err
        assert "client 2 is gone for good: burnt down" in purged.out
        socket.touch()  # as a machine that lost power leaves it
        status = ease("status", sites.folder / "fed", "--run", apart.folder, "--exit-code", "--json")
        # Nobody waits for it either who asks whether a picture is held.
        photograph = sites.folder / "a" / f"{later.ids[0]}.png"
        assert later.ids[0].startswith("a")
        found = json.loads(ease("request", "find", apart.folder, "--image", photograph, "--json").out)
        assert [each["id"] for each in found["pairs"]] == [later.ids[0]] and found["not_asked"] == [2]
        assert status.code == 0 and json.loads(status.out)["nodes"][2]["state"] == "gone for good"
        socket.unlink()
        stayed = [line for line in read_purges(apart.folder).passes[0].stayed if line.what.startswith("client 2: ")]
        assert [line.why for line in stayed] == [f"the site is gone for good (burnt down; dpo, {today()})"]
        # It can repeat nothing, so the rounds that it had a part in are made again without it.
        assert all(2 not in apart.history.clients(number) for number in range(1, apart.history.rounds() + 1))
        left = [each for each in later.ids if not each.startswith("c")]
        close(Run.load(apart.folder), SampleRequest(ids=tuple(left)))
        assert ease("purge", apart.folder, "--quiet").code == 0  # nobody is asked again
        (site,) = read_lost_sites(apart.folder).sites
        assert (site.client, site.by, site.why) == (2, "dpo", "burnt down")
    finally:
        away.rename(socket)
    _, certificate = read_certificate(certificate_of(apart))
    assert len(certificate.outstanding) == 1 and certificate.outstanding[0].startswith("client 2: states that it was")
    log = (apart.folder / "evidence/log.jsonl").read_text()
    assert '"lost-site"' in log and "burnt down" not in log and "burnt" not in json.dumps(certificate.outstanding)


def certificate_of(run: Run) -> Path:
    """A certificate of the last release."""
    path = run.folder / "certificate.json"
    path.write_bytes(issue(run, run.head.releases[-1].answer).file_bytes() + b"\n")
    return path


def today() -> str:
    return datetime.now(UTC).date().isoformat()
