"""What the cache holds: read if it is whole, made if it is absent, made again and said so if it is damaged."""

from collections.abc import Callable
from typing import TypeVar

from ease.console import errors
from ease.errors import Missing, UserError

Value = TypeVar("Value")


def cached(read: Callable[[], Value], make: Callable[[], object]) -> Value:
    """What `read` finds, after `make` where it finds nothing that is whole.

    Nothing is lost with a cache, so damage stops no one; a person should know of it all the same: disks fail slowly.
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
