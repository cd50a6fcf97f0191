"""A folder with captions.jsonl: what it means, and every way it can be wrong."""

import json

import pytest
from PIL import Image

from ease.data.folder import load_folder, split_by_id
from ease.errors import UserError


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("EASE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "data"
    (made / "sub").mkdir(parents=True)
    for shade, name in enumerate(("a.png", "b.jpg", "sub/a.png")):
        Image.new("RGB", (5, 5), (shade, shade, shade)).save(made / name)
    return made


def load(folder, *lines, **options):
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    (folder / "captions.jsonl").write_text(text, encoding="utf-8")
    return load_folder(folder, 4, **options)


def test_everything_a_line_may_say(folder):
    pairs = load(
        folder,
        {"image": "a.png", "caption": "ein Hündchen", "split": "val"},
        "",
        {"image": "sub/a.png", "captions": ["one", "two"], "split": "test", "id": "mine"},
        {"image": "b.jpg", "captions": list("abcdefg")},
        "",
    )
    assert pairs.ids == ("a", "mine", "b")
    assert pairs.captions == (("ein Hündchen",) * 5, ("one", "two", "one", "two", "one"), tuple("abcde"))
    assert pairs.splits == ("validation", "test", split_by_id("b"))
    assert pairs.pixels.shape == (3, 4, 4, 3)


def test_default_ids_keep_subfolders_apart(folder):
    pairs = load(folder, {"image": "a.png", "caption": "x"}, {"image": "sub/a.png", "caption": "y"})
    assert pairs.ids == ("a", "sub/a")


def test_byte_order_mark_and_windows_line_ends(folder):
    line = json.dumps({"image": "a.png", "caption": "x"})
    (folder / "captions.jsonl").write_bytes(b"\xef\xbb\xbf" + line.encode() + b"\r\n\r\n")
    assert load_folder(folder, 4).ids == ("a",)


def test_split_by_id_is_steady_and_near_80_10_10():
    splits = [split_by_id(f"photo{index}") for index in range(2000)]
    assert 1540 < splits.count("train") < 1660
    assert 150 < splits.count("validation") < 250 and 150 < splits.count("test") < 250
    assert splits == [split_by_id(f"photo{index}") for index in range(2000)]


def test_skip_corrupt(folder):
    (folder / "b.jpg").write_bytes(b"\xff\xd8 broken")
    lines = {"image": "b.jpg", "caption": "x"}, {"image": "a.png", "caption": "y"}
    with pytest.raises(UserError, match="skip_corrupt"):
        load(folder, *lines)
    assert load(folder, *lines, skip_corrupt=True).ids == ("a",)


GOOD = {"image": "a.png", "caption": "x"}
BAD_LINES = [
    ("", "no images"),
    ("{", "line 1: damaged JSON"),
    ("[1]", "line 1: must be a JSON object, not list"),
    ({"caption": "x"}, "line 1: key `image` is missing"),
    ({"image": "", "caption": "x"}, "line 1: image: must be the relative path"),
    ({"image": "a\0.png", "caption": "x"}, "line 1: image: must be the relative path"),
    ({"image": "../a.png", "caption": "x"}, "line 1: image: '../a.png' leaves the image folder"),
    ({"image": "sub/../../a.png", "caption": "x"}, "leaves the image folder"),
    ({"image": "/etc/a.png", "caption": "x"}, "leaves the image folder"),
    ({"image": "gone.png", "caption": "x"}, "line 1: image .*gone.png is missing; put"),
    ({"image": "a.png"}, "line 1: needs either"),
    ({"image": "a.png", "caption": "x", "captions": ["y"]}, "line 1: needs either"),
    ({"image": "a.png", "captions": []}, "line 1: captions: must be a list"),
    ({"image": "a.png", "captions": "x"}, "line 1: captions: must be a list"),
    ({"image": "a.png", "captions": ["x", "\t"]}, r"line 1: captions\[1\]: caption is empty"),
    ({"image": "a.png", "caption": None}, "line 1: caption: a caption must be text"),
    (GOOD | {"split": "dev"}, "line 1: split: unknown split 'dev'"),
    (GOOD | {"id": 4}, "line 1: id: must be text"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_errors_name_the_line(folder, line, message):
    with pytest.raises(UserError, match=message) as caught:
        load(folder, line)
    assert "captions.jsonl" in str(caught.value)


def test_duplicate_ids_name_both_lines(folder):
    with pytest.raises(UserError, match="line 3: id 'a' is already used by line 1"):
        load(folder, GOOD, "", GOOD)


def test_missing_folder_and_missing_captions(tmp_path, folder):
    with pytest.raises(UserError, match="no such folder"):
        load_folder(tmp_path / "nowhere", 4)
    with pytest.raises(UserError, match=r"captions\.jsonl: no such file"):
        load_folder(folder, 4)
    (folder / "captions.jsonl").write_bytes(b"\xff\xfe{")
    with pytest.raises(UserError, match="not UTF-8"):
        load_folder(folder, 4)
