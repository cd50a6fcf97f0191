"""What the commands write as JSON, and read again: one model for each file, used on both sides."""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, Field, model_validator

from ease.audit.band import Band
from ease.audit.config import AuditConfig
from ease.audit.membership import Estimate, OperatingPoint
from ease.audit.relearn import Curve
from ease.audit.verdict import Verdict
from ease.config import Config, validate
from ease.errors import UserError
from ease.requests.request import Request
from ease.storage import read_json, write_json

Metrics = dict[str, float]


class Record(Config):
    """A whole file. Its `format` is raised whenever older files can no longer be read."""

    remedy: ClassVar[str]
    """What to do about a file that cannot be read."""
    format: int


R = TypeVar("R", bound=Record)


def write_record(path: Path, record: Record) -> None:
    write_json(path, record.model_dump(mode="json"))


def read_record(kind: type[R], path: Path) -> R:
    """The record in a file; of another format or damaged, one line names the file, the field and the remedy."""
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
        return self.method["method"]


# Answers to requests


class BlockNotes(Config):
    """The entanglement spectrum of one block."""

    block: str
    forget_directions: int
    retain_directions: int
    excised: int
    cosines: tuple[float, ...]
    """Of each direction of the forget updates to the retained ones."""
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


class AnswerRecord(MethodRecord):
    """A method's answer to a request, or further training after one."""

    remedy: ClassVar[str] = "delete its folder and run `ease forget` again"
    format: Literal[2] = 2
    request: Request
    trained_sha256: str
    """Of the model that it began from."""
    seed: int
    resumed: bool
    locked: bool | None = None
    """Of further training: whether the directions were held."""
    files: dict[str, str] = Field(default_factory=dict)
    """The answer's other files and the hash of each: one that is missing is missed."""
    rounds: tuple[RoundRecord, ...] = Field(min_length=1)
    metrics: Metrics

    @property
    def spectrum(self) -> SpectrumNotes | None:
        return self.rounds[0].spectrum

    @property
    def contribution(self) -> ContributionNotes | None:
        return self.rounds[0].contribution


# Audits


class RocPoints(Config):
    """A ROC curve for drawing."""

    fpr: tuple[float, ...]
    tpr: tuple[float, ...]


class AttackRecord(Config):
    """What one attack says of one model."""

    auc: Estimate
    leakage: float
    """How far the AUC lies from a guess, to either side."""
    tpr: OperatingPoint | None
    """None: too few non-members to set a threshold by."""
    unscored: int
    roc: RocPoints


class PairRecord(Config):
    """Where one forget pair stands, under the trained, the unlearned and every retrained model."""

    id: str
    gallery: int
    """Pairs among which it is looked for, itself among them."""
    rank: Metrics
    """Model -> place in the gallery, the geometric mean over its picture and its captions as queries."""
    margin: Metrics
    """Model -> similarity to the own partner less that to the nearest other."""
    log_odds: Metrics
    """Model -> of being partners, against the pool."""

    @property
    def rows(self) -> tuple[tuple[str, Metrics, int], ...]:
        """What each is called, its values, and decimals to show."""
        return ("rank", self.rank, 1), ("margin", self.margin, 3), ("log-odds", self.log_odds, 2)


class Gallery(Config):
    """Among how many pairs recall is measured, and what a random ranking would reach."""

    pairs: int
    chance: Metrics
    among: str = "test pairs of its pseudo-class, the nearest first, and others where it has few"
    """What a few pairs, each by itself, are looked for among."""


class Price(Config):
    """One cost of an answer beside that of retraining."""

    answer: float
    retrain: float
    ratio: float

    @classmethod
    def of(cls, answer: float, retrain: float) -> "Price":
        return cls(answer=answer, retrain=retrain, ratio=answer / retrain if retrain else 0.0)


class Costs(Config):
    totals: dict[str, Price]
    phases: dict[str, float]
    """Seconds of each phase of the answer."""
    compute_matched_retrain: dict[str, Metrics]
    """Share of retraining's rounds -> recall@1 of each set of pairs."""
    training_rounds: int = 0
    """Rounds that could be replayed."""
    replayed_rounds: int = 0
    """Of those, how many the answer replayed; none for methods that replay nothing."""


