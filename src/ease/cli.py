"""The command line: each command is thin, over one library call. Heavy imports wait until a command needs them."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from ease.errors import UserError

app = typer.Typer(
    help="Federated unlearning for image-text models: train, forget, and show that it is forgotten.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)

Settings = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one setting, e.g. training.rounds=5. Repeatable.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, only the result.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the full traceback of an error.")]


@app.command()
def train(
    config: Annotated[Path | None, typer.Argument(help="TOML file; without one, the defaults.")] = None,
    out: Annotated[Path | None, typer.Option(help="Run directory. An interrupted run there is continued.")] = None,
    settings: Settings = None,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train a model over the clients and keep the history that unlearning needs.

    Example: `ease train configs/scenes.toml --out runs/first --set training.rounds=10`
    """
    from ease.commands import train_run
    from ease.run import load_config

    if out is None:
        raise UserError("--out: name the run directory, for example --out runs/first")
    summary = train_run(load_config(config, tuple(settings or ())), out, quiet or as_json)
    _finish(summary, as_json)


@app.command()
def demo(
    out: Annotated[Path | None, typer.Option(help="Keep the run here; by default it goes to a temporary folder.")] = None,
    settings: Settings = None,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show the whole job on generated scenes and the shipped tiny model.

    Example: `ease demo`
    """
    import tempfile

    from ease.commands import train_run
    from ease.run import load_config

    with tempfile.TemporaryDirectory(prefix="ease-demo-") as temporary:
        summary = train_run(load_config(None, tuple(settings or ())), out or Path(temporary) / "run", quiet or as_json)
    _finish(summary, as_json)


def _finish(summary: "object", as_json: bool) -> None:
    """Print a command's result: a JSON object for machines, tables for people."""
    if as_json:
        print(json.dumps(summary.as_json(), allow_nan=False))
    else:
        from ease.console import screen

        for part in summary.render():
            screen.print(part)


def main() -> None:
    """Run a command; a user's mistake is one line and exit code 2."""
    try:
        app(standalone_mode=True)
    except UserError as error:
        if "--debug" in sys.argv:
            raise
        from ease.console import errors

        errors.print(f"[bold red]error:[/] {str(error)}", highlight=False, soft_wrap=True)
        raise SystemExit(2) from error
    except KeyboardInterrupt:
        print("\nstopped; run the same command again to continue", file=sys.stderr)
        raise SystemExit(130) from None
