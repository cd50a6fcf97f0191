"""`ease keys`: new, server, node and admit."""

from pathlib import Path
from typing import Annotated

import typer

from ease.cli.options import Federation, Result, command

PrivateKey = Annotated[Path, typer.Argument(help="File for the private key. The public key is FILE.pub beside it.")]


@command
def new(file: PrivateKey) -> Result:
    """Make a key pair that signs certificates.

    The keys are Ed25519.

    Example: `ease keys new client.key`
    """
    from ease.commands.evidence import make_keys

    return make_keys(file)


@command
def server(
    folder: Federation,
    host: Annotated[
        list[str] | None, typer.Option(help="Name or address at which nodes reach the server. Repeatable.")
    ] = None,
) -> Result:
    """Make the certificate of a federation's server.

    Nodes recognise the server by the file ca.crt, which is written beside it.

    Example: `ease keys server federation --host fed.example.org`
    """
    from ease.commands.federation import server_keys

    return server_keys(folder, list(dict.fromkeys([*(host or ()), "localhost", "127.0.0.1"])))


@command
def node(file: PrivateKey) -> Result:
    """Make the key of a client's node.

    Run this on the client's machine.

    Example: `ease keys node node.key`
    """
    from ease.commands.federation import node_key

    return node_key(file)


@command
def admit(
    folder: Federation,
    file: Annotated[Path, typer.Argument(help="Public key of the client's node.")],
    id: Annotated[int, typer.Option("--id", min=0, help="The number of the client.")],
) -> Result:
    """Admit the node with this key as a client.

    Run this on the server. No other key can act for this client.

    Example: `ease keys admit federation node.key.pub --id 3`
    """
    from ease.commands.federation import admit_key

    return admit_key(folder, id, file)
