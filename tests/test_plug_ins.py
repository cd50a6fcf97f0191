"""Readers and backbones of other packages: used in a run, checked by name, and refused in one line."""

import json
import sys
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ease import plug_ins
from ease.data.rows import Row
from ease.errors import UserError
from ease.model.backbones import load_backbone
from ease.runs.config import load_config
from ease.runs.world import World
from ease.testing import SMALL, check_backbone, check_reader

SOURCE = '''
import json
from ease.data.rows import Row
from ease.errors import UserError
from ease.model.tiny import load_tiny

def rows(path, images):
    """One JSON list of [name, caption, split]."""
    if not path.exists():
        raise UserError(f"{path}: no such file; name the list")
    for number, (name, caption, split) in enumerate(json.loads(path.read_text())):
        yield Row(name, path.parent / name, (caption,), split, f"{path}, entry {number}")

def backbone():
    found = load_tiny()
    found.name = "mine"
    return found

nothing = 3
'''


@pytest.fixture
def package(tmp_path: Path, monkeypatch):
    """A package that is installed nowhere else."""
    (tmp_path / "own_package.py").write_text(SOURCE)
    (tmp_path / "sad_package.py").write_text("import a_module_that_is_not_there")
    monkeypatch.syspath_prepend(tmp_path)
    found = {
        plug_ins.READERS: [("mine", "own_package:rows"), ("sad", "sad_package:rows"), ("odd", "own_package:nothing")],
        plug_ins.BACKBONES: [("mine", "own_package:backbone")],
        plug_ins.TRACKERS: [],
    }
    points = {group: [EntryPoint(*each, group) for each in named] for group, named in found.items()}
    monkeypatch.setattr(plug_ins, "points", points.__getitem__)
    yield points
    sys.modules.pop("own_package", None)


@pytest.fixture
def listing(tmp_path: Path) -> Path:
    """Eighty pictures of noise and a list of them in a layout of its own."""
    rng, entries = np.random.default_rng(0), []
    for number in range(80):
        Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(tmp_path / f"{number}.png")
        entries.append(
            [f"{number}.png", f"a {rng.choice(['dog', 'boat'])} number {number}", "train" if number < 60 else "test"]
        )
    (tmp_path / "list.json").write_text(json.dumps(entries))
    return tmp_path / "list.json"


def test_a_reader_and_a_backbone_of_another_package_make_a_run(package, listing: Path) -> None:
    own = [f"data.path={listing}", "data.name=mine", "model.backbone=mine", "partition.validation_share=0.1"]
    config = load_config(None, (*(each for each in SMALL if not each.startswith("data.")), *own))
    world = World.open(config)
    assert world.server.backbone.name == "mine"
    held = sorted(pair_id for shard in world.shards for pair_id in shard.train_ids)
    assert set(held) <= {f"{number}.png" for number in range(60)} and len(world.evaluator.test) == 20


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["data.name=min"], "unknown layout 'min' (did you mean mine?); choose one of: scenes, karpathy"),
        (["data.name=sad"], "data.name: sad_package:rows cannot be imported (ModuleNotFoundError"),
        (["data.name=odd"], "data.name: own_package:nothing is not a function"),
        (["model.backbone=yours"], "unknown backbone 'yours'; choose one of: tiny, photos, photos-vit, clip-b32"),
    ],
)
def test_unusable_plug_ins_are_refused_by_their_field(package, listing: Path, settings, words) -> None:
    with pytest.raises(UserError) as refused:
        World.open(load_config(None, (*SMALL, f"data.path={listing}", *settings)))
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_two_packages_of_one_name_are_refused(package) -> None:
    package[plug_ins.BACKBONES].append(EntryPoint("mine", "other:backbone", plug_ins.BACKBONES))
    with pytest.raises(UserError, match=r"several packages bring 'mine' \(other:backbone, own_package:backbone\)"):
        load_backbone("mine")


def rows_of(path: Path, change) -> list[Row]:
    import own_package

    return [change(number, row) for number, row in enumerate(own_package.rows(path, None))]


def test_a_sound_reader_passes(package, listing: Path) -> None:
    import own_package

    check_reader(own_package.rows, listing)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda n, row: replace(row, split="training"), "splits: row '0.png': split 'training' is not one of"),
        (lambda n, row: replace(row, split=None if n else "train"), "splits: either every row names a split or none"),
        (lambda n, row: replace(row, id="one"), "ids: id 'one' names several pictures"),
        (lambda n, row: replace(row, id=f" {n}"), "ids: row ' 0': an id is a text"),
        (lambda n, row: replace(row, captions="a dog"), "captions: row '0.png': captions are a tuple"),
        (lambda n, row: replace(row, image=Path("gone.png")), "pictures: gone.png: no such picture"),
        (lambda n, row: replace(row, id=f"{n}-{torch.rand(1)}"), "repeatable: reading the same files again"),
        (lambda n, row: n, "rows: it gives something else"),
    ],
)
def test_the_check_of_a_reader_names_what_failed(package, listing: Path, change, said: str) -> None:
    with pytest.raises(AssertionError) as failed:
        check_reader(lambda path, images: rows_of(path, change), listing)
    assert str(failed.value).startswith(said)


def test_a_reader_must_refuse_a_missing_file(package, listing: Path) -> None:
    import own_package

    known = list(own_package.rows(listing, None))
    with pytest.raises(AssertionError, match="errors: a missing file is read without an error"):
        check_reader(lambda path, images: known, listing)
    with pytest.raises(AssertionError, match="errors: a missing file raises FileNotFoundError"):
        check_reader(lambda path, images: [known, path.read_text()][0], listing)


def test_a_sound_backbone_passes() -> None:
    check_backbone(load_backbone("tiny"))


def test_the_check_of_a_backbone_names_what_failed() -> None:
    def spoilt(**attributes):
        found = load_backbone("tiny")
        for name, value in attributes.items():
            part, _, attribute = name.rpartition("__")
            setattr(getattr(found, part) if part else found, attribute, value)
        return found

    tiny = load_backbone("tiny")
    for backbone, said in (
        (3, "module:"),
        (spoilt(fingerprint=" "), "attributes: its fingerprint is empty"),
        (spoilt(context=4), "tokens: a long caption is cut"),
        (spoilt(image__width=7), "image width:"),
        (spoilt(text__prefix=lambda inputs, first: (torch.rand(len(inputs), 3, 64), None)), "text "),
        (spoilt(tokenize=lambda captions: tiny.tokenize(["a"] * len(captions))), "text features:"),
    ):
        with pytest.raises(AssertionError) as failed:
            check_backbone(backbone)
        assert str(failed.value).startswith(said), failed.value
