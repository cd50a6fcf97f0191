"""Evidence that anyone can check: a log of what happened in a run, and signed certificates of what was forgotten."""

from ease.operations.evidence.canonical import Refuted
from ease.operations.evidence.certificates import read_certificate, witness
from ease.operations.evidence.checks import Verification, verify
from ease.operations.evidence.envelope import countersigned
from ease.operations.evidence.events import attest, issue
from ease.operations.evidence.keys import new_key, read_public_key, read_signing_key
from ease.operations.evidence.log import append, read_log
from ease.operations.evidence.salted import hidden, public_name
from ease.operations.evidence.statement import Certificate

__all__ = [
    "Certificate",
    "Refuted",
    "Verification",
    "append",
    "attest",
    "countersigned",
    "hidden",
    "issue",
    "new_key",
    "public_name",
    "read_certificate",
    "read_log",
    "read_public_key",
    "read_signing_key",
    "verify",
    "witness",
]
