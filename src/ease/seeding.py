"""Independent named random streams: the same labels give the same numbers on every machine."""

import hashlib

import numpy as np
import torch


def stream_seed(seed: int, *labels: str | int) -> int:
    """A 63-bit seed that depends on every label and on their order."""
    text = "\x1f".join([str(seed), *map(str, labels)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(seed: int, *labels: str | int) -> np.random.Generator:
    """A numpy stream for data order, partitions and generated worlds."""
    return np.random.default_rng(stream_seed(seed, *labels))


def torch_generator(seed: int, *labels: str | int) -> torch.Generator:
    """A CPU torch stream for initial weights, so a GPU run starts from the same numbers."""
    return torch.Generator().manual_seed(stream_seed(seed, *labels))
