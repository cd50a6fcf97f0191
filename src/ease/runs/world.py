"""The world of a run in three parts: server, clients and evaluator."""

import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from ease.data import canaries
from ease.data.config import check_sizes, check_splits, load_pairs
from ease.data.dealing import deal
from ease.data.features import Activations, cached_activations
from ease.data.membership import Holding, Membership, membership_of, positions_of, shards_of
from ease.data.pairs import PairSet
from ease.data.partition import Shard, joint_embedding
from ease.errors import UserError
from ease.federation.engines import make_engine, remote_engine
from ease.federation.enrolment import enrolled
from ease.federation.protocol import Engine
from ease.federation.wire import Deal
from ease.model.backbones import Backbone, load_backbone
from ease.model.dual_encoder import DualEncoder, check_fits, first_adapted
from ease.params import Params
from ease.requests.request import Request, held_without, listed_ids, redealt, without
from ease.runs.config import RunConfig, choose_device


@dataclass(frozen=True)
class Server:
    """The server's part: configuration, frozen model and ids of pairs; no pictures, captions or activations."""

    config: RunConfig
    membership: Membership
    centroids: np.ndarray
    """Pseudo-class centres in the joint frozen space [classes, width]."""
    backbone: Backbone
    model: DualEncoder
    device: torch.device

    def initial(self) -> Params:
        """w_0, on the CPU."""
        return self.model.initial().to("cpu")


@dataclass(frozen=True)
class Evaluator:
    """The evaluator's part: all pairs with their activations, for measuring and simulating, never for the server."""

    pairs: PairSet
    activations: Activations
    shards: tuple[Shard, ...]
    """What each client held when the run was trained, less what has vanished from disk since."""
    test: np.ndarray
    """Positions of the test pairs."""
    spare: np.ndarray
    """Positions of further pairs that no client holds."""
    model: DualEncoder
    centroids: np.ndarray
    device: torch.device

    def classes_of(self, positions: np.ndarray) -> np.ndarray:
        """The nearest pseudo-class of each pair [pairs]."""
        return nearest_classes(self.activations, self.centroids, positions)

    @cached_property
    def canaries(self) -> np.ndarray:
        """Positions of all canaries, planted or not."""
        return self.pairs.indices(canaries.SPLIT)

    def without(self, ids: Collection[str]) -> "Evaluator":
        """The evaluator without some pairs outside training, for measures, galleries and searches."""
        if not ids:
            return self
        gone = np.array([place for place, pair_id in enumerate(self.pairs.ids) if pair_id in ids], dtype=np.int64)
        test, spare = (each[~np.isin(each, gone)] for each in (self.test, self.spare))
        return replace(self, test=test, spare=spare, shards=tuple(shard.without_held_out(ids) for shard in self.shards))

    def data(self, positions: np.ndarray) -> np.ndarray:
        """The positions that are not canaries."""
        return positions[~np.isin(positions, self.canaries)]


