"""Your own data: a folder with images and one `captions.jsonl`."""

import json
from pathlib import Path
from typing import Any

from ease.data.images import ImageRecord, check_caption, check_relative_path, check_split, pairs_from_records
from ease.data.pairs import PairSet
from ease.errors import UserError
from ease.storage import digest

CAPTIONS_FILE = "captions.jsonl"


def load_folder(folder: Path | str, size: int, skip_corrupt: bool = False) -> PairSet:
    """Pairs of a folder whose `captions.jsonl` holds one object a line.

    {"image": "relative/path.jpg", "captions": ["..."] or "caption": "...", "split": optional, "id": optional}
    """
    folder = Path(folder)
    source = folder / CAPTIONS_FILE
    lines = _read_lines(folder, source).split("\n")
    records = [_record(line, number, folder, source) for number, line in enumerate(lines, 1) if line.strip()]
    return pairs_from_records(records, source, size, skip_corrupt)


def _read_lines(folder: Path, source: Path) -> str:
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; check the path of the data")
    try:
        return source.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise UserError(f"{source}: no such file; write one line per image with its captions") from error
    except OSError as error:
        raise UserError(f"{source}: cannot read ({error.strerror}); check the permissions") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{source}: not UTF-8 text ({error.reason}); save it as UTF-8") from error


def _record(line: str, number: int, folder: Path, source: Path) -> ImageRecord:
    where = f"line {number}"
    place = f"{source}: {where}"
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place}: damaged JSON ({error}); write one JSON object per line") from error
    if not isinstance(entry, dict):
        raise UserError(f"{place}: must be a JSON object, not {type(entry).__name__}; see the layout of {source.name}")
    if "image" not in entry:
        raise UserError(f"{place}: key `image` is missing; name the image file of this line")
    image = check_relative_path(entry["image"], f"{place}: image")
    pair_id = entry.get("id", image.with_suffix("").as_posix())
    if not isinstance(pair_id, str) or not pair_id.strip():
        raise UserError(f"{place}: id: must be text that is not empty, got {pair_id!r}; write it in quotes")
    split = check_split(entry["split"], f"{place}: split") if "split" in entry else split_by_id(pair_id)
    captions = _captions(entry, place)
    return ImageRecord(id=pair_id, path=folder / image, captions=captions, split=split, where=where)


def _captions(entry: dict[str, Any], place: str) -> tuple[str, ...]:
    if ("captions" in entry) == ("caption" in entry):
        raise UserError(f"{place}: needs either `captions` (a list) or `caption` (one text); give exactly one")
    if "caption" in entry:
        return (check_caption(entry["caption"], f"{place}: caption"),)
    captions = entry["captions"]
    if not isinstance(captions, list) or not captions:
        raise UserError(f"{place}: captions: must be a list with at least one caption; add one or remove the line")
    return tuple(check_caption(text, f"{place}: captions[{index}]") for index, text in enumerate(captions))


def split_by_id(pair_id: str) -> str:
    """80/10/10 by a hash of the id, so that a pair keeps its split when others come or go."""
    tenth = int(digest("split", pair_id), 16) % 10
    return "test" if tenth == 9 else "validation" if tenth == 8 else "train"
