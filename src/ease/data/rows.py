"""Rows of any layout, and how they become pairs: check, join, decode, count."""

import json
import os
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from ease.console import plain
from ease.data.images import ImageSource, decode, identify
from ease.data.pairs import SPLITS, PairSet, pair_digest
from ease.data.report import DataReport
from ease.data.similar_ids import similar_ids
from ease.errors import UserError
from ease.storage import cache_folder, digest, read_bytes, write_atomic

CAPTIONS_PER_IMAGE = 5
SPLIT_NAMES = {
    "train": "train",
    "restval": "train",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "dev": "validation",
    "test": "test",
}
"""The name of a split in a file, in small letters, and ours. `restval`, COCO's spare part, is trained on."""
SITE_COLUMNS = ("client", "site")
"""Either names who holds an image."""
NAMED_IN_MESSAGE = 3
LARGEST_TEXT = 1 << 30
"""Bytes of the largest list of images that is read; parsed it takes several times as much memory."""
PACKED = (b"\x1f\x8b", b"PK\x03\x04")
"""How gzip and zip files begin."""
MOST_UNREADABLE = 0.1
"""Share of the images up to which unreadable ones are left out; more mean a wrong folder, not some bad files."""


@dataclass(frozen=True)
class Row:
    """One image with captions, as some layout lists it. An image may have several rows."""

    id: str
    image: ImageSource
    captions: tuple[str, ...]
    """As written; blank ones are dropped later, and counted."""
    split: str | None
    """One of ours; None when the data names none."""
    where: str
    """File and place in it, for messages."""
    site: str | None = None
    """Who holds the image, where the data says so."""
    columns: tuple[str, ...] = ()
    """All that the row has, by name."""
    unused: tuple[str, ...] = ()
    """Those of its columns that hold something and were not read."""
    folder: Path | None = None
    """Folder that must contain the image, if it is a file."""

    @property
    def name(self) -> str:
        return str(self.image) if isinstance(self.image, Path) else self.where


def pairs_from_rows(
    rows: Sequence[Row],
    source: Path,
    size: int,
    crop: bool = False,
    held_out_share: float = 0.2,
    strict: bool = False,
    by_site: bool = False,
    forgotten: Container[str] = (),
    fits: Callable[[Mapping[str, int]], None] | None = None,
) -> PairSet:
    """Pairs of the rows that `source` lists; rows without a split are dealt by `split_by_id`.

    `by_site`: the sites of the rows are going to be the clients, so every training pair must name one. Pictures of
    `forgotten` ids may be gone without a word.
    """
    if not rows:
        raise UserError(f"{source}: no images listed; give at least one image with captions")
    joined = _join(rows)
    joined = [replace(row, split=row.split or split_by_id(row.id, held_out_share)) for row in joined]
    written = [len(row.captions) for row in joined]
    cleaned = [replace(row, captions=tuple(text.strip() for text in row.captions if _shows(text))) for row in joined]
    captioned = [row for row in cleaned if row.captions]
    if not captioned:
        raise UserError(f"{source}: none of the {len(cleaned)} images has a caption; add captions")

    if by_site:
        _check_sites(captioned, source)
    if fits is not None:
        fits(Counter(str(row.split) for row in captioned))
    captioned = [
        row for row in captioned if row.id not in forgotten or not isinstance(row.image, Path) or row.image.exists()
    ]
    identities, missing = identify([row.image for row in captioned])
    _check_readable(captioned, missing, source, strict)  # before the long decoding
    present = [position for position in range(len(captioned)) if position not in missing]
    decoded = decode([captioned[position].image for position in present], identities, size, crop)
    unreadable = missing | {present[place]: reason for place, reason in decoded.unreadable.items()}
    unreadable_list = _check_readable(captioned, unreadable, source, strict)
    kept = [row for position, row in enumerate(captioned) if position not in unreadable]
    twins = [", ".join(captioned[present[place]].id for place in group) for group in decoded.same_picture]

    ids = tuple(row.id for row in kept)
    lookalikes = similar_ids(ids)
    captions = tuple(_exactly_five(row.captions) for row in kept)
    splits = tuple(str(row.split) for row in kept)
    sites = tuple(row.site for row in kept) if any(row.site for row in kept) else ()
    in_columns = {name for row in rows for name in row.columns if name in SITE_COLUMNS}
    report = DataReport(
        splits={split: splits.count(split) for split in SPLITS},
        joined=len(rows) - len(joined),
        without_caption=len(cleaned) - len(captioned),
        unreadable=len(unreadable),
        blank_captions=sum(written) - sum(len(row.captions) for row in cleaned),
        over_five=sum(len(row.captions) > CAPTIONS_PER_IMAGE for row in kept),
        under_five=sum(len(row.captions) < CAPTIONS_PER_IMAGE for row in kept),
        same_picture=sum(map(len, decoded.same_picture)),
        similar_ids=sum(map(len, lookalikes)),
        listings=(
            *unreadable_list,
            *_listing("same-picture", twins),
            *_listing("look-alike-ids", [", ".join(map(ascii, group)) for group in lookalikes]),
        ),
        unused_columns=tuple(dict.fromkeys(name for row in rows for name in row.unused)),
        unused_site_columns=() if by_site or not sites else tuple(sorted(in_columns)),
        **decoded.traits,
    )
    # Sites only where there are any: what was cached for data without them stays valid.
    fingerprint = digest("pairs", size, ids, captions, splits, decoded.checksum, *([sites] if sites else []))
    digests = tuple(map(pair_digest, decoded.digests, captions))
    return PairSet(ids, captions, decoded.pixels, splits, fingerprint, report, sites, digests)


