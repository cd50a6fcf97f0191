"""Run a method on a request: its rounds are journaled, metered and measured, and the result is stored."""

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from ease.errors import UserError
from ease.federation.fedavg import fedavg
from ease.federation.history import History
from ease.federation.middleware import Guarded
from ease.federation.protocol import Federation
from ease.methods.base import Step, Trained, Unlearner, step_of
from ease.params import Params
from ease.requests.request import Request, held_without, named_in
from ease.runs.answers import (
    Snapshot,
    StoredAnswer,
    answer_of,
    check_current,
    check_method,
    continuation,
    find_answer,
)
from ease.runs.evaluation import evaluation_sets, measure
from ease.runs.memory import forget_peak_memory, peak_memory
from ease.runs.records import AnswerRecord, BegunAnswer, RoundRecord, write_record
from ease.runs.resolve import check_request
from ease.runs.run import Run, load_directions
from ease.runs.world import World
from ease.storage import digest, read_json, remove_leftovers, sha256, write_json
from ease.subspace import ServerLock, save_bases
from ease.trainers import trainer_of


def forget(
    run: Run,
    world: World,
    request: Request,
    method: Unlearner,
    observe: bool = True,
    snapshot: Snapshot | None = None,
) -> Iterator[tuple[Step, dict[str, float]]]:
    """Run a method to its end and yield each step with its recalls; a killed run is resumed.

    `snapshot` is the run as the caller has read it for this request.
    """
    run.check_frozen(world.server.backbone, world.server.device)
    check_request(world, request)
    check_method(run, method)
    world = world.erasing(request)
    snapshot = snapshot or Snapshot.of(run, request)
    trained, stored = snapshot.trained, answer_of(run, request, method)
    with run.locked():
        snapshot.check_unchanged()
        if stored.done:
            check_current(run, stored)
            shutil.rmtree(stored.folder / "journal", ignore_errors=True)  # of a process killed at its very end
        else:
            exact = trainer_of(run.config.model) == "sums"
            answering = method.unlearn if exact or trains_on(world, request) else _unchanged
            steps = partial(answering, trained, request)
            begun = BegunAnswer(
                request=request, method=method.model_dump(mode="json"), trained_sha256=snapshot.start_sha256
            )
            yield from _follow(
                run.hosted(world),
                stored,
                begun,
                steps,
                run.config.seed,
                observe,
                known=(trained.start,),  # every client was sent the trained model
                history=replace(trained.history, place=stored.rounds_path.relative_to(run.folder).as_posix()),
            )


def trains_on(world: World, request: Request) -> bool:
    """Whether some client trains on a pair that a request names."""
    holdings = world.server.membership.clients
    held = held_without(holdings, world.gone)
    return any(not held.get(each.client, frozenset()).isdisjoint(named_in(request, (each,))) for each in holdings)


def _unchanged(trained: Trained, request: Request, federation: Federation) -> Iterator[Step]:
    """The same model, for a request whose pairs no client trains on."""
    yield Step(trained.start, "nothing was trained on", base=trained.base)


def train_further(
    run: Run, world: World, after: str, rounds: int, locked: bool
) -> Iterator[tuple[Step, dict[str, float]]]:
    """Train further on retained pairs after a request, with its directions locked or free."""
    check_trains_on(run, f"--after {after}")
    stored, request, method = find_answer(run, after)
    snapshot = Snapshot.of(run, request)
    with run.locked():
        snapshot.check_unchanged()
        continued = continuation(stored, rounds, locked)
        if not continued.done:
            directions, model = load_directions(stored.folder) if locked else {}, stored.model()
            held = (ServerLock(directions, model),) if directions else ()
            steps = partial(continue_training, snapshot.trained, model, held, rounds=rounds)
            begun = BegunAnswer(
                request=request,
                method=method.model_dump(mode="json"),
                trained_sha256=snapshot.start_sha256,
                locked=bool(held),
            )
            closed = world if request in world.gone else world.without(request)
            yield from _follow(run.hosted(closed), continued, begun, steps, run.config.seed, after=stored.model_sha256)


def check_trains_on(run: Run, option: str) -> None:
    """Refuse more rounds of a closed-form head."""
    if trainer_of(run.config.model) == "sums":
        raise UserError(
            f"{option}: a closed-form head is solved from its sums in one round, and more change nothing; leave it out"
        )


