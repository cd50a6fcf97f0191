"""Checks of a run's ledger and log as a whole, beside those of a certificate."""

from collections.abc import Iterator

from ease.errors import UserError
from ease.operations.evidence.checks import Check
from ease.operations.evidence.log import head_path, read_log
from ease.operations.evidence.witnesses import check_witnesses
from ease.operations.ledger.people import check_signers
from ease.operations.ledger.policy import load_policy
from ease.operations.ledger.steps import link
from ease.operations.ledger.store import Ledger
from ease.runs.run import Run


def ledger_checks(run: Run) -> Iterator[Check]:
    """Check the chain of steps, who signed them, and what witnesses signed of the log."""
    ledger = Ledger(run.folder)
    if ledger.exists:
        try:
            ledger.check()
            words = check_signers(ledger.events(), load_policy(run.folder).approval, str(ledger.path))
            yield Check("ledger", True, words)
        except UserError as error:
            yield Check("ledger", False, str(error))
    try:
        yield from check_witnesses(run, [link(each) for each in ledger.events()])
    except UserError as error:
        yield Check("witnesses", False, str(error))


def log_check(run: Run) -> Check:
    """Check the whole log of a run."""
    if not head_path(run).is_file():
        return Check("log", None, "nothing was logged yet")
    try:
        log = read_log(run)
    except (UserError, OSError) as error:
        return Check("log", False, str(error))
    return Check("log", True, f"{len(log.records)} records, each with the hash of the one before, up to a signed head")
