"""The Karpathy layout: what it means, and every way a file can be wrong."""

import json
from pathlib import Path

import pytest

from ease.errors import UserError

FLICKR8K = Path(__file__).parents[4] / "shared" / "data" / "flickr8k"
"""Beside the repository, where real photographs may lie."""


def entry(name: str, split: str = "train", captions=("a", "b", "c", "d", "e"), **more) -> dict:
    return {"filename": name, "split": split, "sentences": [{"raw": text} for text in captions], **more}


@pytest.fixture
def data(tmp_path, picture, load):
    """Four pictures w, x, y, z; a call writes the JSON file and loads it."""
    for index, name in enumerate("wxyz"):
        picture(tmp_path / "images" / f"{name}.png", index * 10)

    def read(entries, **settings):
        (tmp_path / "set.json").write_text(json.dumps({"images": entries, "dataset": "test"}))
        return load("karpathy", tmp_path / "set.json", **settings)

    return read


def test_splits_captions_ids_and_pixels(data):
    pairs = data([entry("w.png"), entry("x.png", "restval", ["one", " two "]), entry("y.png", "val", "abcdefg"),
                  entry("z.png", "test", ["only"])])  # fmt: skip
    assert pairs.ids == ("w", "x", "y", "z")
    assert pairs.splits == ("train", "train", "validation", "test")
    assert pairs.captions[1] == ("one", "two", "one", "two", "one")
    assert pairs.captions[2] == tuple("abcde") and pairs.captions[3] == ("only",) * 5
    assert pairs.pixels[:, 0, 0, 0].tolist() == [0, 10, 20, 30]
    assert pairs.indices("train").tolist() == [0, 1]
    assert pairs.report.splits == {"train": 2, "validation": 1, "test": 1}


def test_filepath_is_followed_and_a_flat_copy_works_too(data, tmp_path, picture):
    picture(tmp_path / "images" / "val2014" / "n.png", 77)
    pairs = data([entry("n.png", filepath="val2014"), entry("w.png", filepath="val2014")])
    assert pairs.pixels[:, 0, 0, 0].tolist() == [77, 0]


def test_images_may_be_elsewhere(data, tmp_path, picture):
    picture(tmp_path / "else" / "w.png", 55)
    assert (data([entry("w.png")], images=str(tmp_path / "else")).pixels == 55).all()


def test_an_entry_may_name_its_site(data):
    pairs = data([entry("w.png", client="north"), entry("x.png", client=3), entry("y.png", "test")])
    assert pairs.sites == ("north", "3", None) and pairs.report.unused_site_columns == ("client",)
    with pytest.raises(UserError, match=r"images\[0\]: `client` is 'a' and `site` is 'b'"):
        data([entry("w.png", client="a", site="b")])


def test_a_second_file_is_refused_because_the_first_names_its_splits(data, tmp_path):
    with pytest.raises(UserError, match=r'data\.test_path cannot be used when data\.name = "karpathy"'):
        data([entry("w.png")], test_path=str(tmp_path / "set.json"))


BAD_ENTRIES = [
    ([], "no images"),
    (["w.png"], r"images\[0\]: must be an object"),
    ([{"filename": "w.png", "split": "train"}], r"images\[0\]\.sentences: key is missing"),
    ([{"split": "train", "sentences": []}], r"images\[0\]\.filename: key is missing"),
    ([{"filename": "w.png", "sentences": []}], r"images\[0\]\.split: key is missing"),
    ([entry("w.png") | {"sentences": "a dog"}], r"images\[0\]\.sentences: must be a list of objects"),
    ([entry("w.png") | {"sentences": ["a dog"]}], r"images\[0\]\.sentences: must be a list of objects"),
    ([entry("w.png", captions=[]), entry("x.png", captions=[" "])], "none of the 2 images has a caption"),
    ([entry("w.png", captions=[7])], r"images\[0\]\.sentences\[0\]\.raw: a caption must be text, not int"),
    ([entry("w.png", captions=["\ud800"])], r"sentences\[0\]\.raw: caption holds half a character"),
    ([entry("w.png") | {"sentences": [{"tokens": []}]}], r"images\[0\]\.sentences\[0\]\.raw: key is missing"),
    ([entry("w.png", "training")], r"images\[0\]\.split: unknown split 'training'; use one of"),
    ([entry("w.png"), entry("gone.png")], r"cannot read 1 of 2 images: .*gone\.png \(No such file"),
    ([entry("w.png"), entry("w.png", "test")], r"images\[1\]: image 'w' is in split test here"),
    ([entry("../w.png")], r"images\[0\]\.filename: .* leaves the image folder"),
    ([entry("w.png", filepath="/etc")], r"images\[0\]\.filepath: .* leaves the image folder"),
]


@pytest.mark.parametrize(("entries", "message"), BAD_ENTRIES)
def test_errors_name_the_field(data, entries, message):
    with pytest.raises(UserError, match=message) as caught:
        data(entries)
    assert "set.json" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "damaged JSON"), (b"\xff\xfe\x00", "not UTF-8"), (b"[" * 100_000, "damaged JSON"),
        (b"[]", "`images`"), (b'{"images": 3}', "`images` with a list is missing; does data.name fit"),
    ],
)  # fmt: skip
def test_damaged_file(data, load, tmp_path, content, message):
    (tmp_path / "set.json").write_bytes(content)
    with pytest.raises(UserError, match=message):
        load("karpathy", tmp_path / "set.json")


def test_missing_file_and_folder(data, load, tmp_path):
    with pytest.raises(UserError, match=r"nowhere\.json: no such file"):
        load("karpathy", tmp_path / "nowhere.json")
    with pytest.raises(UserError, match="nowhere: no such folder"):
        data([entry("w.png")], images=str(tmp_path / "nowhere"))


@pytest.mark.photos
@pytest.mark.skipif(not FLICKR8K.is_dir(), reason="Flickr8k is not there")
def test_flickr8k(load):
    """The official split, and five captions everywhere."""
    pairs = load("karpathy", FLICKR8K / "dataset_flickr8k.json")
    assert pairs.report.splits == {"train": 6000, "validation": 1000, "test": 1000}
    assert pairs.pixels.shape == (8000, 4, 4, 3)
    assert pairs.report.over_five == pairs.report.under_five == pairs.report.unreadable == 0
