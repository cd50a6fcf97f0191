"""Flickr8k, Flickr30K, COCO and others in the Karpathy JSON layout."""

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


def karpathy_rows(path: Path, images: Path | None = None) -> Iterator[Row]:
    """A row for each entry of `images`; the pictures are in `images`, by default the folder next to the file."""
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
        captions = _captions(field(entry, "sentences", where), f"{where}.sentences")
        yield Row(name.stem, image, captions, split, where, site_of(entry, where), tuple(entry), folder=folder)


def _captions(sentences: Any, where: str) -> tuple[str, ...]:
    if not isinstance(sentences, list) or not all(isinstance(sentence, dict) for sentence in sentences):
        raise UserError(f"{where}: must be a list of objects with the caption in `raw`; mend the file")
    texts = [field(sentence, "raw", f"{where}[{index}]") for index, sentence in enumerate(sentences)]
    return tuple(check_caption(text, f"{where}[{index}].raw") for index, text in enumerate(texts))
