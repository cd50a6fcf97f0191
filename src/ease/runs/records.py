"""Records that commands write as JSON and read again: one model for each file."""

from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, Field, model_validator

from ease.config import Config, validate
from ease.errors import UserError
from ease.requests.request import Request
from ease.storage import identity, read_json, write_json

Metrics = dict[str, float]


class Record(Config):
    """A JSON file. Its `format` increases when older files can no longer be read."""

    remedy: ClassVar[str]
    """What to do if a file cannot be read."""
    format: int


R = TypeVar("R", bound=Record)


def write_record(path: Path, record: Record) -> None:
    write_json(path, record.model_dump(mode="json"))


def read_record(kind: type[R], path: Path) -> R:
    """The record in a file; a damaged file or another format is refused in one line.

    A file is parsed again only after it was replaced.
    """
    return _read_record(kind, path, *(identity(path) if path.is_file() else ()))  # type: ignore[return-value]


@lru_cache(maxsize=32)
def _read_record(kind: type[Record], path: Path, *identity: int) -> Record:
    try:
        found = read_json(path)
    except UserError as error:
        raise UserError(f"{str(error).rpartition('; ')[0]}; {kind.remedy}") from error
    known = kind.model_fields["format"].default
    if found.get("format") != known:
        other = found.get("format", "none")
        raise UserError(f"{path}: format: {other}, and this version reads {known}; {kind.remedy}")
    try:
        return validate(kind, found, str(path))
    except UserError as error:
        raise UserError(f"{error}; {kind.remedy}") from error


def _named(settings: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(settings.get("method"), str):
        raise ValueError("the method has no name")
    return settings


NamedMethod = Annotated[dict[str, Any], AfterValidator(_named)]
"""A method's name as `method`, and its settings."""


class MethodRecord(Record):
    """A file about one method."""

    method: NamedMethod
    """Its name as `method`, and its settings."""

    @property
    def method_name(self) -> str:
        return str(self.method["method"])


# Answers to requests


class BlockNotes(Config):
    """The entanglement spectrum of one block."""

    block: str
    forget_directions: int
    retain_directions: int
    excised: int
    cosines: tuple[float, ...]
    """Cosine of each direction of the forget updates to the retained ones."""
    energies: tuple[float, ...]
    """Share of the forget energy along each."""
    forget_energy: float
    retain_damage: float

    @property
    def short_name(self) -> str:
        """Without the parts that every name has."""
        return self.block.replace(".tower.blocks.", ".").replace(".attention", "")

    @model_validator(mode="after")
    def _one_energy_each(self) -> "BlockNotes":
        if len(self.energies) != len(self.cosines):
            raise ValueError(f"{len(self.cosines)} cosines and {len(self.energies)} energies")
        return self


class SpectrumNotes(Config):
    """The entanglement spectrum of every block, and the directions that `ease_paper` chose from it."""

    reference: str
    """The state that chosen directions are returned to and held at."""
    delta: float
    """Threshold on the cosines: directions up to it are chosen."""
    blocks: tuple[BlockNotes, ...]
    residuals: dict[str, float] = Field(default_factory=dict)
    """Block -> what truncation to its rank left along the chosen directions."""


class ContributionNotes(Config):
    """What `ease` subtracted, and how it was found."""

    share: float
    """Share of the forget contribution that was subtracted."""
    replayed_rounds: int = 0
    replaying_clients: int = 0


class RoundRecord(Config):
    """One round of a method."""

    round: int
    phase: str
    loss: float | None
    metrics: Metrics
    """Empty where nothing was measured between rounds."""
    spectrum: SpectrumNotes | None = None
    """Only in the round in which `ease_paper` decomposes."""
    contribution: ContributionNotes | None = None
    """Only in the round in which `ease` subtracts."""
    notes: dict[str, Any] = Field(default_factory=dict)
    """Other notes of the method."""

    @classmethod
    def of(cls, number: int, phase: str, loss: float | None, metrics: Metrics, notes: dict[str, Any]) -> "RoundRecord":
        """A record of a round. A spectrum is recognised by its `blocks`, a contribution by its `share`."""
        rest = dict(notes)
        typed: dict[str, Any] = {}
        for name, kind, key in (("spectrum", SpectrumNotes, "blocks"), ("contribution", ContributionNotes, "share")):
            if key in rest:
                typed[name] = kind.model_validate({k: rest.pop(k) for k in kind.model_fields if k in rest})
        return cls(round=number, phase=phase, loss=loss, metrics=metrics, notes=rest, **typed)


class BegunAnswer(Config):
    """The start of an answer. An answer with another model or other settings is made anew."""

    request: Request
    method: dict[str, Any]
    """Its name as `method`, and its settings."""
    trained_sha256: str
    """Hash of the model that it began from."""
    locked: bool | None = None
    """Whether the directions are locked in further training."""


class AnswerRecord(MethodRecord):
    """A method's answer to a request, or further training after one."""

    remedy: ClassVar[str] = "delete its folder and run `ease forget` again"
    format: Literal[2] = 2
    request: Request
    trained_sha256: str
    """Hash of the model that it began from."""
    seed: int
    resumed: bool
    locked: bool | None = None
    """Whether the directions were locked in further training."""
    files: dict[str, str] = Field(default_factory=dict)
    """The answer's other files and the hash of each: one that is missing is missed."""
    rounds: tuple[RoundRecord, ...] = Field(min_length=1)
    metrics: Metrics

    @property
    def certified(self) -> str:
        """The (epsilon, delta) that the method proved, in words; empty for methods that prove nothing."""
        found = next((each.notes["certificate"] for each in self.rounds if "certificate" in each.notes), None)
        if found is None:
            return ""
        return (
            f"epsilon = {found['epsilon']:g}, delta = {found['delta']:g}, by noise of deviation {found['sigma']:.3g} "
            f"on every value; assumes: {found['assumptions']}"
        )

    @property
    def spectrum(self) -> SpectrumNotes | None:
        return self.rounds[0].spectrum

    @property
    def contribution(self) -> ContributionNotes | None:
        return self.rounds[0].contribution
