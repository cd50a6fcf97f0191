"""`ease work`."""

from typing import Annotated

import typer

from ease.cli.options import By, Quiet, Result, Run, Settings, command


@command
def work(
    run: Run,
    together: Annotated[bool, typer.Option("--together", help="Answer all waiting requests by one excision.")] = False,
    by: By = None,
    settings: Settings = None,
    quiet: Quiet = False,
) -> Result:
    """Answer approved requests and release the results.

    Requests are answered one after the other. If the policy says so, released requests are then purged. Settings are
    those of policy.toml, such as hold.retain_points and purge.after_days.

    Example: `ease work runs/first --together --set hold.retain_points=1`
    """
    from ease.commands.requests import work_run
    from ease.operations.ledger.policy import load_policy

    return work_run(run, load_policy(run, tuple(settings or ())), by, together, quiet)
