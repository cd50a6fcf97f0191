"""Which engine does the clients' work, in this process or at nodes: one of them made from its name."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from ease.data.features import Activations
from ease.data.partition import Shard
from ease.federation.client import ClientData
from ease.federation.client_history import client_history
from ease.federation.flower import Flower
from ease.federation.remote import Remote, Sockets, Transport, node_socket
from ease.federation.sequential import Sequential
from ease.federation.vectorized import Vectorized
from ease.model.dual_encoder import DualEncoder
from ease.requests.request import Request

EngineKind = Literal["auto", "sequential", "vectorized", "nodes", "flower"]
REMOTE = ("nodes", "flower")
"""Whose clients are processes of their own."""
FEWEST_SHARING = 4
"""Clients from which on shared passes are faster on a CPU too (`benchmarks/shared_passes.py`)."""


def make_engine(
    kind: EngineKind,
    model: DualEncoder,
    shards: Sequence[Shard],
    activations: Activations,
    device: torch.device,
    disks: Path | None = None,
) -> Sequential:
    """`sequential`: one client after the other; `vectorized`: all clients of a round in one pass; `auto`: the faster.

    What nodes do, one after the other does as well: so they are simulated.
    Clients store what jobs ask them to keep in their own folders in `disks`.
    """
    engine: Sequential
    if kind == "vectorized" or (kind == "auto" and prefers_vectorized(model, len(shards), device)):
        engine = Vectorized.of(model, shards, activations, device)
    else:
        engine = Sequential(model, {shard.client: ClientData.of(shard, activations, device) for shard in shards})
    if disks is not None:
        engine.data = {
            client: replace(data, history=client_history(disks, client)) for client, data in engine.data.items()
        }
    return engine


def prefers_vectorized(model: DualEncoder, clients: int, device: torch.device) -> bool:
    """Whether clients share their passes by `auto`: always on a GPU; on a CPU for projectors over fixed features.

    Adapters are left to the loop on a CPU: its runs give the same bytes as nodes do.
    """
    if device.type == "cuda":
        return True
    return model.config.lora == "off" and clients >= FEWEST_SHARING


def remote_engine(
    kind: EngineKind,
    folder: Path,
    run_name: str,
    holdings: Mapping[int, Sequence[str]],
    held: Mapping[int, Collection[str]],
    gone: tuple[Request, ...],
    renewed: int,
    backbone: str,
    deadline: float | None,
    held_out: Mapping[int, Sequence[str]] | None = None,
) -> Remote:
    """Clients of the federation in `folder`: by the sockets of their nodes, or anywhere behind a Flower server."""
    sockets = {client: node_socket(folder, client) for client in holdings}
    line: Transport = Flower(folder) if kind == "flower" else Sockets(sockets)
    return Remote(line, holdings, held, run_name, gone, renewed, backbone, deadline, held_out or {})