def _check_sites(rows: Sequence[Row], source: Path) -> None:
    """Before the long decoding: sites are named at all, and by every training pair."""
    if not any(row.site for row in rows):
        columns = ", ".join(dict.fromkeys(name for row in rows for name in row.columns))
        raise UserError(
            f'{source}: partition.scheme = "sites" needs a column `client` or `site` that names the holder of each '
            f"image (there is: {columns}); add one or choose another partition.scheme"
        )
    for row in rows:
        if row.split == "train" and row.site is None:
            raise UserError(
                f"{row.where}: `client` or `site` is blank, and other rows have one; name the site of every training "
                "image or choose another partition.scheme"
            )


def _shows(caption: str) -> bool:
    """Whether a caption has visible characters."""
    return any(letter.isprintable() and not letter.isspace() for letter in caption)


def _join(rows: Iterable[Row]) -> list[Row]:
    """One row for each id: many files have a line for each caption. An id has one image, split and site."""
    joined: dict[str, Row] = {}
    for row in rows:
        if plain(row.id) != row.id:
            raise UserError(
                f"{row.where}: id {row.id!r} holds control characters or line breaks, and lists have one id a line; "
                "rename the image or give it another `id`"
            )
        first = joined.setdefault(row.id, row)
        if first is row:
            continue
        if row.image != first.image:
            raise UserError(
                f"{row.where}: id {row.id!r} is already used by {first.where} for another image; "
                "every image needs its own id: rename one or give it an `id`"
            )
        if row.split != first.split:
            raise UserError(
                f"{row.where}: image {row.id!r} is in split {row.split} here and in {first.split} at {first.where}; "
                "an image belongs to one split: correct one"
            )
        if row.site and first.site and row.site != first.site:
            raise UserError(
                f"{row.where}: image {row.id!r} is of site {row.site!r} here and of {first.site!r} at {first.where}; "
                "an image belongs to one site: correct one"
            )
        new = tuple(text for text in row.captions if text not in first.captions)
        joined[row.id] = replace(first, captions=first.captions + new, site=first.site or row.site)
    return list(joined.values())


def _check_readable(rows: Sequence[Row], reasons: dict[int, str], source: Path, strict: bool) -> tuple[Path, ...]:
    """The file that lists the unreadable images; an error if there are too many, or if the user wants every image."""
    problems = [f"{rows[position].name} ({reason})" for position, reason in sorted(reasons.items())]
    listing = _listing("unreadable", problems)
    too_many = len(problems) > MOST_UNREADABLE * len(rows)
    if not too_many and not (strict and problems):
        return listing
    more = len(problems) - NAMED_IN_MESSAGE
    others = f" and {more} other{'s' if more > 1 else ''}" if more > 0 else ""
    remedy = (
        f"so many mean a wrong folder: check data.path and data.images, or mend them (all are listed in {listing[0]})"
        if too_many
        else f"mend or remove them (all are listed in {listing[0]}) or set data.strict = false"
    )
    named = f"{', '.join(problems[:NAMED_IN_MESSAGE])}{others}"
    raise UserError(f"{source}: cannot read {len(problems)} of {len(rows)} images: {named}; {remedy}")


def _listing(kind: str, lines: Sequence[str]) -> tuple[Path, ...]:
    """A text file beside the pixel cache with all lines; nothing when there are none."""
    if not lines:
        return ()
    path = cache_folder() / "pixels" / f"{kind}-{digest(lines)}.txt"
    # A file name may contain bytes that are not text, or terminal controls; both are shown escaped.
    write_atomic(path, "".join(f"{plain(line)}\n" for line in lines).encode())
    return (path,)


def _exactly_five(captions: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(captions[index % len(captions)] for index in range(CAPTIONS_PER_IMAGE))


def split_by_id(pair_id: str, held_out_share: float) -> str:
    """Half of the share is `test`, half `validation`, by a hash of the id: a pair keeps its split when others go."""
    place = int(digest("split", pair_id), 16) / 16**16
    return "test" if place < held_out_share / 2 else "validation" if place < held_out_share else "train"


def read_text(path: Path) -> str:
    """The text of a user's file with plain line ends, less a byte order mark."""
    try:
        content = read_bytes(path, LARGEST_TEXT)
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file; check data.path") from error
    except IsADirectoryError as error:
        raise UserError(f"{path}: is a folder; name the file in it") from error
    except OSError as error:
        raise UserError(f"{path}: cannot read ({error.strerror}); check the path and its permissions") from error
    if content.startswith(PACKED):
        raise UserError(f"{path}: is a compressed file; unpack it and name what was in it")
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error.reason}); save it as UTF-8") from error


