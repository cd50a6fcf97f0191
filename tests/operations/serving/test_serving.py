"""`ease serve`: it finds what the model finds and nothing that is forgotten, and answers only whom it should."""

import http.client
import io
import json
import random
import re
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import ease as package
from ease.errors import UserError
from ease.operations.ledger.retention import purge_released
from ease.operations.serving import app, server
from ease.operations.serving.messages import EncodeResponse, Facts, Health, SearchResponse
from ease.operations.serving.served import Found, Served, open_served
from ease.operations.serving.server import Server
from ease.runs.answers import StoredAnswer, open_world, release
from ease.runs.export import export
from ease.runs.run import Run
from ease.runs.using import Source, encode_image, encode_text, search

KEY = "a key of this test"


class Got:
    """An answer, whole."""

    def __init__(self, answer: http.client.HTTPResponse) -> None:
        self.status, self.headers, self.content = answer.status, answer.headers, answer.read()

    @property
    def value(self) -> Any:
        return json.loads(self.content)

    def ids(self) -> set[str]:
        return {hit["id"] for hits in self.value["found"].values() for hit in hits}


@pytest.fixture
def run(one_forgotten: Path, tmp_path: Path) -> Path:
    return shutil.copytree(one_forgotten, tmp_path / "run")


class Visitor:
    """Asks a server in this process."""

    def __init__(self, made: Server) -> None:
        self.port = made.port

    def __call__(self, path: str, method: str = "GET", body: Any = None, key: str | None = KEY, **headers: str) -> Got:
        line = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        if isinstance(body, dict | list):
            body, headers = json.dumps(body).encode(), {"Content-Type": "application/json", **headers}
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if key is not None:
            sent["Authorization"] = f"Bearer {key}"
        line.request(method, path, body, sent)
        got = Got(line.getresponse())
        line.close()
        return got

    def connect(self, content: bytes = b"") -> socket.socket:
        """A connection over which some bytes were sent."""
        line = socket.create_connection(("127.0.0.1", self.port), timeout=20)
        line.sendall(content)
        return line

    def post(self, body: bytes, announced: int, path: str = "/encode") -> socket.socket:
        """A connection over which the beginning of a JSON body was sent."""
        head = (
            f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\nAuthorization: Bearer {KEY}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {announced}\r\n\r\n"
        )
        return self.connect(head.encode() + body)


Start = Callable[..., Visitor]


@pytest.fixture(scope="module")
def ended() -> Iterator[list[threading.Thread]]:
    """Threads of servers that were told to stop: none waits for its own end, which takes uvicorn a quarter second."""
    threads: list[threading.Thread] = []
    yield threads
    for each in threads:
        each.join(timeout=20)
        assert not each.is_alive()


@contextmanager
def serving(ended: list[threading.Thread]) -> Iterator[Start]:
    """Serve a folder, or a model that a test made, in this process."""
    servers: list[Server] = []

    def start(
        what: Path | Served, request: str | None = None, host: str = "127.0.0.1", key: str | None = KEY
    ) -> Visitor:
        servers.append(Server(open_served(what, request) if isinstance(what, Path) else what, host, 0, key))
        ended.append(threading.Thread(target=servers[-1].run, daemon=True))
        ended[-1].start()
        return Visitor(servers[-1])

    yield start
    for each in servers:
        each.stop()


@pytest.fixture
def serve(ended) -> Iterator[Start]:
    with serving(ended) as start:
        yield start


@pytest.fixture(scope="module")
def ask(ended, one_forgotten: Path) -> Iterator[Visitor]:
    """A server of a run that no test changes."""
    with serving(ended) as start:
        yield start(one_forgotten)


class Slow:
    """A model that answers about a text once it is told to."""

    compares = False

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.train_further = threading.Event()

    def facts(self) -> Facts:
        return Facts(model="0" * 64, release=None, request=None, releases=0, pairs=0, backbone="slow")

    def encode_text(self, texts: Sequence[str]) -> torch.Tensor:
        self.asked += texts
        assert self.train_further.wait(20)
        return torch.ones(len(texts), 1)

    def encode_image(self, content: memoryview, most_pixels: int) -> torch.Tensor:
        raise NotImplementedError

    def search(self, words: str, count: int, among: str) -> Found:
        raise NotImplementedError


