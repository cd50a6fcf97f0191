"""Your own data: a JSONL, CSV or Parquet file with an image and its captions in each row, or a folder with one."""

import csv
import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from ease.data.images import ImageSource
from ease.data.readers.arrow import parquet_entries
from ease.data.rows import (
    SITE_COLUMNS,
    Row,
    check_caption,
    check_folder,
    check_relative_path,
    check_split,
    read_text,
    site_of,
)
from ease.errors import UserError

Entries = Iterator[tuple[str, dict[str, Any]]]
"""Place in the file, for messages, and the values by column."""

IMAGE_COLUMNS = ("image", "file_name")
CAPTION_COLUMNS = ("captions", "caption", "text")
"""The first that holds something counts; without any, all of `caption_0`, `caption_1` and so on."""
NUMBERED_CAPTION = re.compile(r"caption_?(\d+)")


def folder_rows(path: Path, images: Path | None = None) -> Iterator[Row]:
    """Rows of the one file `captions.jsonl`, `.csv` or `.parquet` in a folder."""
    check_folder(path)
    files = [path / f"captions{suffix}" for suffix in READERS]
    present = [file for file in files if file.exists()]
    if not present:
        raise UserError(f"{files[0]}: no such file; write one line per image with its captions")
    if len(present) > 1:
        raise UserError(f"{path}: holds {present[0].name} and {present[1].name}; keep one of them")
    return table_rows(present[0], images)


def table_rows(path: Path, images: Path | None = None) -> Iterator[Row]:
    """Rows of a table; image paths are meant from `images`, by default the folder of the file."""
    read = READERS.get(path.suffix.lower())
    if read is None:
        raise UserError(f"{path}: unknown kind of table; use one of: {', '.join(READERS)}")
    folder = check_folder(images or path.parent)
    for number, (where, entry) in enumerate(read(path)):
        yield row_of(entry, where, folder, f"row-{number:06d}")


def row_of(entry: dict[str, Any], where: str, folder: Path, number: str) -> Row:
    """The row that an entry of any table means; `number` names an image that has neither id nor file name."""
    image, name = _image(entry, where, folder)
    pair_id = entry.get("id")
    if pair_id is None:
        pair_id = name or number
    if isinstance(pair_id, bool) or not isinstance(pair_id, str | int) or not str(pair_id).strip():
        raise UserError(f"{where}: id: must be text or a whole number, got {pair_id!r}; write it in quotes")
    named = entry.get("split")
    split = check_split(named, f"{where}: split") if named not in (None, "") else None
    columns = _caption_columns(entry, where)
    read = {*columns, _image_column(entry, where), "id", "split", *SITE_COLUMNS}
    return Row(
        id=str(pair_id),
        image=image,
        captions=_captions(entry, columns, where),
        split=split,
        where=where,
        site=site_of(entry, where),
        columns=tuple(map(sys.intern, entry)),
        unused=tuple(sys.intern(name) for name, value in entry.items() if value is not None and name not in read),
        folder=folder,
    )


def _image_column(entry: dict[str, Any], where: str) -> str:
    column = next((name for name in IMAGE_COLUMNS if entry.get(name) is not None), None)
    if column is None:
        found = ", ".join(map(str, entry))
        raise UserError(f"{where}: `image` or `file_name` is missing; name the image file (there is: {found})")
    return column


def _image(entry: dict[str, Any], where: str, folder: Path) -> tuple[ImageSource, str | None]:
    """The image and its name without suffix; tables hold a path, the bytes, or both as `bytes` and `path`."""
    column = _image_column(entry, where)
    value = entry[column]
    content, path = (value.get("bytes"), value.get("path")) if isinstance(value, dict) else (value, None)
    if isinstance(content, memoryview):
        return content, PurePosixPath(path).stem if path and isinstance(path, str) else None
    relative = check_relative_path(content if content is not None else path, f"{where}: {column}", folder)
    return folder / relative, relative.with_suffix("").as_posix()


def _caption_columns(entry: dict[str, Any], where: str) -> list[str]:
    """The column that counts, or all numbered ones in their order."""
    present = [name for name in CAPTION_COLUMNS if name in entry]
    if present:
        return [next((name for name in present if entry[name] is not None), present[0])]
    numbered = sorted((int(match[1]), name) for name in entry if (match := NUMBERED_CAPTION.fullmatch(name)))
    if not numbered:
        raise UserError(f"{where}: needs either `captions` (a list) or `caption` (one text); add one")
    return [name for _, name in numbered]


def _captions(entry: dict[str, Any], columns: list[str], where: str) -> tuple[str, ...]:
    if columns[0] not in CAPTION_COLUMNS:
        return tuple(check_caption(entry[name], f"{where}: {name}") for name in columns)
    value = entry[columns[0]]
    texts = value if isinstance(value, list) else [value]
    return tuple(check_caption(text, f"{where}: {columns[0]}[{index}]") for index, text in enumerate(texts))


def _jsonl(path: Path) -> Entries:
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}: line {number}"
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: damaged JSON ({error}); write one JSON object per line") from error
        if not isinstance(entry, dict):
            raise UserError(f"{where}: must be a JSON object, not {type(entry).__name__}; mend the line")
        yield where, entry


def _csv(path: Path) -> Entries:
    reader = csv.DictReader(io.StringIO(read_text(path), newline=""), strict=True, skipinitialspace=True)
    try:
        reader.fieldnames = columns = [name.strip().lower() for name in reader.fieldnames or ()]
        other = next((sign for sign in ";\t|" if len(columns) == 1 and sign in columns[0]), None)
        if other is not None:
            raise UserError(f"{path}: its columns are parted by {other!r}; save it with commas")
        for entry in reader:
            where = f"{path}: line {reader.line_num}"
            if None in entry:
                raise UserError(f"{where}: more cells than columns; put captions with commas in quotes")
            yield where, {name: _cell(text) for name, text in entry.items()}
    except csv.Error as error:
        raise UserError(f"{path}: line {reader.line_num}: not valid CSV ({error}); mend the quotes") from error


def _cell(text: str | None) -> Any:
    """A list of captions in one cell is written as JSON."""
    if text is not None and text.startswith("["):
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text
    return text or None


def _parquet(path: Path) -> Entries:
    return ((f"{path}: row {number}", entry) for number, entry in enumerate(parquet_entries(path)))


READERS: dict[str, Callable[[Path], Entries]] = {".jsonl": _jsonl, ".csv": _csv, ".parquet": _parquet}
