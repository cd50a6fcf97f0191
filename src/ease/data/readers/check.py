"""What every reader of a data set keeps to, as a check that its author can run."""

from collections.abc import Callable, Iterable
from pathlib import Path

from ease.data.images import decode, identify
from ease.data.pairs import SPLITS
from ease.data.rows import Row
from ease.errors import UserError

SIDE = 32
"""Pixels to which pictures are decoded for the check."""
MOST_DECODED = 20


def check_reader(
    read: Callable[[Path, Path | None], Iterable[Row]], path: str | Path, images: str | Path | None = None
) -> None:
    """Raise an AssertionError that names the failed check; nothing is raised if a reader keeps to everything.

    Reads a small data set of the layout twice, decodes some of its pictures, and asks for a file that is not there.
    """
    where, folder = Path(path), None if images is None else Path(images)
    first, second = list(read(where, folder)), list(read(where, folder))
    _require("rows", first, "it gives no row")
    _require("rows", all(isinstance(row, Row) for row in first), "it gives something else than ease.data.rows.Row")
    _require("repeatable", first == second, "reading the same files again gives other rows or another order")
    for row in first:
        said = f"row {row.id!r}"
        _require("ids", isinstance(row.id, str) and row.id.strip() == row.id != "", f"{said}: an id is a text")
        _require("ids", row.id.isprintable(), f"{said}: an id has no line breaks or control characters")
        _require("captions", isinstance(row.captions, tuple), f"{said}: captions are a tuple of texts")
        _require("captions", all(isinstance(each, str) for each in row.captions), f"{said}: a caption is a text")
        _require("splits", row.split in (None, *SPLITS), f"{said}: split {row.split!r} is not one of {SPLITS} or None")
        _require("places", row.where.strip(), f"{said}: `where` says in which file and place it is, for messages")
        _require("sites", row.site is None or row.site.strip(), f"{said}: a site has a name or is None")
    pictures: dict[str, set[str]] = {}
    for row in first:
        pictures.setdefault(row.id, set()).add(row.name)
    shared = next((pair_id for pair_id, named in pictures.items() if len(named) > 1), None)
    _require("ids", shared is None, f"id {shared!r} names several pictures")
    _require("captions", any(text.strip() for row in first for text in row.captions), "no row has a caption")
    splits = {row.split is None for row in first}
    _require("splits", len(splits) == 1, "either every row names a split or none does")
    some = first[:MOST_DECODED]
    identities, missing = identify([row.image for row in some])
    gone = next((some[place].name for place in missing), "")
    _require("pictures", not missing, f"{gone}: no such picture; an image is a path or the bytes of a file")
    decoded = decode([row.image for row in some], identities, SIDE, crop=False)
    bad = next((f"{some[place].name}: {reason}" for place, reason in decoded.unreadable.items()), "")
    _require("pictures", not decoded.unreadable, bad)
    _refuses_what_is_not_there(read, where.parent / "a file that is not there", folder)


def _refuses_what_is_not_there(
    read: Callable[[Path, Path | None], Iterable[Row]], path: Path, images: Path | None
) -> None:
    try:
        list(read(path, images))
    except UserError as error:
        _require("errors", path.name in str(error) and "\n" not in str(error), "a UserError names the file in one line")
        return
    except Exception as error:
        raise AssertionError(
            f"errors: a missing file raises {type(error).__name__}; raise ease.errors.UserError that names it"
        ) from error
    raise AssertionError("errors: a missing file is read without an error")


def _require(check: str, condition: object, sentence: str) -> None:
    if not condition:
        raise AssertionError(f"{check}: {sentence}")
