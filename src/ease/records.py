"""What a run leaves behind for people and reports: plain JSON values."""

from typing import Any

from pydantic import Field

from ease.config import Config


class RoundRecord(Config):
    """One round as it was measured."""

    round: int
    phase: str
    loss: float | None = None
    metrics: dict[str, float] = Field(default_factory=dict)
    rejected: dict[str, str] = Field(default_factory=dict)


class RunRecord(Config):
    """One training or unlearning run."""

    method: str
    scenario: str = "none"
    seed: int
    rounds: tuple[RoundRecord, ...] = ()
    metrics: dict[str, float] = Field(default_factory=dict)
    details: dict[str, Any] = Field(default_factory=dict)
