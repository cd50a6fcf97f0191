"""JSON that has one spelling (RFC 8785), so that a hash or a signature of a value is one of its bytes."""

import hashlib
import json
from typing import Any, TypeVar

import rfc8785

from ease.config import Config, validate
from ease.errors import UserError

LARGEST_WHOLE = 2**53 - 1
"""The largest whole number that every reader of JSON keeps as it is."""
C = TypeVar("C", bound=Config)


class Refuted(UserError):
    """Evidence that does not hold; the message says which part and why."""


def canonical(value: Any) -> bytes:
    """The one spelling of a JSON value."""
    try:
        return rfc8785.dumps(value)
    except (rfc8785.CanonicalizationError, RecursionError) as error:
        raise UserError(
            f"cannot be evidence: {str(error)[:200]}; give finite numbers, text, lists and tables"
        ) from error


def parse(content: bytes, source: str) -> Any:
    """The value of canonical JSON; any other spelling is refused, so that no byte of a file may change unseen."""
    try:
        value = json.loads(content, parse_int=_whole)
        spelt = rfc8785.dumps(value)
    except (
        ValueError,
        OverflowError,
        RecursionError,
    ) as error:  # no UTF-8, no JSON, numbers that are none, nested too deeply
        raise Refuted(f"{source}: damaged, not JSON that can be read ({str(error)[:100]})") from error
    if spelt != content:
        raise Refuted(f"{source}: damaged, not in the canonical form (RFC 8785) that it was written in")
    return value


def parse_as(kind: type[C], content: bytes, source: str) -> C:
    """A value of some kind from its canonical JSON."""
    table = parse(content, source)
    if not isinstance(table, dict):
        raise Refuted(f"{source}: no {kind.__name__.lower()}")
    try:
        return validate(kind, table, source)
    except UserError as error:
        raise Refuted(str(error)) from error


def _whole(digits: str) -> int | float:
    """Canonical JSON spells large floats without a point; whole numbers of that size it does not have."""
    number = int(digits)
    return number if abs(number) <= LARGEST_WHOLE else float(number)


def hashed(value: Any) -> str:
    """SHA-256 of a value's one spelling, or of bytes as they are."""
    return hashlib.sha256(value if isinstance(value, bytes) else canonical(value)).hexdigest()
