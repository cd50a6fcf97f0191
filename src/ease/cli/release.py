"""`ease release`."""

from typing import Annotated

import typer

from ease.cli.options import Result, Run, command


@command
def release(
    run: Run,
    request: Annotated[str, typer.Option(help="The result to accept, e.g. client-3 or client-3/finetune.")],
) -> Result:
    """Accept a result, so that the run continues from it.

    The request is closed, and its pairs are never used again. Further requests, more rounds and exports start from
    this model.

    Example: `ease release runs/first --request client-3`
    """
    from ease.commands.forget import release_run

    return release_run(run, request)
