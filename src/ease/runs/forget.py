"""Answering a request on a run: a method's rounds journaled, metered and measured, the result kept whole."""

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from ease.errors import UserError
from ease.federation.fedavg import average, participants
from ease.federation.journal import Journal
from ease.federation.metered import Metered
from ease.federation.protocol import Federation
from ease.methods.base import Step, Trained, Unlearner, retained_clients
from ease.params import Params
from ease.requests.request import Request
from ease.runs.answers import (
    StoredAnswer,
    answer_of,
    check_current,
    continuation,
    find_answer,
    trained_hash,
    trained_of,
)
from ease.runs.evaluation import evaluation_sets, measure
from ease.runs.memory import forget_peak_memory, peak_memory
from ease.runs.records import AnswerRecord, RoundRecord, write_record
from ease.runs.resolve import check_request
from ease.runs.run import Run
from ease.runs.world import World
from ease.storage import read_json, remove_leftovers, write_json
from ease.subspace import Basis, excise, load_bases, save_bases


def forget(
    run: Run, world: World, request: Request, method: Unlearner, observe: bool = True
) -> Iterator[tuple[Step, dict[str, float]]]:
    """Run a method to its end, yielding each step with its recalls; a killed run goes on where it was."""
    run.check_world(world)
    check_request(world, request)
    trained = trained_of(run)
    stored = answer_of(run, request, method)
    with run.locked():
        if stored.done:
            check_current(run, stored)
            shutil.rmtree(stored.folder / "journal", ignore_errors=True)  # of a process killed at its very end
        else:
            steps = partial(method.unlearn, trained, request)
            settings = {
                "request": request.model_dump(mode="json"),
                "method": method.model_dump(mode="json"),
                "trained_sha256": trained_hash(trained),
            }
            yield from _follow(world, stored, request, steps, settings, run.config.seed, observe)


def go_on(run: Run, world: World, after: str, rounds: int, locked: bool) -> Iterator[tuple[Step, dict[str, float]]]:
    """Train on with retained data after a request, with its directions locked or free, to see whether it comes back."""
    stored, request, method = find_answer(run, after)
    trained = trained_of(run)
    with run.locked():
        continued = continuation(stored, rounds, locked)
        if not continued.done:
            bases = load_bases(stored.bases_path) if locked and stored.bases_path.is_file() else {}
            held = Params.load(stored.held_path) if bases else trained.initial
            steps = partial(continue_training, trained, request, stored.model(), bases, held, rounds=rounds)
            settings = {
                "request": request.model_dump(mode="json"),
                "method": method.model_dump(mode="json"),
                "trained_sha256": trained_hash(trained),
                "locked": bool(bases),
            }
            yield from _follow(world, continued, request, steps, settings, run.config.seed, observe=True)


def continue_training(
    trained: Trained,
    request: Request,
    state: Params,
    bases: Mapping[str, Basis],
    held: Params,
    federation: Federation,
    rounds: int,
) -> Iterator[Step]:
    """Plain FedAvg on retained data; with bases, the server's Forget Lock after every round."""
    clients = retained_clients(request, federation)
    for number in range(1, rounds + 1):
        job = trained.training.job(number, trained.seed, trained.temperature, "after", request=request, data="retain")
        drawn = participants(clients, trained.training, trained.seed, number)
        finished = average(state, federation.run(state, job, drawn), trained.training, number)
        state, _ = excise(finished.state, held, dict(bases))
        yield Step(state, "further training", finished.loss)


def _follow(
    world: World,
    stored: StoredAnswer,
    request: Request,
    steps: Callable[[Federation], Iterator[Step]],
    settings: dict[str, Any],
    seed: int,
    observe: bool,
) -> Iterator[tuple[Step, dict[str, float]]]:
    """Iterate a method's steps: journal the clients' answers, meter, measure; `record.json` last makes it count."""
    begun = stored.folder / "request.json"
    if begun.is_file() and read_json(begun) != settings:
        shutil.rmtree(stored.folder)  # begun on another trained model: those answers are no use
    fresh = not stored.folder.exists()
    if not fresh:
        remove_leftovers(stored.folder)
    resumed = any((stored.folder / "journal").glob("*.update"))
    forget_peak_memory(world.device)
    metered = Metered(Journal(world.federation, stored.folder / "journal"))
    sets = evaluation_sets(world, request)
    rounds: list[RoundRecord] = []
    seconds: dict[str, float] = {}
    started = time.perf_counter()
    last: Step | None = None
    for step in _undone_if_refused(steps(metered), stored.folder if fresh else None):
        if last is None:
            write_json(begun, settings)
        seconds[step.phase] = seconds.get(step.phase, 0.0) + time.perf_counter() - started
        last = step
        metrics = measure(world, step.state, sets, draws=1) if observe else {}
        rounds.append(RoundRecord.of(len(rounds), step.phase, step.loss, metrics, step.notes))
        if step.bases is not None:
            step.state.save(stored.held_path)
            save_bases(stored.bases_path, step.bases)
        yield step, metrics
        started = time.perf_counter()
    if last is None:
        raise UserError(f"{stored.folder}: the method yielded no state")
    last.state.save(stored.model_path)
    cost = {f"cost/{key}": value for key, value in asdict(metered.cost).items()}
    phases = {f"cost/seconds/{phase}": value for phase, value in seconds.items()}
    total = {"cost/seconds": sum(seconds.values()), "cost/peak_memory_bytes": float(peak_memory(world.device))}
    metrics = {**measure(world, last.state, sets), **cost, **phases, **total}
    record = AnswerRecord(**settings, seed=seed, resumed=resumed, rounds=tuple(rounds), metrics=metrics)
    write_record(stored.record_path, record)
    shutil.rmtree(stored.folder / "journal", ignore_errors=True)


def _undone_if_refused(steps: Iterator[Step], folder: Path | None) -> Iterator[Step]:
    """The same steps; if the first is refused, the folder that the request began goes, and the run is as it was."""
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
