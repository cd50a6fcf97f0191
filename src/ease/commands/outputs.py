"""What every command prints with `--json` and what lies in a run as JSON: a model each, for the reference."""

from typing import Any, Literal

from pydantic import ConfigDict

from ease.audit.quick_check import Level, QuickCheck
from ease.audit.records import AuditRecord
from ease.config import Config
from ease.data.membership import Membership
from ease.federation.client_history import ClientRound
from ease.federation.history import StoredRound
from ease.operations.evidence.envelope import Envelope
from ease.operations.evidence.log import LogRecord
from ease.operations.evidence.statement import Statement, VerdictWords
from ease.operations.find import HeldPair
from ease.operations.ledger.deadlines import Due
from ease.operations.ledger.impact import Impact
from ease.operations.ledger.records import Consent, Entry, Event
from ease.operations.ledger.work import Finished
from ease.operations.lost_sites import LostSites
from ease.operations.purge import Pass, PurgeRecord
from ease.operations.recipients import Recipients
from ease.operations.serving.messages import Facts, FoundPair
from ease.requests.request import Request
from ease.requests.tombstones import Tombstones
from ease.runs.config import RunConfig
from ease.runs.head import Release, ReleaseChain
from ease.runs.records import AnswerRecord, Metrics
from ease.studies.experiment import Chosen
from ease.studies.records import BenchResults, CellRecord, OverlapRecord, TrialRecord


class TrainOutput(Config):
    """`ease train`, and `summary.json` of a run."""

    run: str
    """Its folder."""
    rounds: int
    loss: float | None
    """Mean training loss of the last round; a closed-form head has none."""
    parameters: int
    """Trained values."""
    metrics: Metrics
    """`seen/`, `unseen/` and `test/` recall in percent, `initial/` the same before training, `cost/` bytes."""
    data: dict[str, int] | None = None
    """Pairs of each split and what was odd in the files; absent for generated data."""
    prospects: str = ""
    """Why an audit would be refused; absent where it would not."""
    advice: str = ""
    """Whether another kind of model may suit better; absent where nothing is to be said."""


class ForgetOutput(AnswerRecord):
    """`ease forget`, and `ease train --resume`: the stored record, and where it lies."""

    id: str
    """The request, as `--request` takes it."""
    meaning: str
    """The request in words."""
    folder: str
    before: Metrics
    """Of the model that was to forget."""
    check: QuickCheck | None = None
    """A quick look; absent where there is none."""
    why_no_check: str = ""
    """Absent where there is a quick look."""
    prospects: str = ""
    """Why an audit would be refused; absent where it would not."""


class ListedOutput(Entry):
    """One request of the ledger."""

    overdue: bool


class EntryOutput(ListedOutput):
    """`ease request add`, `show`, `approve`, `refuse`, `extend` and `cancel`."""

    to_notify: tuple[str, ...]
    """Recipients of exported models who have to be told that theirs contains forgotten pairs."""
    added: bool | None
    """Whether it was handed in just now; null: it was only looked at."""
    touches: Impact | None
    """Null once the request is closed, and while the worker has it."""
    events: tuple[Event, ...]


class LedgerOutput(Config):
    """`ease request list`, in the order in which they are worked on."""

    requests: tuple[ListedOutput, ...]
    consents: tuple[Consent, ...]


class FindOutput(Config):
    """`ease request find`: every pair that was found, with the closed requests that name it."""

    pairs: tuple[HeldPair, ...]


class GivenOutput(Consent):
    """A consent, with what the run remembers of it."""

    sha256: str


class JoinOutput(Config):
    """`ease join`."""

    run: str
    added: bool
    """False: it was there already."""
    client: int
    name: str | None
    """Of its site."""
    training_pairs: int
    validation_pairs: int
    left_out: int
    """Pairs of a kind that was forgotten, which stay out."""
    consent: GivenOutput
    after_round: int
    after_releases: int
    owner: int | None
    """The client whose later pairs these are; null: a new client."""


class PurgeOutput(Config):
    """`ease purge`."""

    purged: tuple[Pass, ...]


class WorkOutput(PurgeOutput):
    """`ease work`."""

    finished: tuple[Finished, ...]
    to_notify: dict[str, tuple[str, ...]]
    """Request -> recipients of exported models who have to be told that theirs contains forgotten pairs."""


