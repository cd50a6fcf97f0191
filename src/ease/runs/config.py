"""Everything that decides the bytes of a run, read from TOML and `--set`."""

from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field

from ease.config import Config, override, read_toml, validate
from ease.data.config import DataConfig, PartitionConfig
from ease.errors import UserError
from ease.federation.fedavg import TrainingConfig
from ease.model.backbones import anchor_checkpoint
from ease.model.dual_encoder import ModelConfig
from ease.storage import digest


class RunConfig(Config):
    """Everything that decides the bytes of a run."""

    seed: int = Field(0, ge=0)
    """Of every random number but those of generated data; the same one gives the same bytes."""
    device: Literal["auto", "cpu", "cuda"] = "cpu"
    """Where to compute; `auto`: on a GPU where there is one."""
    engine: Literal["auto", "loop", "cohort"] = "auto"
    """`loop` trains one client after the other, `cohort` all of a round in one pass; `auto`: cohort on a GPU."""
    gallery: int = Field(500, ge=2)
    """Pairs in a retrieval gallery; the same for every set that is compared."""
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    partition: PartitionConfig = PartitionConfig()
    training: TrainingConfig = TrainingConfig()

    def identity(self) -> str:
        """Hash of the configuration, less the number of rounds, which may grow, and how long and for whom to wait."""
        values = self.model_dump(mode="json")
        for name in ("rounds", "quorum", "deadline"):
            values["training"].pop(name)
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
