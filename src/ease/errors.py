"""Errors that a user can mend, and which the command line turns into one clear line."""

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The known word that was perhaps meant, as a remark in brackets; nothing where none is near."""
    near = get_close_matches(word, list(known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""


class UserError(Exception):
    """A mistake the user can mend; the message names the file or field and the remedy."""


class Missing(UserError):
    """A file that is not there, which for a cache is no fault."""


class Diverged(UserError):
    """Training or unlearning ended in no usable model: for a grid of many answers a finding, and no reason to stop."""


class TooFew(UserError):
    """A round to which too few clients gave a sound answer."""


class Busy(UserError):
    """Another process is at work here: the same command works once it has ended."""


class Unwritable(UserError):
    """A file that the disk did not take: the same command works once it does."""


class ClientError(UserError):
    """A client cannot do its job, because of its own files or of what it was sent; the others can go on without it."""


class Disconnected(UserError):
    """The server's own line to all clients is gone, for which no client is to blame."""
