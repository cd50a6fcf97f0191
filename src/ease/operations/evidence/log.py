"""What happened in a run, one line each: every line holds the hash of the one before, and a signed head the last's.

A line counts once the head that names it is written. The next entry cuts off lines after the head: a killed process
wrote them, and nothing refers to them."""

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import Field

from ease.config import Config, validate
from ease.errors import Unwritable, UserError
from ease.operations.evidence.canonical import Refuted, canonical, hashed, parse
from ease.operations.evidence.envelope import open_envelope, sealed
from ease.operations.evidence.keys import PublicKey, SigningKey, new_key, public_path, read_public_key, read_signing_key
from ease.operations.evidence.salted import evidence_folder, locked_evidence, salt_of, without_ids
from ease.runs.run import Run
from ease.storage import (
    LARGEST_JSON,
    SMALL_JSON,
    open_regular,
    read_bytes,
    remove_leftovers,
    write_atomic,
    write_remedy,
)

HEAD = "application/vnd.ease.log-head+json"
NOTHING = "0" * 64
"""The first line's value instead of a hash."""
KIND = re.compile(r"[a-z][a-z0-9-]{0,63}")
LARGEST_LINE = 1 << 20
BEGUN, ANSWERED, AUDITED, CERTIFIED = "begun", "answered", "audited", "certified"
RELEASED, PURGED, JOINED, LOST = "released", "purged", "joined", "lost-site"


class LogRecord(Config):
    """One line."""

    sequence: int = Field(ge=0)
    previous: str
    """Hash of the line before."""
    time: str
    kind: str
    payload: dict[str, Any]

    def line(self) -> bytes:
        return canonical(self.model_dump(mode="json"))

    @property
    def sha256(self) -> str:
        return hashed(self.line())


class LogHead(Config):
    """How far the log goes; signed by the run's key."""

    records: int = Field(ge=1)
    size: int = Field(ge=1)
    """Bytes of the log up to here."""
    sha256: str
    """Hash of the last line, without its line break."""


@dataclass(frozen=True)
class Log:
    """A log whose every line was checked."""

    records: tuple[LogRecord, ...]
    key: PublicKey
    unfinished: int = 0
    """Bytes behind the head that a killed process left."""

    def of_kind(self, kind: str) -> list[LogRecord]:
        return [each for each in self.records if each.kind == kind]

    def tells(self, kind: str, **parts: Any) -> bool:
        """Whether a line of some kind has these values in its payload."""
        return any(all(each.payload.get(key) == value for key, value in parts.items()) for each in self.of_kind(kind))

    def left_by_purge(self, answer: str) -> dict[str, Any] | None:
        """The trace of the last purge that touched a result: files that it `rewrote`, by hash, and those that are
        `gone`; None if none did."""
        found = [each.payload["answers"] for each in self.of_kind(PURGED)]
        return next((answers[answer] for answers in reversed(found) if answer in answers), None)


def log_path(run: Run) -> Path:
    return evidence_folder(run) / "log.jsonl"


def head_path(run: Run) -> Path:
    return evidence_folder(run) / "head.json"


def key_path(run: Run) -> Path:
    return evidence_folder(run) / "signing.key"


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


# Writing


def append(run: Run, kind: str, payload: Mapping[str, Any]) -> LogRecord:
    """Write one line and wait for the disk; requests and `ids` in the payload become salted hashes."""
    if not KIND.fullmatch(kind):
        raise UserError(f"{kind!r}: the kind of an entry is up to 64 small letters, digits and hyphens")
    salt_of(run)  # made before there is a head, so that a lost one is missed
    table = parse(canonical(without_ids(run, dict(payload))), "the entry")
    begun = {"configuration": run.config.identity()}
    with locked_evidence(run):
        remove_leftovers(evidence_folder(run))  # of a process that was killed while it wrote the head
        key = signing_key(run)
        head = _head(run, key.public)
        if head is None:
            _start(run)
            head = _write(
                run, key, None, LogRecord(sequence=0, previous=NOTHING, time=now(), kind=BEGUN, payload=begun)
            )
        record = LogRecord(sequence=head.records, previous=head.sha256, time=now(), kind=kind, payload=table)
        _write(run, key, head, record)
    return record


def signing_key(run: Run) -> SigningKey:
    """The run's key, made on first use; the public half is made again if a killed process left none."""
    path = key_path(run)
    if not path.is_file():
        if head_path(run).is_file():
            raise UserError(f"{path}: missing, and the log is signed with it; restore it")
        public_path(path).unlink(missing_ok=True)
        return new_key(path)
    key = read_signing_key(path)
    if not public_path(path).is_file():
        write_atomic(public_path(path), key.public.pem())
    return key


