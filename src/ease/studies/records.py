"""Records of experiments and sweeps, as they are written and read."""

from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from ease.audit.band import Band
from ease.audit.relative import RelativeTest
from ease.config import Config
from ease.runs.records import MethodRecord, Metrics, Record


def frozen(value: Any) -> Any:
    """A value with tuples for lists, which can be a key."""
    return tuple(map(frozen, value)) if isinstance(value, list | tuple) else value


class Varied(Config):
    """A varied setting and the value that it has here; of several settings names with commas and a list of values."""

    name: str
    value: Any

    @field_validator("value")
    @classmethod
    def _frozen(cls, value: Any) -> Any:
        """Lists from JSON as tuples, so that equal points group together."""
        return frozen(value)

    @property
    def settings(self) -> dict[str, Any]:
        """Each setting and its value."""
        names = self.name.split(", ")
        return dict(zip(names, self.value if len(names) > 1 else [self.value], strict=True))

    @property
    def words(self) -> str:
        """`name = value` of each setting."""
        return ", ".join(f"{name} = {value}" for name, value in self.settings.items())


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
    """The band in which a further retraining would fall, for one request and seed."""

    scenario: str
    seed: int
    at: Varied | None = None
    metrics: dict[str, Band]


class BenchExperiment(Config):
    """The experiment, as its file and the command line define it."""

    title: str
    kind: str
    run: dict[str, Any]
    """Settings of training, for display only: results outlive the settings of the version that made them."""
    scenarios: tuple[str, ...]
    seeds: tuple[int, ...]
    methods: tuple[dict[str, Any], ...]
    vary: dict[str, tuple[Any, ...]]
    tuned: str | None
    band_retrains: int
    shadows: int
    reduced: bool = False


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
    def run_setting(self) -> str | None:
        """Name of the run's varied settings, as rows have it; None: nothing of the run varies."""
        return ", ".join(sorted(self.header.experiment.vary)) or None

    @property
    def seeds(self) -> int:
        return len(self.header.experiment.seeds)


class StreamStep(Config):
    """One answered request of a stream."""

    kind: str
    """Kind of request: client, class or sample."""
    metrics: Metrics
    """Recall after it: `forget/0/`, `forget/1/` ... for the pairs of each request, `retain/` and `test/`."""
    shares: dict[str, float]
    """Cost so far as a share of retraining after each request: pairs passed, bytes and rounds."""


class StreamRecord(Record):
    """One method on a stream of requests."""

    remedy: ClassVar[str] = "delete it and run `ease bench` again"
    format: Literal[1] = 1
    method: str
    label: str
    settings: dict[str, Any] = Field(default_factory=dict)
    steps: tuple[StreamStep, ...]
    stopped: str = ""
    """Why it did not answer all requests. Empty if it did."""
    relative: RelativeTest | None
    """The nearer kind of model after the last request. Null if it stopped or nothing can be seen."""


class StreamReference(Record):
    """What all methods on a stream are measured by."""

    remedy: ClassVar[str] = "delete it and run `ease bench` again"
    format: Literal[1] = 1
    kinds: tuple[str, ...]
    """Kind of each request."""
    pairs: dict[str, int]
    """Pairs of each request, and those that are left."""
    trained: Metrics
    """Recall before the first request."""
    retrained: tuple[Metrics, ...]
    """Recall of retrained models without the pairs of all requests."""


class StreamResults(Record):
    """Several methods on the same stream of requests."""

    remedy: ClassVar[str] = "run `ease bench` again"
    format: Literal[1] = 1
    title: str
    reduced: bool
    """Whether `--quick` made it smaller."""
    reference: StreamReference
    streams: tuple[StreamRecord, ...]


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
