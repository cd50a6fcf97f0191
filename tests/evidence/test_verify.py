"""Certificates against what they list: all of it is computed again, and each change is refused for its own reason."""

from pathlib import Path

from ease.evidence import verify
from ease.runs.run import Run


def test_a_true_certificate_holds(run: Run, certificate: Path) -> None:
    found = verify(certificate, run)
    assert found.holds and found.reasons == ()
    assert all(check.holds for check in found.checks)
