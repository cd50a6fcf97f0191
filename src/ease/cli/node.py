"""`ease node`."""

from pathlib import Path
from typing import Annotated

import typer

from ease.cli.options import Configuration, Log, LogFormat, Quiet, Result, Settings, command
from ease.errors import UserError


@command
def node(
    config: Configuration = None,
    id: Annotated[int, typer.Option("--id", min=0, help="The number of the client.")] = 0,
    data: Annotated[Path | None, typer.Option(help="Folder of the data on this machine, replaces data.path.")] = None,
    server: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Server to connect to. Without one, only a Unix socket.")
    ] = None,
    key: Annotated[Path | None, typer.Option(help="Private key of this node (`ease keys node`).")] = None,
    ca: Annotated[Path | None, typer.Option(help="Certificate of the server (ca.crt).")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="No TLS and no key, on this machine only.")] = False,
    folder: Annotated[
        Path | None, typer.Option(help="Its own disk, for what it receives and keeps. By default beside the socket.")
    ] = None,
    socket: Annotated[
        Path | None, typer.Option(help="Socket to listen at. By default in the folder of the federation.")
    ] = None,
    policy: Annotated[
        Path | None, typer.Option(help="TOML file: which objectives are allowed, how often, with how many others.")
    ] = None,
    group: Annotated[str | None, typer.Option(help="A group of this machine that may also connect.")] = None,
    audit: Annotated[
        bool, typer.Option("--audit", help="Show what the node of --folder was asked so far, and exit.")
    ] = False,
    log_format: LogFormat = Log.text,
    settings: Settings = None,
    quiet: Quiet = False,
) -> Result:
    """Work for one client, next to its data.

    Jobs arrive as bytes over a Unix socket until the node is stopped. The configuration is that of the server.

    Example: `ease node site.toml --id 3 --data /srv/photos --server fed.example.org:8000 --key node.key --ca ca.crt`
    """
    from ease.commands.federation import Upstream, asked_of_node, run_node
    from ease.console import log_as_json
    from ease.runs.config import load_config

    if audit:
        if folder is None:
            raise UserError("--audit: name the folder of the node with --folder")
        return asked_of_node(folder)
    if log_format is Log.json:
        log_as_json()
    changes = (*(settings or ()), *((f"data.path={data}",) if data else ()))
    if server is not None and not insecure and (key is None or ca is None):
        raise UserError("--server: name the key of this node with --key and the server's certificate with --ca")
    upstream = None if server is None else Upstream(server, None if insecure else key, None if insecure else ca)
    run_node(load_config(config, changes), id, folder, socket, policy, group, upstream, quiet)
    return None
