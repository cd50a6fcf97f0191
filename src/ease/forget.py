"""Answering a request on a run: a method's rounds journaled, metered and measured, the result kept whole."""

import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ease.audit.evaluate import common_size, recalls
from ease.data.request import ClassRequest, ClientRequest, Request, SampleRequest, forget_mask
from ease.errors import UserError
from ease.federation.journal import Journal
from ease.federation.metered import Metered
from ease.methods.base import Step, Trained, Unlearner
from ease.params import Params
from ease.run import Run, World
from ease.storage import digest, read_json, write_json


@dataclass(frozen=True)
class Outcome:
    """One method's answer to one request, in its own folder. It is complete once `record.json` exists."""

    folder: Path

    @property
    def model_path(self) -> Path:
        return self.folder / "model.safetensors"

    @property
    def record_path(self) -> Path:
        return self.folder / "record.json"

    @property
    def done(self) -> bool:
        return self.record_path.is_file()

    def model(self) -> Params:
        return Params.load(self.model_path)

    def record(self) -> dict[str, Any]:
        if not self.done:
            raise UserError(f"{self.folder}: this request is not finished; run the same `ease forget` again to continue it")
        return read_json(self.record_path)


def request_id(request: Request) -> str:
    """A stable name: the same request always has the same one."""
    if isinstance(request, ClientRequest):
        return "client-" + "-".join(map(str, request.clients))
    if isinstance(request, ClassRequest):
        return "class-" + "-".join(map(str, request.classes))
    return "sample-" + digest(sorted(request.ids))[:10]


def check_request(world: World, request: Request) -> None:
    """Refuse a request that names nothing, something unknown, or everything."""
    clients = [shard.client for shard in world.shards]
    if isinstance(request, ClientRequest):
        unknown = sorted(set(request.clients) - set(clients))
        if unknown:
            raise UserError(f"--client {unknown[0]}: no such client; this run has clients {clients[0]} to {clients[-1]}")
    if isinstance(request, ClassRequest):
        unknown = sorted(set(request.classes) - set(range(len(world.centroids))))
        if unknown:
            raise UserError(f"--class {unknown[0]}: no such pseudo-class; this run has 0 to {len(world.centroids) - 1}")
    if isinstance(request, SampleRequest):
        known = {pair_id for shard in world.shards for pair_id in shard.train_ids}
        unknown = sorted(set(request.ids) - known)
        if unknown:
            raise UserError(f"--samples: {len(unknown)} of {len(request.ids)} ids are not training pairs of this run, e.g. {unknown[0]!r}")
    masks = [forget_mask(request, shard) for shard in world.shards]
    named, total = sum(int(mask.sum()) for mask in masks), sum(len(mask) for mask in masks)
    if named == 0:
        raise UserError("the request matches no training pair of this run: there is nothing to forget")
    if named == total:
        raise UserError("the request names all training data: nothing would be retained; delete the run instead")


def trained_of(run: Run) -> Trained:
    """The finished training of a run."""
    rounds, wanted = run.history.rounds(), run.config.training.rounds
    if rounds < wanted:
        raise UserError(f"{run.folder}: training stopped after round {rounds} of {wanted}; finish it with: ease train --out {run.folder}")
    return Trained(run.history, run.config.training, run.config.model.temperature, run.config.seed)


def evaluation_sets(world: World, request: Request) -> dict[str, np.ndarray]:
    """Positions of forget, retained and test pairs. For a class request, test pairs of that class are left out."""
    masks = {shard.client: forget_mask(request, shard) for shard in world.shards}
    test = world.pairs.indices("test")
    if isinstance(request, ClassRequest):
        test = test[~np.isin(world.classes_of(test), request.classes)]
    return {
        "forget": np.concatenate([shard.train[masks[shard.client]] for shard in world.shards]),
        "retain": np.concatenate([shard.train[~masks[shard.client]] for shard in world.shards]),
        "test": test,
    }


def measure(world: World, state: Params, sets: dict[str, np.ndarray], draws: int = 5) -> dict[str, float]:
    """Recall of forget, retained and test pairs on galleries of one size."""
    results = recalls(world.model, state, world.activations, sets, world.config.gallery, world.device, draws)
    metrics = {f"{name}/recall@{k}": result[f"recall@{k}"].mean for name, result in results.items() for k in (1, 5, 10)}
    return metrics | {"gallery": float(common_size(sets, world.config.gallery))}


def outcome_of(run: Run, request: Request, method: Unlearner) -> Outcome:
    """Where a method's answer to a request lives; other settings of the method get another folder."""
    settings = method.model_dump(mode="json")
    label = method.name if method == type(method)() else f"{method.name}-{digest(settings)[:8]}"
    return Outcome(run.folder / "requests" / request_id(request) / label)


def forget(
    run: Run, world: World, request: Request, method: Unlearner, observe: bool = True
) -> Iterator[tuple[Step, dict[str, float]]]:
    """Run a method to its end, yielding each step with its recalls; a killed run goes on where it was.

    The folder's `record.json` is written last: until then nothing counts as done.
    """
    check_request(world, request)
    trained = trained_of(run)
    outcome = outcome_of(run, request, method)
    if outcome.done:
        return
    write_json(outcome.folder / "request.json", {"request": request.model_dump(mode="json"), "method": method.model_dump(mode="json")})
    metered = Metered(Journal(world.federation, outcome.folder / "journal"))
    sets = evaluation_sets(world, request)
    rounds, seconds, step = [], {}, None
    steps = method.unlearn(trained, request, metered)
    while True:
        started = time.perf_counter()
        step = next(steps, None)
        if step is None:
            break
        seconds[step.phase] = seconds.get(step.phase, 0.0) + time.perf_counter() - started
        last = step
        metrics = measure(world, step.state, sets, draws=1) if observe else {}
        rounds.append({"round": len(rounds), "phase": step.phase, "loss": step.loss, "metrics": metrics, "notes": step.notes})
        if step.bases is not None:
            step.bases.save(outcome.folder / "bases.safetensors")
        yield step, metrics
    last.state.save(outcome.model_path)
    cost = {f"cost/{key}": value for key, value in asdict(metered.cost).items()}
    phases = {f"cost/seconds/{phase}": value for phase, value in seconds.items()}
    write_json(
        outcome.record_path,
        {
            "request": request.model_dump(mode="json"),
            "scenario": request.scope,
            "method": method.model_dump(mode="json"),
            "seed": run.config.seed,
            "rounds": rounds,
            "metrics": {**measure(world, last.state, sets), **cost, **phases, "cost/seconds": sum(seconds.values())},
        },
    )
    shutil.rmtree(outcome.folder / "journal", ignore_errors=True)
