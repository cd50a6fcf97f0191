"""`ease report`."""

from pathlib import Path
from typing import Annotated

import typer

from ease.cli.options import Quiet, Result, command


@command
def report(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder of a run, of a request in it, or of an experiment.")
    ],
    out: Annotated[Path | None, typer.Option(help="The page. By default report.html in DIR.")] = None,
    thumbnails: Annotated[
        bool | None,
        typer.Option(
            "--thumbnails/--no-thumbnails",
            help="Show some of the forgotten pictures. By default only generated ones, because pages are passed on.",
        ),
    ] = None,
    quiet: Quiet = False,
) -> Result:
    """Write one HTML page about a run and its audits.

    The page is self-contained. It shows the verdict, every measure, and the pictures behind them.

    Example: `ease report runs/first --out report.html`
    """
    from ease.commands.report import report_run

    return report_run(folder, out, thumbnails, quiet)
