"""`ease verify`."""

from pathlib import Path
from typing import Annotated

import typer

from ease.cli.options import REFUTED, CheckQuick, Quiet, Result, command


@command
def verify(
    certificate: Annotated[Path, typer.Argument(metavar="CERT|RUN", help="A certificate, or a run directory.")],
    run: Annotated[Path | None, typer.Option(help="The run it is about, to compute everything again.")] = None,
    key: Annotated[
        list[str] | None,
        typer.Option(metavar="[NAME=]FILE", help="A public key that must have signed. Repeatable."),
    ] = None,
    model: Annotated[Path | None, typer.Option(help="The model file it should be about.")] = None,
    quick: CheckQuick = False,
    quiet: Quiet = False,
) -> Result:
    """Check a certificate, or the log and ledger of a run.

    With --run, every hash and figure is computed again. Without it, only signatures are checked. For a run directory,
    the log, the chain of the ledger's steps, their signatures and those of witnesses are checked.

    Exit code 0 if nothing contradicts the certificate or the run, 1 if something does, with each reason.

    Example: `ease verify certificate.json --run runs/first --key hospital=hospital.pub`
    """
    from ease.commands.evidence import verify_certificate

    summary = verify_certificate(certificate, run, key or [], model, quick, quiet)
    return summary, REFUTED if not summary.holds else 0
