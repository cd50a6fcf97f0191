"""The verdict of the queue: an answer is audited before its release, because nobody can measure closed pairs at sites
afterwards."""

from collections.abc import Iterator

from ease.audit.config import AuditConfig
from ease.audit.exact import judge_identity
from ease.audit.preflight import USUAL_POOL
from ease.audit.records import current_audit
from ease.audit.runner import Audit, AuditBatch, check_audited, check_possible
from ease.errors import UserError
from ease.methods.base import Step, Unlearner
from ease.methods.retrain import Retrain
from ease.requests.request import Request
from ease.runs.answers import StoredAnswer
from ease.runs.forget import forget
from ease.runs.records import Metrics
from ease.runs.run import Run
from ease.runs.world import World
from ease.storage import remove_leftovers
from ease.trainers import trainer_of


def audit_settings(run: Run, world: World, request: Request, method: Unlearner, asked_for: bool) -> AuditConfig | str:
    """Return the settings of the audit that a request gets, or why it gets none.

    Without being `asked_for`, an audit needs the full pool: an audit of a small run says less and is often
    inconclusive."""
    usual = AuditConfig()
    if trainer_of(run.config.model) == "sums":
        return usual
    settings = usual if asked_for or run.config.partition.on_site else usual.model_copy(update={"pool": USUAL_POOL})
    try:
        check_audited("this answer", method)
        check_possible(run, world, request, settings)
    except UserError as error:
        return str(error)
    return settings


def audit_answer(
    run: Run, world: World, stored: StoredAnswer, request: Request, method: Unlearner, settings: AuditConfig
) -> Iterator[tuple[Request, Unlearner, Iterator[tuple[Step, Metrics]]]]:
    """Audit an answer that is not released yet, and keep what was found beside it.

    Yields trainings for the caller to follow. Existing retrainings and shadows are not made again.
    """
    if current_audit(stored) is not None:
        return
    again = Retrain()
    yield request, again, forget(run, world, request, again)
    with run.locked():
        remove_leftovers(stored.folder)
        if trainer_of(run.config.model) == "sums":
            judge_identity(run, stored, request, settings)
            return
    name = stored.folder.relative_to(run.folder / "requests").as_posix()
    together = AuditBatch((Audit.of(run, world, name, settings),))
    with run.locked():
        for _ in together.shadows():
            pass
        list(together.judge())
