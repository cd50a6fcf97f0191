"""Add clients that joined to a closed-form head: their sums are added, and the maps are solved again."""

import shutil
from dataclasses import replace

from ease.federation.middleware import Guarded
from ease.requests.request import leaving_clients
from ease.runs.head import Extension, write_head
from ease.runs.run import Run
from ease.runs.world import World
from ease.trainers import trainer_of
from ease.trainers.sums import add_and_solve

JOINED = "joined"


def newcomers(run: Run, world: World) -> tuple[int, ...]:
    """Clients that joined and whose sums are not in the total, without those that left again."""
    if trainer_of(run.config.model) != "sums":
        return ()
    there = set(run.history.clients(1))
    left = {client for request in run.head.gone for client in leaving_clients(request)}
    joined = [each.client for each in world.server.membership.clients if each.joined is not None]
    return tuple(client for client in joined if client not in there and client not in left)


def extend(run: Run, world: World) -> None:
    """Make a new round with the sums of all newcomers and continue the run from it; the caller holds the run's lock.

    A killed process leaves a round that the head does not name; it is made again.
    """
    coming = newcomers(run, world)
    if not coming:
        return
    head, history = run.head, run.history
    folder = run.folder / JOINED / f"client-{max(coming)}"
    shutil.rmtree(folder, ignore_errors=True)
    federation = Guarded(run.hosted(world).federation, run.config.training, metered=True)
    recipe = run.config.training, run.config.seed, run.config.model.temperature
    finished = add_and_solve(history.initial(), federation, *recipe, coming, history)
    made = Extension(
        clients=coming,
        rounds=(folder / "rounds").relative_to(run.folder).as_posix(),
        after_releases=len(head.releases),
    )
    cost = federation.cost
    replace(history, place=made.rounds).append(finished, cost.bytes_down, cost.bytes_up)
    write_head(run.folder / "head.json", head.model_copy(update={"extensions": (*head.extensions, made)}))