@pytest.fixture
def slow() -> Iterator[Slow]:
    model = Slow()
    yield model
    model.train_further.set()


def until(condition: Callable[[], bool]) -> None:
    """Wait for what another thread does."""
    ends = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.005)


def jpeg(width: int = 40, height: int = 30) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.full((height, width, 3), 90, np.uint8)).save(file, "JPEG")
    return file.getvalue()


def test_it_finds_what_the_model_finds(serve, run: Path) -> None:
    ask, opened = serve(run), Run.load(run)
    source = Source.of(opened, None)
    expected = search(open_world(opened), source, "a green boat", 7)
    for got in (
        ask("/search?words=a+green+boat&k=7"),
        ask("/search", "POST", {"words": "a green boat", "k": 7}),
    ):
        (hits,) = got.value["found"].values()
        assert [hit["id"] for hit in hits] == [hit.id for hit in expected]
        assert "picture" not in hits[0] and "place" not in hits[0]
    (hits,) = ask("/search?words=a+green+boat&k=1&pictures=true").value["found"].values()
    assert hits[0]["picture"].startswith("data:image/jpeg;base64,")
    texts = ["a boat", "two hats"]
    reported = ask("/encode", "POST", {"texts": texts}).value
    torch.testing.assert_close(torch.tensor(reported["embeddings"]), encode_text(source, texts))
    (alone,) = ask("/encode?text=a+boat").value["embeddings"]
    torch.testing.assert_close(torch.tensor(alone), encode_text(source, "a boat")[0])
    picture = jpeg()
    got = ask("/encode", "POST", picture, Content_Type="image/jpeg")
    torch.testing.assert_close(torch.tensor(got.value["embeddings"]), encode_image(source, memoryview(picture)))


def test_health_names_model_release_and_version(serve, run: Path) -> None:
    """Without the key too, for whoever watches over it: there is nothing private in it."""
    ask, opened = serve(run), Run.load(run)
    before = ask("/health", key=None).value
    assert before["model"] == opened.history.state_sha256(opened.history.rounds()) and before["release"] is None
    assert before["version"] == package.__version__ and before["pairs"] == len(open_world(opened).evaluator.pairs)
    release(opened, "client-1/finetune")
    after = ask("/health", key=None).value
    assert after["release"] == "client-1/finetune" and after["releases"] == 1
    assert after["model"] == Run.load(run).head.releases[0].model_sha256


def test_forgotten_pairs_are_never_found_again(serve, run: Path) -> None:
    """From the release on, while it is being served; of the client that left what it had held out neither."""
    ask = serve(run)
    everything = "/search?words=a+boat&k=200"
    shard = open_world(Run.load(run)).evaluator.shards[1]
    pairs = open_world(Run.load(run)).evaluator.pairs
    forgotten = {pairs.ids[place] for place in (*shard.train, *shard.validation)}
    assert len(shard.train) and len(shard.validation)
    kept = ask(everything).ids() - forgotten
    assert forgotten <= ask(everything).ids()
    release(Run.load(run), "client-1/finetune")
    assert ask(everything).ids() == kept
    page = ask("/?words=a+boat&k=200").content.decode()
    assert not any(pair_id in page for pair_id in forgotten) and any(pair_id in page for pair_id in kept)
    purge_released(Run.load(run))
    assert ask(everything).ids() == kept
    assert serve(run)(everything).ids() == kept


def test_it_falls_silent_where_it_cannot_know_what_is_forgotten(serve, run: Path) -> None:
    ask = serve(run)
    (run / "head.json").write_text("{")
    got = ask("/search?words=boat")
    assert got.status == 503 and "nothing is served" in got.value["error"]
    assert ask("/?words=boat").status == 503 and ask("/health").status == 503
    (run / "head.json").unlink()
    assert ask("/search?words=boat").status == 200


def test_an_open_request_is_shown_before_and_after(serve, run: Path) -> None:
    ask = serve(run, "client-1/finetune")
    found = ask("/search?words=a+boat&k=60").value["found"]
    assert list(found) == ["before", "after client-1/finetune"]
    held = open_world(Run.load(run)).server.membership.clients[1]
    named = {*held.train_ids, *held.validation_ids}
    assert all(hit["forgotten"] == (hit["id"] in named) for hits in found.values() for hit in hits)
    record = StoredAnswer(run / "requests" / "client-1" / "finetune").record()
    assert ask("/health").value["model"] == record.files["model.safetensors"]
    page = ask("/?words=a+boat").content.decode()
    assert page.count("<img") == 24 and "beside" in page and "Pairs that the request named are marked" in page
    release(Run.load(run), "client-1/finetune")
    assert ask("/search?words=boat").status == 503, "its pairs are gone now"
    with pytest.raises(UserError, match="without --request"):
        open_served(run, "client-1/finetune")