class DueOutput(Config):
    """`ease request due`, the most urgent first."""

    due: tuple[Due, ...]
    reminded: str
    """Where a reminder was posted to; empty: nowhere."""


class WitnessOutput(Config):
    """`ease certificate attest`."""

    path: str
    key_id: str


class LetterOutput(Config):
    """`ease request letter`."""

    id: str
    kind: Literal["received", "extended", "granted", "refused"]
    text: str
    path: str | None
    """Where it was written; null: nowhere."""


class NotifyOutput(Config):
    """`ease request notify`."""

    id: str
    notified: tuple[str, ...]
    to_notify: tuple[str, ...]


class RegisterOutput(Config):
    """`ease request export`."""

    files: tuple[str, ...]


class NearMissOutput(Config):
    """A pair that nearly fits some words."""

    id: str
    cosine: float


class MatchOutput(Config):
    """What some words fit."""

    words: str
    ids: tuple[str, ...]
    saying: tuple[str, ...]
    """Those whose captions have the words."""
    threshold: float | None
    """How near a pair had to be; null: captions alone decided."""
    near_misses: tuple[NearMissOutput, ...]


class PreviewOutput(Config):
    """`ease forget --dry-run`."""

    id: str
    request: Request
    meaning: str
    ids: tuple[str, ...]
    touches: Impact
    examples: tuple[str, ...]
    """Captions."""
    matches: tuple[MatchOutput, ...]
    answered: str
    """When it was answered already; empty: it was not."""
    advice: str
    """Another method that suits it better; empty: none does."""
    files: tuple[str, ...]


class SearchOutput(Config):
    """`ease search`."""

    words: str
    found: dict[str, tuple[FoundPair, ...]]
    """Model -> the nearest pairs."""
    page: str | None


class ServeOutput(Facts):
    """`ease serve`: its first line. `/health` answers with the fields from `model` to `version`."""

    address: str
    key: str | None
    """To be sent as `Authorization: Bearer KEY`; none with `--no-key`."""
    page: str
    """The address to open in a browser."""
    queue: str | None
    """The address of the page of requests; null for exports, and where others can reach the server."""


class AuditOutput(AuditRecord):
    """`ease audit`: the stored record, where it lies, and what to do next."""

    id: str
    folder: str
    next_steps: tuple[str, ...]
    """Commands to go on with where the verdict is not that it passed."""


class AuditsOutput(Config):
    """`ease audit` with several `--request`."""

    audits: tuple[AuditOutput, ...]


class QuickOutput(Config):
    """`ease audit --quick`."""

    format: Literal[2]
    method: dict[str, Any]
    """Its name as `method`, and its settings."""
    request: Request
    model_sha256: str
    """Of the model that was looked at."""
    forget_pairs: int
    held_out_pairs: int
    compared_with: str
    """Which held-out pairs."""
    before: Level
    """Under the model that was to forget."""
    after: Level
    found: bool
    """Whether forget pairs can be told from unseen ones."""
    words: str
    """What was found, in one line."""
    rule: str
    """When something counts as found."""
    notes: tuple[str, ...]
    """What to know before believing it."""
    id: str
    folder: str


class ReportOutput(Config):
    """`ease report`."""

    path: str
    answers: int
    audited: int
    compared: int | None
    """Models of an experiment; null where there is none."""
    bytes: int


class CertificateOutput(Config):
    """`ease certificate`, and `ease certificate sign` of one that holds."""

    certificate: str
    unchecked: tuple[str, ...]
    """What whoever signed could not check."""
    page: str | None
    sha256: str
    """Of the signed statement."""
    signatures: tuple[str, ...]
    """Ids of the keys."""
    verdict: str


class CheckOutput(Config):
    """One thing that was looked at."""

    name: str
    holds: bool | None
    """Null: it could not be checked."""
    words: str


class SignerOutput(Config):
    """Whose signature a certificate bears."""

    key_id: str
    name: str | None
    """As `--key` calls it; null for a key that was not named."""


