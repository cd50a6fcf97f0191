"""Sites that hold their own pairs, for tests: three folders of clients, one of the server, and nodes for them."""

import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from PIL import Image

from ease.commands.federation import make_node
from ease.data.pairs import PairSet
from ease.data.scenes import load_scenes
from ease.federation.node import Node, listen, serve
from ease.federation.remote import Remote, Sockets, node_socket
from ease.methods import make_method
from ease.requests.request import Request
from ease.runs.answers import open_world, release
from ease.runs.config import load_config
from ease.runs.forget import forget
from ease.runs.run import Run
from ease.storage import sha256

SIZES = {"a": 34, "b": 22, "c": 14}
"""Sites, in the order of their numbers, and how many pictures each has."""
TESTS = 20
FOLDER = ("data.name=folder", "partition.classes=2", "partition.validation_share=0.3", "training.rounds=3")
APART = ("partition.scheme=on_site", "partition.clients=3", "engine=nodes")


def draw(folder: Path, pairs: PairSet, places: dict[str, int], **columns: str) -> list[str]:
    """Some of the pictures under names of their own, and the list of them."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for name, place in places.items():
        Image.fromarray(pairs.pixels[place]).save(folder / f"{name}.png")
        lines.append(json.dumps({"image": f"{name}.png", "captions": pairs.captions[place], "id": name, **columns}))
    with (folder / "captions.jsonl").open("a") as file:
        file.write("".join(f"{line}\n" for line in lines))
    return lines


@dataclass
class Sites:
    """Three folders of clients, one of the server, and one with everything, for comparison."""

    folder: Path
    small: tuple[str, ...]
    nodes: dict[int, Node]

    def assignments(self, *changes: str) -> tuple[str, ...]:
        federation = f"federation={self.folder / 'fed'}"
        return (*self.small, *FOLDER, *APART, federation, f"data.path={self.server}", *changes)

    def config(self, *changes: str):
        return load_config(None, self.assignments(*changes))

    @property
    def server(self) -> Path:
        return self.folder / "server"

    def begun(self, name: str = "apart") -> Run:
        return Run.create(self.folder / name, self.config())

    def trained(self, name: str = "apart") -> Run:
        run = Run.plan(self.folder / name, self.config())
        world = open_world(run)
        run = Run.create(run.folder, run.config)
        list(run.train(world))
        return run

    def pooled(self) -> Run:
        changes = ("partition.scheme=sites", f"data.path={self.folder / 'all'}", "engine=sequential")
        run = Run.create(self.folder / "pooled", load_config(None, (*self.small, *FOLDER, *changes)))
        list(run.train(open_world(run)))
        return run

    def node(self, client: int) -> Node:
        """What `ease node --id N --data FOLDER` would make now."""
        site = sorted(SIZES)[client]
        config = self.config(f"data.path={self.folder / site}")
        return make_node(config, client, self.folder / "disks" / site, quiet=True)

    def remote(self, **more) -> Remote:
        nothing = dict.fromkeys(range(3), ())
        line = Sockets({client: node_socket(self.folder / "fed", client) for client in range(3)})
        return Remote(line, nothing, nothing, "ab" * 16, backbone=self.nodes[0].backbone, **more)


def draw_sites(folder: Path) -> None:
    """Pictures of every site, of the server, and of all together."""
    pairs = load_scenes(0, sum(SIZES.values()), 0, TESTS)
    left = iter(range(len(pairs)))
    for site, size in SIZES.items():
        places = {f"{site}{number}": next(left) for number in range(size)}
        for where in (site, "all"):
            draw(folder / where, pairs, places, site=site, split="train")
    places = {f"t{number}": next(left) for number in range(TESTS)}
    for where in ("server", "all"):
        draw(folder / where, pairs, places, split="test")


@contextmanager
def serving(drawn: Path, folder: Path, settings: tuple[str, ...]) -> Iterator[Sites]:
    """The sites with their nodes in threads of this process, each with a socket of its own."""
    shutil.copytree(drawn, folder)
    made, lines = Sites(folder, settings, {}), []
    for client in range(len(SIZES)):
        node = made.nodes[client] = made.node(client)
        lines.append(listen(node_socket(made.folder / "fed", client)))
        threading.Thread(target=serve, args=(node, lines[-1]), daemon=True).start()
    try:
        yield made
    finally:
        for line in lines:
            line.close()


@contextmanager
def lasting(drawn: Path, folders: pytest.TempPathFactory, settings: tuple[str, ...], cache: Path) -> Iterator[Sites]:
    """The same for all tests of a module, which share a cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EASE_CACHE", str(cache))
        with serving(drawn, folders.mktemp("sites") / "w", settings) as made:
            yield made


def states(run: Run) -> dict[str, str]:
    return {str(path.relative_to(run.folder)): sha256(path) for path in sorted(run.folder.rglob("*.safetensors"))}


def close(run: Run, request: Request) -> None:
    """Answer a request and release the answer."""
    answered(run, request)
    release(run, run.unreleased()[0])


def answered(run: Run, request: Request, method: str = "ease") -> list[dict[str, float]]:
    return [metrics for _, metrics in forget(run, open_world(run), request, make_method(method))]
