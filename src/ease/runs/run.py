"""A run from its configuration: the world it lives in, training with history, and resuming."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field, model_validator

from ease.config import Config, override, read_toml, to_toml, validate
from ease.data.features import Activations, cached_activations
from ease.data.pairs import PairSet
from ease.data.partition import MINIMUM_PAIRS, Shard, cached_classes, joint_embedding, make_shards, partition
from ease.data.readers.coco import coco_rows
from ease.data.readers.hf import hf_rows
from ease.data.readers.karpathy import karpathy_rows
from ease.data.readers.table import folder_rows, table_rows
from ease.data.readers.textcaps import textcaps_rows
from ease.data.rows import Row, pairs_from_rows
from ease.data.scenes import load_scenes
from ease.errors import UserError
from ease.federation.client import ClientData
from ease.federation.cohort import Cohort
from ease.federation.fedavg import TrainingConfig, fedavg
from ease.federation.history import History
from ease.federation.loop import Loop
from ease.federation.metered import Cost, Metered
from ease.model.backbones import Backbone, anchor_checkpoint, load_backbone
from ease.model.dual_encoder import DualEncoder, ModelConfig, first_adapted
from ease.model.peft import adapter_fingerprint
from ease.params import Params
from ease.storage import digest, exclusive, read_json, remove_leftovers, write_atomic, write_json


class DataConfig(Config):
    name: Literal["scenes", "karpathy", "coco", "textcaps", "folder", "table", "hf"] = "scenes"
    """Layout of the data; `scenes` are generated. See docs/data.md."""
    path: Path | None = None
    """The file or the folder; not used by `scenes`."""
    test_path: Path | None = None
    """A second file or folder in the same layout, whose images are all for testing."""
    images: Path | None = None
    """Folder of the images; each layout has a default."""
    held_out_share: float = Field(0.2, ge=0, lt=1)
    """Share of the images held out where the data names no splits; half is for validation, half for testing."""
    seed: int = 0
    """Seed of the generated world."""
    train: int = Field(2000, ge=4)
    """Generated training pairs."""
    validation: int = Field(300, ge=0)
    """Generated pairs of no client, for choosing settings."""
    test: int = Field(1000, ge=4)
    """Generated test pairs."""
    strict: bool = False
    """Stop at unreadable images instead of leaving them out."""

    @model_validator(mode="after")
    def _needs_path(self) -> "DataConfig":
        if self.name != "scenes" and self.path is None:
            raise ValueError(f'data.path is needed when data.name = "{self.name}"')
        if self.test_path is not None and self.name in ("scenes", "karpathy"):
            raise ValueError(
                f'data.test_path cannot be used when data.name = "{self.name}", which has its own test split'
            )
        return self


class PartitionConfig(Config):
    clients: int = Field(10, ge=1)
    scheme: Literal["iid", "dirichlet", "uniform"] = "dirichlet"
    """`iid`, `dirichlet` (skewed by pseudo-class) or `uniform` (every pseudo-class spread evenly)."""
    beta: float = Field(0.5, gt=0)
    """Dirichlet concentration; smaller is more skewed."""
    classes: int = Field(10, ge=1)
    """Number of pseudo-classes."""
    validation_share: float = Field(0.1, ge=0, lt=1)
    """Share of each client's pairs that is never trained on."""


class RunConfig(Config):
    """Everything that decides the bytes of a run."""

    seed: int = Field(0, ge=0)
    device: Literal["auto", "cpu", "cuda"] = "cpu"
    engine: Literal["auto", "loop", "cohort"] = "auto"
    """`loop` trains one client after the other, `cohort` all of a round in one pass; `auto`: cohort on a GPU."""
    gallery: int = Field(500, ge=2)
    """Pairs in a retrieval gallery; the same for every set that is compared."""
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    partition: PartitionConfig = PartitionConfig()
    training: TrainingConfig = TrainingConfig()

    def identity(self) -> str:
        """Hash of the configuration, less the number of rounds, which may grow."""
        values = self.model_dump(mode="json")
        values["training"].pop("rounds")
        return digest(values)