class VerifyOutput(Config):
    """`ease verify`, and `ease certificate sign` of one that does not hold."""

    certificate: str
    holds: bool
    reasons: tuple[str, ...]
    """Why it is refused."""
    checks: tuple[CheckOutput, ...]
    signatures: tuple[SignerOutput, ...]
    verdict: VerdictWords | None
    """What it says; null where it could not be read."""


class KeysOutput(Config):
    """`ease keys new`."""

    private: str
    public: str
    key_id: str


class MadeOutput(Config):
    """`ease keys server`, `ease keys node` and `ease keys admit`."""

    files: dict[str, str]
    """What it is -> where it lies."""


class NodeOutput(Config):
    """One client's node."""

    client: int
    state: str
    jobs: int
    refused: int
    last: float | None
    """Seconds since it last began a job; null: it never did."""
    parts: int


class RunStatusOutput(Config):
    """A run beside its federation."""

    run: str
    round: int
    rounds: int
    bytes_down: int
    bytes_up: int
    queue: tuple[tuple[str, str, str], ...]
    """Requests that wait: name, state, until when."""
    late: int


class StatusOutput(Config):
    """`ease status`."""

    folder: str
    server: str
    nodes: tuple[NodeOutput, ...]
    run: RunStatusOutput | None


class ExportOutput(Config):
    """`ease export`."""

    request: str | None
    format: Literal["peft", "safetensors", "onnx"]
    files: tuple[str, ...]
    recipient: str | None
    """Who is recorded to have it."""


class ComparedOutput(Config):
    """One model of a demonstration."""

    scenario: str
    seed: int
    model: str
    """What is trained: `projectors and adapters`, `projectors`, `adapters` or `closed form`."""
    method: str
    """`trained` is the model before the request."""
    metrics: Metrics


class DemoOutput(Config):
    """`ease demo`."""

    rows: tuple[ComparedOutput, ...]


class TrialOutput(Config):
    """One model of `ease compare`."""

    model: str
    method: str
    """By which it forgot."""
    trained: Metrics
    """Recall before the request, and what training cost."""
    forgotten: Metrics
    """Recall after it, and what forgetting cost."""
    identical: bool | None
    """Whether the answer is the file that retraining gives; null where it was not retrained."""


class CompareOutput(Config):
    """`ease compare`."""

    request: str
    """Its kind."""
    models: tuple[TrialOutput, TrialOutput]
    """The closed-form head, then the configured model."""
    gap: float
    """Points of test R@1 that the closed form has more."""
    advice: str


class BenchOutput(BenchResults):
    """`ease bench`: the stored results and the files that were written."""

    files: tuple[str, ...]


class SweepOutput(Config):
    """`ease sweep`."""

    file: str
    chosen: dict[str, dict[str, Chosen]]
    """Method -> kind of request -> settings."""
    diverged: tuple[str, ...]
    """Methods and requests without a choice, since all their trials diverged."""


class SettingOutput(Config):
    """One setting of a method."""

    name: str
    default: Any
    help: str


class MethodOutput(Config):
    """One method."""

    name: str
    title: str
    about: str
    needs: tuple[str, ...]
    rounds: dict[str, int]
    """Kind of request -> rounds after 20 of training."""
    source: str
    settings: tuple[SettingOutput, ...]


class MethodsOutput(Config):
    """`ease methods`."""

    methods: tuple[MethodOutput, ...]
    refused: dict[str, str]
    """Plug-ins that cannot be used, and why."""


class PartOutput(Config):
    """One kind of cached files."""

    name: str
    files: int
    bytes: int
    newest: str
    """When the last of them was written; empty where there is none."""
    exposed: int
    """Files and folders that other users of the machine may read or change."""


class CacheOutput(Config):
    """`ease cache list`; of `ease cache clear`, what went."""

    folder: str
    bytes: int
    cleared: bool
    private: bool
    parts: tuple[PartOutput, ...]


class FindingOutput(Config):
    """One thing that was looked at."""

    name: str
    state: Literal["fine", "warning", "failed"]
    words: str


class DoctorOutput(Config):
    """`ease doctor`."""

    version: str
    healthy: bool
    """Whether nothing failed."""
    findings: tuple[FindingOutput, ...]
    cache: CacheOutput | None


