"""Evidence that anyone can check: a log of what happened in a run, and signed certificates of what was forgotten."""

from ease.evidence.canonical import Refuted
from ease.evidence.certificates import read_certificate, witness
from ease.evidence.checks import Verification, verify
from ease.evidence.envelope import countersigned
from ease.evidence.keys import new_key, read_public_key, read_signing_key
from ease.evidence.log import append, read_log
from ease.evidence.salted import hidden, public_name
from ease.evidence.standing import attest, issue
from ease.evidence.statement import Certificate

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
