"""Records of audits."""

from typing import ClassVar, Literal

from ease.audit.config import AuditConfig
from ease.audit.membership import Estimate, OperatingPoint
from ease.audit.relative import RelativeTest
from ease.audit.relearn import Curve
from ease.audit.strata import Stratum
from ease.audit.verdict import Verdict
from ease.config import Config
from ease.requests.request import Request
from ease.runs.answers import StoredAnswer
from ease.runs.records import MethodRecord, Metrics, read_record
from ease.storage import sha256


class RocPoints(Config):
    """Points of a ROC curve, for figures."""

    fpr: tuple[float, ...]
    tpr: tuple[float, ...]


class AttackRecord(Config):
    """The result of one attack on one model."""

    auc: Estimate
    leakage: float
    """Distance of the AUC from a guess, to either side."""
    tpr: OperatingPoint | None
    """None: too few non-members to set a threshold by."""
    unscored: int
    roc: RocPoints


class PairRecord(Config):
    """Ranks of one forget pair under the trained, the unlearned and every retrained model."""

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
        """Name, values and decimals of each statistic."""
        return ("rank", self.rank, 1), ("margin", self.margin, 3), ("log-odds", self.log_odds, 2)


class Gallery(Config):
    """The gallery size of recalls and the recall by chance."""

    pairs: int
    chance: Metrics
    among: str = "test pairs of its pseudo-class, the nearest first, and others where it has few"
    """The gallery in which a few pairs are searched, each by itself."""


class Price(Config):
    """One cost of a result and of retraining."""

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
    """How many of those the method replayed; none for methods that replay nothing."""


class AuditRecord(MethodRecord):
    """The record of an audit: the verdict and its measurements."""

    remedy: ClassVar[str] = "delete it and run `ease audit` again"
    format: Literal[2] = 2
    request: Request
    model_sha256: str
    """Hash of the audited model. The verdict applies only to this model."""
    retrain_sha256: str
    settings: AuditConfig
    verdict: Verdict
    gallery: Gallery
    attack: str
    """The attack that the verdict goes by; empty where there were too few pairs to attack."""
    attacks: dict[str, dict[str, AttackRecord]]
    """Attack -> model -> what it says."""
    relearning: dict[str, dict[str, Curve]]
    """Pairs that were trained again -> model -> how much of the forget margin returned."""
    similarities: dict[str, tuple[float, ...]]
    """Model -> cosine of picture and caption of each forget pair."""
    pairs: tuple[PairRecord, ...] = ()
    """Each pair of a request of few pairs."""
    relative: RelativeTest | None = None
    """Whether the result is closer to retrained models or to the trained one; None with too few models or no signal."""
    strata: tuple[Stratum, ...] = ()
    """The same of forget pairs of rare classes and of small clients."""
    neighbours: RelativeTest | None = None
    """The same of crops of forgotten pictures with shortened captions; below 0 they are known less than by chance."""
    costs: Costs
    warnings: tuple[str, ...]
    not_tested: tuple[str, ...]

    @property
    def pair_galleries(self) -> str:
        """Gallery sizes of single pairs; they differ between sites."""
        sizes = sorted({pair.gallery for pair in self.pairs})
        return " to ".join(map(str, dict.fromkeys((sizes[0], sizes[-1])))) if sizes else ""


def current_audit(stored: StoredAnswer) -> AuditRecord | None:
    """The stored audit of a result, or None if the model has changed since.

    A purge deletes the models of older releases. Their audits are compared with the recorded hash.
    """
    if not stored.audit_path.is_file():
        return None
    found = read_record(AuditRecord, stored.audit_path)
    model = sha256(stored.model_path) if stored.model_path.is_file() else stored.model_sha256
    return found if found.model_sha256 == model else None
