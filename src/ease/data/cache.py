"""Cached values: read if undamaged, computed if absent, computed again with a warning if damaged."""

from collections.abc import Callable
from typing import TypeVar

from ease.console import errors
from ease.errors import Missing, UserError

Value = TypeVar("Value")


def cached(read: Callable[[], Value], make: Callable[[], object]) -> Value:
    """The result of `read`, after `make` if the cached value is missing or damaged.

    A damaged cache loses nothing, but the user should know, because disks fail slowly.
    """
    try:
        return read()
    except Missing:
        pass
    except UserError as error:
        errors.print(
            f"{str(error).partition(';')[0]}; this part of the cache is made again", soft_wrap=True, markup=False
        )
    except (LookupError, TypeError, ValueError):  # whole, and of another version
        pass
    make()
    return read()
