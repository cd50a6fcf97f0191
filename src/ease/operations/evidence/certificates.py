"""Certificates of answered requests: gathered from a run's records, logged, signed, and countersigned by others."""

import hashlib
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import ease
from ease.audit.exact import sums_hash
from ease.audit.records import AuditRecord, current_audit
from ease.errors import UserError
from ease.operations.evidence.canonical import LARGEST_WHOLE, Refuted
from ease.operations.evidence.envelope import Envelope, open_envelope
from ease.operations.evidence.log import ANSWERED, AUDITED, LogRecord, append, head_path, now, read_log
from ease.operations.evidence.salted import public_name, redacted
from ease.operations.evidence.statement import (
    EXACT_LIMITS,
    LIMITS,
    PAYLOAD,
    UNAUDITED,
    Certificate,
    Code,
    Directions,
    LogPosition,
    Models,
    VerdictWords,
    asked,
    read_statement,
)
from ease.operations.lost_sites import read_lost_sites
from ease.requests.request import Request
from ease.runs.answers import StoredAnswer, find_answer
from ease.runs.records import AnswerRecord
from ease.runs.run import Run
from ease.storage import SMALL_JSON, read_bytes, sha256

LIBRARIES = ("torch", "numpy", "scipy", "scikit-learn", "safetensors")
LARGEST_CERTIFICATE = SMALL_JSON
DRAWN = ("similarities", "roc", "request")
"""Parts of an audit's record that a certificate leaves out: curves for drawing, and the request with its ids."""


def answer_named(run: Run, name: str) -> tuple[StoredAnswer, Request]:
    """A finished answer by its name; one that leads elsewhere names none."""
    parts = name.split("/")
    if len(parts) > 2 or any(part in ("", ".", "..") or "\\" in part or "\0" in part for part in parts):
        raise UserError(f"{name}: no name of an answer; write REQUEST or REQUEST/METHOD, such as client-3/ease")
    stored, request, _ = find_answer(run, name)
    return stored, request


def witness(run: Run, stored: StoredAnswer, request: Request) -> LogRecord:
    """Make the log contain a result and its audit; returns the position of the log's last line.

    The line about a purge lists the files that it rewrote.
    """
    label, record = label_of(run, stored), stored.record()
    events: list[tuple[str, dict[str, Any]]] = [
        (
            ANSWERED,
            {
                "answer": label,
                "request": request,
                "record": sha256(stored.record_path),
                "model": record.files.get(stored.model_path.name),
                "before": record.trained_sha256,
            },
        )
    ]
    audit = current_audit(stored) if stored.model_path.is_file() else None
    if audit is not None:
        verdict = {"passed": audit.verdict.passed, "words": audit.verdict.words}
        found = {"answer": label, "audit": sha256(stored.audit_path), "model": audit.model_sha256, **verdict}
        events.append((AUDITED, found))
    for (kind, payload), path in zip(events, (stored.record_path, stored.audit_path), strict=False):
        log = read_log(run) if head_path(run).is_file() else None
        part, listed_hash = path.stem, payload[path.stem]
        left = None if log is None else log.left_by_purge(label)
        rewritten = left is not None and left["rewritten"].get(path.name) == listed_hash
        if log is None or not (rewritten or log.tells(kind, answer=label, **{part: listed_hash})):
            append(run, kind, payload)
    return read_log(run).records[-1]


def label_of(run: Run, stored: StoredAnswer) -> str:
    """An answer's name for others: its folders, that of single pairs as a salted hash."""
    return f"{public_name(run, stored.folder.parent.name)}/{stored.folder.name}"


def gathered(
    run: Run, stored: StoredAnswer, request: Request, audit: AuditRecord | None, position: LogPosition
) -> Certificate:
    """Everything that is on record about an answer; its files are hashed anew."""
    record = stored.record()
    files = answer_files(stored, record, audited=audit is not None)
    table = redacted(run, request, stored.folder.parent.name)
    identity = None if audit is None else audit.verdict.identity
    return Certificate(
        issued=now(),
        asked=asked(table),
        request=table,
        answer=stored.folder.name,
        method=plain(record.method),
        models=Models(
            before=record.trained_sha256,
            after=files[stored.model_path.name],
            retrain=None if audit is None else audit.retrain_sha256,
            sums=sums_hash(run, stored) or None,
            retrain_sums=None if identity is None else identity.retrain_sums,
        ),
        code=installed_code(),
        configuration=plain(run.config.model_dump(mode="json")),
        seeds=plain({"training": run.config.seed, "answer": record.seed}),
        files=files,
        directions=directions_of(record, files),
        costs=costs_of(record),
        figures=figures_of(record),
        audit=None if audit is None else audit_figures(audit),
        verdict=verdict_of(audit),
        not_tested=("everything: the answer was not audited",) if audit is None else audit.not_tested,
        outstanding=tuple(f"{each.what}, recorded {each.time[:10]}" for each in read_lost_sites(run.folder).sites),
        limits=LIMITS if identity is None else EXACT_LIMITS,
        log=position,
    )


