"""Parts of other packages, found by their entry points: readers of data sets, backbones and trackers."""

from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from ease.errors import UserError

READERS = "ease.readers"
"""Functions (path, images) -> rows; `ease.testing.check_reader` checks them."""
BACKBONES = "ease.backbones"
"""Functions () -> backbone; `ease.testing.check_backbone` checks them."""
TRACKERS = "ease.trackers"
"""Functions (run folder) -> tracker."""


def points(group: str) -> Iterable[EntryPoint]:
    """All entry points of a group on this machine."""
    return entry_points(group=group)


def names(group: str) -> list[str]:
    """Names in the group, sorted; nothing is imported."""
    return sorted({point.name for point in points(group)})


def load(group: str, name: str, field: str) -> Any:
    """The function behind an entry point. One that cannot be imported or is there twice is refused."""
    values = {point.value: point for point in points(group) if point.name == name}
    if not values:
        raise UserError(f"{field}: unknown {name!r}; install the package that brings it (entry point group {group})")
    if len(values) > 1:
        raise UserError(
            f"{field}: several packages bring {name!r} ({', '.join(sorted(values))}); uninstall all but one"
        )
    ((value, point),) = values.items()
    try:
        found = point.load()
    except Exception as error:  # a foreign module may fail in any way when it is imported
        raise UserError(f"{field}: {value} cannot be imported ({type(error).__name__}: {error})") from error
    if not callable(found):
        raise UserError(f"{field}: {value} is not a function; see docs/howto.md for what the entry point must name")
    return found