def test_an_export_is_served_without_running_its_script(serve, run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    export(Run.load(run), "client-1/finetune", "safetensors", folder)
    (folder / "load.py").write_text("raise SystemExit('run')")
    ask, source = serve(folder), Source.of(Run.load(run), "client-1/finetune")
    reported = ask("/encode?text=a+boat").value
    torch.testing.assert_close(torch.tensor(reported["embeddings"]), encode_text(source, "a boat"))
    assert ask("/health").value["request"] == "client-1/finetune"
    refused = ask("/search?words=boat")
    assert refused.status == 400 and "serve the run" in refused.value["error"]
    assert "serve the run" in ask("/?words=boat").content.decode()
    stored = StoredAnswer(run / "requests" / "client-1" / "finetune").model_path
    shutil.copy(stored, folder / "model.safetensors")  # no header that says what it is
    with pytest.raises(UserError, match="not of an export"):
        open_served(folder, None)


def test_pages_need_the_key_and_keep_it_out_of_the_address(ask) -> None:
    for path in ("/", "/search?words=boat", "/encode?text=boat", "/nowhere"):
        for key in (None, "wrong"):
            assert ask(path, key=key).status == 401
    assert ask("/?key=wrong", key=None).status == 401
    opened = ask(f"/?key={KEY.replace(' ', '+')}", key=None)
    assert opened.status == 303 and opened.headers["Location"] == "/"
    cookie = opened.headers["Set-Cookie"]
    assert "HttpOnly" in cookie and "samesite=strict" in cookie.lower()


def test_the_cookie_opens_the_page(serve, one_forgotten: Path) -> None:
    ask = serve(one_forgotten, key="plain")
    cookie = ask("/?key=plain", key=None).headers["Set-Cookie"].partition(";")[0]
    page = ask("/", key=None, Cookie=cookie)
    assert page.status == 200 and b"<form" in page.content and b"<script" not in page.content
    assert (
        page.headers["Cache-Control"] == "no-store" and "default-src 'none'" in page.headers["Content-Security-Policy"]
    )
    assert ask("/", key=None, Cookie=cookie.replace("plain", "other")).status == 401


def test_pages_of_other_sites_are_not_answered(serve, one_forgotten: Path) -> None:
    """A name that leads here by a trick of its owner, and what a foreign page would have a browser send."""
    ask = serve(one_forgotten, key=None)
    assert ask("/search?words=boat", key=None).status == 200
    assert ask("/search?words=boat", key=None, Host="evil.example").status == 403
    assert ask("/search?words=boat", key=None, Sec_Fetch_Site="cross-site").status == 403
    body = {"words": "boat"}
    assert ask("/search", "POST", body, key=None, Origin="http://evil.example").status == 403
    assert ask("/search", "POST", body, key=None, Origin=f"http://127.0.0.1:{ask.port}").status == 200


@pytest.mark.parametrize(
    ("path", "method", "body", "headers", "status", "part"),
    [
        ("/search", "GET", None, {}, 400, "words"),
        ("/search?words=%20", "GET", None, {}, 400, "no words"),
        ("/search?words=a&k=0", "GET", None, {}, 400, "k: input should be greater"),
        ("/search?words=a&k=201", "GET", None, {}, 400, "k: input should be less"),
        ("/search?words=a&kk=3", "GET", None, {}, 400, "unknown key"),
        ("/search?words=a&among=mine", "GET", None, {}, 400, "among"),
        ("/search?words=%ff", "GET", None, {}, 400, "cannot be read"),
        ("/search?words=" + "a" * 2001, "GET", None, {}, 400, "at most 2000"),
        ("/search?words=" + "a" * 9000, "GET", None, {}, 414, "8192"),
        ("/search", "POST", ["words"], {}, 400, "not a JSON object"),
        ("/search", "POST", b"[" * 100_000, {"Content_Type": "application/json"}, 400, "not JSON"),
        ("/search", "POST", b"{}", {"Content_Type": "text/plain"}, 415, "application/json"),
        ("/search", "DELETE", None, {}, 405, "GET, POST"),
        ("/encode", "POST", {"texts": []}, {}, 400, "texts"),
        ("/encode", "POST", {"texts": ["a"] * 65}, {}, 400, "texts"),
        ("/encode", "POST", {"texts": ["a" * 2001]}, {}, 400, "2000 characters"),
        ("/encode", "GET", None, {}, 400, "no empty one"),
        ("/encode", "POST", b"no picture", {"Content_Type": "image/png"}, 400, "not an image"),
        ("/encode", "POST", jpeg()[:200], {"Content_Type": "image/jpeg"}, 400, "cannot be read as a picture"),
        ("/encode", "POST", b"", {"Content_Type": "image/png", "Transfer_Encoding": "chunked"}, 411, "Content-Length"),
        ("/../run.json", "GET", None, {}, 404, "nothing here"),
    ],
)
def test_invalid_questions_are_refused_in_a_sentence(
    ask, path: str, method: str, body: Any, headers: dict[str, str], status: int, part: str
) -> None:
    got = ask(path, method, body, **headers)
    assert got.status == status and part in got.value["error"]


def test_sizes_are_known_before_anything_is_read(ask, monkeypatch) -> None:
    """The first by what is announced, of which nothing is sent; the second by the picture's first bytes."""
    line = http.client.HTTPConnection("127.0.0.1", ask.port, timeout=20)
    line.putrequest("POST", "/encode")
    for name, value in {
        "Authorization": f"Bearer {KEY}",
        "Content-Type": "image/jpeg",
        "Content-Length": str(app.LARGEST_PICTURE + 1),
    }.items():
        line.putheader(name, value)
    line.endheaders()
    got = Got(line.getresponse())
    line.close()
    assert got.status == 413 and "at most 20,971,520" in got.value["error"]
    monkeypatch.setattr(app, "MOST_PIXELS", 1199)
    got = ask("/encode", "POST", jpeg(40, 30), Content_Type="image/jpeg")
    assert got.status == 400 and "1,200 pixels, at most 1,199" in got.value["error"]


@pytest.mark.parametrize("part", [b"", b"GET /health HTTP/1.1\r\nHost: 127", b"POST /encode"])
def test_a_connection_without_a_whole_head_is_closed(ask, monkeypatch, part: bytes) -> None:
    """However it drips: the deadline counts from the beginning."""
    monkeypatch.setattr(server, "HEAD_SECONDS", 0.2)
    with ask.connect(part) as line:
        line.settimeout(0.02)
        ends, content = time.monotonic() + 10, None
        while content is None and time.monotonic() < ends:
            with suppress(TimeoutError):
                content = line.recv(100)
            with suppress(OSError):
                line.sendall(part[-1:])
    assert content == b""
    assert ask("/health").status == 200


def test_a_slow_body_does_not_block_others(ask) -> None:
    """Its own deadline is further than those of the others here wait."""
    assert app.BODY_SECONDS > 20
    with ask.post(b'{"texts"', 1000):
        assert ask("/health", key=None).status == 200
        assert ask("/search?words=boat").status == 200
        assert ask("/encode", "POST", {"texts": ["boat"]}).status == 200


def test_a_body_is_not_awaited_forever(ask, monkeypatch) -> None:
    monkeypatch.setattr(app, "BODY_SECONDS", 0.2)
    with ask.post(b'{"texts"', 1000) as line:
        got = b"".join(iter(lambda: line.recv(1 << 16), b"")).decode()  # to the end of the connection
        assert " 408 " in got.partition("\r\n")[0] and "8 of 1,000 bytes" in got


def test_no_connection_outlives_the_last_deadline(serve, slow, monkeypatch) -> None:
    """Not even one whose question is being answered."""
    monkeypatch.setattr(server, "SECONDS", 0.3)
    ask, body = serve(slow), b'{"texts": ["a"]}'
    with ask.post(body, len(body)) as line:
        assert line.recv(100) == b""
    assert slow.asked == ["a"] and not slow.train_further.is_set()


def test_idle_connections_give_way_and_questions_do_not(serve, slow, monkeypatch) -> None:
    """The oldest idle one is cut for a newcomer; where all are being answered, the newcomer is turned away."""
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 3)
    ask, body = serve(slow), b'{"texts": ["a"]}'
    with ask.post(body, len(body)) as asked:
        until(lambda: slow.asked == ["a"])
        with ask.connect() as first, ask.post(b"{", 9) as second:
            for _ in range(3):
                assert ask("/health").status == 200
            assert first.recv(100) == b""
            second.settimeout(0.05)
            with pytest.raises(TimeoutError):  # the newcomers after the first needed no more room
                second.recv(100)
        monkeypatch.setattr(server, "MOST_CONNECTIONS", 100)
        with ask.post(body, len(body)), ask.post(body, len(body)):
            assert ask("/health").status == 200, "the server has read what was sent before"
            monkeypatch.setattr(server, "MOST_CONNECTIONS", 3)
            with ask.connect() as newcomer:
                assert newcomer.recv(100).startswith(b"HTTP/1.1 503 ")
        slow.train_further.set()
        assert asked.recv(100).startswith(b"HTTP/1.1 200 ")


