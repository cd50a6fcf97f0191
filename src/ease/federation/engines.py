"""Which engine does the clients' work in this process: one of them made from its name."""

from collections.abc import Sequence
from typing import Literal

import torch

from ease.data.features import Activations
from ease.data.partition import Shard
from ease.federation.client import ClientData
from ease.federation.cohort import Cohort
from ease.federation.loop import Loop
from ease.model.dual_encoder import DualEncoder

EngineKind = Literal["auto", "loop", "cohort"]


def make_engine(
    kind: EngineKind, model: DualEncoder, shards: Sequence[Shard], activations: Activations, device: torch.device
) -> Loop:
    """`loop`: one client after the other; `cohort`: all clients of a round in one pass; `auto`: cohort on a GPU."""
    if kind == "cohort" or (kind == "auto" and device.type == "cuda"):
        return Cohort.of(model, shards, activations, device)
    return Loop(model, {shard.client: ClientData.of(shard, activations, device) for shard in shards})
