"""Decode images once into a memory-mapped array that is cached by file content."""

import hashlib
import io
import os
import struct
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from threading import Condition
from typing import BinaryIO, NamedTuple, TypeVar

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from ease.console import with_progress
from ease.data.cache import cached
from ease.data.pairs import picture_digest
from ease.storage import cache_folder, digest, map_array, new_array, open_regular, read_json, write_json

ImageSource = Path | memoryview
"""A file, or the bytes of one."""

DECODER_VERSION = 4
"""Part of the cache key: raise it when decoding gives other pixels or another record."""
SMALL_SIDE = 16
FORMATS = ("JPEG", "MPO", "PNG", "GIF", "WEBP", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
"""Accepted formats of pictures. Pillow knows more, some by way of other programs, such as PostScript's interpreter."""
BYTES_AT_ONCE = 1 << 30
"""Memory that all threads together may take for pictures being decoded, and so the most for one of them."""
PIXEL_BYTES = 24
"""Most that a decoded pixel takes while a picture is turned, laid on white and resized."""
COEFFICIENT_BYTES = 8
"""Bytes per pixel that the JPEG decoder needs, also for skipped pixels."""
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
ORIENTATION = 0x0112

Item = TypeVar("Item")
Result = TypeVar("Result")


class Decoded(NamedTuple):
    """The decoded images of a list; positions refer to the list."""

    pixels: np.ndarray
    """uint8 [readable images, size, size, 3], memory-mapped."""
    unreadable: dict[int, str]
    """Position of each image that cannot be read, and why."""
    digests: list[str]
    """Hash of each readable image's pixels."""
    checksum: str
    """Hash of all pixels."""
    same_picture: list[list[int]]
    """Positions of images whose pixels are all equal."""
    traits: dict[str, int]
    """How many images were `rotated`, `converted`, `animated` or `small`."""


class Picture(NamedTuple):
    pixels: np.ndarray
    """uint8 [size, size, 3]."""
    traits: tuple[str, ...]


def identify(images: Sequence[ImageSource]) -> tuple[list[str], dict[int, str]]:
    """A hash of every image that follows its content, and for those that cannot be opened why, by position.

    Names and times do not count, so a copied data set is not decoded again. Every byte counts: a picture in which
    someone is blacked out may keep its name, its size, its time and most of its bytes.
    """
    unreadable: dict[int, str] = {}
    identities = []
    for position, outcome in enumerate(_in_threads(_identity, images, "Checking images")):
        if isinstance(outcome, OSError):
            unreadable[position] = outcome.strerror or str(outcome)
        else:
            identities.append(outcome)
    return identities, unreadable


def _identity(image: ImageSource) -> str | OSError:
    try:
        with _open(image) as file:
            whole = hashlib.sha256()
            while piece := file.read(1 << 20):
                whole.update(piece)
            return whole.hexdigest()[:32]
    except OSError as error:
        return error
    except ValueError as error:  # a name that no file can have
        return OSError(str(error))


def _open(image: ImageSource) -> BinaryIO:
    return open_regular(image) if isinstance(image, Path) else io.BytesIO(image)


def decode(images: Sequence[ImageSource], identities: Sequence[str], size: int, crop: bool = False) -> Decoded:
    """Pixels of all images that can be read, from the cache or decoded now; `crop` as in `decode_image`.

    Interrupted decoding leaves nothing and begins anew; damaged files are recorded, so they cost no second pass.
    """
    stem = cache_folder() / "pixels" / digest("pixels", DECODER_VERSION, identities, size, *(["crop"] if crop else []))
    array_path, record_path = stem.with_suffix(".npy"), stem.with_suffix(".json")
    make = partial(_decode_into, array_path, record_path, images, size, crop)
    return cached(partial(_stored, array_path, record_path), make)


def _stored(array_path: Path, record_path: Path) -> Decoded:
    record = read_json(record_path)
    unreadable = {int(position): reason for position, reason in record["unreadable"].items()}
    pixels = map_array(array_path)
    # The readable rows are at the front, so that dropping the others stays a view of the mapped file.
    kept = pixels[: len(pixels) - len(unreadable)]
    if len(record["digests"]) != len(kept):
        raise ValueError(f"{record_path}: not the record of {array_path}")
    return Decoded(kept, unreadable, record["digests"], record["checksum"], record["same_picture"], record["traits"])


def _decode_into(array_path: Path, record_path: Path, images: Sequence[ImageSource], size: int, crop: bool) -> None:
    unreadable: dict[str, str] = {}
    traits: Counter[str] = Counter()
    positions: dict[str, list[int]] = {}
    digests: list[str] = []
    with new_array(array_path, (len(images), size, size, 3), np.uint8) as pixels, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's remarks on odd files would break the progress bar
        work = partial(_picture_or_reason, size=size, crop=crop)
        for position, outcome in enumerate(_in_threads(work, images, "Decoding images")):
            if isinstance(outcome, str):
                unreadable[str(position)] = outcome
                continue
            pixels[len(digests)] = outcome.pixels
            digests.append(picture_digest(outcome.pixels))
            positions.setdefault(digests[-1], []).append(position)
            traits.update(outcome.traits)
        # Written before the array appears under its name, so an array is never without its record.
        record = {
            "unreadable": unreadable,
            "digests": digests,
            "checksum": hashlib.sha256("".join(digests).encode()).hexdigest(),
            "same_picture": [group for group in positions.values() if len(group) > 1],
            "traits": traits,
        }
        write_json(record_path, record)


def _picture_or_reason(image: ImageSource, size: int, crop: bool) -> Picture | str:
    try:
        return decode_image(image, size, crop)
    except UnidentifiedImageError:  # it would show the reader's inner workings
        return "not an image, or damaged at its beginning"
    except DECODER_ERRORS as error:
        return str(error) or type(error).__name__


def decode_image(image: ImageSource, size: int, crop: bool = False, most_pixels: int | None = None) -> Picture:
    """One image: upright, RGB, and its middle square (`crop`) or all of it squashed to a square."""
    with _open(image) as file, Image.open(file, formats=_formats()) as opened:
        whole = opened.width * opened.height
        if most_pixels is not None and whole > most_pixels:
            raise ValueError(f"too large: {whole:,} pixels, at most {most_pixels:,} are taken")
        small, converted = min(opened.size) < SMALL_SIDE, opened.mode != "RGB"
        # MPO is what cameras write: a plain picture with previews behind it.
        animated = getattr(opened, "is_animated", False) and opened.format != "MPO"
        # Lets the JPEG decoder skip detail that the resize would discard; it never goes below the size asked for.
        opened.draft(None, (2 * size, 2 * size))
        kept = COEFFICIENT_BYTES * whole if opened.format in ("JPEG", "MPO") else 0
        with _memory.taken(kept + PIXEL_BYTES * opened.width * opened.height):
            rotated = _orientation(opened) != 1
            square = squared(opened, size, crop)
    found = {"rotated": rotated, "converted": converted, "animated": animated, "small": small}
    return Picture(square, tuple(name for name, true in found.items() if true))


def squared(picture: Image.Image, size: int, crop: bool = False) -> np.ndarray:
    """A picture as encoders take it: upright, RGB, uint8 [size, size, 3]."""
    upright = ImageOps.exif_transpose(picture) if _orientation(picture) != 1 else picture
    box = _middle_square(*upright.size) if crop else None
    return np.asarray(_to_rgb(upright).resize((size, size), Image.Resampling.BICUBIC, box))


@cache
def _formats() -> tuple[str, ...]:
    """The image formats that this Pillow can read."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


class Memory:
    """A memory budget for pictures being decoded; threads wait until there is room."""

    def __init__(self) -> None:
        self._free = Condition()
        self._taken = 0

    @contextmanager
    def taken(self, wanted: int) -> Iterator[None]:
        if wanted > BYTES_AT_ONCE:
            raise ValueError(
                f"too large: needs {wanted >> 20:,} MB to decode, at most {BYTES_AT_ONCE >> 20:,} are taken"
            )
        with self._free:
            self._free.wait_for(lambda: self._taken + wanted <= BYTES_AT_ONCE)
            self._taken += wanted
        try:
            yield
        finally:
            with self._free:
                self._taken -= wanted
                self._free.notify_all()


_memory = Memory()


def _middle_square(width: int, height: int) -> tuple[float, float, float, float]:
    side = min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def _orientation(image: Image.Image) -> int:
    try:
        orientation = image.getexif().get(ORIENTATION, 1)
    except DECODER_ERRORS:  # a damaged note does not mean a damaged picture
        return 1
    return orientation if orientation in range(1, 9) else 1


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        # Pillow would clip 16-bit greys to white instead of scaling them.
        image = Image.fromarray((np.asarray(image) // 256).clip(0, 255).astype(np.uint8))
    if image.has_transparency_data:
        # The colour behind transparent pixels is arbitrary; white is what a viewer would show.
        layers = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", layers.size, "white"), layers)
    return image.convert("RGB")


def _in_threads(work: Callable[[Item], Result], items: Sequence[Item], label: str) -> Iterator[Result]:
    """Results in order with progress; an interruption cancels the rest.

    Threads, not processes: Pillow works outside the interpreter lock, and the pixels need not travel.
    """
    pool = ThreadPoolExecutor(_usable_cores())
    try:
        yield from with_progress(pool.map(work, items), len(items), label)
    finally:
        pool.shutdown(cancel_futures=True)


def _usable_cores() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(8, cores)
