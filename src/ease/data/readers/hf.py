"""Hugging Face `datasets` on disk: what `save_to_disk` writes, or Parquet files named by their split."""

import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from ease.console import plain
from ease.data.readers.arrow import parquet_entries, stream_entries
from ease.data.readers.table import row_of
from ease.data.rows import Row, check_folder, check_split, read_lists
from ease.errors import UserError

STATE = "state.json"
"""Marks the folder of one saved data set and names its files in order."""


def hf_rows(path: Path, images: Path | None = None) -> Iterator[Row]:
    """Rows of a data set; where several splits have their own files, ids begin with theirs, since names may recur.

    A row may name another split: some data sets are in one file called `test` and name the splits in a column.
    """
    check_folder(path)
    parts = {"": _saved(path)} if (path / STATE).is_file() else _saved_splits(path) or _parquet_splits(path)
    if not parts:
        raise UserError(f"{path}: no saved data set here ({STATE}, or train-*.parquet, is missing); check data.path")
    for part, entries in parts.items():
        split = check_split(part, str(path)) if part else None
        for number, entry in enumerate(entries):
            row = row_of(entry, f"{path / part}: row {number}", images or path, f"{number:06d}")
            yield replace(row, id=f"{split}/{row.id}" if len(parts) > 1 else row.id, split=row.split or split)


def _saved_splits(path: Path) -> dict[str, Iterator[dict[str, Any]]]:
    return {file.parent.name: _saved(file.parent) for file in sorted(path.glob(f"*/{STATE}"))}


def _saved(folder: Path) -> Iterator[dict[str, Any]]:
    (files,) = read_lists(folder / STATE, "_data_files")
    names: list[Any] = [file.get("filename") for file in files]
    for name in names:
        harmless = isinstance(name, str) and Path(name).name == name and plain(name) == name
        if not harmless or Path(os.path.realpath(folder / name)).parent != folder.resolve():
            raise UserError(f"{folder / STATE}: {name!r} is not a file of this folder; save the data set again")
    return chain.from_iterable(stream_entries(folder / name) for name in names)


def _parquet_splits(path: Path) -> dict[str, Iterator[dict[str, Any]]]:
    """Files such as `train-00000-of-00002.parquet`, here or in the folder `data`."""
    files: dict[str, list[Path]] = {}
    for file in sorted([*path.glob("*.parquet"), *path.glob("data/*.parquet")]):
        files.setdefault(file.stem.split("-")[0], []).append(file)
    return {part: chain.from_iterable(map(parquet_entries, group)) for part, group in files.items()}
