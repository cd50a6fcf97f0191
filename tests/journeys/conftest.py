"""What the journeys share: the command as a person types it, photographs with names of sites, and an answered run."""

import io
import json
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ease.cli import main
from ease.data.scenes import lexicon

SITES = ("north", "east", "south", "west", "harbour")
PER_SITE, TESTED = 28, 60
SETTINGS = """
gallery = 20

[data]
name = "folder"
path = "photos"

[partition]
scheme = "sites"
classes = 3
validation_share = 0.2

[model]
hidden = 32
embedding = 16

[training]
rounds = 3
local_epochs = 2
batch_size = 8
"""


def typed(*arguments: object) -> str:
    """What a command prints on standard output; it must end well."""
    code, out, err = attempted(*arguments)
    assert code == 0, f"{arguments}: {out}{err}"
    return out


def attempted(*arguments: object) -> tuple[int, str, str]:
    """Exit code and both streams of a command, in this process, which spares the imports."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["ease", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
    assert isinstance(ended.value.code, int)
    return ended.value.code, out.getvalue(), err.getvalue()


def take_photographs(folder: Path) -> list[dict[str, Any]]:
    """Small pictures of coloured squares, with captions that the tiny tower can read, of five sites."""
    folder.mkdir(parents=True)
    draw, words = np.random.default_rng(0), lexicon()
    entries: list[dict[str, Any]] = []
    for number in range(len(SITES) * PER_SITE + TESTED):
        pixels = draw.integers(0, 256, (4, 4, 3), dtype=np.uint8).repeat(16, 0).repeat(16, 1)
        Image.fromarray(pixels).save(folder / f"{number:03d}.png")
        caption = " ".join(words[index] for index in draw.choice(len(words), 5, replace=False))
        trained = number < len(SITES) * PER_SITE
        site = SITES[number // PER_SITE] if trained else "north"
        entries.append(
            {
                "image": f"{number:03d}.png",
                "caption": caption,
                "split": "train" if trained else "test",
                "site": site,
            }
        )
    (folder / "captions.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return entries


@dataclass(frozen=True)
class Answered:
    """A run of photographs whose four requests were answered."""

    folder: Path
    run: Path
    listed: list[dict[str, Any]]
    """The ledger afterwards."""

    def answer(self, id: str) -> str:
        return next(each["outcome"]["answer"] for each in self.listed if each["id"] == id)


@pytest.fixture(scope="session")
def answered(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> Answered:
    """Train on photographs of five sites, then answer two sites, three photographs and a kind of picture."""
    folder = tmp_path_factory.mktemp("engineer")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EASE_CACHE", str(shared_cache))
        take_photographs(folder / "photos")
        (folder / "run.toml").write_text(SETTINGS)
        run = folder / "run"
        typed("train", folder / "run.toml", "--out", run, "--quiet")
        members = json.loads((run / "membership.json").read_text())["clients"]
        south = next(each for each in members if each["name"] == "south")
        (folder / "ids.txt").write_text("\n".join(south["train_ids"][:3]))
        asked: list[list[object]] = [
            ["--client", "north", "--ground", "GDPR art. 17(1)(b)", "--by", "site north"],
            ["--samples", folder / "ids.txt", "--reason", "three people asked"],
            ["--class", "0", "--priority", "-1"],
            ["--client", "west", "--due", "2030-01-31"],
        ]
        for number, options in enumerate(asked):
            typed("request", "add", run, *options, "--id", f"request-{number}", "--quiet")
            typed("request", "approve", run, f"request-{number}", "--by", "the engineer")
        typed("work", run, "--quiet", "--set", "hold.retain_points=100", "--set", "retrain.forgotten_fraction=1")
        listed = json.loads(typed("request", "list", run, "--json"))["requests"]
    return Answered(folder, run, listed)


@pytest.fixture(scope="session")
def command() -> Callable[..., str]:
    return typed


@pytest.fixture(scope="session")
def attempt() -> Callable[..., tuple[int, str, str]]:
    return attempted