class AuditRecord(MethodRecord):
    """A verdict and all that it rests on."""

    remedy: ClassVar[str] = "delete it and run `ease audit` again"
    format: Literal[2] = 2
    request: Request
    model_sha256: str
    """Of the audited model; the verdict holds for no other."""
    retrain_sha256: str
    settings: AuditConfig
    verdict: Verdict
    gallery: Gallery
    attack: str
    """The attack that the verdict goes by; empty where there were too few pairs to attack."""
    attacks: dict[str, dict[str, AttackRecord]]
    """Attack -> model -> what it says."""
    relearning: dict[str, dict[str, Curve]]
    """What was taught -> model -> how the forgotten came back."""
    similarities: dict[str, tuple[float, ...]]
    """Model -> cosine of picture and caption of each forget pair."""
    pairs: tuple[PairRecord, ...] = ()
    """Of a request of few pairs, each pair by itself."""
    costs: Costs
    warnings: tuple[str, ...]
    not_tested: tuple[str, ...]

    @property
    def pair_galleries(self) -> str:
        """Among how many each of a few pairs is looked for; clients of their own hold out more or less."""
        sizes = sorted({pair.gallery for pair in self.pairs})
        return " to ".join(map(str, dict.fromkeys((sizes[0], sizes[-1])))) if sizes else ""


# Experiments


class Varied(Config):
    """A varied setting and the value that it has here."""

    name: str
    value: Any


Role = Literal["trained", "method", "band", "retrain"]
"""`band`: a retraining in another order."""


class BenchRow(Config):
    """One model of one request and seed."""

    scenario: str
    seed: int
    role: Role
    method: str
    label: str
    settings: dict[str, Any] = Field(default_factory=dict)
    tuned: bool = False
    at: Varied | None = None
    metrics: Metrics
    diverged: str = ""
    """Why there is no model, where there is none."""
    pairs: dict[str, tuple[float, ...]] | None = None
    """Forget and retained pairs: similarities of some, where they are to be drawn."""


class CellRecord(Record):
    """All models of one request and seed."""

    remedy: ClassVar[str] = "delete it and run `ease bench` again"
    format: Literal[2] = 2
    rows: tuple[BenchRow, ...]


class Overlap(Config):
    """Principal cosines between every two clients' leading update directions, in one block."""

    block: str
    modality: str
    clients: tuple[int, ...]
    cosines: tuple[tuple[tuple[float, ...], ...], ...]
    """[client][client][direction], descending; the mean over directions is the similarity of two clients."""


class OverlapRecord(Record):
    """How alike the clients' updates of one run are."""

    remedy: ClassVar[str] = "delete it and run `ease bench` again"
    format: Literal[2] = 2
    seed: int
    blocks: tuple[Overlap, ...]


class BenchBand(Config):
    """Where a further retraining would fall, on one request and seed."""

    scenario: str
    seed: int
    at: Varied | None = None
    metrics: dict[str, Band]


class BenchExperiment(Config):
    """What was run, as the experiment's file and the command line said it."""

    title: str
    kind: str
    run: dict[str, Any]
    """Settings of training, told and never computed with: results outlive the settings of the version they are of."""
    scenarios: tuple[str, ...]
    seeds: tuple[int, ...]
    methods: tuple[dict[str, Any], ...]
    vary: dict[str, tuple[Any, ...]]
    tuned: str | None
    band_retrains: int
    shadows: int


class BenchHeader(Config):
    """Enough to know what was run, on what, and when."""

    experiment: BenchExperiment
    command: str
    date: str
    commit: str | None
    versions: dict[str, str]
    machine: dict[str, Any]


class BenchResults(Record):
    """Several methods, requests and seeds side by side."""

    remedy: ClassVar[str] = "run `ease bench` again"
    format: Literal[2] = 2
    header: BenchHeader
    bands: tuple[BenchBand, ...]
    rows: tuple[BenchRow, ...]
    subspaces: tuple[OverlapRecord, ...] = ()

    @property
    def title(self) -> str:
        return self.header.experiment.title

    @property
    def kind(self) -> str:
        return self.header.experiment.kind

    @property
    def seeds(self) -> int:
        return len(self.header.experiment.seeds)


class TrialRecord(MethodRecord):
    """One setting of a method on the request of a sweep."""

    remedy: ClassVar[str] = "delete it and run `ease sweep` again"
    format: Literal[2] = 2
    score: float | None
    """None where the settings left no usable model."""
    error: float = 0.0
    """Standard error of the score."""
    diverged: str = ""
    """Why there is no score."""
