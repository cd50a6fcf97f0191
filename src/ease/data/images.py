"""Image files on disk: decode each once into a memory-mapped array, and join them with captions into pairs."""

import logging
import os
import struct
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeVar

import numpy as np
from PIL import Image, ImageOps
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ease.data.pairs import PairSet
from ease.errors import UserError
from ease.storage import cache_folder, digest, map_array, new_array, read_json, write_json

CAPTIONS_PER_IMAGE = 5
SPLIT_NAMES = {"train": "train", "restval": "train", "val": "validation", "validation": "validation", "test": "test"}
DECODER_VERSION = 1
"""Part of the cache key: raise it when decoding gives other pixels."""
# What Pillow's decoders raise on damaged files; running out of memory is not the fault of a file and passes through.
DECODER_ERRORS = (
    OSError,
    ValueError,
    SyntaxError,
    EOFError,
    ArithmeticError,
    LookupError,
    TypeError,
    RuntimeError,
    struct.error,
    Image.DecompressionBombError,
)
SECONDS_BEFORE_PROGRESS = 2.0

Item = TypeVar("Item")
log = logging.getLogger(__name__)


class Decoded(NamedTuple):
    pixels: np.ndarray
    """uint8 [readable images, size, size, 3], memory-mapped."""
    readable: np.ndarray
    """bool [paths]."""
    problems: list[tuple[Path, str]]
    """Each unreadable file and why."""


@dataclass(frozen=True)
class ImageRecord:
    """One validated entry of a caption file."""

    id: str
    path: Path
    captions: tuple[str, ...]
    split: str
    where: str
    """Place in the caption file, for error messages."""


def pairs_from_records(records: Sequence[ImageRecord], source: Path, size: int, skip_corrupt: bool = False) -> PairSet:
    """Decode the images of validated records and join everything into a PairSet; `source` is the caption file."""
    if not records:
        raise UserError(f"{source}: no images listed; give at least one image with captions")
    _refuse_duplicates(records, source)
    stamps = _file_stamps(records, source)
    pixels_key = digest([record.id for record in records], stamps)
    paths = [record.path for record in records]
    if skip_corrupt:
        pixels, readable, problems = decode_readable(paths, size, pixels_key)
        if not readable.any():
            raise UserError(f"{source}: none of the {len(records)} images can be read; check the image folder")
        for path, reason in problems:
            log.warning("%s: skipped, cannot read this image (%s)", path, reason)
        records = [record for record, good in zip(records, readable, strict=True) if good]
        stamps = [stamp for stamp, good in zip(stamps, readable, strict=True) if good]
    else:
        pixels = decode_images(paths, size, pixels_key)
    ids = tuple(record.id for record in records)
    captions = tuple(_exactly_five(record.captions) for record in records)
    splits = tuple(record.split for record in records)
    fingerprint = digest("pairs", DECODER_VERSION, size, ids, captions, splits, stamps)
    return PairSet(ids=ids, captions=captions, pixels=pixels, splits=splits, fingerprint=fingerprint)


def decode_images(paths: Sequence[Path], size: int, cache_key: str) -> np.ndarray:
    """Pixels of every image as uint8 [n, size, size, 3], memory-mapped; an unreadable image is an error."""
    return _decode(paths, size, cache_key, skip_corrupt=False).pixels


def decode_readable(paths: Sequence[Path], size: int, cache_key: str) -> Decoded:
    """Pixels of the images that can be read, and which could not and why (`data.skip_corrupt = true`)."""
    return _decode(paths, size, cache_key, skip_corrupt=True)


def _decode(paths: Sequence[Path], size: int, cache_key: str, skip_corrupt: bool) -> Decoded:
    stem = cache_folder() / "pixels" / digest("pixels", DECODER_VERSION, cache_key, size, len(paths))
    array_path, problems_path = stem.with_suffix(".npy"), stem.with_suffix(".json")
    if not _cached(array_path, problems_path, shape=(len(paths), size, size, 3)):
        _decode_into(array_path, problems_path, paths, size, skip_corrupt)
    reasons = {int(index): reason for index, reason in read_json(problems_path).items()}
    if reasons and not skip_corrupt:
        raise _corrupt_images(paths, reasons)
    readable = np.ones(len(paths), dtype=bool)
    readable[list(reasons)] = False
    # The readable rows lie at the front, so that dropping the others stays a view of the mapped file.
    pixels = map_array(array_path)[: int(readable.sum())]
    return Decoded(pixels, readable, [(Path(paths[index]), reason) for index, reason in sorted(reasons.items())])


def _cached(array_path: Path, problems_path: Path, shape: tuple[int, ...]) -> bool:
    if not (array_path.exists() and problems_path.exists()):
        return False
    try:
        read_json(problems_path)
        return map_array(array_path).shape == shape
    except UserError:
        return False


