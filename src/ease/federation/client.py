"""What a client holds."""

from dataclasses import dataclass

import numpy as np
import torch

from ease.data.examples import Examples, examples_at
from ease.data.features import Activations
from ease.data.partition import Shard
from ease.federation.protocol import LocalJob
from ease.requests.request import forget_mask


@dataclass(frozen=True)
class ClientData:
    """Everything a client holds: its shard and the activations of its own pairs."""

    shard: Shard
    train: Examples
    validation: Examples

    @classmethod
    def of(cls, shard: Shard, activations: Activations, device: torch.device | str) -> "ClientData":
        return cls(
            shard, examples_at(activations, shard.train, device), examples_at(activations, shard.validation, device)
        )

    def select(self, job: LocalJob) -> np.ndarray:
        """Positions of the training pairs the job speaks of."""
        if job.data == "all" or job.request is None:
            return np.arange(len(self.train))
        forget = forget_mask(job.request, self.shard)
        return np.flatnonzero(forget if job.data == "forget" else ~forget)
