"""Errors that a user can mend, and which the command line turns into one clear line."""


class UserError(Exception):
    """A mistake the user can mend; the message names the file or field and the remedy."""


class Missing(UserError):
    """A file that is not there, which for a cache is no fault."""


class Diverged(UserError):
    """Training or unlearning ended in no usable model: for a grid of many answers a finding, and no reason to stop."""


class Busy(UserError):
    """Another process is at work here: the same command works once it has ended."""


class Unwritable(UserError):
    """A file that the disk did not take: the same command works once it does."""


class Disconnected(UserError):
    """The server's own line to all clients is gone, for which no client is to blame."""
