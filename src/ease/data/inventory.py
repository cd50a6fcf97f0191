"""Contents, size and permissions of the cache folder, and deleting from it."""

import re
import shutil
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ease.errors import Unwritable, UserError, did_you_mean

PARTS = {
    "activations": "what frozen encoders make of pictures and captions",
    "classes": "pseudo-classes of pairs",
    "pixels": "small copies of pictures, and lists of those that could not be read",
    "scenes": "generated scenes with their captions",
    "weights": "converted weights of encoders",
}
OTHER = "other"
"""What some other program put there: it is counted, and never deleted."""
SCENES = re.compile(r"scenes-[0-9a-f]{16}")
OTHERS = 0o077
"""Bits of a file's mode that let anyone but its owner do something."""
DAY = 86400.0


@dataclass(frozen=True)
class Part:
    """One kind of cached files."""

    name: str
    files: int
    bytes: int
    newest: float | None
    """When the last of them was written, in seconds since 1970."""
    exposed: int
    """Files and folders that other users of the machine may read or change."""


def inventory(cache: Path) -> tuple[Part, ...]:
    """All parts of a cache, empty ones too; foreign files come last."""
    found: dict[str, list[Path]] = {name: [] for name in PARTS}
    for entry in _entries(cache):
        found.setdefault(_part_of(entry, cache), []).append(entry)
    return tuple(_counted(name, entries) for name, entries in found.items())


def clear(cache: Path, parts: Collection[str] = (), older_than_days: float = 0.0) -> tuple[Part, ...]:
    """Delete some or all own parts that are old enough; returns what was deleted."""
    for name in parts:
        if name not in PARTS:
            raise UserError(
                f"{name}: no part of the cache{did_you_mean(name, PARTS)}; choose one of: {', '.join(PARTS)}"
            )
    latest = time.time() - older_than_days * DAY
    gone: dict[str, list[Part]] = {}
    for entry in list(_entries(cache)):
        name = _part_of(entry, cache)
        counted = _counted(name, [entry])
        if name in (parts or PARTS) and (counted.newest or 0.0) <= latest:
            _remove(entry)
            gone.setdefault(name, []).append(counted)
    return tuple(
        Part(
            name,
            sum(each.files for each in gone[name]),
            sum(each.bytes for each in gone[name]),
            max((each.newest for each in gone[name] if each.newest is not None), default=None),
            sum(each.exposed for each in gone[name]),
        )
        for name in PARTS
        if name in gone
    )


def _entries(cache: Path) -> Iterator[Path]:
    """The units that are kept or deleted as a whole: a folder of arrays that belong together, or a file."""
    for path in sorted(cache.iterdir()) if cache.is_dir() else ():
        if path.name in PARTS and path.is_dir() and not path.is_symlink():
            yield from sorted(path.iterdir())
        else:
            yield path


def _part_of(entry: Path, cache: Path) -> str:
    if entry.parent != cache:
        return entry.parent.name
    return "scenes" if SCENES.fullmatch(entry.name) and not entry.is_symlink() else OTHER


def _counted(name: str, entries: list[Path]) -> Part:
    files = size = exposed = 0
    newest: float | None = None
    for path in (path for entry in entries for path in (entry, *_below(entry))):
        with suppress(FileNotFoundError):  # another process replaced it just now
            found = path.lstat()
            exposed += not path.is_symlink() and bool(found.st_mode & OTHERS)
            if not path.is_dir():
                files, size = files + 1, size + found.st_size
                newest = max(newest or 0.0, found.st_mtime)
    return Part(name, files, size, newest, exposed)


def _below(entry: Path) -> Iterator[Path]:
    return entry.rglob("*") if entry.is_dir() and not entry.is_symlink() else iter(())


def _remove(entry: Path) -> None:
    try:
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink(missing_ok=True)
    except OSError as error:
        raise Unwritable(f"{entry}: cannot delete ({error.strerror}); check its permissions") from error
