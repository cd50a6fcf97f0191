"""`ease purge`."""

from typing import Annotated

import typer

from ease.cli.options import By, Quiet, Result, Run, command


@command
def purge(
    run: Run,
    older_than: Annotated[
        float, typer.Option(min=0, metavar="DAYS", help="Only requests released at least this many days ago.")
    ] = 0.0,
    lost_site: Annotated[
        list[str] | None,
        typer.Option(metavar="CLIENT", help="A site that is gone for good: recorded, and not waited for. Repeatable."),
    ] = None,
    reason: Annotated[str, typer.Option(help="With --lost-site: why it is gone for good.")] = "",
    by: By = None,
    quiet: Quiet = False,
) -> Result:
    """Delete what released requests left on disk.

    Files that are still needed are computed again as if the pairs had never been there. `purge.json` lists what was
    deleted, what was computed again, and what stayed and why. This cannot be undone, so audit first.

    A site that is gone for good is recorded once with who decided and why. Later purges do not wait for it, and
    certificates list what could not be deleted there.

    Example: `ease purge runs/first --older-than 30`
    """
    from ease.commands.requests import purge_run

    return purge_run(run, older_than, lost_site or (), by, reason, quiet)
