"""Countersignatures of a log: others sign how far it goes and when, so that its keeper cannot rewrite it unnoticed.

The witness keeps a copy. With a countersignature anyone can show that a log which ends earlier, or differs, was
altered."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from pydantic import Field

from ease.config import Config
from ease.operations.evidence.canonical import Refuted, parse_as
from ease.operations.evidence.checks import Check
from ease.operations.evidence.envelope import Envelope, open_envelope, sealed
from ease.operations.evidence.keys import SigningKey
from ease.operations.evidence.log import Log, read_log
from ease.operations.evidence.salted import evidence_folder
from ease.runs.run import Run
from ease.storage import SMALL_JSON, read_bytes, write_atomic

KIND = "application/vnd.ease.witnessed+json"


class WitnessStatement(Config):
    """The statement of a witness: at this time of their clock the log had this many records, and the last had this
    hash."""

    records: int = Field(ge=1)
    sha256: str
    log_key: str
    """Id of the key that signs the log."""
    ledger_steps: int = Field(ge=0)
    ledger_sha256: str
    """Hash of the last step of the ledger; empty if it has none."""
    time: str


def countersign(run: Run, key: SigningKey, ledger: tuple[int, str]) -> tuple[Path, Envelope]:
    """Sign how far log and ledger of a run go, and store that in the run; `ledger` has its steps and last hash."""
    log = read_log(run)
    if key.public.id == log.key.id:
        raise Refuted("--key: this is the run's own key; a witness is somebody else")
    statement = WitnessStatement(
        records=len(log.records),
        sha256=log.records[-1].sha256,
        log_key=log.key.id,
        ledger_steps=ledger[0],
        ledger_sha256=ledger[1] if ledger[0] else "",
        time=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    )
    envelope = sealed(KIND, statement.model_dump(mode="json"), key)
    path = witness_folder(run) / f"{len(log.records):06d}-{key.public.id[:16]}.json"
    write_atomic(path, envelope.file_bytes() + b"\n")
    return path, envelope


def witness_folder(run: Run) -> Path:
    return evidence_folder(run) / "witnesses"


def read_witness(path: Path) -> tuple[str, WitnessStatement]:
    """Return the id of the witness's key, and what was signed."""
    envelope = open_envelope(read_bytes(path, SMALL_JSON).removesuffix(b"\n"), KIND, str(path))
    return envelope.signatures[0].keyid, parse_as(WitnessStatement, envelope.content, str(path))


def check_witnesses(run: Run, links: Sequence[str]) -> Iterator[Check]:
    """Compare log and ledger with everything that witnesses signed of them; `links` are the hashes of the steps."""
    paths = sorted(witness_folder(run).glob("*.json")) if witness_folder(run).is_dir() else []
    log = read_log(run) if paths else None
    for path in paths:
        assert log is not None
        key, found = read_witness(path)
        check_witness(log, links, found, str(path))
        yield Check("witness", True, f"{key} signed {found.records} records of the log at {found.time}")


def check_witness(log: Log, links: Sequence[str], found: WitnessStatement, source: str) -> None:
    """Refuse a log or a ledger that does not contain what a witness signed."""
    if found.log_key != log.key.id:
        raise Refuted(f"{source}: is about another log, signed by {found.log_key}")
    if found.records > len(log.records) or log.records[found.records - 1].sha256 != found.sha256:
        raise Refuted(f"{source}: the log had {found.records} records then, and it is another one here")
    steps = found.ledger_steps
    if steps and (steps > len(links) or links[steps - 1] != found.ledger_sha256):
        raise Refuted(f"{source}: the ledger had {steps} steps then, and it is another one here")
