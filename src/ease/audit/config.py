"""Settings of an audit."""

from typing import Literal

from pydantic import Field, field_validator

from ease.config import Config


class AuditConfig(Config):
    """Settings of `ease audit`."""

    shadows: int = Field(16, ge=4)
    """Shadow federations; an even number, since they come in complementary pairs."""
    retrains: int = Field(9, ge=1)
    """Further retrainings, in other orders of the data, which show how much retrained models differ."""
    level: float = Field(0.05, gt=0, lt=1)
    """How often the verdict may refuse a model that really was retrained."""
    pool: int | None = Field(None, ge=16)
    """Pairs, seen by no model, that every statistic is measured against; by default 512, or half of the validation and
    test pairs where there are fewer than 514."""
    fpr: float = Field(0.01, gt=0, lt=1)
    """False positive rate at which the share of found members is reported."""
    attack: Literal["bavaria", "strongest"] = "bavaria"
    """Attack on forget pairs: BaVarIA, or the attack that found members best before unlearning."""
    relearn_pairs: int = Field(16, ge=2)
    """Forget pairs that are shown again in the relearning test."""
    workers: int | None = Field(None, ge=1)
    """Processes that train shadows; default: one for each core, up to 4; on a GPU one, or up to 8 of small models
    while there is room for them."""

    @field_validator("shadows")
    @classmethod
    def _even(cls, count: int) -> int:
        if count % 2:
            raise ValueError("shadows come in complementary pairs: choose an even number")
        return count
