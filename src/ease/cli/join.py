"""`ease join`."""

from typing import Annotated

import typer

from ease.cli.options import By, Quiet, Result, Run, Samples, command


@command
def join(
    run: Run,
    consent: Annotated[str, typer.Option(help="Who agreed to what, in words. Kept in the ledger.")],
    site: Annotated[str | None, typer.Option(help="Only pairs that the data assign to this site.")] = None,
    samples: Samples = None,
    of: Annotated[
        str | None, typer.Option(metavar="CLIENT", help="The client that these later pairs belong to.")
    ] = None,
    again_after: Annotated[
        str | None, typer.Option(metavar="CLIENT", help="The client that left, if the consent covers its purged pairs.")
    ] = None,
    by: By = None,
    quiet: Quiet = False,
) -> Result:
    """Add a client with new pairs and its consent.

    The pairs were added to the data after the training. More rounds then train on them. To a closed-form head their
    sums are added at once.

    Example: `ease join runs/first --site clinic-4 --consent "clinic 4 agrees, form 12 of 3 May" --by "dr. a"`
    """
    from ease.commands.joining import join_run

    return join_run(run, consent, by, site, samples, of, again_after, quiet)
