"""`ease serve`."""

from pathlib import Path
from typing import Annotated

import typer

from ease.cli.options import By, Json, Key, Log, LogFormat, Quiet, command


@command
def serve(
    folder: Annotated[Path, typer.Argument(metavar="RUN|EXPORT", help="Run directory, or a folder of `ease export`.")],
    request: Annotated[
        str | None, typer.Option(help="Show the models before and after this open request side by side, e.g. client-3.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at. 0 means any free port.")] = 8400,
    public: Annotated[
        bool, typer.Option("--public", help="Allow a --host that others can reach. Pictures are then not shown.")
    ] = False,
    keyless: Annotated[
        bool, typer.Option("--no-key", help="Answer every user of this machine, without a key.")
    ] = False,
    allow_decisions: Annotated[
        bool, typer.Option("--allow-decisions", help="Let the queue page approve and refuse requests.")
    ] = False,
    by: By = None,
    key: Key = None,
    log_format: LogFormat = Log.text,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Serve a model and the queue of requests over HTTP.

    It serves a page to search by words, /search, /encode, /health, /metrics and /openapi.json until Ctrl-C. For a run
    on this machine it also serves /queue, which shows requests and, with --allow-decisions, decides on them.

    A run is served as its last release left it, so forgotten pairs are never found. The server listens on this machine
    only, and answers clients that send the key it prints. It needs the extra `serve`.

    Example: `ease serve runs/first --request client-3`
    """
    from ease.commands.serve import Deciding, serve_model
    from ease.console import log_as_json

    deciding = Deciding(by, key) if allow_decisions else None
    log = log_format is Log.json
    if log:
        log_as_json()
    serve_model(folder, request, host, port, public, keyless, deciding, as_json, quiet, log)
