"""What the report reads of stored records and audits; fields it does not show are passed over."""

from typing import Any, Literal

from pydantic import ConfigDict, Field, model_validator

from ease.config import Config


class Stored(Config):
    """A part of a JSON file that may hold more."""

    model_config = ConfigDict(extra="ignore")


class Block(Stored):
    """The entanglement spectrum of one block."""

    block: str
    cosines: tuple[float, ...]
    energies: tuple[float, ...] = ()
    """Share of the forget energy along each direction; without them all directions count the same."""
    forget_energy: float | None = None
    retain_damage: float | None = None

    @model_validator(mode="after")
    def _one_energy_each(self) -> "Block":
        if self.energies and len(self.energies) != len(self.cosines):
            raise ValueError(f"{len(self.cosines)} cosines and {len(self.energies)} energies")
        return self

    @property
    def shares(self) -> tuple[float, ...]:
        return self.energies or (1 / len(self.cosines),) * len(self.cosines)


class Notes(Stored):
    delta: float | str | None = None
    depth: float | None = None
    blocks: tuple[Block, ...] = ()


class RoundRecord(Stored):
    phase: str = ""
    metrics: dict[str, float] = Field(default_factory=dict)
    notes: Notes = Notes()


class Asked(Stored):
    """What was to be forgotten; one of these."""

    clients: tuple[int, ...] = ()
    classes: tuple[int, ...] = ()
    ids: tuple[str, ...] = ()


class Method(Stored):
    method: str


class Record(Stored):
    """A method's answer to a request."""

    request: Asked
    method: Method
    rounds: tuple[RoundRecord, ...] = Field(min_length=1)
    metrics: dict[str, float]

    @property
    def method_name(self) -> str:
        return self.method.method


class Measure(Stored):
    name: str
    value: float
    retrain: float
    before: float | None = None
    """Of the trained model."""
    low: float | None = None
    """None with a `high`: the band is open below."""
    high: float | None = None
    inside: bool | None = None
    note: str = ""


class Roc(Stored):
    fpr: tuple[float, ...] = ()
    tpr: tuple[float, ...] = ()


class Estimate(Stored):
    value: float


class Attack(Stored):
    auc: Estimate
    roc: Roc = Roc()


class Curve(Stored):
    steps: tuple[int, ...]
    levels: tuple[float, ...]
    lost: float = 0.0


class Price(Stored):
    answer: float
    retrain: float
    ratio: float


class Costs(Stored):
    totals: dict[str, Price] = Field(default_factory=dict)
    compute_matched_retrain: dict[str, dict[str, float]] = Field(default_factory=dict)
    """Share of retraining's rounds -> recall@1 of each set of pairs."""


class Audit(Stored):
    """A verdict and what it rests on."""

    verdict: str
    words: str = "evidence of approximate erasure"
    outside: tuple[str, ...]
    measures: tuple[Measure, ...]
    attack: str = ""
    attacks: dict[str, dict[str, Attack]] = Field(default_factory=dict)
    similarities: dict[str, tuple[float, ...]] = Field(default_factory=dict)
    relearning: dict[str, dict[str, Curve]] = Field(default_factory=dict)
    costs: Costs = Costs()
    warnings: tuple[str, ...] = ()
    not_tested: tuple[str, ...] = ()

    def measure(self, name: str) -> Measure | None:
        return next((measure for measure in self.measures if measure.name == name), None)


class BenchRow(Stored):
    scenario: str
    seed: int
    role: Literal["trained", "method", "band", "retrain"]
    label: str
    settings: dict[str, Any]
    tuned: bool
    metrics: dict[str, float]


class BenchExperiment(Stored):
    seeds: tuple[int, ...]
    vary: dict[str, Any]


class BenchHeader(Stored):
    title: str
    kind: str
    command: str
    experiment: BenchExperiment


class Bench(Stored):
    """Several methods, requests and seeds side by side, as `ease bench` writes them."""

    header: BenchHeader
    bands: tuple[dict[str, Any], ...]
    rows: tuple[BenchRow, ...]
    subspaces: tuple[dict[str, Any], ...] = ()
