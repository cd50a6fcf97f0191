"""`ease keys`: new, server, node, admit, list, revoke and rotate."""

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
def list_(folder: Federation) -> Result:
    """List a federation's keys and when its certificate ends.

    Example: `ease keys list federation`
    """
    from ease.commands.federation import list_keys

    return list_keys(folder)


@command
def revoke(
    folder: Federation, id: Annotated[int, typer.Option("--id", min=0, help="The number of the client.")]
) -> Result:
    """Revoke the key of a client's node.

    Nobody can act for this client until another key is admitted. A key that signs decisions is revoked in policy.toml
    (approval.revoked).

    Example: `ease keys revoke federation --id 3`
    """
    from ease.commands.federation import revoke_key

    return revoke_key(folder, id)


@command
def rotate(folder: Federation) -> Result:
    """Replace the certificate of a federation's server.

    The names stay the same, and the old files are kept in a folder beside. Restart the server, and give every node the
    new ca.crt. The key of a node is replaced by `ease keys node` and `ease keys admit`.

    Example: `ease keys rotate federation`
    """
    from ease.commands.federation import rotate_keys

    return rotate_keys(folder)


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