def test_few_questions_wait_for_the_model_and_health_does_not(serve, slow, monkeypatch) -> None:
    monkeypatch.setattr(app, "MOST_WAITING", 2)
    ask, body = serve(slow), b'{"texts": ["a"]}'
    with ask.post(body, len(body)) as first, ask.post(body, len(body)) as second:
        until(lambda: slow.asked == ["a"])
        until(lambda: ask("/encode", "POST", {"texts": ["b"]}).status == 503)
        refused = ask("/encode?text=c")
        assert refused.status == 503 and refused.headers["Retry-After"] == "1"
        assert ask("/health").value["backbone"] == "slow"
        slow.train_further.set()
        assert all(each.recv(100).startswith(b"HTTP/1.1 200 ") for each in (first, second))
    assert slow.asked == ["a", "a"]
    assert ask("/encode?text=d").status == 200, "there is room again"


def test_disconnected_clients_cost_no_model_pass(serve, slow) -> None:
    ask = serve(slow)
    bodies = [json.dumps({"texts": [text]}).encode() for text in "abc"]
    with ask.post(bodies[0], len(bodies[0])):
        until(lambda: slow.asked == ["a"])
        ask.post(bodies[1], len(bodies[1])).close()
        with ask.post(bodies[2], len(bodies[2])) as last:
            assert ask("/health").status == 200, "the server has seen what was sent before"
            slow.train_further.set()
            assert last.recv(100).startswith(b"HTTP/1.1 200 ")
    assert slow.asked == ["a", "c"]


