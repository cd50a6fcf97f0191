"""Flickr8k, Flickr30K, COCO and others in the Karpathy JSON layout."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from ease.data.images import ImageRecord, check_caption, check_relative_path, check_split, pairs_from_records
from ease.data.pairs import PairSet
from ease.errors import UserError


def load_karpathy(
    json_path: Path | str, image_folder: Path | str, size: int, skip_corrupt: bool = False, limit: int | None = None
) -> PairSet:
    """Pairs of a Karpathy JSON file; `limit` keeps about that share of every split."""
    json_path, image_folder = Path(json_path), Path(image_folder)
    if limit is not None and limit < 1:
        raise UserError(f"data.limit = {limit}: must be at least 1; leave it out to use all images")
    entries = _read_entries(json_path)
    if not image_folder.is_dir():
        raise UserError(f"{image_folder}: no such image folder; check where the images are")
    records = [_record(entry, f"images[{index}]", json_path, image_folder) for index, entry in enumerate(entries)]
    return pairs_from_records(_spread(records, limit), json_path, size, skip_corrupt)


def _read_entries(json_path: Path) -> list[Any]:
    try:
        content = json.loads(json_path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        raise UserError(f"{json_path}: no such file; check the path of the Karpathy JSON") from error
    except OSError as error:
        raise UserError(f"{json_path}: cannot read ({error.strerror}); check path and permissions") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{json_path}: damaged JSON ({error}); download it again") from error
    entries = content.get("images") if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise UserError(f"{json_path}: key `images` with a list is missing; is this a Karpathy JSON file?")
    return entries


def _record(entry: Any, where: str, json_path: Path, image_folder: Path) -> ImageRecord:
    place = f"{json_path}: {where}"
    if not isinstance(entry, dict):
        raise UserError(f"{place}: must be an object, not {type(entry).__name__}; see the Karpathy layout")
    for key in ("filename", "split", "sentences"):
        if key not in entry:
            raise UserError(f"{place}.{key}: key is missing; add it or remove the entry")
    name = check_relative_path(entry["filename"], f"{place}.filename")
    path = image_folder / name
    if entry.get("filepath"):
        nested = image_folder / check_relative_path(entry["filepath"], f"{place}.filepath") / name
        # COCO names a subfolder, but many copies keep all images in one folder.
        path = nested if nested.exists() or not path.exists() else path
    captions = _captions(entry["sentences"], f"{place}.sentences")
    split = check_split(entry["split"], f"{place}.split")
    return ImageRecord(id=name.stem, path=path, captions=captions, split=split, where=where)


def _captions(sentences: Any, place: str) -> tuple[str, ...]:
    if not isinstance(sentences, list) or not sentences:
        raise UserError(f"{place}: must be a list with at least one caption; add one or remove the entry")
    for index, sentence in enumerate(sentences):
        if not isinstance(sentence, dict) or "raw" not in sentence:
            raise UserError(f"{place}[{index}].raw: key is missing; add the caption text")
    return tuple(check_caption(sentence["raw"], f"{place}[{i}].raw") for i, sentence in enumerate(sentences))


def _spread(records: list[ImageRecord], limit: int | None) -> list[ImageRecord]:
    """`limit` records in file order, evenly spaced within the splits so that each keeps its share."""
    if limit is None or limit >= len(records):
        return records
    by_split = sorted(range(len(records)), key=lambda index: records[index].split)
    chosen = np.linspace(0, len(records), limit, endpoint=False).astype(int)
    return [records[index] for index in sorted(by_split[place] for place in chosen)]
