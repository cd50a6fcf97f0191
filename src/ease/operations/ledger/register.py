"""The register: every request with its steps as CSV and as a page to print, and records of consent."""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from ease.audit.records import current_audit
from ease.audit.verdict import Verdict
from ease.operations.ledger.deadlines import day_in, due
from ease.operations.ledger.policy import OfficePolicy, Policy
from ease.operations.ledger.records import Consent, Entry, Event, now, stamp
from ease.operations.ledger.steps import link
from ease.operations.ledger.store import Ledger
from ease.operations.recipients import read_recipients, to_notify
from ease.requests.request import in_words
from ease.runs.answers import StoredAnswer
from ease.runs.run import Run
from ease.show.page import policy as content_policy
from ease.show.template import render, source
from ease.storage import write_atomic

COLUMNS = (
    "id",
    "received",
    "asked_by",
    "ground",
    "reason",
    "forget",
    "state",
    "why",
    "until",
    "first_deadline",
    "urgency",
    "approved_by",
    "closed",
    "answer",
    "release",
    "model_sha256",
    "verdict",
    "notified",
    "to_notify",
)
STEP_COLUMNS = ("request", "time", "from", "to", "by", "why", "deadline", "key", "hash")
CONSENT_SCHEMA = "ISO/IEC TS 27560:2023"
FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""Characters that begin a formula in a spreadsheet."""
CLOSED = ("done", "refused", "cancelled")


@dataclass(frozen=True)
class Register:
    """All requests, steps and consents of a run at one moment."""

    run: str
    made: str
    zone: str
    office: OfficePolicy
    rows: tuple[dict[str, str], ...]
    steps: tuple[dict[str, str], ...]
    consents: tuple[dict[str, Any], ...]


def register(run: Run, policy: Policy) -> Register:
    """Gather the register of a run."""
    ledger, zone = Ledger(run.folder), policy.time_zone
    entries, events, recipients = ledger.entries(), ledger.events(), read_recipients(run.folder)
    known = run.known()
    names = {} if known is None else known[0].names
    urgencies = {each.id: each.urgency for each in due(entries, now(), zone, policy.remind.within_days)}
    rows = []
    for entry in sorted(entries, key=lambda each: each.number):
        steps = [each for each in events if each.request == entry.id]
        rows.append(
            {
                "id": entry.id,
                "received": day_in(entry.submitted, zone),
                "asked_by": entry.asked_by,
                "ground": entry.ground,
                "reason": entry.reason,
                "forget": in_words(entry.request, names),
                "state": entry.state,
                "why": entry.why,
                "until": day_in(entry.deadline, zone),
                "first_deadline": day_in(entry.first_deadline, zone) if entry.first_deadline else "",
                "urgency": urgencies.get(entry.id, ""),
                "approved_by": ", ".join(entry.approved_by),
                "closed": _closed(steps, zone),
                "answer": entry.outcome.answer or "",
                "release": "" if entry.outcome.release is None else str(entry.outcome.release),
                "model_sha256": entry.outcome.model_sha256 or "",
                "verdict": _verdict_words(run, entry),
                "notified": ", ".join(entry.notified),
                "to_notify": ", ".join(to_notify(recipients, entry)),
            }
        )
    consents = tuple(consent_record(each, policy.office) for each in ledger.consents())
    return Register(
        run.folder.name, stamp(now()), zone, policy.office, tuple(rows), tuple(map(_step, events)), consents
    )


def verdict_of_answer(run: Run, entry: Entry) -> Verdict | None:
    """Return the verdict on a request's answer; None if it has no current audit."""
    if entry.outcome.answer is None:
        return None
    stored = StoredAnswer(run.folder / "requests" / entry.outcome.answer)
    audit = current_audit(stored) if stored.done and stored.model_path.is_file() else None
    return None if audit is None else audit.verdict


def _verdict_words(run: Run, entry: Entry) -> str:
    verdict = verdict_of_answer(run, entry)
    return entry.outcome.verdict if verdict is None else verdict.words


def _closed(steps: Sequence[Event], zone: str) -> str:
    times = [each.time for each in steps if each.after in CLOSED and each.before != each.after]
    return day_in(times[-1], zone) if times else ""


def _step(step: Event) -> dict[str, str]:
    key = "" if step.signature is None else step.signature.key
    return {
        "request": step.request,
        "time": step.time,
        "from": step.before or "",
        "to": step.after,
        "by": step.by,
        "why": step.why,
        "deadline": step.deadline,
        "key": key,
        "hash": link(step),
    }


def consent_record(consent: Consent, office: OfficePolicy) -> dict[str, Any]:
    """Return a consent with the fields of ISO/IEC TS 27560; what nobody recorded is null."""
    return {
        "record_metadata": {
            "record_id": consent.content_hash,
            "schema_version": CONSENT_SCHEMA,
            "pii_principal_id": f"client {consent.client}",
        },
        "pii_processing": {
            "privacy_notice": office.notice or None,
            "language": "en",
            "purposes": [
                {
                    "purpose": office.purpose,
                    "lawful_basis": "consent, Art. 6(1)(a) GDPR",
                    "pii_information": [{"pii_type": "pictures with captions", "count": consent.pairs}],
                    "pii_controllers": [{"name": office.name or None, "contact": office.contact or None}],
                    "collection_method": "ease join",
                    "processing_locations": None,
                    "retention_period": "until withdrawn by a request to forget",
                    "recipients": None,
                    "jurisdiction": None,
                }
            ],
        },
        "event": {
            "event_time": consent.time,
            "event_type": "explicit",
            "event_state": "given",
            "entity_id": consent.given_by,
            "validity_duration": None,
            "evidence": consent.text,
            "returned_pairs": consent.returned,
        },
    }


def as_csv(columns: Sequence[str], rows: Sequence[dict[str, str]]) -> str:
    """Return rows as CSV in which no cell is taken for a formula."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow(["'" + row[name] if row[name].startswith(FORMULA) else row[name] for name in columns])
    return out.getvalue()


def register_page(found: Register) -> str:
    """Return the register as one page for reading and printing."""
    style = source("page.css") + source("register.css")
    return render(
        "register.html", policy=content_policy(style, ""), style=Markup(style), register=found, columns=COLUMNS
    )


def write_register(run: Run, policy: Policy, out: Path) -> list[Path]:
    """Write `register.csv`, `steps.csv`, `register.html` and `consents.json` into a folder."""
    found = register(run, policy)
    contents = {
        "register.csv": as_csv(COLUMNS, found.rows),
        "steps.csv": as_csv(STEP_COLUMNS, found.steps),
        "register.html": register_page(found),
        "consents.json": json.dumps(found.consents, indent=2, ensure_ascii=False) + "\n",
    }
    for name, text in contents.items():
        write_atomic(out / name, text.encode())
    return [out / name for name in contents]