def read_lists(path: Path, *keys: str) -> list[list[dict[str, Any]]]:
    """The lists of objects that a JSON file holds under these keys."""
    try:
        content = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: damaged JSON ({error}); download it again") from error
    lists = []
    for key in keys:
        entries = content.get(key) if isinstance(content, dict) else None
        if not isinstance(entries, list):
            raise UserError(f"{path}: key `{key}` with a list is missing; does data.name fit this file?")
        for index, entry in enumerate(entries):
            if not isinstance(entry, dict):
                raise UserError(f"{path}: {key}[{index}]: must be an object, not {type(entry).__name__}; mend the file")
        lists.append(entries)
    return lists


def field(entry: dict[str, Any], key: str, where: str) -> Any:
    """A required value of an entry."""
    if key not in entry:
        raise UserError(f"{where}.{key}: key is missing; add it or remove the entry")
    return entry[key]


def check_caption(value: Any, where: str) -> str:
    """Unchanged text; an error that begins with `where` when it is none. Nothing at all is a blank caption."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(f"{where}: a caption must be text, not {type(value).__name__}; write it in quotes")
    if not _is_text(value):
        raise UserError(f"{where}: caption holds half a character (lone surrogate); write it again")
    return value


def _is_text(value: str) -> bool:
    """Whether a value is text that can be encoded."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def site_of(entry: Mapping[str, Any], where: str) -> str | None:
    """The site that an entry names, if any: a text or a number, taken as text."""
    named = {column: text for column in SITE_COLUMNS if (text := _site(entry.get(column), f"{where}: {column}"))}
    if len(set(named.values())) > 1:
        raise UserError(
            f"{where}: `client` is {named['client']!r} and `site` is {named['site']!r}; both name who holds the image: "
            "keep the one that does and rename the other"
        )
    return next(iter(named.values()), None)


def _site(value: Any, where: str) -> str | None:
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # a whole number in a column with gaps is often stored as a fraction
    if value is None or value != value:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise UserError(f"{where}: must be a text or a number, got {value!r}; name the site or rename the column")
    name = check_caption(str(value), where).strip()
    if plain(name) != name:
        raise UserError(f"{where}: {name!r} holds control characters or line breaks; name the site in one line")
    return name or None


def check_split(value: Any, where: str) -> str:
    """Our name for a split in a file."""
    known = SPLIT_NAMES.get(value.strip().lower()) if isinstance(value, str) else None
    if known is None:
        raise UserError(f"{where}: unknown split {value!r}; use one of: {', '.join(SPLIT_NAMES)}")
    return known


def check_links(rows: Iterable[Row]) -> None:
    """Refuse images that links in their folder lead out of it; the folder itself may be a link."""
    real = cache(Path.resolve)
    for row in rows:
        if not isinstance(row.image, Path) or row.folder is None:
            continue
        place = real(row.image.parent) / row.image.name
        place = Path(os.path.realpath(place)) if _is_link(place) else place  # `resolve` fails on a circle
        if not place.is_relative_to(real(row.folder)):
            raise UserError(
                f"{row.where}: a link leads from {row.image} to {place}, out of the image folder; copy the image there "
                "or set data.follow_links = true"
            )


def _is_link(path: Path) -> bool:
    try:
        return path.is_symlink()
    except OSError:  # a name too long for any file
        return False


def check_relative_path(value: Any, where: str, folder: Path | None = None) -> PurePosixPath:
    """A path that stays inside its folder by its own words; of links, see `check_links`.

    Absolute paths are accepted if they are in `folder`, and backslashes are what Windows writes between folders.
    """
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise UserError(f"{where}: must be the path of an image, got {value!r}; name the image file")
    if "://" in value:
        raise UserError(f"{where}: {value!r} is a web address; download the image and name its file")
    if not _is_text(value):
        raise UserError(f"{where}: {value!r} holds half a character (lone surrogate); rename the image file")
    path = PurePosixPath(value.replace("\\", "/"))
    if not path.name:
        raise UserError(f"{where}: must be the path of an image, got {value!r}, a folder; name the image file")
    if path.is_absolute() and folder is not None:
        real, root = Path(path.parent).resolve() / path.name, folder.resolve()
        path = PurePosixPath(real.relative_to(root)) if real.is_relative_to(root) else path
    if path.is_absolute() or ".." in path.parts:
        raise UserError(f"{where}: {value!r} leaves the image folder; name one that holds all images in data.images")
    return path


def check_folder(folder: Path) -> Path:
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; check data.path and data.images")
    return folder


def first_existing(candidates: Sequence[Path]) -> Path:
    """Copies of one data set differ in their folders; where none fits, the first is what the message names."""
    return next((path for path in candidates if os.path.exists(path)), candidates[0])  # False for names too long
