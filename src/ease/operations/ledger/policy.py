"""The policy of a run's queue: when it holds a model for a person, trains from the start, or purges."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import Field, field_validator

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


class ApprovalPolicy(Config):
    people: int = Field(1, ge=1, le=5)
    """How many different people have to approve a request, or a held model, before it is worked on."""
    signed: bool = False
    """Whether people have to sign their decisions with a key (`--key`)."""
    keys: dict[str, str] = Field(default_factory=dict)
    """Name of a person -> id of the key that they sign with, as `ease keys new` prints it."""
    revoked: dict[str, str] = Field(default_factory=dict)
    """Id of a key -> the date from which its signatures do not count, such as 2030-01-31."""


class RemindPolicy(Config):
    url: str = ""
    """Address to which `ease request due --notify` posts due requests as JSON; https, or this machine."""
    within_days: int = Field(7, ge=0, le=365)
    """How many days before its deadline a request is due soon."""


class OfficePolicy(Config):
    """Who signs letters and answers for the register."""

    name: str = ""
    """The controller, such as a hospital."""
    contact: str = ""
    """How to reach the data protection officer."""
    authority: str = ""
    """The supervisory authority that complaints go to."""
    notice: str = ""
    """The address of the privacy notice that consents refer to."""
    purpose: str = "training an image-text model together with other sites"
    """Purpose of the processing, in records of consent."""


class RetentionPolicy(Config):
    closed_days: float | None = Field(None, ge=0)
    """Remove names, grounds and reasons of requests at the end of `ease purge` and `ease work` if they were closed so
    many days ago. Steps and hashes stay. Absent: they are kept as long as the run."""


class Policy(Config):
    """`policy.toml` of a run; absent, the defaults."""

    time_zone: str = "UTC"
    """The time zone in which the day of a deadline ends, such as Europe/Berlin."""
    release: Literal["after_audit", "at_once"] = "after_audit"
    """`after_audit`: audit each answer, release it if the verdict is passed, and else hold it for a person. If an audit
    with a full pool of unseen pairs is impossible, the result is released at once. `at_once`: release unaudited."""

    hold: HoldPolicy = HoldPolicy()
    retrain: RetrainPolicy = RetrainPolicy()
    purge: PurgePolicy = PurgePolicy()
    approval: ApprovalPolicy = ApprovalPolicy()
    remind: RemindPolicy = RemindPolicy()
    office: OfficePolicy = OfficePolicy()
    retention: RetentionPolicy = RetentionPolicy()

    @field_validator("time_zone")
    @classmethod
    def _known_zone(cls, name: str) -> str:
        try:
            ZoneInfo(name)
        except (ZoneInfoNotFoundError, ValueError, OSError) as error:
            raise ValueError("no such time zone; write a name such as Europe/Berlin") from error
        return name


def load_policy(folder: Path, assignments: Sequence[str] = ()) -> Policy:
    """Read the policy of a run, with some settings changed."""
    path = folder / NAME
    table = read_toml(path) if path.is_file() else {}
    return validate(Policy, override(table, assignments), f"{path} with --set" if assignments else str(path))