def _head(run: Run, key: PublicKey) -> LogHead | None:
    """The signed head; None before the first line."""
    path = head_path(run)
    if not path.is_file():
        return None
    envelope = open_envelope(read_bytes(path, SMALL_JSON), HEAD, str(path))
    if [each.keyid for each in envelope.signatures] != [key.id]:
        raise Refuted(f"{path}: signed by another key than the run's ({key.id})")
    table = parse(envelope.content, str(path))
    try:
        return validate(LogHead, table if isinstance(table, dict) else {}, str(path))
    except UserError as error:
        raise Refuted(str(error)) from error


def _start(run: Run) -> None:
    """An empty log. One without a head holds at most the first line of a killed process."""
    path = log_path(run)
    if path.is_file() and read_bytes(path, LARGEST_JSON).count(b"\n") > 1:
        raise Refuted(f"{head_path(run)}: missing, so no one can say where {path.name} ends; restore it")
    write_atomic(path, b"")


def _write(run: Run, key: SigningKey, head: LogHead | None, record: LogRecord) -> LogHead:
    line, path, size = record.line(), log_path(run), 0 if head is None else head.size
    if len(line) > LARGEST_LINE:
        raise UserError(
            f"an entry of {len(line):,} bytes, and the log takes {LARGEST_LINE:,}; log a hash of it instead"
        )
    if head is not None:
        _check_end(path, head)
    try:
        with path.open("r+b") as file:
            try:
                file.truncate(size)
                file.seek(size)
                file.write(line + b"\n")
                file.flush()
                os.fsync(file.fileno())
            except OSError:
                with suppress(OSError):  # its error would hide the one that brought us here
                    file.truncate(size)
                raise
    except OSError as error:
        raise Unwritable(f"{path}: cannot write ({error.strerror}); {write_remedy(error)}") from error
    made = LogHead(records=record.sequence + 1, size=size + len(line) + 1, sha256=hashed(line))
    write_atomic(head_path(run), sealed(HEAD, made.model_dump(mode="json"), key).file_bytes())
    return made


def _check_end(path: Path, head: LogHead) -> None:
    """Refuse to continue a log whose last line is not the one that the head signs."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, head.size - LARGEST_LINE - 2))
            end = file.read(min(head.size, LARGEST_LINE + 2))
    except OSError as error:
        raise Refuted(f"{path}: missing or unreadable ({error.strerror}), and head.json requires it") from error
    last = end.removesuffix(b"\n").rpartition(b"\n")[2]
    if hashed(last) != head.sha256 or not end.endswith(b"\n"):
        raise Refuted(f"{path}: its last line is not the one that head.json signs: the log was cut or altered")


# Reading


def read_log(run: Run, key: PublicKey | None = None) -> Log:
    """The whole log, checked from its signed head back to the first line; the fault nearest to the end is named."""
    path = log_path(run)
    key = key or read_public_key(public_path(key_path(run)))
    head = _head(run, key)
    if head is None:
        raise Refuted(f"{head_path(run)}: missing, and without it no one can say where the log ends")
    try:
        content = read_bytes(path, LARGEST_JSON)
    except OSError as error:
        raise Refuted(f"{path}: missing or unreadable ({error.strerror}), and head.json requires it") from error
    lines = _check_chain(content, head, path)
    records = [_record(line, f"{path}:{number}") for number, line in enumerate(lines, 1)]
    for number, record in enumerate(records):
        if record.sequence != number:
            raise Refuted(f"{path}:{number + 1}: says that it is record {record.sequence}")
    if records[0].previous != NOTHING:
        raise Refuted(f"{path}:1: records before it were left out")
    return Log(tuple(records), key, max(0, len(content) - head.size))


def _check_chain(content: bytes, head: LogHead, path: Path) -> list[bytes]:
    """The lines that the head signs, from it back: each one that holds is trusted for the hash of the one before it."""
    lines = content[: head.size].split(b"\n")[:-1]
    expected = head.sha256
    for place in range(head.records - 1, -1, -1):
        at = len(lines) - head.records + place
        if at < 0 or hashed(lines[at]) != expected:
            raise Refuted(_fault(path, content.split(b"\n")[:-1], expected, place, head.records))
        expected = _record(lines[at], f"{path}:{at + 1}").previous
    if len(lines) > head.records:
        raise Refuted(f"{path}: {len(lines)} records, and head.json signs {head.records}: some were put in")
    return lines


def _fault(path: Path, lines: list[bytes], expected: str, place: int, records: int) -> str:
    """The fault of the record at this place, in one line."""
    if expected in map(hashed, lines):
        return f"{path}: record {place} is not in its place: records were doubled, reordered or put in"
    if len(lines) < records:
        return f"{path}: record {place} was left out: {records} are signed, and {len(lines)} are there"
    return f"{path}: record {place} was altered: its hash is not the one that the record after it, or the head, holds"


def _record(line: bytes, source: str) -> LogRecord:
    table = parse(line, source)
    try:
        return validate(LogRecord, table if isinstance(table, dict) else {}, source)
    except UserError as error:
        raise Refuted(str(error)) from error
