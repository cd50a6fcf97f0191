"""What a run's queue does by itself: when it holds a model for a person, trains from the start, or purges."""

from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from ease.config import Config, override, read_toml, validate

NAME = "policy.toml"


class HoldPolicy(Config):
    retain_points: float = Field(2.0, ge=0, le=100)
    """A model whose recall@1 of retained pairs lies more points than that below the one before waits for a person."""


class RetrainPolicy(Config):
    gone_share: float = Field(0.4, gt=0, le=1)
    """Once more than this share of what the model was trained on is gone, a request is answered by training from the
    start, and later ones go on from there: what is subtracted is true for small changes. 1: never."""


class PurgePolicy(Config):
    after_days: float | None = Field(None, ge=0)
    """Purge at the end of `ease work` what was released so long ago; absent: only `ease purge` does."""


class Policy(Config):
    """`policy.toml` of a run; absent, the defaults."""

    hold: HoldPolicy = HoldPolicy()
    retrain: RetrainPolicy = RetrainPolicy()
    purge: PurgePolicy = PurgePolicy()


def load_policy(folder: Path, assignments: Sequence[str] = ()) -> Policy:
    path = folder / NAME
    table = read_toml(path) if path.is_file() else {}
    return validate(Policy, override(table, assignments), f"{path} with --set" if assignments else str(path))
