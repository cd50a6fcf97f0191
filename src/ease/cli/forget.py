"""`ease forget`."""

from typing import Annotated

import typer

from ease.cli.options import (
    Classes,
    Clients,
    Concepts,
    Except,
    Method,
    Quiet,
    RequestName,
    Result,
    Run,
    Samples,
    Settings,
    Threshold,
    chosen_method,
    tracked,
)


@tracked
def forget(
    run: Run,
    client: Clients = None,
    concept: Concepts = None,
    class_: Classes = None,
    samples: Samples = None,
    canaries: Annotated[
        bool, typer.Option("--canaries", help="All planted canaries (data.canaries), at every client.")
    ] = False,
    threshold: Threshold = None,
    except_: Except = None,
    name: RequestName = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Forget nothing. Show whose pairs these are, and list their ids.")
    ] = False,
    method: Method = None,
    settings: Settings = None,
    quiet: Quiet = False,
) -> Result:
    """Forget clients, concepts or single pairs.

    One request may name all of these. The new model and its record are written to the run.

    Examples: `ease forget runs/first --client 3`, `ease forget runs/first --concept "on the beach" --dry-run`,
    `ease forget runs/first --client 3 --samples ids.txt --name farewell`
    """
    unlearner = chosen_method(method, settings)
    from ease.runs.resolve import RequestOptions

    wanted = RequestOptions(
        client or [], class_ or [], concept or [], samples, canaries, name, threshold, except_ or []
    )
    if dry_run:
        from ease.commands.preview import preview_run

        return preview_run(run, wanted, unlearner, quiet)
    from ease.commands.forget import forget_run

    return forget_run(run, wanted, unlearner, quiet)
