"""The log brought up to what became of a run, and the certificates that rest on it."""

from typing import Any

from ease.audit.records import current_audit
from ease.operations.evidence.canonical import hashed
from ease.operations.evidence.certificates import answer_named, files_of, gathered, label_of, witness
from ease.operations.evidence.envelope import Envelope, sealed
from ease.operations.evidence.log import (
    ANSWERED,
    CERTIFIED,
    JOINED,
    LOST,
    PURGED,
    RELEASED,
    Log,
    append,
    head_path,
    read_log,
    signing_key,
)
from ease.operations.evidence.salted import BUSY_SECONDS, evidence_folder, hidden
from ease.operations.evidence.statement import PAYLOAD, LogPosition, statement_of
from ease.operations.lost_sites import read_lost_sites
from ease.operations.purge import read_purges
from ease.requests.request import SampleRequest
from ease.runs.answers import StoredAnswer
from ease.runs.run import Run
from ease.storage import exclusive, sha256

LOCK = ".standing.lock"
"""Held while the log is compared with the run, so that two processes do not log the same release."""


def attest(run: Run) -> None:
    """Log what is not logged yet, such as what a process that was killed had done and not logged.

    Nothing is logged twice: files that someone altered later do not get into the log this way.
    """
    busy = f"{evidence_folder(run)}: another process brings this log up to date; wait for it"
    with exclusive(evidence_folder(run) / LOCK, busy, BUSY_SECONDS):
        _releases(run)
        _joins(run)
        _lost_sites(run)
        _purges(run)


def issue(run: Run, name: str) -> Envelope:
    """A signed certificate of the finished answer `REQUEST` or `REQUEST/METHOD`, logged.

    The log is brought up to date first, so that no certificate rests on a log that lacks a release.
    """
    stored, request = answer_named(run, name)
    attest(run)
    audit = current_audit(stored)
    last = witness(run, stored, request)
    key = signing_key(run)
    position = LogPosition(sequence=last.sequence, sha256=last.sha256, key=key.public.id)
    certificate = gathered(run, stored, request, audit, position)
    envelope = sealed(PAYLOAD, statement_of(certificate), key)
    append(run, CERTIFIED, {"answer": label_of(run, stored), "certificate": hashed(envelope.content)})
    return envelope


def _log(run: Run) -> Log | None:
    return read_log(run) if head_path(run).is_file() else None


def _releases(run: Run) -> None:
    log = _log(run)  # once for all: reading it takes longer the longer it is
    for place, release in enumerate(run.head.releases, start=1):
        stored = StoredAnswer(run.folder / "requests" / release.answer)
        label = label_of(run, stored)
        if log is None or not log.tells(RELEASED, answer=label, release=place):
            witness(run, stored, release.request)
            fields = {"answer": label, "release": place, "model": release.model_sha256}
            again = {"trained_again": True} if release.rounds else {}
            append(run, RELEASED, {**fields, "after_round": release.after_round, **again})
            log = _log(run)


def _joins(run: Run) -> None:
    known, log = run.known(), _log(run)
    for holding in known[0].clients if known is not None else ():
        if holding.joined is None or (log is not None and log.tells(JOINED, client=holding.client)):
            continue
        ids = sorted(hidden(run, each) for each in (*holding.train_ids, *holding.validation_ids))
        fields = {"client": holding.client, "pairs": len(ids), "pairs_sha256": hashed(ids)}
        how = holding.joined.model_dump(mode="json")
        append(run, JOINED, {**fields, **how, "consent": hidden(run, holding.joined.consent)})


def _lost_sites(run: Run) -> None:
    """One line for each site that purges no longer wait for; who decided that and why, as a salted hash."""
    sites = read_lost_sites(run.folder).sites
    log = _log(run) if sites else None
    for site in sites:
        if log is None or not log.tells(LOST, client=site.client):
            fields = {"client": site.client, "recorded": site.time, "undeleted": site.what}
            append(run, LOST, {**fields, "decision": hidden(run, hashed(site.model_dump(mode="json")))})


def _purges(run: Run) -> None:
    """One line for all passes of `purge.json` since the last: what they left of the results in the log."""
    passes, log = len(read_purges(run.folder).passes), _log(run)
    if log is None or any(each.payload["passes"] >= passes for each in log.of_kind(PURGED)) or not passes:
        return
    stored = {
        label_of(run, each): each
        for each in (StoredAnswer(path) for path in sorted(run.folder.glob("requests/*/*")) if path.is_dir())
        if each.done
    }
    purged = {release.answer for release in run.head.releases if release.purged}
    answers = {}
    for label in dict.fromkeys(str(each.payload["answer"]) for each in log.of_kind(ANSWERED)):
        here = stored.get(label)
        left = _left(here)
        closed = here is not None and here.folder.relative_to(run.folder / "requests").as_posix() in purged
        if here is None or closed or _is_other(log, label, left):
            answers[label] = left
    append(run, PURGED, {"passes": passes, "answers": answers})


def _left(stored: StoredAnswer | None) -> dict[str, Any]:
    """The files of a result that exist. For single pairs the record and the audit contain ids, so a purge rewrites
    them."""
    if stored is None:
        return {"gone": ["record.json"], "rewritten": {}}
    record = stored.record()
    spelt = (stored.record_path, stored.audit_path) if isinstance(record.request, SampleRequest) else ()
    return {
        "gone": [name for name, path in files_of(stored).items() if name in record.files and not path.is_file()],
        "rewritten": {path.name: sha256(path) for path in spelt if path.is_file()},
    }


def _is_other(log: Log, label: str, left: dict[str, Any]) -> bool:
    record = left["rewritten"].get("record.json")
    return bool(left["gone"]) or (record is not None and not log.tells(ANSWERED, answer=label, record=record))