def continue_training(
    trained: Trained, state: Params, held: Sequence[ServerLock], federation: Federation, rounds: int
) -> Iterator[Step]:
    """Plain FedAvg on the retained pairs; locks are applied after every round."""
    recipe = trained.training.model_copy(update={"rounds": rounds})
    for finished in fedavg(state, federation, recipe, trained.seed, trained.temperature, stream="after", locks=held):
        yield step_of(finished, "further training")


def _follow(
    world: World,
    stored: StoredAnswer,
    begun: BegunAnswer,
    steps: Callable[[Federation], Iterator[Step]],
    seed: int,
    observe: bool = True,
    known: Sequence[Params] = (),
    after: str = "",
    history: History | None = None,
) -> Iterator[tuple[Step, dict[str, float]]]:
    """Iterate a method's steps, journal, meter and measure them, and write `record.json` last.

    Rounds that the method keeps are stored in `history`. `after` is the hash of a model that is trained further.
    """
    marker, settings = stored.folder / "request.json", begun.model_dump(mode="json")
    if marker.is_file() and read_json(marker) != settings:
        shutil.rmtree(stored.folder)  # begun on another trained model: those answers cannot be used
    fresh = not stored.folder.exists()
    if not fresh:
        remove_leftovers(stored.folder)
    resumed = any((stored.folder / "journal").glob("*.update"))
    forget_peak_memory(world.server.device)
    training, journal = world.config.training, stored.folder / "journal"
    federation = Guarded(world.federation, training, journal, digest(settings, after), metered=True, known=known)
    sets = evaluation_sets(world, begun.request)
    rounds: list[RoundRecord] = []
    seconds: dict[str, float] = {}
    started = time.perf_counter()
    last: Step | None = None
    files: dict[str, str] = {}
    down = up = 0
    for step in _undone_if_refused(steps(federation), stored.folder if fresh else None):
        if last is None:
            write_json(marker, settings)
        seconds[step.phase] = seconds.get(step.phase, 0.0) + time.perf_counter() - started
        last = step = _with_left_out(step, federation.left_out())
        metrics = measure(world, step.state, sets, draws=1) if observe else {}
        rounds.append(RoundRecord.of(len(rounds), step.phase, step.loss, metrics, step.notes))
        if step.base is not None:
            step.base.save(stored.base_path)
            files[stored.base_path.name] = sha256(stored.base_path)
        if step.round is not None and history is not None:
            history.append(step.round, federation.cost.bytes_down - down, federation.cost.bytes_up - up)
        down, up = federation.cost.bytes_down, federation.cost.bytes_up
        yield step, metrics
        started = time.perf_counter()
    if last is None:
        raise UserError(f"{stored.folder}: the method yielded no state")
    files[stored.model_path.name] = last.state.save(stored.model_path)
    if last.bases is not None:
        save_bases(stored.bases_path, last.bases)
        files[stored.bases_path.name] = sha256(stored.bases_path)
    cost = {f"cost/{key}": value for key, value in asdict(federation.cost).items()}
    phases = {f"cost/seconds/{phase}": value for phase, value in seconds.items()}
    total = {"cost/seconds": sum(seconds.values()), "cost/peak_memory_bytes": float(peak_memory(world.server.device))}
    metrics = {**measure(world, last.state, sets), **cost, **phases, **total}
    record = AnswerRecord(**dict(begun), seed=seed, resumed=resumed, files=files, rounds=tuple(rounds), metrics=metrics)
    write_record(stored.record_path, record)
    shutil.rmtree(stored.folder / "journal", ignore_errors=True)


def _with_left_out(step: Step, left_out: dict[int, str]) -> Step:
    """The step with all clients that were left out in its notes."""
    rejected = left_out | step.notes.get("rejected", {})
    return replace(step, notes={**step.notes, "rejected": rejected}) if rejected else step


def _undone_if_refused(steps: Iterator[Step], folder: Path | None) -> Iterator[Step]:
    """The steps; if the first one is refused, the folder of the request is deleted again."""
    begun = False
    try:
        for step in steps:
            begun = True
            yield step
    except UserError:
        if folder is not None and not begun:
            shutil.rmtree(folder, ignore_errors=True)
            for parent in (folder.parent, folder.parent.parent):
                with suppress(OSError):  # other requests live there
                    parent.rmdir()
        raise
