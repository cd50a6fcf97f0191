"""What `ease node` and the other commands of a federation of processes do."""

import grp
import signal
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import ease.methods  # whose objectives a node knows
from ease.config import read_toml, validate
from ease.errors import UserError
from ease.federation.node import Node, Policy, listen, serve
from ease.federation.remote import node_socket
from ease.runs.config import RunConfig
from ease.runs.world import World


def make_node(config: RunConfig, client: int, folder: Path, policy: Path | None = None, quiet: bool = False) -> Node:
    """The worker of one client: its own shard of the configured data, and a folder of its own."""
    world = World.open(config)
    shard = next((each for each in world.shards if each.client == client), None)
    if shard is None:
        known = ", ".join(str(each.client) for each in world.shards)
        raise UserError(f"--id {client}: no client of this configuration (its clients: {known})")
    rules = validate(Policy, read_toml(policy), str(policy)) if policy is not None else Policy()
    return Node(
        world.server.model,
        shard,
        world.evaluator.activations,
        world.server.device,
        folder,
        world.server.backbone.fingerprint,
        _version(),
        rules,
        None if quiet else sys.stderr,
    )


def run_node(
    config: RunConfig,
    client: int,
    folder: Path | None,
    socket: Path | None,
    policy: Path | None,
    group: str | None,
    quiet: bool,
) -> None:
    """Answer jobs for one client until the process is ended."""
    if socket is None:
        socket = node_socket(config.federation_folder, client)
    line = listen(socket, _group(group))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        node = make_node(config, client, folder or socket.with_suffix(""), policy, quiet)
        if not quiet:
            print(f"client {client}: {len(node.shard.train)} pairs; listening at {socket}", file=sys.stderr, flush=True)
        serve(node, line)
    finally:
        line.close()
        socket.unlink(missing_ok=True)


def _version() -> str:
    with suppress(PackageNotFoundError):
        return version("ease-unlearning")
    return ""


def _group(name: str | None) -> int | None:
    if name is None:
        return None
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise UserError(f"--group {name}: no such group on this machine; make it or leave the option out") from None