@dataclass(frozen=True)
class World:
    """A server, clients behind a federation, and an evaluator beside them."""

    server: Server
    evaluator: Evaluator
    gone: tuple[Request, ...] = ()
    """Closed requests; their pairs are not in any client's data."""
    disks: Path | None = None
    """Folder with one disk folder per client; absent if clients store nothing."""
    run_name: str = ""
    """The name by which nodes know the run."""
    renewed: int = 0
    """Number of closed requests before the last training from the start."""

    @classmethod
    def open(
        cls,
        config: RunConfig,
        known: tuple[Membership, np.ndarray] | None = None,
        forgotten: Collection[str] = (),
        barred: Callable[[str], bool] | None = None,
    ) -> "World":
        """Open the world: partition the data, or use the stored partition and class centres of a `known` run.

        Files of `forgotten` pairs may be missing. Pairs that are `barred` are not read.
        """
        device = choose_device(config.device)
        backbone = load_backbone(config.model.backbone, device)
        check_fits(backbone, config.model)  # here and below: whatever cannot work is refused before the long decoding
        apart, run_name = config.partition.on_site, ""
        if apart:
            check_on_site(config)
        by_site = config.partition.scheme == "sites"
        fits = partial(check_sizes, config.data, config.partition) if known is None and not apart else None
        owner: Literal["server"] | None = "server" if apart else None
        pairs = load_pairs(config.data, backbone.image_size, backbone.crop, by_site, forgotten, barred, fits, owner)
        pairs = canaries.with_canaries(pairs, config.data.canaries, config.seed)
        check_splits(pairs, config.data, ("test",) if apart else ("train", "test"))
        activations = activations_of(pairs, backbone, config, device)
        model = DualEncoder(backbone, config.model, config.seed).to(device)
        if known is None and apart:
            run_name = uuid.uuid4().hex  # nodes are asked before there is a folder that has a name
            holdings, centroids = _enrolled(config, run_name, backbone, activations)
            membership = membership_of(pairs, ()).model_copy(update={"clients": holdings})
            shards = shards_of(membership, pairs)
        elif known is None:
            shards, centroids = deal(config.partition, pairs, activations, config.data.seed, config.seed)
            shards = canaries.plant(shards, pairs, partial(nearest_classes, activations, centroids), config.seed)
            membership = membership_of(pairs, shards)
        else:
            membership, centroids = known
            shards = shards_of(membership, pairs, forgotten)
        test, spare = (positions_of(ids, pairs) for ids in (membership.test, membership.validation))
        return cls(
            Server(config, membership, centroids, backbone, model, device),
            Evaluator(pairs, activations, shards, test, spare, model, centroids, device),
            run_name=run_name,
        )

    def without(self, *requests: Request) -> "World":
        """The world after these requests are closed."""
        return replace(self, gone=(*self.gone, *requests)) if requests else self

    def erasing(self, *requests: Request) -> "World":
        """The world without the listed pairs outside training; training pairs stay."""
        untrained = self.server.membership.untrained().values()
        ids = listed_ids(requests) & frozenset[str]().union(*untrained)
        return replace(self, evaluator=self.evaluator.without(ids)) if ids else self

    def with_disks(self, disks: Path | None) -> "World":
        """The world with folders as the clients' disks."""
        return self if disks == self.disks else replace(self, disks=disks)

    @property
    def config(self) -> RunConfig:
        return self.server.config

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        """The clients' current pairs."""
        dealt = {holding.client: holding for holding in self.server.membership.clients}
        return redealt(without(self.evaluator.shards, self.gone), dealt, self.gone[: self.renewed])

    def check_together(self, what: str) -> None:
        """Refuse an operation that needs all clients' pairs in one place."""
        if self.config.partition.on_site:
            raise UserError(
                f'{what}: needs the clients\' pairs, and they are only at their sites (partition.scheme = "on_site")'
            )

    @cached_property
    def federation(self) -> Engine:
        """The clients behind the configured engine; each has its own pairs only."""
        if self.config.remote:
            return remote_engine(
                self.config.engine,
                self.config.federation_folder,
                self.run_name,
                {holding.client: holding.train_ids for holding in self.server.membership.clients},
                held_without(self.server.membership.clients, self.gone),
                self.gone,
                self.renewed,
                self.server.backbone.fingerprint,
                self.config.training.deadline,
                {holding.client: holding.validation_ids for holding in self.server.membership.clients},
            )
        shards, activations = self.shards, self.evaluator.activations
        return make_engine(self.config.engine, self.server.model, shards, activations, self.server.device, self.disks)


def check_on_site(config: RunConfig) -> None:
    """Refuse settings that do not work with pairs on site."""
    if not config.remote:
        raise UserError(
            f'partition.scheme = "on_site": pairs are at nodes, and engine = "{config.engine}" has none; set engine '
            'to "nodes" or "flower"'
        )
    if config.data.name == "scenes":
        raise UserError('data.name = "scenes": generated pairs are at no site; choose another partition.scheme')
    if config.data.canaries:
        raise UserError("data.canaries: no one can plant them in pairs that are on site; leave it out")


def activations_of(pairs: PairSet, backbone: Backbone, config: RunConfig, device: torch.device) -> Activations:
    """The frozen activations of pairs that the configured model needs."""
    first = {side: first_adapted(getattr(backbone, side), config.model) for side in ("image", "text")}
    return cached_activations(pairs, backbone, first["image"], first["text"], device)


def _enrolled(
    config: RunConfig, run_name: str, backbone: Backbone, activations: Activations
) -> tuple[tuple[Holding, ...], np.ndarray]:
    """The nodes' holdings and the pseudo-class centres that they agreed on."""
    none = dict.fromkeys(range(config.partition.clients), ())
    folder, deadline = config.federation_folder, config.training.deadline
    remote = remote_engine(config.engine, folder, run_name, none, none, (), 0, backbone.fingerprint, deadline)
    deal = Deal(
        classes=config.partition.classes,
        class_seed=config.data.seed,
        seed=config.seed,
        validation_share=config.partition.validation_share,
    )
    return enrolled(remote, deal, activations.pooled_image.shape[-1] + activations.pooled_text.shape[-1])


def nearest_classes(activations: Activations, centroids: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The pseudo-class of the nearest centre for each pair [pairs]."""
    joint = joint_embedding(activations.pooled_image[positions], activations.pooled_text[positions])
    return ((joint[:, None] - centroids[None]) ** 2).sum(-1).argmin(1)
