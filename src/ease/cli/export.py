"""`ease export`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ease.cli.options import By, Quiet, Result, Run, command


class Format(StrEnum):
    peft = "peft"
    safetensors = "safetensors"
    onnx = "onnx"


@command
def export(
    run: Run,
    request: Annotated[
        str | None, typer.Option(help="The request whose model to write, e.g. client-3. By default the trained model.")
    ] = None,
    form: Annotated[Format, typer.Option("--format", help="What to write.")] = Format.safetensors,
    out: Annotated[Path | None, typer.Option(help="Folder to write to. By default exports/ in the run.")] = None,
    recipient: Annotated[
        str | None, typer.Option(metavar="NAME", help="Record the recipient, to notify once pairs in it are forgotten.")
    ] = None,
    by: By = None,
    quiet: Quiet = False,
) -> Result:
    """Write a model in a format that other tools read.

    Example: `ease export runs/first --request client-3 --format peft --out adapter --recipient "Clinic 5"`
    """
    from ease.commands.export import export_run

    return export_run(run, request, form.value, out, quiet, recipient, by)
