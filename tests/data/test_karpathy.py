"""The Karpathy layout: what it means, and every way a file can be wrong."""

import json
import os

import numpy as np
import pytest
from PIL import Image

from ease.data.karpathy import load_karpathy
from ease.errors import UserError


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("EASE_CACHE", str(tmp_path / "cache"))


def entry(name: str, split: str = "train", captions=("a", "b", "c", "d", "e"), **more) -> dict:
    return {"filename": name, "split": split, "sentences": [{"raw": text} for text in captions], **more}


class Data:
    def __init__(self, folder):
        self.json, self.images = folder / "set.json", folder / "images"
        self.images.mkdir()

    def image(self, name: str, shade: int = 0) -> None:
        (self.images / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (6, 6), (shade, shade, shade)).save(self.images / name)

    def load(self, entries, **options):
        self.json.write_text(json.dumps({"images": entries, "dataset": "test"}))
        return load_karpathy(self.json, self.images, 4, **options)


@pytest.fixture
def data(tmp_path):
    made = Data(tmp_path)
    for index, name in enumerate("wxyz"):
        made.image(f"{name}.png", index * 10)
    return made


def test_splits_captions_ids_and_pixels(data):
    pairs = data.load([
        entry("w.png"), entry("x.png", "restval", ["one", " two "]), entry("y.png", "val", "abcdefg"),
        entry("z.png", "test", ["only"]),
    ])  # fmt: skip
    assert pairs.ids == ("w", "x", "y", "z")
    assert pairs.splits == ("train", "train", "validation", "test")
    assert pairs.captions[1] == ("one", "two", "one", "two", "one")
    assert pairs.captions[2] == tuple("abcde") and pairs.captions[3] == ("only",) * 5
    assert pairs.pixels[:, 0, 0, 0].tolist() == [0, 10, 20, 30]
    assert pairs.indices("train").tolist() == [0, 1]


def test_filepath_is_followed_and_a_flat_copy_works_too(data):
    data.image("sub/n.png", 77)
    pairs = data.load([entry("n.png", filepath="sub"), entry("w.png", filepath="sub")])
    assert pairs.pixels[:, 0, 0, 0].tolist() == [77, 0]


def test_fingerprint_follows_the_content(data):
    first = data.load([entry("w.png"), entry("x.png")]).fingerprint
    assert data.load([entry("w.png"), entry("x.png")]).fingerprint == first
    assert data.load([entry("w.png"), entry("x.png", "val")]).fingerprint != first
    assert data.load([entry("w.png"), entry("x.png", captions="abcdz")]).fingerprint != first
    os.utime(data.images / "w.png", (1, 1))
    assert data.load([entry("w.png"), entry("x.png")]).fingerprint != first


def test_a_changed_image_is_decoded_again(data):
    data.load([entry("w.png")])
    data.image("w.png", 99)
    os.utime(data.images / "w.png", (1, 1))
    assert (data.load([entry("w.png")]).pixels == 99).all()


def test_limit_keeps_the_shares_of_the_splits(data):
    names = [f"{index:02}.png" for index in range(20)]
    for name in names:
        data.image(name)
    entries = [entry(name, "train" if index < 10 else "test") for index, name in enumerate(names)]
    pairs = data.load(entries, limit=6)
    assert pairs.splits.count("train") == pairs.splits.count("test") == 3
    assert list(pairs.ids) == sorted(pairs.ids)
    assert len(data.load(entries, limit=99)) == 20


def test_skip_corrupt_drops_the_pair_and_says_so(data, caplog):
    (data.images / "x.png").write_bytes(b"broken")
    entries = [entry("w.png"), entry("x.png", captions="vwxyz"), entry("y.png", "test")]
    with pytest.raises(UserError, match=r"x\.png: cannot read.*skip_corrupt"):
        data.load(entries)
    pairs = data.load(entries, skip_corrupt=True)
    assert "x.png: skipped" in caplog.text
    assert pairs.ids == ("w", "y") and pairs.splits == ("train", "test")
    assert np.array(pairs.pixels)[:, 0, 0, 0].tolist() == [0, 20]
    with pytest.raises(UserError, match="none of the 1 images"):
        data.load([entry("x.png")], skip_corrupt=True)


BAD_ENTRIES = [
    ([], "no images"),
    (["w.png"], r"images\[0\]: must be an object"),
    ([{"filename": "w.png", "split": "train"}], r"images\[0\]\.sentences: key is missing"),
    ([{"split": "train", "sentences": []}], r"images\[0\]\.filename: key is missing"),
    ([entry("w.png"), entry("x.png", captions=[])], r"images\[1\]\.sentences: must be a list with at least one"),
    ([entry("w.png", captions=["fine", "  "])], r"images\[0\]\.sentences\[1\]\.raw: caption is empty"),
    ([entry("w.png", captions=[7])], r"images\[0\]\.sentences\[0\]\.raw: a caption must be text, not int"),
    ([entry("w.png", captions=["\ud800"])], r"sentences\[0\]\.raw: caption holds half a character"),
    ([entry("w.png") | {"sentences": [{"tokens": []}]}], r"images\[0\]\.sentences\[0\]\.raw: key is missing"),
    ([entry("w.png", "training")], r"images\[0\]\.split: unknown split 'training'; use one of"),
    ([entry("w.png", None)], r"images\[0\]\.split: unknown split None"),
    ([entry("w.png"), entry("gone.png"), entry("too.png")], r"images\[1\]: image .*gone\.png is missing, and 1 other"),
    ([entry("w.png"), entry("w.png")], r"images\[1\]: id 'w' is already used by images\[0\]"),
    ([entry("../w.png")], r"images\[0\]\.filename: .* leaves the image folder"),
    ([entry("w.png", filepath="/etc")], r"images\[0\]\.filepath: .* leaves the image folder"),
    ([entry(5)], r"images\[0\]\.filename: must be the relative path"),
]


@pytest.mark.parametrize(("entries", "message"), BAD_ENTRIES)
def test_errors_name_the_field(data, entries, message):
    with pytest.raises(UserError, match=message) as caught:
        data.load(entries)
    assert "set.json" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "damaged JSON"), (b"\xff\xfe\x00", "damaged JSON"), ("[" * 100_000, "damaged JSON"),
        ("[]", "`images`"), ('{"images": 3}', "`images`"),
    ],
)  # fmt: skip
def test_damaged_file(data, content, message):
    data.json.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=message):
        load_karpathy(data.json, data.images, 4)


def test_missing_file_folder_and_bad_limit(data):
    with pytest.raises(UserError, match=r"nowhere\.json: no such file"):
        load_karpathy(data.images / "nowhere.json", data.images, 4)
    data.json.write_text(json.dumps({"images": [entry("w.png")]}))
    with pytest.raises(UserError, match="no such image folder"):
        load_karpathy(data.json, data.images / "nowhere", 4)
    with pytest.raises(UserError, match=r"data\.limit = 0"):
        load_karpathy(data.json, data.images, 4, limit=0)
