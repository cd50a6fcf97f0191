"""The whole life of a federation, with a process for each site: training and its failure, requests by several people,
audits before releases, a site that is gone for good, and purges that leave nothing of a person."""

import base64
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.federation.on_site import draw

from ease.data.images import decode_image
from ease.data.scenes import load_scenes
from ease.federation.remote import node_socket, spoken
from ease.federation.wire import Ask, encode
from ease.model.backbones import load_backbone
from ease.runs.run import Run

pytestmark = pytest.mark.slow
SIZES = {"north": 40, "east": 30, "south": 24, "west": 20}
"""Sites by their numbers."""
NAME = "lovelace"
"""Of the person who asks. It is in ids, in who asked and why, and in the words of a letter."""
PERSON = 3
"""Photographs of that person at the first site."""
PATIENCE = 300.0
SETTINGS = """
engine = "nodes"
federation = "{folder}/federation"
gallery = 20
[data]
name = "folder"
path = "{folder}/server"
[partition]
scheme = "on_site"
clients = 4
classes = 2
validation_share = 0.25
[model]
hidden = 32
embedding = 16
lora = "off"
[training]
rounds = 3
local_epochs = 2
batch_size = 8
quorum = 0.7
"""
POLICY = """
time_zone = "Europe/Berlin"
[hold]
retain_points = 100
[retrain]
forgotten_fraction = 1
[approval]
people = 2
signed = true
[approval.keys]
ada = "{ada}"
bo = "{bo}"
[office]
name = "Example Hospital"
[retention]
closed_days = 0
"""


@dataclass
class Life:
    """A folder with all that takes part, and the processes of the sites."""

    folder: Path
    attempt: Callable[..., tuple[int, str, str]]
    nodes: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def ease(self, *arguments: object, code: int = 0) -> str:
        """What a command prints; errors are one line."""
        found, out, err = self.attempt(*arguments)
        assert found == code, f"{arguments}: {out}{err}"
        return out + " ".join(err.split())

    def read(self, *arguments: object, code: int = 0) -> Any:
        found, out, err = self.attempt(*arguments, "--json")
        assert found == code, f"{arguments}: {out}{err}"
        return json.loads(out)

    def start(self, *sites: str) -> None:
        """Start nodes; they listen when this returns."""
        for site in sites:
            number, here = list(SIZES).index(site), self.folder
            command = [sys.executable, "-m", "ease", "node", str(here / "run.toml"), "--id", str(number)]
            command += ["--data", str(here / site), "--folder", str(here / "disks" / site)]
            command += ["--policy", str(here / "site.toml"), "--log-format", "json"]
            with (here / "logs" / f"{site}.log").open("ab") as log:
                self.nodes[site] = subprocess.Popen(command, stdout=log, stderr=log)
        until = time.monotonic() + PATIENCE
        for site in sites:
            number = list(SIZES).index(site)
            hello = encode(Ask(kind="hello", client=number, nonce="0" * 32, run="0" * 32))
            path = node_socket(self.folder / "federation", number)
            while isinstance(spoken(path, hello, time.monotonic() + PATIENCE), str):
                assert self.nodes[site].poll() is None and time.monotonic() < until, site
                time.sleep(0.2)

    def kill(self, *sites: str) -> None:
        for site in sites:
            self.nodes[site].kill()
            self.nodes.pop(site).wait()

    def ask(self, id: str, *what: object, by: str) -> None:
        """Submit a request, and let two people approve it with their keys."""
        self.ease("request", "add", self.run, *what, "--id", id, "--by", by, "--quiet")
        self.decide(id)

    def decide(self, id: str) -> None:
        alone = self.read("request", "approve", self.run, id, "--key", self.folder / "ada.key")
        assert alone["state"] in ("submitted", "held")  # one person is not enough
        again = self.ease("request", "approve", self.run, id, "--key", self.folder / "ada.key", code=2)
        assert "another person has to" in again
        self.ease("request", "approve", self.run, id, "--key", self.folder / "bo.key")

    def work(self) -> dict[str, dict[str, Any]]:
        """Answer what waits; two people accept what its audit does not pass. Every answer gets a verdict."""
        code, out, err = self.attempt("work", self.run, "--json")
        assert code in (0, 4), err
        done = {each["ids"][0]: each for each in json.loads(out)["finished"]}
        for id in [id for id, each in done.items() if each["state"] == "held"]:
            assert "read the verdict" in done[id]["why"] and not done[id]["outcome"]["passed"]
            assert f"{id}, which is held" in self.ease("release", self.run, "--request", id, code=2)
            self.decide(id)
            (done[id],) = self.read("work", self.run)["finished"]
        assert {each["state"] for each in done.values()} <= {"done"}
        return done

    def certificate(self, id: str) -> dict[str, Any]:
        path = self.folder / f"{id}.json"
        self.ease("certificate", self.run, "--request", id, "--html", "--out", path)
        found: dict[str, Any] = json.loads(base64.b64decode(json.loads(path.read_text())["payload"]))["predicate"]
        return found

    def holding(self, needle: bytes) -> list[str]:
        """Files of run, sites, caches, logs and temporary folders that hold some bytes, or are named by them."""
        places = [self.folder / each for each in ("run", "disks", "cache", "logs", "tmp", "federation")]
        files = [path for place in places for path in place.rglob("*") if path.is_file()]
        named = [path for path in files if needle in path.name.encode() or needle in path.read_bytes()]
        return sorted(path.relative_to(self.folder).as_posix() for path in named)


