"""`ease work`."""

from typing import Annotated

import typer

from ease.cli.options import By, Log, LogFormat, Quiet, Result, Run, Settings, command


@command
def work(
    run: Run,
    together: Annotated[bool, typer.Option("--together", help="Answer all waiting requests by one excision.")] = False,
    audit: Annotated[
        bool | None,
        typer.Option("--audit/--no-audit", help="Audit each result before its release. By default as the policy says."),
    ] = None,
    by: By = None,
    log_format: LogFormat = Log.text,
    settings: Settings = None,
    quiet: Quiet = False,
) -> Result:
    """Answer approved requests and release the results.

    Requests are answered one after the other. By default each result is audited, and it is released if the verdict is
    passed. Otherwise it is held until a person approves it. A run that is too small for a full audit releases at
    once; --audit then makes a smaller audit. If the policy says so, released requests are purged. Settings
    are those of policy.toml, such as release, hold.retain_points and purge.after_days.

    Exit code 4 if a request that was worked on is held for a person or could not be answered now.

    Example: `ease work runs/first --audit --set hold.retain_points=1`
    """
    from ease.commands.requests import work_run
    from ease.console import log_as_json
    from ease.operations.ledger.policy import load_policy

    if log_format is Log.json:
        log_as_json()
    summary = work_run(run, load_policy(run, tuple(settings or ())), by, together, audit, quiet)
    return summary, summary.exit_code
