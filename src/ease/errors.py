"""User errors, which the command line prints as one line."""

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint at the most similar known word, or nothing if none is similar."""
    near = get_close_matches(word, list(known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""


class UserError(Exception):
    """An error that the user can fix. The message names the file or field and the remedy."""


class Missing(UserError):
    """A missing file. For a cache it is not an error."""


class Diverged(UserError):
    """Training or unlearning diverged. Experiments with many results record it and continue."""


class TooFew(UserError):
    """Too few clients answered a round correctly."""


class Busy(UserError):
    """Another process holds the lock or has changed the run. Running the same command later works."""


class Unwritable(UserError):
    """A file could not be written. The same command works once it can."""


class ClientError(UserError):
    """A client cannot do its job, because of its files or of what it was sent. The others can continue without it."""


class Disconnected(UserError):
    """The server lost its connection to all clients, which is not a client's fault."""