def test_bodies_together_are_bounded_by_what_has_arrived(ask, monkeypatch) -> None:
    monkeypatch.setattr(app, "LARGEST_HELD", 1000)
    long = {"texts": ["a" * 600]}
    assert ask("/encode", "POST", long).status == 200
    with ask.post(b" " * 500, 100_000):
        until(lambda: ask("/encode", "POST", long).status == 503)
        assert ask("/encode", "POST", {"texts": ["a"]}).status == 200, "what was only announced takes no room"
    until(lambda: ask("/encode", "POST", long).status == 200)


@pytest.mark.parametrize("origin", ["http://[", "http://[::1", "null", "", "://", "http://", "\xff", "http://a:b:c"])
def test_a_malformed_origin_is_a_foreign_one(ask, origin: str) -> None:
    got = ask("/search", "POST", {"words": "boat"}, Origin=origin)
    assert got.status == 403 and "other sites" in got.value["error"]


def test_mutated_requests_are_refused_and_break_nothing(ask, monkeypatch, capfd) -> None:
    """Bytes are changed, left out and added; none is a fault of this program, and nothing is printed."""
    monkeypatch.setattr(server, "HEAD_SECONDS", 0.05)
    monkeypatch.setattr(app, "BODY_SECONDS", 0.05)
    draw, statuses = random.Random(0), set()
    body = b'{"words": "a boat", "k": 3}'
    whole = (
        f"POST /search?x=1 HTTP/1.1\r\nHost: 127.0.0.1:{ask.port}\r\nAuthorization: Bearer {KEY}\r\n"
        f"Origin: http://127.0.0.1:{ask.port}\r\nCookie: a=b; ease-1=c\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    ).encode() + body
    for _ in range(200):
        changed = bytearray(whole)
        for _ in range(draw.randint(0, 3)):
            place = draw.randrange(len(changed))
            changed[place : place + draw.randint(0, 2)] = bytes(draw.choices(range(256), k=draw.randint(0, 2)))
        with ask.connect(bytes(changed)) as line:
            with suppress(ConnectionError):
                if (got := line.recv(1000)).startswith(b"HTTP/1.1 "):
                    statuses.add(int(got[9:12]))
    assert {200, 400} <= statuses and 500 not in statuses, statuses
    assert ask("/health").status == 200
    assert capfd.readouterr().err == ""


def test_every_route_is_described_and_answers_as_it_is_described(ask) -> None:
    described = ask("/openapi.json", key=None).value
    assert described["openapi"] == "3.1.0" and described["info"]["version"] == package.__version__
    named = set(re.findall(r'"\$ref": "#/components/schemas/(\w+)"', json.dumps(described)))
    assert {"SearchRequest", "SearchResponse", "EncodeResponse", "Health", "Problem"} <= named
    assert named <= described["components"]["schemas"].keys()
    listed = ask("/nowhere").value["error"].partition(": ")[2].split(", ")
    assert sorted(described["paths"]) == sorted(listed)
    for path, operations in described["paths"].items():
        assert ask(path, "DELETE").headers["Allow"] == ", ".join(each.upper() for each in operations)
    (words, *others) = described["paths"]["/search"]["get"]["parameters"]
    assert words["name"] == "words" and words["required"] and not any(each["required"] for each in others)
    SearchResponse.model_validate_json(ask("/search?words=boat&pictures=true").content)
    EncodeResponse.model_validate_json(ask("/encode?text=boat").content)
    Health.model_validate_json(ask("/health").content)


def test_a_public_server_shows_no_picture(serve, one_forgotten: Path) -> None:
    ask = serve(one_forgotten, host="0.0.0.0")
    assert ask("/search?words=boat").status == 200
    assert ask("/search?words=boat&pictures=true").status == 403
    assert b"<img" not in ask("/?words=boat").content


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (("--host", "0.0.0.0"), "add --public"),
        (("--host", "192.0.2.1"), "add --public"),
        (("--host", "0.0.0.0", "--public", "--no-key"), "--no-key"),
        (("--host", "192.0.2.1", "--public"), "cannot listen there"),
        (("--request", "client-9"), "client-9: no finished request"),
    ],
)
def test_a_server_that_cannot_be_is_one_line(ease, one_forgotten: Path, options: tuple[str, ...], part: str) -> None:
    result = ease("serve", one_forgotten, *options)
    assert result.code == 2 and result.out == "" and result.err.count("\n") == 1 and part in result.err


