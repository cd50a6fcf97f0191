"""Checks before an audit: whether it would be refused or see less."""

from ease.audit.config import AuditConfig
from ease.audit.joint import LEAST_RETRAINED
from ease.audit.site_measures import FEWEST_UNSEEN
from ease.audit.subjects import Subjects
from ease.data.membership import Holding
from ease.errors import UserError
from ease.requests.request import Request, forget_mask, held_out_without, held_without
from ease.runs.evaluation import evaluation_sets
from ease.runs.world import World
from ease.trainers import trainer_of

SMALLEST_POOL = 16
USUAL_POOL = 512
_NONE = "no audit of this request is possible: "


def audit_prospects(world: World, request: Request | None = None) -> str:
    """A note if an audit with default settings would be refused or see less; else empty.

    Without a request only the pairs that no client holds are counted, because every audit needs them. Exact
    answers are compared with retraining by their hashes, which is always possible.
    """
    if trainer_of(world.config.model) == "sums":
        return ""
    if world.config.partition.on_site:
        return "" if request is None else _at_sites(world, request)
    spare = _unseen(world)
    if spare < SMALLEST_POOL + 2:
        return (
            f"no audit is possible: it needs {SMALLEST_POOL + 2} validation and test pairs at least, better 1000, and "
            f"there are {spare}"
        )
    said = []
    pools = _pools(spare)
    if pools[0] != USUAL_POOL:
        said.append(
            f"an audit will compare with {pools[0]} pairs instead of {USUAL_POOL}, since there are {spare} validation "
            "and test pairs, and see less"
        )
    if request is None:
        return "; ".join(said)
    found = {pool: _subjects(world, request, pool) for pool in pools}
    possible = [each for each in found.values() if isinstance(each, Subjects)]
    if not possible:
        return f"{_NONE}{found[SMALLEST_POOL]}"
    missing = next((each for each in possible if not each.candidates.why_no_attack()), possible[0])
    if why := missing.candidates.why_no_attack():
        said.append(f"an audit will go by ranks and levels compared with retraining only: {why}")
    return "; ".join(said)


def fitted_pool(world: World, request: Request, asked: int | None) -> int:
    """The requested size of the pool, or one that the data allow.

    The largest of the usual pool, half of the pairs that no client holds and the smallest one; a smaller one only if it
    leaves enough pairs for the attacks.
    """
    if asked is not None or world.config.partition.on_site:
        return asked or USUAL_POOL
    found = {pool: _subjects(world, request, pool) for pool in _pools(_unseen(world))}
    possible = {pool: each for pool, each in found.items() if isinstance(each, Subjects)}
    attacked = [pool for pool, each in possible.items() if not each.candidates.why_no_attack()]
    return next(iter(attacked or possible), SMALLEST_POOL)


def verdict_prospects(config: AuditConfig) -> str:
    """Why an audit with these settings cannot give a verdict; nothing if it can."""
    if config.retrains + 1 >= LEAST_RETRAINED:
        return ""
    return (
        f"--retrains {config.retrains}: no verdict is possible, only measures: with the reference that makes "
        f"{config.retrains + 1} retrained models, and a verdict needs {LEAST_RETRAINED}; add --retrains "
        f"{LEAST_RETRAINED - 1} or more"
    )


def _unseen(world: World) -> int:
    """Number of pairs that no client holds."""
    return len(world.evaluator.spare) + len(world.evaluator.test)


def _pools(spare: int) -> list[int]:
    """Pool sizes to try, largest first."""
    half = max(SMALLEST_POOL, spare // 2)
    usual = [USUAL_POOL] if spare >= USUAL_POOL + 2 else []
    return sorted({*usual, min(half, USUAL_POOL), SMALLEST_POOL}, reverse=True)


def _subjects(world: World, request: Request, pool: int) -> Subjects | str:
    """The pairs that an audit would use, or why it is impossible."""
    try:
        return Subjects.of(world, request, pool)
    except UserError as error:
        return str(error)


def _at_sites(world: World, request: Request) -> str:
    """A note if nodes cannot measure the request; else empty."""
    try:
        check_sites(world, request, closed=False)
    except UserError as error:
        return f"{_NONE}{error}"
    return ""


def check_sites(world: World, request: Request, closed: bool) -> None:
    """Refuse requests that sites cannot measure."""
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
    """The clients' current holdings by id."""
    left = held_without(world.server.membership.clients, world.gone)

    def kept(holding: Holding) -> Holding:
        both = zip(holding.train_ids, holding.train_classes, strict=True)
        there = [(pair_id, label) for pair_id, label in both if pair_id in left[holding.client]]
        ids, classes = zip(*there, strict=True) if there else ((), ())
        return holding.model_copy(update={"train_ids": ids, "train_classes": classes})

    holdings = held_out_without(world.server.membership.clients, world.gone)
    return [kept(holding) for holding in holdings if holding.client in left]