class AskedLine(Config):
    """One question that a node was asked."""

    model_config = ConfigDict(extra="allow")

    time: str
    kind: str
    run: str
    cohort: int
    bytes_in: int
    bytes_out: int
    refused: str
    """Why it was refused; nothing if it was answered."""


class AskedOutput(Config):
    path: str
    asked: tuple[AskedLine, ...]


OUTPUTS: dict[str, tuple[type[Config], ...]] = {
    "train": (TrainOutput, ForgetOutput),
    "forget": (ForgetOutput, PreviewOutput),
    "release": (Release,),
    "request add": (EntryOutput,),
    "request list": (LedgerOutput,),
    "request show": (EntryOutput,),
    "request find": (FindOutput,),
    "request approve": (EntryOutput,),
    "request refuse": (EntryOutput,),
    "request extend": (EntryOutput,),
    "request cancel": (EntryOutput,),
    "request due": (DueOutput,),
    "request letter": (LetterOutput,),
    "request notify": (NotifyOutput,),
    "request export": (RegisterOutput,),
    "work": (WorkOutput,),
    "purge": (PurgeOutput,),
    "join": (JoinOutput,),
    "node": (AskedOutput,),
    "search": (SearchOutput,),
    "serve": (ServeOutput,),
    "audit": (AuditOutput, AuditsOutput, QuickOutput),
    "report": (ReportOutput,),
    "certificate issue": (CertificateOutput,),
    "certificate sign": (CertificateOutput, VerifyOutput),
    "certificate attest": (WitnessOutput,),
    "verify": (VerifyOutput,),
    "keys new": (KeysOutput,),
    "keys server": (MadeOutput,),
    "keys node": (MadeOutput,),
    "keys admit": (MadeOutput,),
    "status": (StatusOutput,),
    "export": (ExportOutput,),
    "demo": (DemoOutput,),
    "compare": (CompareOutput,),
    "bench": (BenchOutput,),
    "sweep": (SweepOutput,),
    "methods": (MethodsOutput,),
    "doctor": (DoctorOutput,),
    "cache list": (CacheOutput,),
    "cache clear": (CacheOutput,),
}
"""Command -> what it may print with `--json`."""


# Files of a run


class RunFile(Config):
    """What is trained here; also readable, as `config.toml`."""

    format: Literal[2]
    config: RunConfig


class WorldFile(Config):
    """What is frozen under the training, by hash, and how many threads added up."""

    backbone: str
    adapter: str | None
    device: str
    threads: int


class BegunFile(Config):
    """What an answer was begun with: another model or setting begins anew."""

    request: Request
    method: dict[str, Any]
    trained_sha256: str
    locked: bool | None = None
    """Of further training: whether the directions are held."""


FILES: dict[str, type[Config]] = {
    "run.json": RunFile,
    "world.json": WorldFile,
    "membership.json": Membership,
    "summary.json": TrainOutput,
    "head.json": ReleaseChain,
    "purge.json": PurgeRecord,
    "lost_sites.json": LostSites,
    "recipients.json": Recipients,
    "tombstones.json": Tombstones,
    "rounds/*/round.json": StoredRound,
    "requests/*/*/rounds/*/round.json": StoredRound,
    "clients/*/rounds/*/round.json": ClientRound,
    "requests/*/*/request.json": BegunFile,
    "requests/*/*/record.json": AnswerRecord,
    "requests/*/*/quick.json": QuickCheck,
    "requests/*/*/audit.json": AuditRecord,
    "requests/*/*/certificate.json": Envelope,
    "evidence/log.jsonl": LogRecord,
    "evidence/head.json": Envelope,
    "evidence/witnesses/*.json": Envelope,
    "cells/*.json": CellRecord,
    "cells/overlap.json": OverlapRecord,
    "trials/*.json": TrialRecord,
}
"""Where in a run -> what lies there; `results.json` of an experiment is a `BenchResults`."""
UNSEALED = {
    "requests/*/*/certificate.json",
    "evidence/log.jsonl",
    "evidence/head.json",
    "evidence/witnesses/*.json",
}
"""Signed or chained instead of sealed."""
ELSEWHERE: tuple[type[Config], ...] = (BenchResults, Statement)
"""`results.json` of an experiment, and what a certificate's envelope holds."""