def answer_files(stored: StoredAnswer, record: AnswerRecord, audited: bool) -> dict[str, str]:
    """Hashes of an answer's files as they are now; those that its record lists must have the listed hashes."""
    known = files_of(stored)
    strange = sorted(set(record.files) - set(known))
    if strange:
        raise UserError(f"{stored.record_path}: files: {strange[0]!r} is none that an answer has; restore the record")
    names = [stored.record_path.name, *([stored.audit_path.name] if audited else []), *record.files]
    found = {name: sha256(known[name]) for name in names}
    wrong = [name for name, listed_hash in record.files.items() if found[name] != listed_hash]
    if wrong:
        raise UserError(f"{known[wrong[0]]}: not the file that record.json lists; restore it")
    return found


def files_of(stored: StoredAnswer) -> dict[str, Path]:
    """All files that an answer may have, by name: what a record or a certificate says is never a path."""
    kept = (stored.model_path, stored.bases_path, stored.base_path)
    paths = (stored.record_path, stored.audit_path, *kept)
    return {path.name: path for path in paths}


def directions_of(record: AnswerRecord, files: dict[str, str]) -> Directions | None:
    bases = files.get("bases.safetensors")
    if bases is None:
        return None
    spectrum = record.spectrum
    return Directions(
        bases_sha256=bases, spectrum=None if spectrum is None else plain(spectrum.model_dump(mode="json"))
    )


def costs_of(record: AnswerRecord) -> dict[str, float]:
    return {name: value for name, value in record.metrics.items() if name.startswith("cost/")}


def figures_of(record: AnswerRecord) -> dict[str, float]:
    return {name: value for name, value in record.metrics.items() if not name.startswith("cost/")}


def audit_figures(audit: AuditRecord) -> dict[str, Any]:
    """All figures of an audit, without what is only for drawing."""
    return {key: plain(each) for key, each in _without(audit.model_dump(mode="json"), DRAWN).items()}


def verdict_of(audit: AuditRecord | None) -> VerdictWords:
    if audit is None:
        return VerdictWords(passed=None, words=UNAUDITED)
    return VerdictWords(passed=audit.verdict.passed, words=audit.verdict.words)


def _without(value: Any, names: tuple[str, ...]) -> Any:
    if isinstance(value, dict):
        return {key: _without(each, names) for key, each in value.items() if key not in names}
    return [_without(each, names) for each in value] if isinstance(value, list) else value


def plain(value: Any) -> Any:
    """The same as any reader of JSON sees it: whole numbers that would be rounded are text."""
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return str(value) if isinstance(value, int) and abs(value) > LARGEST_WHOLE else value


def installed_code() -> Code:
    """The version of this package, a hash of its files, and the libraries that compute."""
    root = Path(ease.__file__).parent
    files = sorted(path for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    whole = hashlib.sha256()
    for path in files:
        whole.update(f"{sha256(path)}  {path.relative_to(root).as_posix()}\n".encode())
    found = {"python": platform.python_version(), **{name: _version(name) for name in LIBRARIES}}
    return Code(version=ease.__version__, sources_sha256=whole.hexdigest(), libraries=found)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def read_certificate(path: Path) -> tuple[Envelope, Certificate]:
    """A certificate from its file, with every signature checked against the key that travels with it."""
    try:
        content = read_bytes(path, LARGEST_CERTIFICATE)
    except OSError as error:
        raise UserError(
            f"{path}: cannot read ({error.strerror}); name a certificate that `ease certificate` wrote"
        ) from error
    envelope = open_envelope(content.removesuffix(b"\n"), PAYLOAD, str(path))
    if content != envelope.file_bytes() + b"\n":
        raise Refuted(f"{path}: damaged, more or less than one envelope and a line break")
    certificate = read_statement(envelope.content, str(path))
    if envelope.signatures[0].keyid != certificate.log.key:
        raise Refuted(f"{path}: its first signature is not by the key that signs the log of its run")
    return envelope, certificate
