"""A probe: one state down, two updates back, of what the forget pairs and what the retained pairs would teach."""

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from ease.federation.client import ClientData
from ease.federation.eight_bit import to_8bit
from ease.federation.objectives import Objective, Pairs, register
from ease.federation.protocol import LocalJob, Update

KINDS: tuple[Pairs, ...] = ("forget", "retain")


def probe_parts(job: LocalJob) -> dict[str, LocalJob]:
    """The two trainings of a probe."""
    return {kind: replace(job, objective="align", data=kind, stream=f"{job.stream}-{kind}") for kind in KINDS}


def probed(client: ClientData, updates: Mapping[str, Update]) -> Update:
    """The answer to a probe: both updates in 8 bit; what a client has too little of is left out."""
    values: dict[str, Tensor] = {}
    for kind, update in updates.items():
        if update.delta is not None:
            values |= {f"{kind}/{name}": tensor for name, tensor in to_8bit(update.delta.tensors).items()}
    return Update(client.shard.client, len(client.train), None, values)


PROBE = "probe"
register(PROBE, Objective(parts=probe_parts, combine=probed, reads=frozenset(KINDS)))
