"""What a run leaves behind for people and reports: plain JSON values."""

from typing import Any

from ease.config import Config


class RoundRecord(Config):
    """One round as it was measured."""

    round: int
    phase: str
    loss: float | None = None
    metrics: dict[str, float] = {}
    rejected: dict[str, str] = {}


class RunRecord(Config):
    """One training or unlearning run."""

    method: str
    scenario: str = "none"
    seed: int
    rounds: tuple[RoundRecord, ...] = ()
    metrics: dict[str, float] = {}
    details: dict[str, Any] = {}
