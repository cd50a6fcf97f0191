"""`ease up`."""

from pathlib import Path
from typing import Annotated

import typer

from ease.cli.options import Configuration, Quiet, Settings, service


@service
def up(
    config: Configuration = None,
    nodes: Annotated[int | None, typer.Option(min=2, help="Number of clients. By default as configured.")] = None,
    folder: Annotated[Path, typer.Option(help="Folder of the federation.")] = Path("federation"),
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="By default a free one.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="No TLS and no keys.")] = False,
    flower: Annotated[bool, typer.Option("--flower/--sockets", help="Connect by Flower, or by sockets only.")] = True,
    simulation: Annotated[
        bool,
        typer.Option("--simulation", help="Use Flower's simulation, which needs Ray. No TLS and no keys."),
    ] = False,
    settings: Settings = None,
    quiet: Quiet = False,
) -> None:
    """Start a whole federation on this machine.

    It starts a server and nodes and makes their keys, for a first try. Ctrl-C stops all of them.

    Example: `ease up --nodes 3`
    """
    from ease.commands.federation import run_up
    from ease.runs.config import load_config

    changes = (*(settings or ()), *((f"partition.clients={nodes}",) if nodes else ()))
    source = [*((str(config),) if config else ()), *(part for each in changes for part in ("--set", each))]
    folder, insecure = folder.absolute(), insecure or simulation
    run_up(load_config(config, changes), source, folder, port, insecure, flower, simulation, quiet)
