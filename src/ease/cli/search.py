"""`ease search`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ease.cli.options import Quiet, Result, Run, command


class Among(StrEnum):
    all = "all"
    train = "train"
    test = "test"


@command
def search(
    run: Run,
    words: Annotated[str, typer.Argument(help='What to look for, such as "a dog in the snow".')],
    request: Annotated[
        str | None, typer.Option(help="Compare the models before and after this request, e.g. client-3.")
    ] = None,
    count: Annotated[int, typer.Option("-k", "--count", help="Pictures per model.")] = 5,
    among: Annotated[Among, typer.Option(help="The pairs to search.")] = Among.all,
    out: Annotated[Path | None, typer.Option(help="The page of pictures. By default in searches/ of the run.")] = None,
    quiet: Quiet = False,
) -> Result:
    """Find pictures by words.

    With --request, the models before and after the request are shown side by side.

    Example: `ease search runs/first "a red kite" --request client-3`
    """
    from ease.commands.search import search_run

    return search_run(run, words, request, count, among.value, out, quiet)
