"""Whether an audit of a run or a request would be refused, told before anyone waits for one."""

from ease.audit.config import AuditConfig
from ease.errors import UserError
from ease.requests.request import Request
from ease.runs.attackers import Subjects
from ease.runs.world import World

SMALLEST_POOL = 16
_NONE = "no audit of this request is possible: "


def audit_prospects(world: World, request: Request | None = None) -> str:
    """One line where an audit with the usual settings would be refused, and what to do; nothing where it would not.

    Without a request, what no request of this run could do without is looked at: pairs that no client holds.
    """
    usual, spare = AuditConfig().pool, len(world.evaluator.spare) + len(world.evaluator.test)
    if spare < SMALLEST_POOL + 2:
        return (
            f"no audit is possible: it needs {SMALLEST_POOL + 2} validation and test pairs at least, better 1000, and "
            f"there are {spare}"
        )
    half = max(SMALLEST_POOL, spare // 2)
    smaller = f"an audit needs a smaller pool, since there are {spare} validation and test pairs: add --pool"
    if request is None:
        return f"{smaller} {half}" if spare < usual + 2 else ""
    refused = {pool: _refusal(world, request, pool) for pool in (SMALLEST_POOL, half, usual)}
    if not refused[usual]:
        return ""
    if not refused[half]:
        return f"{smaller} {half}"
    return f"{smaller} {SMALLEST_POOL}" if not refused[SMALLEST_POOL] else _NONE + refused[SMALLEST_POOL]


def _refusal(world: World, request: Request, pool: int) -> str:
    try:
        Subjects.of(world, request, pool)
    except UserError as error:
        return str(error)
    return ""
