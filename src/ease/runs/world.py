"""The world of a run, opened from its configuration: pairs, cached activations, shards, classes and the model."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from ease.data.config import check_splits, load_pairs
from ease.data.dealing import deal
from ease.data.features import Activations, cached_activations
from ease.data.pairs import PairSet
from ease.data.partition import Shard, joint_embedding
from ease.federation.engines import make_engine
from ease.federation.loop import Loop
from ease.model.backbones import Backbone, load_backbone
from ease.model.dual_encoder import DualEncoder, first_adapted
from ease.params import Params
from ease.runs.config import RunConfig, choose_device


@dataclass(frozen=True)
class World:
    """What a configuration stands for: pairs, cached activations, shards, classes and the model."""

    config: RunConfig
    pairs: PairSet
    activations: Activations
    shards: tuple[Shard, ...]
    centroids: np.ndarray
    """Pseudo-class centres in the joint frozen space [classes, width]."""
    backbone: Backbone
    model: DualEncoder
    device: torch.device

    @classmethod
    def open(cls, config: RunConfig) -> "World":
        device = choose_device(config.device)
        backbone = load_backbone(config.model.backbone, device)
        pairs = load_pairs(config.data, backbone.image_size, backbone.crop, config.partition.scheme == "sites")
        check_splits(pairs, config.data)
        first = {side: first_adapted(getattr(backbone, side), config.model) for side in ("image", "text")}
        activations = cached_activations(pairs, backbone, first["image"], first["text"], device)
        model = DualEncoder(backbone, config.model, config.seed).to(device)
        shards, centroids = deal(config.partition, pairs, activations, config.data.seed, config.seed)
        return cls(config, pairs, activations, shards, centroids, backbone, model, device)

    @cached_property
    def federation(self) -> Loop:
        return make_engine(self.config.engine, self.model, self.shards, self.activations, self.device)

    def classes_of(self, positions: np.ndarray) -> np.ndarray:
        """Nearest pseudo-class of any pairs [pairs]."""
        joint = joint_embedding(self.activations.pooled_image[positions], self.activations.pooled_text[positions])
        return ((joint[:, None] - self.centroids[None]) ** 2).sum(-1).argmin(1)

    def initial(self) -> Params:
        return self.model.initial().to("cpu")
