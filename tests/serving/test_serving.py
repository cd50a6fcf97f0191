"""`ease serve`: it finds what the model finds and nothing that is forgotten, and answers only whom it should."""

import http.client
import io
import json
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import ease as package
from ease.errors import UserError
from ease.ledger.purging import purge_released
from ease.runs.answers import StoredAnswer, open_world, release
from ease.runs.export import export
from ease.runs.run import Run
from ease.runs.using import Source, encode_image, encode_text, search
from ease.serving import http as serving
from ease.serving.http import Server
from ease.serving.served import open_served

KEY = "a key of this test"
Ask = Callable[..., "Got"]


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


@pytest.fixture
def serve() -> Iterator[Callable[..., Ask]]:
    """Serve a folder in this process; what comes back asks it."""
    servers: list[Server] = []

    def start(folder: Path, request: str | None = None, host: str = "127.0.0.1", key: str | None = KEY) -> Ask:
        servers.append(Server(open_served(folder, request), host, 0, key))
        threading.Thread(target=servers[-1].serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        port = servers[-1].server_port

        def ask(path: str, method: str = "GET", body: Any = None, key: str | None = KEY, **headers: str) -> Got:
            line = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
            if isinstance(body, dict | list):
                body, headers = json.dumps(body).encode(), {"Content-Type": "application/json", **headers}
            told = {name.replace("_", "-"): value for name, value in headers.items()}
            if key is not None:
                told["Authorization"] = f"Bearer {key}"
            line.request(method, path, body, told)
            got = Got(line.getresponse())
            line.close()
            return got

        ask.port = port  # type: ignore[attr-defined]
        return ask

    yield start
    for each in servers:
        each.shutdown()
        each.server_close()


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
    told = ask("/encode", "POST", {"texts": texts}).value
    torch.testing.assert_close(torch.tensor(told["embeddings"]), encode_text(source, texts))
    (alone,) = ask("/encode?text=a+boat").value["embeddings"]
    torch.testing.assert_close(torch.tensor(alone), encode_text(source, "a boat")[0])
    picture = jpeg()
    got = ask("/encode", "POST", picture, Content_Type="image/jpeg")
    torch.testing.assert_close(torch.tensor(got.value["embeddings"]), encode_image(source, memoryview(picture)))


def test_health_names_model_release_and_version(serve, run: Path) -> None:
    """Without the key too, for whoever watches over it: there is nothing private in it."""
    ask, opened = serve(run), Run.load(run)
    record = opened.history.record(opened.history.rounds())
    before = ask("/health", key=None).value
    assert before["model"] == record["sha256"]["state.safetensors"] and before["release"] is None
    assert before["version"] == package.__version__ and before["pairs"] == len(open_world(opened).evaluator.pairs)
    release(opened, "client-1/finetune")
    after = ask("/health", key=None).value
    assert after["release"] == "client-1/finetune" and after["releases"] == 1
    assert after["model"] == Run.load(run).head.releases[0].model_sha256


def test_what_is_forgotten_is_never_found_again(serve, run: Path) -> None:
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
    named = set(open_world(Run.load(run)).evaluator.shards[1].train_ids)
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
    told = ask("/encode?text=a+boat").value
    torch.testing.assert_close(torch.tensor(told["embeddings"]), encode_text(source, "a boat"))
    assert ask("/health").value["request"] == "client-1/finetune"
    refused = ask("/search?words=boat")
    assert refused.status == 400 and "serve the run" in refused.value["error"]
    assert "serve the run" in ask("/?words=boat").content.decode()
    stored = StoredAnswer(run / "requests" / "client-1" / "finetune").model_path
    shutil.copy(stored, folder / "model.safetensors")  # no header that says what it is
    with pytest.raises(UserError, match="not of an export"):
        open_served(folder, None)


def test_pages_need_the_key_and_keep_it_out_of_the_address(serve, one_forgotten: Path) -> None:
    ask = serve(one_forgotten)
    for path in ("/", "/search?words=boat", "/encode?text=boat", "/nowhere"):
        for key in (None, "wrong"):
            assert ask(path, key=key).status == 401
    assert ask("/?key=wrong", key=None).status == 401
    opened = ask(f"/?key={KEY.replace(' ', '+')}", key=None)
    assert opened.status == 303 and opened.headers["Location"] == "/"
    cookie = opened.headers["Set-Cookie"]
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie


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
        ("/search", "POST", ["words"], {}, 400, "no JSON object"),
        ("/search", "POST", b"[" * 100_000, {"Content_Type": "application/json"}, 400, "no JSON"),
        ("/search", "POST", b"{}", {"Content_Type": "text/plain"}, 415, "application/json"),
        ("/search", "DELETE", None, {}, 405, "GET, POST"),
        ("/encode", "POST", {"texts": []}, {}, 400, "texts"),
        ("/encode", "POST", {"texts": ["a"] * 65}, {}, 400, "texts"),
        ("/encode", "POST", {"texts": ["a" * 2001]}, {}, 400, "2000 letters"),
        ("/encode", "GET", None, {}, 400, "no empty one"),
        ("/encode", "POST", b"no picture", {"Content_Type": "image/png"}, 400, "not an image"),
        ("/encode", "POST", jpeg()[:200], {"Content_Type": "image/jpeg"}, 400, "cannot be read as a picture"),
        ("/encode", "POST", b"", {"Content_Type": "image/png", "Transfer_Encoding": "chunked"}, 411, "Content-Length"),
        ("/../run.json", "GET", None, {}, 404, "nothing here"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(
    serve, one_forgotten: Path, path: str, method: str, body: Any, headers: dict[str, str], status: int, part: str
) -> None:
    got = serve(one_forgotten)(path, method, body, **headers)
    assert got.status == status and part in got.value["error"]


def test_sizes_are_known_before_anything_is_read(serve, one_forgotten: Path, monkeypatch) -> None:
    """The first by what is announced, of which nothing is sent; the second by the picture's first bytes."""
    ask = serve(one_forgotten)
    line = http.client.HTTPConnection("127.0.0.1", ask.port, timeout=20)
    line.putrequest("POST", "/encode")
    for name, value in {
        "Authorization": f"Bearer {KEY}",
        "Content-Type": "image/jpeg",
        "Content-Length": str(serving.LARGEST_PICTURE + 1),
    }.items():
        line.putheader(name, value)
    line.endheaders()
    got = Got(line.getresponse())
    line.close()
    assert got.status == 413 and "at most 20,971,520" in got.value["error"]
    monkeypatch.setattr(serving, "MOST_PIXELS", 1199)
    got = ask("/encode", "POST", jpeg(40, 30), Content_Type="image/jpeg")
    assert got.status == 400 and "1,200 pixels, at most 1,199" in got.value["error"]


def test_those_who_are_slow_are_cut_and_the_rest_is_turned_away(serve, one_forgotten: Path, monkeypatch) -> None:
    monkeypatch.setattr(serving, "SECONDS", 0.5)
    ask = serve(one_forgotten)
    slow = [socket.create_connection(("127.0.0.1", ask.port), timeout=20) for _ in range(serving.AT_ONCE)]
    for each in slow:
        each.sendall(b"GET /health HTTP/1.1\r\nHost:")
    with socket.create_connection(("127.0.0.1", ask.port), timeout=20) as further:
        assert b" 503 " in further.recv(100)
    for each in slow:
        assert each.recv(100) == b""
        each.close()
    assert ask("/health").status == 200


def test_where_others_can_reach_it_no_picture_is_shown(serve, one_forgotten: Path) -> None:
    ask = serve(one_forgotten, host="0.0.0.0")
    assert ask("/search?words=boat").status == 200
    assert ask("/search?words=boat&pictures=true").status == 403
    assert b"<img" not in ask("/?words=boat").content


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (("--host", "0.0.0.0"), "say --public"),
        (("--host", "192.0.2.1"), "say --public"),
        (("--host", "0.0.0.0", "--public", "--no-key"), "--no-key"),
        (("--host", "192.0.2.1", "--public"), "cannot listen there"),
        (("--request", "client-9"), "client-9: no finished request"),
    ],
)
def test_a_server_that_cannot_be_is_one_line(ease, one_forgotten: Path, options: tuple[str, ...], part: str) -> None:
    result = ease("serve", one_forgotten, *options)
    assert result.code == 2 and result.out == "" and result.err.count("\n") == 1 and part in result.err


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
