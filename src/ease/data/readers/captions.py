"""Layouts that keep captions in one JSON file: MS COCO, the Karpathy layout and TextCaps 0.1."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ease.data.rows import (
    Row,
    check_caption,
    check_folder,
    check_relative_path,
    check_split,
    field,
    first_existing,
    read_lists,
    site_of,
)
from ease.errors import UserError


def coco_rows(path: Path, images: Path | None = None) -> Iterator[Row]:
    """The official captions of MS COCO, `captions_train2017.json` with images in `train2017`.

    A row for each entry of `images` with its annotations; the file names no splits.
    """
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


def karpathy_rows(path: Path, images: Path | None = None) -> Iterator[Row]:
    """Flickr8k, Flickr30K, COCO and others in the Karpathy layout.

    A row for each entry of `images`; the pictures are in `images`, by default the folder next to the file.
    """
    (entries,) = read_lists(path, "images")
    folder = check_folder(images or path.parent / "images")
    for index, entry in enumerate(entries):
        where = f"{path}: images[{index}]"
        name = check_relative_path(field(entry, "filename", where), f"{where}.filename")
        image = folder / name
        if entry.get("filepath") not in (None, "", "."):
            # COCO names a subfolder, but many copies keep all images in one folder.
            image = first_existing([folder / check_relative_path(entry["filepath"], f"{where}.filepath") / name, image])
        split = check_split(field(entry, "split", where), f"{where}.split")
        captions = _sentences(field(entry, "sentences", where), f"{where}.sentences")
        yield Row(name.stem, image, captions, split, where, site_of(entry, where), tuple(entry), folder=folder)


def _sentences(sentences: Any, where: str) -> tuple[str, ...]:
    if not isinstance(sentences, list) or not all(isinstance(sentence, dict) for sentence in sentences):
        raise UserError(f"{where}: must be a list of objects with the caption in `raw`; mend the file")
    texts = [field(sentence, "raw", f"{where}[{index}]") for index, sentence in enumerate(sentences)]
    return tuple(check_caption(text, f"{where}[{index}].raw") for index, text in enumerate(texts))


def textcaps_rows(path: Path, images: Path | None = None) -> Iterator[Row]:
    """TextCaps, `TextCaps_0.1_train.json`: a row for each entry of `data`, which has one caption.

    A file of one set, as the official ones are, names no splits.
    """
    (entries,) = read_lists(path, "data")
    folder = check_folder(images or path.parent)
    one_set = len({str(entry.get("set_name")) for entry in entries}) == 1
    for index, entry in enumerate(entries):
        where = f"{path}: data[{index}]"
        name = check_relative_path(field(entry, "image_path", where), f"{where}.image_path")
        # The files say `train/x.jpg`, the official archive unpacks to `train_images/x.jpg`.
        unpacked = folder / f"{name.parent.name}_images" / name.name
        image = first_existing([unpacked, folder / name, folder / name.name])
        split = None if one_set else check_split(field(entry, "set_name", where), f"{where}.set_name")
        pair_id = str(field(entry, "image_id", where))
        captions, site = _own_caption(entry, where), site_of(entry, where)
        yield Row(pair_id, image, captions, split, where, site, tuple(entry), folder=folder)


def _own_caption(entry: dict[str, Any], where: str) -> tuple[str, ...]:
    """Each entry has one caption of its own; the references repeat those of all entries of the image."""
    if "caption_str" in entry:
        return (check_caption(entry["caption_str"], f"{where}.caption_str"),)
    references = entry.get("reference_strs") or []  # the official test file has no captions
    if not isinstance(references, list):
        raise UserError(f"{where}.reference_strs: must be a list of captions; mend the file")
    return tuple(check_caption(text, f"{where}.reference_strs[{index}]") for index, text in enumerate(references))
