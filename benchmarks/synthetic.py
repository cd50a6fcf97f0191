"""A federation of any size over fixed features that are drawn, not encoded: what benchmarks of scale train."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from torch import Tensor, nn

from ease.data.features import Activations
from ease.data.partition import Shard
from ease.federation.fedavg import TrainingConfig
from ease.model.dual_encoder import DualEncoder, ModelConfig
from ease.seeding import generator


class FixedTower(nn.Module):
    """Features as they are: nothing before the projector."""

    depth = 0

    def __init__(self, width: int):
        super().__init__()
        self.width = width

    def prefix(self, inputs: Tensor, first: int) -> tuple[Tensor, None]:
        return inputs, None

    def forward(self, states: Tensor, mask: Tensor | None, first: int) -> Tensor:
        return states

    def attention(self, block: int) -> dict[str, tuple[nn.Module, str]]:
        return {}


class FixedFeatures(nn.Module):
    name = fingerprint = "fixed"
    image_size, crop, context = 1, False, 1

    def __init__(self, image: int, text: int):
        super().__init__()
        self.image, self.text = FixedTower(image), FixedTower(text)

    def tokenize(self, captions: Sequence[str]) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class Federation:
    """What an engine is made of."""

    model: DualEncoder
    shards: list[Shard]
    activations: Activations


@dataclass(frozen=True)
class Setting:
    """Sizes of a federation and the recipe of its training."""

    image: int = 512
    text: int = 512
    hidden: int = 128
    embedding: int = 256
    clients: int = 10
    pairs: int = 4408
    rounds: int = 4
    epochs: int = 2
    batch: int = 64
    rate: float = 0.5
    temperature: float = 0.07
    participation: float = 1.0
    seed: int = 0

    @cached_property
    def training(self) -> TrainingConfig:
        return TrainingConfig(
            rounds=self.rounds,
            local_epochs=self.epochs,
            batch_size=self.batch,
            learning_rate=self.rate,
            participation=self.participation,
        )

    def world(self) -> Federation:
        """Pictures and captions that have something in common; clients hold 0.5 to 1.5 times the mean."""
        rng = generator(self.seed, "synthetic")
        meaning = rng.standard_normal((self.pairs, 32), dtype=np.float32)

        def seen(width: int) -> np.ndarray:
            noise = rng.standard_normal((self.pairs, width), dtype=np.float32)
            return meaning @ rng.standard_normal((32, width), dtype=np.float32) / 32**0.5 + noise

        image, text = seen(self.image), seen(self.text)[:, None]
        shares = np.linspace(0.5, 1.5, self.clients) / self.clients
        ends = np.rint(np.cumsum(shares) * self.pairs).astype(int)
        nobody = np.zeros(0, dtype=np.int64)
        shards = []
        for client, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
            own = np.arange(start, end)
            ids = tuple(f"p{number}" for number in own)
            shards.append(Shard(client, own, nobody, ids, np.zeros(len(own), dtype=np.int64), nobody))
        model = ModelConfig(lora="off", hidden=self.hidden, embedding=self.embedding, temperature=self.temperature)
        backbone = FixedFeatures(self.image, self.text)
        return Federation(DualEncoder(backbone, model, self.seed), shards, Activations(image, text, None, image, text))


def write_setting(path: Path, setting: Setting) -> None:
    path.write_text(json.dumps(asdict(setting)))


def read_setting(path: Path) -> Setting:
    return Setting(**json.loads(path.read_text()))