def test_without_the_extra_one_line_says_what_to_install(ease, one_forgotten: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    result = ease("serve", one_forgotten)
    assert result.code == 2 and result.out == "" and result.err.count("\n") == 1
    assert 'pip install "ease-unlearning[serve]"' in result.err


def test_a_folder_with_nothing_to_serve_is_one_line(ease, tmp_path: Path) -> None:
    result = ease("serve", tmp_path)
    assert result.code == 2 and "neither a run nor an export" in result.err


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (1200, "dark"), (390, "dark")])
def test_people_search_in_a_browser(
    serve, one_forgotten: Path, browser: Any, barriers: Callable[[Any], list[str]], width: int, scheme: str
) -> None:
    ask = serve(one_forgotten, "client-1/finetune", key="plain")
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page, said, sought = context.new_page(), [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("request", lambda request: sought.append(request.url))
    page.goto(f"http://127.0.0.1:{ask.port}/?key=plain")
    assert page.url == f"http://127.0.0.1:{ask.port}/", "the key is in no history"
    page.get_by_label("What to look for").fill("a green boat")
    page.keyboard.press("Enter")
    page.wait_for_selector("li img")
    assert page.locator("section").count() == 2 and page.locator("li").count() == 24
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert said == [] and all(url.startswith((f"http://127.0.0.1:{ask.port}/", "data:")) for url in sought)
    assert barriers(page) == []
    paper = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert (paper == "rgb(21, 24, 28)") == (scheme == "dark")
    page.emulate_media(media="print", color_scheme=scheme)
    assert page.evaluate("getComputedStyle(document.documentElement).backgroundColor") == "rgb(255, 255, 255)"
    assert not page.locator("form").is_visible()
    context.close()
