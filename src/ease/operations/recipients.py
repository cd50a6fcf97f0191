"""Recipients of exported models, and whom to notify once a release has forgotten what their model contains."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from ease.config import Config, validate
from ease.operations.ledger.records import Entry, check_text, now, stamp
from ease.runs.run import Run
from ease.storage import read_json, write_json

NAME = "recipients.json"


class Recipient(Config):
    """One model that was handed to someone."""

    recipient: str = Field(min_length=1)
    time: str
    by: str
    format: str
    request: str | None
    """The request whose unlearned model was taken; null: the run's model."""
    releases: int
    """Releases that the run had then: what a later one forgot is in the model."""
    files: dict[str, str]
    """Name of an exported file -> its SHA-256."""


class Recipients(Config):
    """Every export of a run that names its recipient, oldest first."""

    format: Literal[1] = 1
    exports: tuple[Recipient, ...] = ()


def read_recipients(folder: Path) -> Recipients:
    """Return who was handed models of a run; nobody if none was recorded."""
    path = folder / NAME
    return validate(Recipients, read_json(path), str(path)) if path.is_file() else Recipients()


def record_recipient(
    run: Run, recipient: str, by: str, format: str, request: str | None, files: dict[str, str]
) -> Recipient:
    """Store who is handed an exported model; the same files for the same recipient are stored once."""
    check_text("recipient", recipient)
    known = read_recipients(run.folder)
    made = Recipient(
        recipient=recipient,
        time=stamp(now()),
        by=by,
        format=format,
        request=request,
        releases=len(run.head.releases),
        files=files,
    )
    if not any((each.recipient, each.files) == (recipient, files) for each in known.exports):
        write_json(run.folder / NAME, Recipients(exports=(*known.exports, made)).model_dump(mode="json"))
    return made


def to_notify(known: Recipients, entry: Entry) -> list[str]:
    """Return recipients of a model with pairs that a request forgot, who were not notified yet (Art. 19 GDPR)."""
    release, answer = entry.outcome.release, entry.outcome.answer or ""
    if release is None:
        return []
    holders = [
        each.recipient
        for each in known.exports
        if each.releases < release and each.request not in (answer, answer.partition("/")[0])
    ]
    return [name for name in dict.fromkeys(holders) if name not in entry.notified]
