"""Whether an audit of a run or a request would be refused, told before anyone waits for one."""

from ease.audit.config import AuditConfig
from ease.audit.site_measures import FEWEST_UNSEEN
from ease.audit.subjects import Subjects
from ease.data.membership import Holding
from ease.errors import UserError
from ease.requests.request import Request, forget_mask, held_out_without, held_without
from ease.runs.evaluation import evaluation_sets
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


def check_sites(world: World, request: Request, closed: bool) -> None:
    """Refuse what sites cannot measure, before anyone waits for it."""
    if closed:
        raise UserError(
            "this request is closed: nodes touch its pairs no more, so that nobody can measure them; audit an answer "
            "before `ease release`"
        )
    for holding in holdings_now(world):
        unseen = len(holding.validation_ids)
        if forget_mask(request, holding).any() and unseen < FEWEST_UNSEEN:
            raise UserError(
                f"client {holding.client}: holds forget pairs and holds out {unseen}, and its pairs are measured "
                f"beside {FEWEST_UNSEEN} at least; train with a larger partition.validation_share"
            )
    if len(evaluation_sets(world, request)["test"]) < 2:
        raise UserError("an audit needs 2 test pairs at the server at least, whether the model is whole; add some")


def holdings_now(world: World) -> list[Holding]:
    """What clients hold by ids, less what is closed."""
    left = held_without(world.server.membership.clients, world.gone)

    def kept(holding: Holding) -> Holding:
        both = zip(holding.train_ids, holding.train_classes, strict=True)
        there = [(pair_id, label) for pair_id, label in both if pair_id in left[holding.client]]
        ids, classes = zip(*there, strict=True) if there else ((), ())
        return holding.model_copy(update={"train_ids": ids, "train_classes": classes})

    holdings = held_out_without(world.server.membership.clients, world.gone)
    return [kept(holding) for holding in holdings if holding.client in left]
