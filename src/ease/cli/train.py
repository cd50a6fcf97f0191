"""`ease train`."""

from pathlib import Path
from typing import Annotated

import typer

from ease.cli.options import Configuration, Quiet, Result, Settings, tracked
from ease.errors import UserError


@tracked
def train(
    config: Configuration = None,
    out: Annotated[Path | None, typer.Option(help="Run directory. An interrupted run there is continued.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Continue this run. With --after, on trial in a copy.")] = None,
    after: Annotated[
        str | None, typer.Option(help="The request to continue from, e.g. client-3 or client-3/retrain.")
    ] = None,
    until: Annotated[int | None, typer.Option(min=1, help="Total number of rounds of the resumed run.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of the trial.")] = 10,
    lock: Annotated[bool, typer.Option("--lock/--no-lock", help="Keep the request's directions locked.")] = True,
    settings: Settings = None,
    quiet: Quiet = False,
) -> Result:
    """Train a model over several clients, or continue a run.

    The run keeps the history that unlearning needs.

    Example: `ease train configs/scenes.toml --out runs/first --set training.rounds=10`

    Continue a run with more rounds and with all clients that joined: `ease train --resume runs/first --until 25`

    Test whether a forgotten client returns: `ease train --resume runs/first --after client-3 --rounds 10 --no-lock`
    """
    if resume is not None or after is not None:
        if resume is None or config is not None or out is not None or settings:
            raise UserError("--resume RUN goes with either --until, or --after REQUEST, --rounds and --lock")
        if (after is None) == (until is None) or (after is None and not lock):
            raise UserError(
                "--resume RUN: add --until ROUNDS to continue, or --after REQUEST to test if forgotten pairs return"
            )
        if after is not None:
            from ease.commands.forget import continue_run

            return continue_run(resume, after, rounds, lock, quiet)
        from ease.commands.train import train_more

        assert until is not None  # checked above
        return train_more(resume, until, quiet)
    if out is None:
        raise UserError("--out: name the run directory, for example --out runs/first")
    from ease.commands.train import train_run
    from ease.runs.config import load_config

    return train_run(load_config(config, tuple(settings or ())), out, quiet)
