"""The data of a client."""

from dataclasses import dataclass

import numpy as np
import torch

from ease.data.examples import Examples, examples_at
from ease.data.features import Activations
from ease.data.partition import Shard
from ease.errors import ClientError
from ease.federation.client_history import ClientHistory
from ease.federation.protocol import LocalJob, Update
from ease.params import Params
from ease.requests.request import forget_mask


@dataclass(frozen=True)
class ClientData:
    """All data of a client: its shard, the activations of its own pairs, and its history of the training."""

    shard: Shard
    train: Examples
    validation: Examples
    history: ClientHistory | None = None
    """Its history on its own disk; None: only the server stores a history."""

    @classmethod
    def of(cls, shard: Shard, activations: Activations, device: torch.device | str) -> "ClientData":
        return cls(
            shard, examples_at(activations, shard.train, device), examples_at(activations, shard.validation, device)
        )

    def select(self, job: LocalJob) -> np.ndarray:
        """Positions of the training pairs that the job names."""
        if job.data == "all" or job.request is None:
            return np.arange(len(self.train))
        forget = forget_mask(job.request, self.shard)
        return np.flatnonzero(forget if job.data == "forget" else ~forget)

    @property
    def required_history(self) -> ClientHistory:
        """Its history; an error if it stores none."""
        if self.history is None:
            raise ClientError(
                f"client {self.shard.client}: keeps nothing of the training, and is asked about it; open the world of "
                'the run with its folder, or train with training.history = "server"'
            )
        return self.history

    def keep(self, number: int, state: Params, update: Update) -> None:
        """Store a round of the training, unless the client abstained."""
        if update.delta is not None:
            self.required_history.write(number, state, update.delta)
