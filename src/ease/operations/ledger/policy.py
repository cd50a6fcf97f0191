"""The policy of a run's queue: when it holds a model for a person, trains from the start, or purges."""

from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from ease.config import Config, override, read_toml, validate

NAME = "policy.toml"


class HoldPolicy(Config):
    retain_points: float = Field(2.0, ge=0, le=100)
    """A model waits for a person if its recall@1 of retained pairs is more points than this below the one before."""


class RetrainPolicy(Config):
    forgotten_fraction: float = Field(0.4, gt=0, le=1)
    """A request is answered by training from the start if more than this fraction of the last training is forgotten
    then. Later requests build on that training. 1: never."""


class PurgePolicy(Config):
    after_days: float | None = Field(None, ge=0)
    """Purge at the end of `ease work` what was released so many days ago; absent: only `ease purge` does."""


class Policy(Config):
    """`policy.toml` of a run; absent, the defaults."""

    hold: HoldPolicy = HoldPolicy()
    retrain: RetrainPolicy = RetrainPolicy()
    purge: PurgePolicy = PurgePolicy()


def load_policy(folder: Path, assignments: Sequence[str] = ()) -> Policy:
    """Read the policy of a run, with some settings changed."""
    path = folder / NAME
    table = read_toml(path) if path.is_file() else {}
    return validate(Policy, override(table, assignments), f"{path} with --set" if assignments else str(path))
