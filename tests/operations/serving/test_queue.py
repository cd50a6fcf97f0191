"""The queue page: it shows what the ledger says, decides only where that is allowed, and works in a browser."""

import http.client
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from tests.operations.ledger.test_work import add, kept, listed, run, run_json
from tests.operations.serving.test_serving import Got

from ease.operations.ledger.people import Person
from ease.operations.ledger.store import Ledger
from ease.operations.serving.queue import Queue
from ease.operations.serving.served import open_served
from ease.operations.serving.server import Server
from ease.runs.run import Run

__all__ = ["kept", "run"]  # fixtures
KEY = "a-key-of-this-test"
DPO = Person("the officer")
Serve = Callable[..., "Desk"]


class Desk:
    """A server of a run with its queue, and what asks it."""

    def __init__(self, folder: Path, decider: Person | None) -> None:
        self.server = Server(open_served(folder, None), "127.0.0.1", 0, KEY, Queue.of(folder, decider))
        self.address = self.server.address
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()

    def ask(self, path: str, form: dict[str, str] | None = None, **headers: str) -> Got:
        line = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=20)
        sent = {"Cookie": f"ease-{self.server.port}={KEY}"}
        body = None
        if form is not None:
            body = urlencode(form)
            sent["Content-Type"] = "application/x-www-form-urlencoded"
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        line.request("GET" if form is None else "POST", path, body, sent)
        got = Got(line.getresponse())
        line.close()
        return got

    def token(self, id: str) -> str:
        found = re.search(rb'name="token" value="(\w+)"', self.ask(f"/queue/{id}").content)
        assert found
        return found[1].decode()

    def text(self, path: str) -> str:
        return self.ask(path).content.decode()


@pytest.fixture
def serve() -> Iterator[Serve]:
    desks: list[Desk] = []

    def start(folder: Path, decider: Person | None = None) -> Desk:
        desks.append(Desk(folder, decider))
        return desks[-1]

    yield start
    for each in desks:
        each.server.stop()
    for each in desks:
        each.thread.join(timeout=20)


@pytest.fixture
def filled(ease, run: Path) -> Path:
    """One request that is overdue, one due later, and one that is done and certified."""
    add(ease, run, "--client", 1, "--by", "site one", id="done-1")
    run_json(ease, "work", run)
    run_json(ease, "certificate", run, "--request", "client-1")
    add(ease, run, "--client", 2, "--due", "2020-01-31", id="late-2", approve=False)
    add(ease, run, "--client", 3, "--by", "<b>Eve</b>", "--reason", "moved away", id="later-3", approve=False)
    return run


def test_the_list_goes_by_urgency_and_says_it_in_words(serve: Serve, filled: Path) -> None:
    page = serve(filled).text("/queue")
    places = [page.index(f"/queue/{id}") for id in ("late-2", "later-3", "done-1")]
    assert places == sorted(places) and "Overdue since 2020-01-31" in page
    assert re.findall(r'<article class="(\w+)"', page) == ["overdue", "later", "closed"]
    assert "&lt;b&gt;Eve" in page and "<b>Eve" not in page and "<script" not in page


def test_a_request_shows_impact_steps_answer_and_certificate(serve: Serve, filled: Path) -> None:
    desk = serve(filled)
    still_open, done = desk.text("/queue/later-3"), desk.text("/queue/done-1")
    assert "training pairs" in still_open and "moved away" in still_open and "read-only" in still_open
    assert "<form" not in still_open and "No audit: " in done and "/queue/done-1/certificate" in done
    certificate = desk.ask("/queue/done-1/certificate")
    assert certificate.status == 200 and b"Is this certificate unchanged?" in certificate.content
    assert "sha256-" in certificate.headers["Content-Security-Policy"]
    assert "script" not in desk.ask("/queue").headers["Content-Security-Policy"]
    assert desk.ask("/queue/later-3/certificate").status == 400
    assert desk.ask("/queue/nothing").status == 400


def test_pairs_outside_training_and_how_far_a_held_request_is_are_shown(
    ease, serve: Serve, filled: Path, tmp_path: Path
) -> None:
    known = Run.load(filled).known()
    assert known is not None
    add(ease, filled, "--samples", listed(tmp_path, [known[0].test[0]]), id="test-pair", approve=False)
    desk = serve(filled)
    page = desk.text("/queue/test-pair")
    assert "0 of" in page and "1 test pair, on which no model was trained" in page and "rounds</dd>" not in page
    Ledger(filled).approve("later-3", "bo")
    Ledger(filled).claim("w", together=False)
    Ledger(filled).finish(["later-3"], "held", "w", "its audit did not pass")
    assert desk.text("/queue/later-3").count('class="reached"') == 3


def test_a_read_only_page_accepts_no_decision(serve: Serve, filled: Path) -> None:
    desk = serve(filled)
    got = desk.ask("/queue/late-2/approve", {"token": "x"})
    assert got.status == 403 and "read-only" in got.value["error"]
    assert Ledger(filled).entry("late-2").state == "submitted"


def test_a_decision_is_recorded_in_the_name_of_the_officer(serve: Serve, filled: Path) -> None:
    desk = serve(filled, DPO)
    got = desk.ask("/queue/later-3/approve", {"token": desk.token("later-3")})
    assert got.status == 303 and got.headers["Location"] == "/queue/later-3"
    assert Ledger(filled).events("later-3")[-1].by == "the officer"
    empty = desk.ask("/queue/late-2/refuse", {"token": desk.token("late-2"), "reason": " "})
    assert empty.status == 409 and b"--reason" in empty.content and Ledger(filled).entry("late-2").is_open
    reason = {"token": desk.token("late-2"), "reason": "the site did not ask for this"}
    assert desk.ask("/queue/late-2/refuse", reason).status == 303
    assert Ledger(filled).entry("late-2").why == "the site did not ask for this"