def load_config(path: Path | None, assignments: tuple[str, ...] = ()) -> RunConfig:
    """Read a TOML file and `--set` assignments; with no file, the defaults."""
    table = anchor_paths(read_toml(path), path.parent) if path is not None else {}
    source = " with ".join(([str(path)] if path else []) + (["--set"] if assignments else []))
    # Only now can what `--set` gave still be relative: it is meant from where the user stands.
    return validate(RunConfig, anchor_paths(override(table, assignments), Path.cwd()), source)


def anchor_paths(table: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Make the paths of a configuration absolute; relative ones are meant from `folder`."""
    anchored = dict(table)
    for section, keys in (("data", ("path", "test_path", "images")), ("model", ("adapter",))):
        values = table.get(section)
        if isinstance(values, dict):
            paths = {key: str((folder / values[key]).resolve()) for key in keys if isinstance(values.get(key), str)}
            anchored[section] = {**values, **paths}
    model = anchored.get("model")
    if isinstance(model, dict) and isinstance(model.get("backbone"), str):
        anchored["model"] = {**model, "backbone": anchor_checkpoint(model["backbone"], folder)}
    return anchored


def choose_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError('device = "cuda": no CUDA device is visible; set device = "cpu" or "auto"')
    return torch.device(name)


LAYOUTS: dict[str, Callable[[Path, Path | None], Iterator[Row]]] = {
    "karpathy": karpathy_rows,
    "coco": coco_rows,
    "textcaps": textcaps_rows,
    "folder": folder_rows,
    "table": table_rows,
    "hf": hf_rows,
}
"""Each reads the rows of a file or folder, with the images in another folder if one is given."""


def load_pairs(config: DataConfig, image_size: int, crop: bool = False) -> PairSet:
    """The pairs of a configuration, with pictures as a backbone takes them."""
    if config.name == "scenes":
        return load_scenes(config.seed, config.train, config.validation, config.test)
    assert config.path is not None  # checked by DataConfig
    read = LAYOUTS[config.name]
    rows = list(read(config.path, config.images))
    if config.test_path is not None:
        rows = [replace(row, split=row.split or "train") for row in rows]
        rows += [replace(row, split="test") for row in read(config.test_path, config.images)]
    return pairs_from_rows(rows, config.path, image_size, crop, config.held_out_share, config.strict)


def check_splits(pairs: PairSet, config: DataConfig) -> None:
    """Refuse data that could be trained on but not measured, before the training."""
    for split in ("train", "test"):
        count = len(pairs.indices(split))
        if count < MINIMUM_PAIRS:
            raise UserError(
                f"{config.path}: {count} of the {len(pairs)} pairs are in the {split} split, at least {MINIMUM_PAIRS} "
                "are needed; name a split for each image, or none and set data.held_out_share"
            )


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
        pairs = load_pairs(config.data, backbone.image_size, backbone.crop)
        check_splits(pairs, config.data)
        first = {side: first_adapted(getattr(backbone, side), config.model) for side in ("image", "text")}
        activations = cached_activations(pairs, backbone, first["image"], first["text"], device)
        model = DualEncoder(backbone, config.model, config.seed).to(device)
        shards, centroids = deal(config, pairs, activations)
        return cls(config, pairs, activations, shards, centroids, backbone, model, device)

    @cached_property
    def federation(self) -> Loop:
        engine = self.config.engine
        if engine == "cohort" or (engine == "auto" and self.device.type == "cuda"):
            return Cohort.of(self.model, self.shards, self.activations, self.device)
        return Loop(self.model, {s.client: ClientData.of(s, self.activations, self.device) for s in self.shards})

    def classes_of(self, positions: np.ndarray) -> np.ndarray:
        """Nearest pseudo-class of any pairs [pairs]."""
        joint = joint_embedding(self.activations.pooled_image[positions], self.activations.pooled_text[positions])
        return ((joint[:, None] - self.centroids[None]) ** 2).sum(-1).argmin(1)

    def initial(self) -> Params:
        return self.model.initial().to("cpu")


def deal(config: RunConfig, pairs: PairSet, activations: Activations) -> tuple[tuple[Shard, ...], np.ndarray]:
    """Cluster the training pairs in the frozen space and deal them to clients."""
    pool = pairs.indices("train")
    settings = config.partition
    labels, centroids = cached_classes(
        activations.pooled_image[pool], activations.pooled_text[pool], settings.classes, config.data.seed
    )
    dealt = partition(settings.scheme, labels, settings.clients, settings.beta, config.seed)
    return make_shards(pool, pairs.ids, labels, dealt, settings.validation_share, config.seed), centroids


MATCH = 0.15
"""Least cosine of a class descriptor with a pseudo-class."""
FORMAT = 1
"""Of the run directory; raise it when an older run can no longer be read."""


@dataclass(frozen=True)
class Run:
    """A run directory: configuration, history and what was done with it."""

    folder: Path
    config: RunConfig

    @classmethod
    def create(cls, folder: Path, config: RunConfig) -> "Run":
        """A new run, or the same run continued; another configuration in the same place is refused."""
        run = cls.plan(folder, config)
        marker = folder / "run.json"
        if not marker.is_file() or cls.load(folder).config != run.config:
            write_json(marker, {"format": FORMAT, "config": run.config.model_dump(mode="json")})
        write_atomic(folder / "config.toml", to_toml(run.config).encode())
        return run

    @classmethod
    def plan(cls, folder: Path, config: RunConfig) -> "Run":
        """What `create` would give, with nothing written: the place to refuse before the long work begins."""
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{folder}: is a file; choose a folder for --out")
        if not (folder / "run.json").is_file():
            # A process killed at its very start leaves hidden files alone; those are no one's work.
            if folder.is_dir() and any(not path.name.startswith(".") for path in folder.iterdir()):
                raise UserError(f"{folder}: is not empty and holds no run; choose another --out")
            return cls(folder, config)
        run = cls.load(folder)
        if run.config.identity() != config.identity():
            difference = _difference(run.config, config)
            raise UserError(f"{folder}: holds a run of another configuration ({difference}); choose another --out")
        return run if run.config.training.rounds >= config.training.rounds else cls(folder, config)

    @classmethod
    def load(cls, folder: Path) -> "Run":
        marker = folder / "run.json"
        if not marker.is_file():
            raise UserError(f"{folder}: no run here (run.json is missing); make one with: ease train --out {folder}")
        stored = read_json(marker)
        if not isinstance(stored, dict) or stored.get("format") != FORMAT or "config" not in stored:
            raise UserError(f"{marker}: not a run that this version knows; restore the file or train again elsewhere")
        return cls(folder, validate(RunConfig, stored["config"], str(marker)))

    @property
    def history(self) -> History:
        return History(self.folder)

    def train(self, world: World) -> Iterator[dict[str, Any]]:
        """Train, or go on from the last complete round; yields each new round's record."""
        with self.locked():
            remove_leftovers(self.folder)
            yield from self._train(world)

    def check_world(self, world: World) -> None:
        """Refuse data or weights that are not those of the training: other pairs would be dealt to the clients."""
        path = self.folder / "world.json"
        if path.is_file() and read_json(path).get("data") != world.pairs.fingerprint:
            raise UserError(
                f"{self.folder}: the data are not those this run was trained on (files were added, removed or "
                "changed); restore them or train a new run"
            )
        self.check_frozen(world.backbone, world.device)

    def check_frozen(self, backbone: Backbone, device: torch.device) -> None:
        """Refuse other weights than those of the training under what it has learnt."""
        path = self.folder / "world.json"
        if not path.is_file():
            return
        told, adapter = read_json(path), self.config.model.adapter
        # A backbone's weights may be rounded for a device; then nothing can be said.
        if told.get("device") == device.type and told.get("backbone") != backbone.fingerprint:
            raise UserError(
                f"{self.folder}: the weights of {backbone.name} are not those this run was trained on; restore them"
            )
        if adapter is not None and told.get("adapter") != adapter_fingerprint(adapter):
            raise UserError(f"{self.folder}: the adapter in {adapter} is not the one this run began from; restore it")

    def locked(self) -> AbstractContextManager[None]:
        """Hold the run for this process alone."""
        busy = f"{self.folder}: another process is working on this run; wait for it or choose another --out"
        return exclusive(self.folder / ".lock", busy)

    def _train(self, world: World) -> Iterator[dict[str, Any]]:
        history, config = self.history, self.config
        done = history.rounds()
        if done == 0:
            world.initial().save(history.initial_path)
            write_json(self.folder / "world.json", _identity(world))
        self.check_world(world)
        history.verify()
        state = history.state(done)
        if _layout(state) != _layout(world.initial()):
            path = history.state_path(done)
            raise UserError(
                f"{path}: made by another model than config.toml names; restore it or train again elsewhere"
            )
        metered = Metered(world.federation)
        for finished in fedavg(
            state,
            metered,
            config.training,
            config.seed,
            config.model.temperature,
            first_round=done + 1,
        ):
            cost, metered.cost = metered.cost, Cost()
            yield history.append(finished, {"bytes_down": cost.bytes_down, "bytes_up": cost.bytes_up})


def _identity(world: World) -> dict[str, str | None]:
    """What decides the pairs and what is frozen."""
    adapter = world.config.model.adapter
    return {
        "data": world.pairs.fingerprint,
        "backbone": world.backbone.fingerprint,
        "adapter": adapter_fingerprint(adapter) if adapter else None,
        "device": world.device.type,
    }


def _layout(state: Params) -> tuple[Any, ...]:
    return state.blocks, {name: (tensor.shape, tensor.dtype) for name, tensor in state.tensors.items()}


def _difference(old: RunConfig, new: RunConfig) -> str:
    """The first field in which two configurations differ, for an error message."""
    for section, value in old.model_dump(mode="json").items():
        other = new.model_dump(mode="json")[section]
        if not isinstance(value, dict):
            if value != other:
                return f"{section} is {value!r} there and {other!r} here"
            continue
        for key in value:
            if value[key] != other[key] and key != "rounds":
                return f"{section}.{key} is {value[key]!r} there and {other[key]!r} here"
    return "same settings, other version"


def class_cosines(world: World, text: str) -> np.ndarray:
    """Cosine of a descriptor with each pseudo-class, by the text half of its centroid [classes]."""
    tower, first = world.backbone.text, world.model.text.first
    with torch.no_grad():
        states, mask = tower.prefix(world.backbone.tokenize([text]).to(world.device), first)
        query = tower(states, mask, first)[0].cpu().double().numpy()
    halves = world.centroids[:, -len(query) :]
    centre = halves.mean(axis=0)  # what all classes have in common tells none of them apart
    halves, query = halves - centre, query / max(np.linalg.norm(query), 1e-12) - centre
    return halves @ query / (np.linalg.norm(halves, axis=1) * np.linalg.norm(query) + 1e-12)


def match_class(world: World, text: str) -> int:
    """The pseudo-class a descriptor names; one that fits none well is refused with the nearest."""
    cosines = class_cosines(world, text)
    best = int(cosines.argmax())
    if cosines[best] < MATCH:
        raise UserError(
            f"--class {text!r}: fits no pseudo-class well; the nearest is {best} (cosine {cosines[best]:.2f}, "
            f"at least {MATCH} is needed); use other words or --class {best}"
        )
    return best
