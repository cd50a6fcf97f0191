"""`ease status`."""

import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from ease.cli.options import Federation, Json, command, print_summary


@command
def status(
    folder: Federation = Path("federation"),
    run: Annotated[Path | None, typer.Option(help="Also show a run: its round, bytes and requests.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Repeat every few seconds until stopped.")] = False,
    exit_code: Annotated[
        bool, typer.Option("--exit-code", help="1: a node is silent or the certificate ended; 4, 5: requests wait.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show the nodes of a federation and the waiting requests.

    It prints when each node last worked, and the round, the bytes and the deadlines of a run.

    Example: `ease status federation --run runs/first --watch`
    """
    from ease.commands.federation import WATCHING, federation_status

    first = federation_status(folder, run)
    print_summary(first, as_json)
    with suppress(KeyboardInterrupt):  # which is how a watch ends
        while watch:
            time.sleep(WATCHING)
            found = federation_status(folder, run)
            if not as_json and sys.stdout.isatty():
                typer.clear()  # redraw the screen instead of scrolling
            print_summary(found, as_json)
    if exit_code and first.exit_code:
        raise typer.Exit(first.exit_code)
