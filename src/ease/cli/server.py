"""`ease server`."""

from pathlib import Path
from typing import Annotated

import typer

from ease.cli.options import Federation, Log, LogFormat, Quiet, service


@service
def server(
    folder: Federation = Path("federation"),
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen at.")] = 8000,
    insecure: Annotated[bool, typer.Option("--insecure", help="No TLS and no keys, on this machine only.")] = False,
    log_format: LogFormat = Log.text,
    quiet: Quiet = False,
) -> None:
    """Run the server of a federation.

    It runs until it is stopped. Nodes connect to it, and runs with engine = "flower" use it.

    Example: `ease server federation --host 0.0.0.0 --port 8000`
    """
    from ease.commands.federation import run_server
    from ease.console import log_as_json

    if log_format is Log.json:
        log_as_json()
    run_server(folder, host, port, insecure, quiet)
