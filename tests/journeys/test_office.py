"""The officer's page as printed: every command runs with the ids that it shows. Screenshots are made of what results.

`EASE_SCREENS=write pytest -m slow tests/journeys/test_office.py` writes the pictures of docs/screens anew.
"""

import io
import os
import re
import shlex
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tests.fixtures import LEARNT

from ease.operations.ledger.people import Person
from ease.operations.ledger.store import Ledger
from ease.operations.serving.queue import Queue
from ease.operations.serving.served import open_served
from ease.operations.serving.server import Server

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
SCREENS = ROOT / "docs" / "screens"
PAGE = (ROOT / "docs" / "officer.md").read_text()
COMMANDS = re.findall(r"^ease (.*)$", PAGE.split("## The life of a request")[1].split("```")[1], re.MULTILINE)
POLICY = """
time_zone = "Europe/Berlin"
[hold]
retain_points = 100
[retrain]
forgotten_fraction = 1
[office]
name = "Example Hospital"
contact = "dpo@example.org"
authority = "the supervisory authority"
"""
LARGEST = 1_500_000
"""Bytes of all pictures in the documents."""


@dataclass(frozen=True)
class Office:
    folder: Path
    before_purge: Path
    said: dict[str, tuple[int, str, str]]
    """Command of the page -> exit code and both streams."""


@pytest.fixture(scope="module")
def office(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path, attempt: Callable[..., Any]) -> Office:
    """Run every command of the page in order, in the folder above a small run."""
    folder = tmp_path_factory.mktemp("office")
    before = tmp_path_factory.mktemp("before") / "office"
    said = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EASE_CACHE", str(shared_cache))
        patch.chdir(folder)
        settings = [word for each in (*LEARNT, "data.test=800") for word in ("--set", each)]
        assert attempt("train", "--out", "runs/first", "--quiet", *settings)[0] == 0
        (folder / "runs" / "first" / "policy.toml").write_text(POLICY)
        for line in COMMANDS:
            if line.startswith("purge"):
                shutil.copytree(folder, before)
            said[line] = attempt(*shlex.split(line))
    return Office(folder, before, said)


def test_every_command_of_the_page_works_with_the_ids_that_it_shows(office: Office) -> None:
    assert len(COMMANDS) > 15
    failed = {line: streams for line, (code, *streams) in office.said.items() if code != 0}
    assert failed == {}
    ledger = Ledger(office.folder / "runs" / "first")
    assert [each.id for each in ledger.entries()] == ["site-1"] and ledger.entry("site-1").state == "done"


def test_letters_register_and_verdict_say_what_happened(office: Office) -> None:
    letters = {name: (office.folder / f"{name}.txt").read_text() for name in ("received", "extended", "answer")}
    assert "We have received your request" in letters["received"]
    assert "three sites have to answer" in letters["extended"] and "authority" in letters["extended"]
    assert "We have done what you asked" in letters["answer"] and "Clinic 5" in letters["answer"]
    register = (office.folder / "register" / "register.csv").read_text()
    assert "site-1" in register and "Clinic 5" in register
    listed = office.said["ease request notify runs/first site-1".removeprefix("ease ")][1]
    assert "still to notify: Clinic 5" in listed
    verified = office.said["verify certificate.json --run runs/first"][1]
    assert "nothing contradicts it" in verified and "holds: ledger" in verified


# --- pictures ---


@pytest.fixture(scope="module")
def desk(office: Office, attempt: Callable[..., Any], shared_cache: Path) -> Iterator[tuple[str, Path]]:
    """The queue of the run before its purge with more requests, and the folder in which page and certificate are."""
    run = office.before_purge / "runs" / "first"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EASE_CACHE", str(shared_cache))
        for client, days in ((0, -2), (2, 5), (3, 26)):
            due = date.today() + timedelta(days)
            words = ["--client", client, "--by", f"site {client}", "--ground", "GDPR art. 17(1)(b)", "--due", due]
            assert attempt("request", "add", run, *words, "--id", f"site-{client}", "--quiet")[0] == 0
        assert attempt("request", "approve", run, "site-2", "--by", "the officer")[0] == 0
        assert attempt("report", run, "--out", office.before_purge / "report.html", "--quiet")[0] == 0
        server = Server(open_served(run, None), "127.0.0.1", 0, None, Queue.of(run, Person("the officer")))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        yield server.address, office.before_purge
        server.stop()
        thread.join(timeout=20)


def shots() -> Iterator[tuple[str, int, str, str]]:
    """Name, width, colour scheme and medium of every picture of a page."""
    for width in (1280, 390):
        for scheme in ("light", "dark"):
            yield f"{width}-{scheme}", width, scheme, "screen"
    yield "print", 794, "light", "print"


def test_pages_are_pictured_for_the_documents(desk: tuple[str, Path], browser: Any, tmp_path: Path) -> None:
    """Nothing is wider than the screen, dark is dark, paper is white, and the documents have exactly these pictures."""
    address, folder = desk
    pages = {
        "queue": f"{address}/queue",
        "report": (folder / "report.html").as_uri(),
        "certificate": (folder / "certificate.html").as_uri(),
    }
    made = {}
    for page, url in pages.items():
        for name, width, scheme, medium in shots():
            context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
            opened = context.new_page()
            opened.goto(url)
            opened.emulate_media(media=medium, color_scheme=scheme)
            assert opened.evaluate("document.documentElement.scrollWidth") <= width, (page, name)
            picture = Image.open(io.BytesIO(opened.screenshot())).convert("RGB")
            context.close()
            grey = picture.convert("L").resize((1, 1), Image.Resampling.BOX).getpixel((0, 0))
            assert isinstance(grey, int) and (grey < 80 if scheme == "dark" else grey > 190), (page, name, grey)
            assert len(picture.getcolors(1 << 20) or []) > 16, (page, name)
            made[f"{page}-{name}.png"] = picture.quantize(128, dither=Image.Dither.NONE)
    for name, picture in made.items():
        picture.save(tmp_path / name, optimize=True)
    if os.environ.get("EASE_SCREENS") == "write":
        shutil.rmtree(SCREENS, ignore_errors=True)
        shutil.copytree(tmp_path, SCREENS)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < LARGEST
    assert {path.name for path in SCREENS.iterdir()} == set(made)
    for name, picture in made.items():
        with Image.open(SCREENS / name) as known:
            assert known.size == picture.size and f"(screens/{name})" in PAGE
