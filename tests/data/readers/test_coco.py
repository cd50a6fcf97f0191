"""The official COCO captions: where the pictures are found, and how the splits arise."""

import json

import pytest

from ease.data.rows import split_by_id
from ease.errors import UserError


def captions_file(path, images: dict[int, list[str]], **changes):
    """As the official file: images with ids, and annotations of all images in one shuffled list."""
    content = {
        "info": {"year": 2017},
        "licenses": [],
        "images": [{"id": key, "file_name": f"{key:012d}.jpg", "height": 18, "width": 20} for key in images],
        "annotations": [
            {"image_id": key, "id": 10 * key + number, "caption": texts[number]}
            for number in range(5)
            for key, texts in images.items()
            if number < len(texts)
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content | changes))
    return path


@pytest.fixture
def train(tmp_path, picture):
    for key in (9, 25):
        picture(tmp_path / "train2017" / f"{key:012d}.jpg", key)
    images = {9: [f"nine {number}" for number in range(5)], 25: ["a giraffe\n", "trees"]}
    return captions_file(tmp_path / "annotations" / "captions_train2017.json", images)


def test_annotations_find_their_images(load, train):
    pairs = load("coco", train)
    assert pairs.ids == ("000000000009", "000000000025")
    assert pairs.captions[0] == tuple(f"nine {number}" for number in range(5))
    assert pairs.captions[1][:2] == ("a giraffe", "trees")
    assert pairs.pixels[:, 0, 0, 0].tolist() == [9, 25]
    assert pairs.splits == tuple(split_by_id(pair_id, 0.2) for pair_id in pairs.ids)


def test_a_second_file_is_the_test_split(load, train, tmp_path, picture):
    picture(tmp_path / "val2017" / "000000000139.jpg", 139)
    second = captions_file(tmp_path / "annotations" / "captions_val2017.json", {139: ["a room"]})
    pairs = load("coco", train, test_path=str(second))
    assert pairs.splits == ("train", "train", "test")
    assert pairs.pixels[2, 0, 0, 0] == 139


def test_a_stated_share_is_held_out(load, train):
    assert load("coco", train, held_out_share=0.0).splits == ("train", "train")
    assert "train" not in load("coco", train, held_out_share=0.999999).splits


@pytest.mark.parametrize("folder", ["pictures/train2017", "pictures"])
def test_images_may_be_elsewhere(load, train, tmp_path, folder):
    (tmp_path / folder).parent.mkdir(exist_ok=True)
    (tmp_path / "train2017").rename(tmp_path / folder)
    assert len(load("coco", train, images=str(tmp_path / "pictures"))) == 2
    with pytest.raises(UserError, match=r"train2017: no such folder; check data\.path and data\.images"):
        load("coco", train)


def test_images_in_a_folder_of_that_name_are_found(load, train, tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "train2017").rename(tmp_path / "images" / "train2017")
    assert len(load("coco", train)) == 2


def test_images_without_annotations_are_left_out(load, tmp_path, picture):
    picture(tmp_path / "train2017" / "000000000001.jpg")
    path = captions_file(tmp_path / "captions_train2017.json", {1: ["one"], 2: []})
    pairs = load("coco", path)
    assert pairs.ids == ("000000000001",) and pairs.report.without_caption == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"annotations": [{"image_id": 7, "caption": "x"}]}, r"annotations\[0\]\.image_id: no image has the id 7"),
        ({"annotations": [{"image_id": "9", "caption": "x"}]}, r"annotations\[0\]\.image_id: must be a whole number"),
        ({"annotations": [{"image_id": 9}]}, r"annotations\[0\]\.caption: key is missing"),
        ({"annotations": [{"image_id": 9, "caption": 3}]}, r"annotations\[0\]\.caption: a caption must be text"),
        ({"annotations": None}, "key `annotations` with a list is missing"),
        ({"images": [{"id": 9, "file_name": "../x.jpg"}], "annotations": []}, "leaves the image folder"),
        ({"images": [{"file_name": "x.jpg"}]}, r"images\[0\]\.id: key is missing"),
        ({"images": [{"id": 9}], "annotations": []}, r"images\[0\]\.file_name: key is missing"),
    ],
)
def test_errors_name_the_field(load, train, changes, message):
    train.write_text(json.dumps(json.loads(train.read_text()) | changes))
    with pytest.raises(UserError, match=message) as caught:
        load("coco", train)
    assert "captions_train2017.json" in str(caught.value)


def test_an_image_may_name_its_site(load, train):
    content = json.loads(train.read_text())
    for image, site in zip(content["images"], (4, "east"), strict=True):
        image["site"] = site
    train.write_text(json.dumps(content))
    pairs = load("coco", train)
    assert pairs.sites == ("4", "east") and pairs.report.unused_site_columns == ("site",)
    assert pairs.report.unused_columns == (), "what the official file holds besides is not worth a word"
