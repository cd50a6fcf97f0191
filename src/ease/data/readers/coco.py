"""The official captions of MS COCO: `captions_train2017.json` with images in `train2017`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ease.data.rows import (
    Row,
    check_caption,
    check_folder,
    check_relative_path,
    field,
    first_existing,
    read_lists,
    site_of,
)
from ease.errors import UserError


def coco_rows(path: Path, images: Path | None = None) -> Iterator[Row]:
    """A row for each entry of `images` with its annotations; the file names no splits."""
    entries, annotations = read_lists(path, "images", "annotations")
    folder = _image_folder(path, images)
    captions: dict[int, list[str]] = {}
    for index, entry in enumerate(entries):
        captions[_image_id(entry, "id", f"{path}: images[{index}]")] = []
    for index, annotation in enumerate(annotations):
        where = f"{path}: annotations[{index}]"
        image_id = _image_id(annotation, "image_id", where)
        if image_id not in captions:
            raise UserError(f"{where}.image_id: no image has the id {image_id}; remove the annotation")
        captions[image_id].append(check_caption(field(annotation, "caption", where), f"{where}.caption"))
    for index, entry in enumerate(entries):
        where = f"{path}: images[{index}]"
        name = check_relative_path(field(entry, "file_name", where), f"{where}.file_name")
        texts = tuple(captions[entry["id"]])
        yield Row(name.stem, folder / name, texts, None, where, site_of(entry, where), tuple(entry), folder=folder)


def _image_id(entry: dict[str, Any], key: str, where: str) -> int:
    value = field(entry, key, where)
    if not isinstance(value, int):
        raise UserError(f"{where}.{key}: must be a whole number, not {value!r}; mend the file")
    return value


def _image_folder(path: Path, images: Path | None) -> Path:
    """The official archives give `annotations/captions_train2017.json` beside the folder `train2017`."""
    part = path.stem.removeprefix("captions_")
    if images is not None:
        return check_folder(first_existing([images / part, images]))
    around = path.parent.parent
    return check_folder(first_existing([around / part, around / "images" / part, path.parent / part]))
