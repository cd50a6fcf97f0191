"""`ease doctor`."""

from ease.cli.options import REFUTED, Quiet, Result, command


@command
def doctor(quiet: Quiet = False) -> Result:
    """Check the installation, the machine and the cache.

    It also tries a small run. Exit code 0 if everything works, 1 if something does not.

    Example: `ease doctor`
    """
    from ease.commands.doctor import doctor as examine

    summary = examine(quiet)
    return summary, REFUTED if not summary.healthy else 0