def test_forms_of_others_and_of_an_older_page_change_nothing(serve: Serve, filled: Path) -> None:
    """Another site, no token, the token of another request, of another server, and of a page that is out of date."""
    desk = serve(filled, DPO)
    token = desk.token("late-2")
    for headers in ({"Origin": "https://evil.example"}, {"Sec_Fetch_Site": "cross-site"}, {"Cookie": ""}):
        assert desk.ask("/queue/late-2/approve", {"token": token}, **headers).status in (401, 403)
    for wrong in ("", "0" * 64, desk.token("later-3"), serve(filled, DPO).token("late-2")):
        assert desk.ask("/queue/late-2/approve", {"token": wrong}).status == 409
    assert Ledger(filled).entry("late-2").state == "submitted"
    stale = desk.token("later-3")
    Ledger(filled).extend("later-3", 5, "somebody", "many pairs")
    got = desk.ask("/queue/later-3/refuse", {"token": stale, "reason": "no"})
    assert got.status == 409 and b"has changed since you opened the page" in got.content
    assert desk.ask("/queue/late-2/approve", {"token": token, "more": "x" * 40000}).status == 413
    assert desk.ask("/queue/late-2/approve", {"token": token}, Content_Type="text/plain").status == 415


def test_two_people_are_asked_for_where_the_policy_wants_two(serve: Serve, filled: Path) -> None:
    with (filled / "policy.toml").open("a") as policy:
        policy.write("[approval]\npeople = 2\n")
    desk = serve(filled, DPO)
    assert desk.ask("/queue/late-2/approve", {"token": desk.token("late-2")}).status == 303
    assert Ledger(filled).entry("late-2").state == "submitted"
    again = desk.ask("/queue/late-2/approve", {"token": desk.token("late-2")})
    assert again.status == 409 and b"another person has to" in again.content


def test_metrics_count_answers_by_route_and_requests_by_state(serve: Serve, filled: Path) -> None:
    desk = serve(filled)
    desk.ask("/queue/late-2")
    desk.ask("/queue/nothing")
    found = desk.text("/metrics")
    assert 'ease_http_requests_total{path="/queue/{id}",status="200"} 1.0' in found
    assert 'ease_http_requests_total{path="/queue/{id}",status="400"} 1.0' in found
    assert 'ease_requests{state="done"} 1.0' in found and 'ease_requests{state="submitted"} 2.0' in found
    assert 'ease_requests_due{urgency="overdue"} 1.0' in found and "late-2" not in found
    assert desk.ask("/metrics", Cookie="").status == 401


# --- in a browser ---

Open = Callable[..., Any]


@pytest.fixture
def window(browser: Any) -> Iterator[Open]:
    """Open a page of a desk with its key; nothing may be complained about and nothing else asked for."""
    contexts: list[Any] = []
    complaints: list[str] = []
    asked: list[str] = []

    def open_page(desk: Desk, path: str = "/queue", width: int = 1280, scheme: str = "light") -> Any:
        contexts.append(browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme))
        opened = contexts[-1].new_page()
        opened.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
        opened.on("pageerror", lambda error: complaints.append(str(error)))
        opened.on("request", lambda request: asked.append(request.url))
        opened.goto(f"{desk.address}/queue?key={KEY}")
        assert "key=" not in opened.url
        if path != "/queue":
            opened.goto(desk.address + path)
        return opened

    yield open_page
    for each in contexts:
        each.close()
    assert [each for each in complaints if "favicon" not in each] == []
    assert [url for url in asked if not url.startswith(("http://127.0.0.1:", "data:"))] == []


@pytest.mark.slow
def test_an_officer_can_decide_by_keyboard(window: Open, serve: Serve, filled: Path) -> None:
    opened = window(serve(filled, DPO))

    def tab_to(name: str) -> None:
        for _ in range(30):
            opened.keyboard.press("Tab")
            if name in opened.evaluate("document.activeElement.innerText || document.activeElement.id || ''"):
                style = opened.evaluate("getComputedStyle(document.activeElement).outlineStyle")
                assert style in ("solid", "auto")
                return
        raise AssertionError(f"{name} cannot be reached")

    tab_to("late-2")
    opened.keyboard.press("Enter")
    opened.wait_for_url("**/queue/late-2")
    tab_to("reason")
    opened.keyboard.type("the site did not ask for this")
    opened.keyboard.press("Enter")
    opened.get_by_text("refused: the site did not ask for this").first.wait_for()
    assert Ledger(filled).entry("late-2").state == "refused"
    opened.goto(opened.url.replace("late-2", "later-3"))
    tab_to("Approve")
    opened.keyboard.press("Enter")
    opened.locator("[aria-current=step]", has_text="approved").wait_for()
    assert Ledger(filled).entry("later-3").state == "approved"


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")])
def test_every_page_is_readable_at_every_width_and_without_barriers(
    window: Open, serve: Serve, filled: Path, barriers: Callable[[Any], list[str]], width: int, scheme: str
) -> None:
    desk = serve(filled, DPO)
    for path in ("/queue", "/queue/late-2", "/queue/done-1"):
        opened = window(desk, path, width, scheme)
        assert opened.evaluate("document.documentElement.scrollWidth") <= width, path
        assert barriers(opened) == [], path
        small = opened.evaluate("[...document.querySelectorAll('button')].filter(b => b.offsetHeight < 44).length")
        assert small == 0, path


@pytest.mark.slow
def test_the_certificate_checks_itself_behind_the_server(window: Open, serve: Serve, filled: Path) -> None:
    opened = window(serve(filled), "/queue/done-1/certificate")
    opened.locator("#check.good").wait_for()