def _decode_into(array_path: Path, problems_path: Path, paths: Sequence[Path], size: int, skip_corrupt: bool) -> None:
    reasons: dict[int, str] = {}
    # Threads suffice: Pillow decodes and resizes outside the interpreter lock.
    with (
        new_array(array_path, (len(paths), size, size, 3), np.uint8) as pixels,
        ThreadPoolExecutor(_usable_cores()) as pool,
    ):
        decoded = pool.map(lambda path: _pixels_or_reason(path, size), paths)
        filled = 0
        for index, outcome in enumerate(with_progress(decoded, len(paths), "Decoding images")):
            if isinstance(outcome, str):
                reasons[index] = outcome
            else:
                pixels[filled] = outcome
                filled += 1
        if reasons and not skip_corrupt:
            raise _corrupt_images(paths, reasons)
        # Written before the array appears under its name, so an array is never without its list of problems.
        write_json(problems_path, {str(index): reason for index, reason in reasons.items()})


def _pixels_or_reason(path: Path, size: int) -> np.ndarray | str:
    try:
        return decode_image(path, size)
    except DECODER_ERRORS as error:
        return str(error) or type(error).__name__


def decode_image(path: Path, size: int) -> np.ndarray:
    """One image as uint8 [size, size, 3]: upright, RGB, squashed to a square."""
    with Image.open(path) as opened:
        # Lets the JPEG decoder skip detail that the resize would discard; it never goes below the size asked for.
        opened.draft(None, (2 * size, 2 * size))
        upright = ImageOps.exif_transpose(opened)
    return np.asarray(_to_rgb(upright).resize((size, size), Image.Resampling.BICUBIC))


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        # Pillow would clip 16-bit greys to white instead of scaling them.
        image = Image.fromarray((np.asarray(image) // 256).clip(0, 255).astype(np.uint8))
    if image.has_transparency_data:
        # The colour behind transparent pixels is arbitrary; white is what a viewer would show.
        layers = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", layers.size, "white"), layers)
    return image.convert("RGB")


def _corrupt_images(paths: Sequence[Path], reasons: dict[int, str]) -> UserError:
    first = min(reasons)
    return UserError(
        f"{paths[first]}: cannot read this image ({reasons[first]}){_and_others(len(reasons) - 1)}; "
        "remove them from the data or set `data.skip_corrupt = true`"
    )


def _and_others(count: int) -> str:
    return f", and {count} other{'s' if count > 1 else ''}" if count else ""


def _usable_cores() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(8, cores)


def _refuse_duplicates(records: Sequence[ImageRecord], source: Path) -> None:
    seen: dict[str, str] = {}
    for record in records:
        if record.id in seen:
            raise UserError(
                f"{source}: {record.where}: id {record.id!r} is already used by {seen[record.id]}; "
                "every image needs its own id: remove or rename one"
            )
        seen[record.id] = record.where


def _file_stamps(records: Sequence[ImageRecord], source: Path) -> list[tuple[int, int]]:
    """Size and modification time of every image: cheap to take, and they change when the picture does."""
    stamps, missing = [], []
    for record in records:
        try:
            status = record.path.stat()
        except OSError:
            missing.append(record)
        else:
            stamps.append((status.st_size, status.st_mtime_ns))
    if missing:
        first = missing[0]
        raise UserError(
            f"{source}: {first.where}: image {first.path} is missing{_and_others(len(missing) - 1)}; "
            "put the images there or remove their entries"
        )
    return stamps


def _exactly_five(captions: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(captions[index % len(captions)] for index in range(CAPTIONS_PER_IMAGE))


def check_caption(value: Any, where: str) -> str:
    """The caption without outer blanks; an error that begins with `where` when it is not usable text."""
    if not isinstance(value, str):
        raise UserError(f"{where}: a caption must be text, not {type(value).__name__}; write it in quotes")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: caption holds half a character (lone surrogate); write it again") from error
    if not value.strip():
        raise UserError(f"{where}: caption is empty; write a caption or remove the entry")
    return value.strip()


def check_split(value: Any, where: str) -> str:
    """Our name of a split that a caption file names."""
    if not isinstance(value, str) or value not in SPLIT_NAMES:
        raise UserError(f"{where}: unknown split {value!r}; use one of: {', '.join(SPLIT_NAMES)}")
    return SPLIT_NAMES[value]


def check_relative_path(value: Any, where: str) -> PurePosixPath:
    """A path that stays inside its folder by its own words; links the owner put in the folder are followed."""
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise UserError(f"{where}: must be the relative path of an image, got {value!r}; name the image file")
    path = PurePosixPath(value)
    if path.is_absolute() or ".." in path.parts:
        raise UserError(f"{where}: {value!r} leaves the image folder; use a path inside it")
    return path


def with_progress(items: Iterable[Item], total: int, label: str) -> Iterator[Item]:
    """Pass items through; work of more than two seconds shows a bar with the time left, if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield from items
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task(label, total=total)
    begun, shown = time.monotonic(), False
    try:
        for item in items:
            yield item
            bar.advance(task)
            if not shown and time.monotonic() - begun > SECONDS_BEFORE_PROGRESS:
                bar.start()
                shown = True
    finally:
        if shown:
            bar.stop()
