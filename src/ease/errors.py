"""The one error a user can cause, and which the command line turns into one clear line."""


class UserError(Exception):
    """A mistake the user can mend; the message names the file or field and the remedy."""