@pytest.fixture
def life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attempt: Callable[..., Any]) -> Iterator[Life]:
    """Photographs of four sites, of which one person is in some at the first, keys of two officers, no process yet."""
    for name in ("cache", "tmp", "logs"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("EASE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(each for each in sys.path if each))
    pairs = load_scenes(0, sum(SIZES.values()), 0, 40)
    left = iter(range(len(pairs)))
    for site, size in SIZES.items():
        names = [f"{NAME}-{each}" if site == "north" and each < PERSON else f"{site}-{each}" for each in range(size)]
        draw(tmp_path / site, pairs, {name: next(left) for name in names}, site=site, split="train")
    draw(tmp_path / "server", pairs, {f"test-{each}": next(left) for each in range(40)}, split="test")
    noise = np.random.default_rng(1)
    for number in range(PERSON):  # pixels that are in no other picture
        pixels = noise.integers(0, 256, (64, 64, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "north" / f"{NAME}-{number}.png")
    (tmp_path / "run.toml").write_text(SETTINGS.format(folder=tmp_path))
    (tmp_path / "site.toml").write_text("fewest_pairs = 2\n")
    made = Life(tmp_path, attempt)
    try:
        yield made
    finally:
        made.kill(*made.nodes)


def pixels_of(path: Path) -> bytes:
    """The beginning of a picture as caches keep it."""
    backbone = load_backbone("tiny")
    return decode_image(path, backbone.image_size, backbone.crop).pixels.tobytes()[: 3 * backbone.image_size]


def test_the_whole_life_of_a_federation(life: Life) -> None:
    here, run = life.folder, life.run
    ids = {name: life.read("keys", "new", here / f"{name}.key")["key_id"] for name in ("ada", "bo")}
    life.start("north", "east", "south", "west")
    life.ease("train", here / "run.toml", "--out", run, "--quiet")
    (run / "policy.toml").write_text(POLICY.format(**ids))

    # Two sites fail, and so does further training. The last finished round is a model to use.
    life.kill("south", "west")
    assert "are needed" in life.ease("train", "--resume", run, "--until", 4, "--quiet", code=2)
    life.ease("export", run, "--out", here / "shared", "--recipient", "Clinic 5", "--by", "ada", "--quiet")
    assert life.read("search", run, "a red boat")["found"]
    life.start("south", "west")

    # A person asks. Everything that is held is found, whatever it is used for, and one request erases all of it.
    asked = [f"{NAME}-{number}" for number in range(PERSON)]
    photographs = [here / "north" / f"{each}.png" for each in asked]
    needles = {NAME.encode(), *map(pixels_of, photographs)}
    found = life.read("request", "find", run, NAME)["pairs"]
    assert [each["id"] for each in found] == asked
    (pair,) = life.read("request", "find", run, "--image", photographs[0])["pairs"]
    assert pair["id"] == asked[0]
    members = Run.load(run).known()[0]  # type: ignore[index]
    outside = members.clients[1].validation_ids[0]
    (here / "person.txt").write_text("\n".join(asked))
    (here / "outside.txt").write_text(f"{outside}\ntest-3\n")
    life.ask("person", "--samples", here / "person.txt", "--reason", f"{NAME} moved away", by=f"Ada {NAME.title()}")
    life.ask("outside", "--samples", here / "outside.txt", by="Eve")
    assert life.read("request", "due", run, "--within", 40, code=4)["due"]
    assert NAME.title() in life.ease("request", "letter", run, "person")
    assert life.read("status", here / "federation", "--run", run, "--exit-code", code=4)["run"]["queue"]

    # An audit needs all sites, so the request waits for the one that is away and nothing is released.
    life.kill("west")
    away = life.read("work", run, code=4)["finished"]
    states = {each["ids"][0]: each["state"] for each in away}
    assert states["outside"] == "done" and states["person"] in ("pending", "held") and len(Run.load(run).head.gone) == 1
    life.start("west")
    done = life.work()
    assert done["person"]["outcome"]["verdict"] and done["person"]["outcome"]["release"] == 2
    certificate = life.certificate("person")
    assert certificate["verdict"]["words"] == done["person"]["outcome"]["verdict"]
    verified = life.ease("verify", here / "person.json", "--run", run)
    assert "nothing contradicts it" in verified and "were purged" not in verified
    assert life.read("request", "notify", run, "person")["to_notify"] == ["Clinic 5"]
    life.ease("request", "notify", run, "person", "--recipient", "Clinic 5", "--key", here / "ada.key")
    assert "Clinic 5" in life.ease("request", "letter", run, "person")
    assert "No model was trained on your data" in life.ease("request", "letter", run, "outside")

    # A site is gone for good. Purges pass once a person has recorded that, and certificates name what is outstanding.
    life.kill("west")
    shutil.rmtree(here / "disks" / "west")
    assert "client 3: no node answers" in life.ease("purge", run, code=2)
    lost = ("--lost-site", "west", "--reason", "closed, disks destroyed", "--by", "ada")
    assert "client 3 is gone for good" in life.ease("purge", run, *lost)
    life.ask("left", "--client", "west", by="site west")
    life.ease("work", run, "--no-audit")
    assert life.certificate("left")["outstanding"]
    life.ease("purge", run)
    assert life.read("request", "find", run, "--image", photographs[0])["not_asked"] == [3]
    assert life.read("status", here / "federation", "--exit-code", "--run", run)["nodes"][3]["state"] == "gone for good"

    # Nothing of the person is left, with photographs still on the site's disk, also after the node starts again.
    life.kill("north")
    life.start("north")
    assert {each["split"] for each in life.read("request", "find", run, "--ids", here / "person.txt")["pairs"]} == {
        "purged"
    }
    for needle in (*needles, NAME.title().encode()):
        assert life.holding(needle) == []
