"""TextCaps 0.1: `TextCaps_0.1_train.json` with an entry for each caption."""

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


def textcaps_rows(path: Path, images: Path | None = None) -> Iterator[Row]:
    """A row for each entry of `data`; a file of one set, as the official ones are, names no splits."""
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
        yield Row(
            pair_id, image, _captions(entry, where), split, where, site_of(entry, where), tuple(entry), folder=folder
        )


def _captions(entry: dict[str, Any], where: str) -> tuple[str, ...]:
    """Each entry has one caption of its own; the references repeat those of all entries of the image."""
    if "caption_str" in entry:
        return (check_caption(entry["caption_str"], f"{where}.caption_str"),)
    references = entry.get("reference_strs") or []  # the official test file has no captions
    if not isinstance(references, list):
        raise UserError(f"{where}.reference_strs: must be a list of captions; mend the file")
    return tuple(check_caption(text, f"{where}.reference_strs[{index}]") for index, text in enumerate(references))
