"""The configuration of a run, read from TOML and `--set`."""

import os
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, model_validator

from ease.config import Config, override, read_toml, validate
from ease.data.config import DataConfig, PartitionConfig
from ease.errors import UserError
from ease.federation.engines import REMOTE, EngineKind
from ease.federation.fedavg import TrainingConfig
from ease.model.backbones import anchor_checkpoint
from ease.model.dual_encoder import ModelConfig
from ease.storage import digest
from ease.trainers import trainer_of

ONLY_AVERAGED = (
    "rounds",
    "participation",
    "weighting",
    "history_every",
    "history_precision",
    "aggregation",
    "strategy",
    "shards",
)
"""Settings of training that a closed-form head does not have."""


class RunConfig(Config):
    """The configuration of a run; it determines every byte of the result."""

    seed: int = Field(0, ge=0)
    """Seed of all random numbers except those of generated data."""
    device: Literal["auto", "cpu", "cuda"] = "cpu"
    """Device that computes; `auto` uses a GPU if there is one."""
    engine: EngineKind = "auto"
    """`sequential` trains one client after the other, `vectorized` all clients of a round in one pass; `auto`:
    `vectorized` on a GPU and for projectors without adapters, else `sequential`. `nodes`: clients are processes on
    this machine; `flower`: on any machine."""
    federation: Path | None = None
    """Folder of the federation, for `nodes` and `flower`; EASE_FEDERATION names another one."""
    gallery: int = Field(500, ge=2)
    """Pairs in a retrieval gallery; the same for every set that is compared."""
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    partition: PartitionConfig = PartitionConfig()
    training: TrainingConfig = TrainingConfig()

    @model_validator(mode="before")
    @classmethod
    def _one_round_of_sums(cls, table: Any) -> Any:
        """Default to one round for a closed-form head."""
        if not isinstance(table, dict) or not isinstance(table.get("model"), dict):
            return table
        training = table.get("training", {})
        if table["model"].get("projector") != "closed_form" or not isinstance(training, dict):
            return table
        return {**table, "training": {"rounds": 1, **training}}

    @model_validator(mode="after")
    def _sums_are_of_all(self) -> "RunConfig":
        if trainer_of(self.model) == "sums":
            usual = TrainingConfig(rounds=1)
            for name in ONLY_AVERAGED:
                if getattr(self.training, name) != getattr(usual, name):
                    raise ValueError(
                        f'training.{name}: model.projector = "closed_form" is solved in one round from the sums of all '
                        f"clients; leave it at {getattr(usual, name)}"
                    )
        return self

    @model_validator(mode="after")
    def _secure_adds_sums(self) -> "RunConfig":
        if self.training.secure and trainer_of(self.model) != "sums":
            raise ValueError(
                'training.secure = true: only sums are aggregated securely; set model.projector = "closed_form", or '
                "leave it out"
            )
        return self

    @property
    def remote(self) -> bool:
        """Whether clients are separate processes."""
        return self.engine in REMOTE

    @property
    def federation_folder(self) -> Path:
        """The folder of the federation, if clients are separate processes."""
        folder = os.environ.get("EASE_FEDERATION") or self.federation
        if folder is None:
            raise UserError(f'engine = "{self.engine}": name the folder of the federation, as federation = "FOLDER"')
        return Path(folder)

    def identity(self) -> str:
        """Hash of the configuration without rounds, federation, quorum and deadline, which may change."""
        values = self.model_dump(mode="json")
        values.pop("federation", None)
        for name in ("rounds", "quorum", "deadline"):
            values["training"].pop(name)
        return digest(values)


def load_config(path: Path | None, assignments: tuple[str, ...] = ()) -> RunConfig:
    """Read a TOML file and `--set` assignments; with no file, the defaults."""
    table = anchor_paths(read_toml(path), path.parent) if path is not None else {}
    source = " with ".join(([str(path)] if path else []) + (["--set"] if assignments else []))
    # Only now can what `--set` gave still be relative: it is relative to the user's working folder.
    return validate(RunConfig, anchor_paths(override(table, assignments), Path.cwd()), source)


def anchor_paths(table: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The table with absolute paths; relative ones start at `folder`."""
    anchored = dict(table)
    for section, keys in (("data", ("path", "test_path", "images")), ("model", ("adapter",))):
        values = table.get(section)
        if isinstance(values, dict):
            paths = {key: str((folder / values[key]).resolve()) for key in keys if isinstance(values.get(key), str)}
            anchored[section] = {**values, **paths}
    if isinstance(table.get("federation"), str):
        anchored["federation"] = str((folder / table["federation"]).resolve())
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
