"""TextCaps: an entry for each caption, references that repeat them, and archives with folders of another name."""

import json

import pytest

from ease.errors import UserError


def entries(image_id: str, captions, set_name: str = "train", **changes) -> list[dict]:
    """As in the official files: every caption is an entry, and each entry repeats all captions as references."""
    return [
        {
            "caption_str": text,
            "caption_id": number,
            "image_id": image_id,
            "image_name": image_id,
            "image_path": f"train/{image_id}.jpg",
            "set_name": set_name,
            "reference_strs": list(captions),
            **changes,
        }
        for number, text in enumerate(captions)
    ]


@pytest.fixture
def data(tmp_path, picture, load):
    for shade, name in enumerate(("aa", "bb", "cc")):
        picture(tmp_path / "train_images" / f"{name}.jpg", shade * 30)

    def read(*groups, name="TextCaps_0.1_train.json", **settings):
        (tmp_path / name).write_text(
            json.dumps({"dataset_name": "textcaps", "data": [entry for group in groups for entry in group]})
        )
        return load("textcaps", tmp_path / name, **settings)

    return read


def test_entries_of_an_image_are_joined(data):
    pairs = data(entries("aa", "vwxyz"), entries("bb", ["sign"]), held_out_share=0.0)
    assert pairs.ids == ("aa", "bb") and pairs.captions == (tuple("vwxyz"), ("sign",) * 5)
    assert pairs.pixels[:, 0, 0, 0].tolist() == [0, 30]
    assert pairs.splits == ("train", "train") and pairs.report.joined == 4


def test_references_serve_where_entries_have_no_caption_of_their_own(data):
    (entry,) = entries("aa", ["x"], reference_strs=["one", "two"])
    del entry["caption_str"]
    assert data([entry]).captions[0][:2] == ("one", "two")


def test_a_second_file_is_the_test_split(data, tmp_path):
    data(entries("cc", ["c"], "val"), name="TextCaps_0.1_val.json")
    pairs = data(entries("aa", ["a"]), test_path=str(tmp_path / "TextCaps_0.1_val.json"))
    assert pairs.ids == ("aa", "cc") and pairs.splits == ("train", "test")


def test_a_file_with_several_sets_keeps_them(data):
    pairs = data(entries("aa", ["a"]), entries("bb", ["b"], "val"), entries("cc", ["c"], "test"))
    assert pairs.splits == ("train", "validation", "test")


@pytest.mark.parametrize("folder", ["train", "."])
def test_other_copies_keep_their_images_elsewhere(data, tmp_path, folder):
    (tmp_path / "else" / folder).mkdir(parents=True, exist_ok=True)
    (tmp_path / "train_images" / "aa.jpg").rename(tmp_path / "else" / folder / "aa.jpg")
    assert data(entries("aa", ["a"]), images=str(tmp_path / "else")).ids == ("aa",)


def test_the_official_test_file_has_no_captions(data):
    (entry,) = entries("aa", ["x"], "test")
    del entry["caption_str"], entry["reference_strs"]
    with pytest.raises(UserError, match="none of the 1 images has a caption"):
        data([entry])


@pytest.mark.parametrize(
    ("group", "message"),
    [
        (entries("aa", ["x"], image_path="../aa.jpg"), r"data\[0\]\.image_path: .* leaves"),
        (entries("aa", [3]), r"data\[0\]\.caption_str: a caption must be text"),
        ([{"image_path": "train/aa.jpg"}], r"data\[0\]\.image_id: key is missing"),
        ([{"image_id": "aa", "caption_str": "x"}], r"data\[0\]\.image_path: key is missing"),
        ([{"image_id": "aa", "image_path": "aa.jpg", "reference_strs": "x"}], "reference_strs: must be a list"),
        (entries("aa", ["x"]) + entries("bb", ["x"], "new"), r"data\[1\]\.set_name: unknown split 'new'"),
        (entries("aa", ["x"]) + entries("aa", ["x"], image_path="train/bb.jpg"), r"data\[1\]: id 'aa' is already used"),
    ],
)
def test_errors_name_the_field(data, group, message):
    with pytest.raises(UserError, match=message) as caught:
        data(group)
    assert "TextCaps_0.1_train.json" in str(caught.value)


def test_an_entry_may_name_its_site(data):
    pairs = data(entries("aa", "xy", client="north"), entries("bb", "z", client="south"))
    assert pairs.sites == ("north", "south")
    with pytest.raises(UserError, match=r"data\[1\]: image 'aa' is of site 'south' here and of 'north' at .*data\[0\]"):
        data(entries("aa", "x", client="north"), entries("aa", "y", client="south"))
