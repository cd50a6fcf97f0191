"""The models of what commands print with `--json` and of the JSON files of a run, for the reference."""

from ease.audit.deployed import DeployedAudit
from ease.audit.quick_check import QuickCheck
from ease.audit.records import AuditRecord
from ease.commands.audit import AuditsSummary, AuditSummary, DeployedSummary, QuickSummary
from ease.commands.bench import BenchSummary, LeaderboardSummary
from ease.commands.cache import CacheSummary
from ease.commands.compare import CompareSummary, DemoSummary
from ease.commands.doctor import DoctorSummary
from ease.commands.evidence import CertificateSummary, KeysSummary, VerifySummary, WitnessSummary
from ease.commands.export import ExportSummary
from ease.commands.federation import FederationStatus, KeyFiles, KeysList, QuestionsSummary
from ease.commands.find import FindSummary
from ease.commands.forget import ForgetSummary, ReleaseSummary
from ease.commands.joining import JoinSummary
from ease.commands.methods import MethodsSummary
from ease.commands.preview import Preview
from ease.commands.register import DueSummary, LetterSummary, NotifySummary, RegisterSummary
from ease.commands.report import ReportSummary
from ease.commands.requests import EntrySummary, LedgerSummary, PurgeSummary, WorkSummary
from ease.commands.search import SearchSummary
from ease.commands.serve import ServeSummary
from ease.commands.streams import StreamSummary
from ease.commands.sweep import SweepSummary
from ease.commands.train import TrainSummary
from ease.config import Config
from ease.data.membership import Membership
from ease.federation.client_history import ClientRound
from ease.federation.history import StoredRound
from ease.operations.evidence.envelope import Envelope
from ease.operations.evidence.log import LogRecord
from ease.operations.evidence.statement import Statement
from ease.operations.lost_sites import LostSites
from ease.operations.purge import PurgeRecord
from ease.operations.recipients import Recipients
from ease.requests.tombstones import Tombstones
from ease.runs.head import ReleaseChain, ReleaseCount
from ease.runs.records import AnswerRecord, BegunAnswer
from ease.runs.run import FrozenParts, RunFile
from ease.studies.records import (
    BenchResults,
    CellRecord,
    OverlapRecord,
    StreamRecord,
    StreamReference,
    StreamResults,
    TrialRecord,
)

OUTPUTS: dict[str, tuple[type[Config], ...]] = {
    "train": (TrainSummary, ForgetSummary),
    "forget": (ForgetSummary, Preview),
    "release": (ReleaseSummary,),
    "request add": (EntrySummary,),
    "request list": (LedgerSummary,),
    "request show": (EntrySummary,),
    "request find": (FindSummary,),
    "request approve": (EntrySummary,),
    "request refuse": (EntrySummary,),
    "request extend": (EntrySummary,),
    "request cancel": (EntrySummary,),
    "request due": (DueSummary,),
    "request letter": (LetterSummary,),
    "request notify": (NotifySummary,),
    "request export": (RegisterSummary,),
    "work": (WorkSummary,),
    "purge": (PurgeSummary,),
    "join": (JoinSummary,),
    "node": (QuestionsSummary,),
    "search": (SearchSummary,),
    "serve": (ServeSummary,),
    "audit": (AuditSummary, AuditsSummary, QuickSummary, DeployedSummary),
    "report": (ReportSummary,),
    "certificate issue": (CertificateSummary,),
    "certificate sign": (CertificateSummary, VerifySummary),
    "certificate attest": (WitnessSummary,),
    "verify": (VerifySummary,),
    "keys new": (KeysSummary,),
    "keys list": (KeysList,),
    "keys revoke": (KeysList,),
    "keys rotate": (KeyFiles,),
    "keys server": (KeyFiles,),
    "keys node": (KeyFiles,),
    "keys admit": (KeyFiles,),
    "status": (FederationStatus,),
    "export": (ExportSummary,),
    "demo": (DemoSummary,),
    "compare": (CompareSummary,),
    "bench": (BenchSummary, LeaderboardSummary, StreamSummary),
    "sweep": (SweepSummary,),
    "methods": (MethodsSummary,),
    "doctor": (DoctorSummary,),
    "cache list": (CacheSummary,),
    "cache clear": (CacheSummary,),
}
"""Command -> what it may print with `--json`."""


FILES: dict[str, type[Config]] = {
    "run.json": RunFile,
    "world.json": FrozenParts,
    "membership.json": Membership,
    "summary.json": TrainSummary,
    "head.json": ReleaseChain,
    "releases.json": ReleaseCount,
    "purge.json": PurgeRecord,
    "lost_sites.json": LostSites,
    "recipients.json": Recipients,
    "tombstones.json": Tombstones,
    "rounds/*/round.json": StoredRound,
    "requests/*/*/rounds/*/round.json": StoredRound,
    "clients/*/rounds/*/round.json": ClientRound,
    "requests/*/*/request.json": BegunAnswer,
    "requests/*/*/record.json": AnswerRecord,
    "requests/*/*/quick.json": QuickCheck,
    "requests/*/*/audit.json": AuditRecord,
    "requests/*/*/deployed.json": DeployedAudit,
    "requests/*/*/certificate.json": Envelope,
    "evidence/log.jsonl": LogRecord,
    "evidence/head.json": Envelope,
    "evidence/witnesses/*.json": Envelope,
    "cells/*.json": CellRecord,
    "cells/overlap.json": OverlapRecord,
    "trials/*.json": TrialRecord,
    "streams/*.json": StreamRecord,
    "streams/reference-*.json": StreamReference,
}
"""Path in a run -> its record; `results.json` of an experiment is a `BenchResults`."""
UNSEALED = {
    "requests/*/*/certificate.json",
    "evidence/log.jsonl",
    "evidence/head.json",
    "evidence/witnesses/*.json",
}
"""Signed or chained instead of sealed."""
ELSEWHERE: tuple[type[Config], ...] = (BenchResults, StreamResults, Statement)
"""`results.json` of an experiment, what `ease bench` prints of a stream, and what a certificate's envelope holds."""
