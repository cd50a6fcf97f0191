"""Whether an audit of a run or a request would be refused, told before anyone waits for one."""

from ease.audit.at_sites import check_sites
from ease.audit.config import AuditConfig
from ease.audit.shadow_runs import Subjects
from ease.errors import UserError
from ease.requests.request import Request
from ease.runs.world import World
from ease.trainers import trainer_of

SMALLEST_POOL = 16
_NONE = "no audit of this request is possible: "


def audit_prospects(world: World, request: Request | None = None) -> str:
    """One line where an audit with the usual settings would be refused or see less, and what to do; else nothing.

    Without a request, what no request of this run could do without is looked at: pairs that no client holds. Exact
    answers are compared with retraining by their hashes, which is always possible.
    """
    if trainer_of(world.config.model) == "sums":
        return ""
    if world.config.partition.apart:
        return "" if request is None else _at_sites(world, request)
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
    found = {pool: _subjects(world, request, pool) for pool in (usual, half, SMALLEST_POOL)}
    possible = {pool: each for pool, each in found.items() if isinstance(each, Subjects)}
    if not possible:
        return f"{_NONE}{found[SMALLEST_POOL]}"
    attacked = [pool for pool, each in possible.items() if not each.candidates.why_no_attack()]
    pool = next(iter(attacked or possible))
    said = [f"{smaller} {pool}"] if pool != usual else []
    missing = possible[pool].candidates.why_no_attack()
    if missing:
        said.append(f"an audit will go by ranks and levels beside retraining alone: {missing}")
    return "; ".join(said)


def _subjects(world: World, request: Request, pool: int) -> Subjects | str:
    """Which pairs an audit would look at, or why there is none."""
    try:
        return Subjects.of(world, request, pool)
    except UserError as error:
        return str(error)


def _at_sites(world: World, request: Request) -> str:
    """The same where nodes measure."""
    try:
        check_sites(world, request, closed=False)
    except UserError as error:
        return f"{_NONE}{error}"
    return ""
