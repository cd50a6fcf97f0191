"""Answering a request on a run: a method's rounds journaled, metered and measured, the result kept whole."""

import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter
from torch import Tensor

from ease.audit.alignment import pair_similarity
from ease.audit.evaluate import common_size, embed_pairs, recalls
from ease.errors import UserError
from ease.federation.fedavg import average, participants
from ease.federation.journal import Journal
from ease.federation.metered import Metered
from ease.federation.protocol import Federation
from ease.methods import make_method
from ease.methods.base import Step, Trained, Unlearner, retained_clients
from ease.params import Params
from ease.requests.request import ClassRequest, ClientRequest, Request, SampleRequest, forget_mask
from ease.runs.run import Run, World
from ease.storage import digest, read_json, remove_leftovers, write_json
from ease.subspace import Basis, excise, load_bases, save_bases


@dataclass(frozen=True)
class StoredAnswer:
    """One method's answer to one request, in its own folder. It is complete once `record.json` exists."""

    folder: Path

    @property
    def model_path(self) -> Path:
        return self.folder / "model.safetensors"

    @property
    def record_path(self) -> Path:
        return self.folder / "record.json"

    @property
    def bases_path(self) -> Path:
        """Directions that later training must keep locked."""
        return self.folder / "bases.safetensors"

    @property
    def held_path(self) -> Path:
        """The state at which they are held."""
        return self.folder / "held.safetensors"

    @property
    def done(self) -> bool:
        return self.record_path.is_file()

    def model(self) -> Params:
        return Params.load(self.model_path)

    def record(self) -> dict[str, Any]:
        if not self.done:
            raise UserError(
                f"{self.folder}: this request is not finished; run the same `ease forget` again to continue it"
            )
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
            raise UserError(
                f"--client {unknown[0]}: no such client; this run has clients {clients[0]} to {clients[-1]}"
            )
    if isinstance(request, ClassRequest):
        unknown = sorted(set(request.classes) - set(range(len(world.centroids))))
        if unknown:
            raise UserError(f"--class {unknown[0]}: no such pseudo-class; this run has 0 to {len(world.centroids) - 1}")
    if isinstance(request, SampleRequest):
        known = {pair_id for shard in world.shards for pair_id in shard.train_ids}
        strange = sorted(set(request.ids) - known)
        if strange:
            raise UserError(
                f"--samples: {len(strange)} of {len(request.ids)} ids are no training pairs here, e.g. {strange[0]!r}"
            )
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
        raise UserError(
            f"{run.folder}: training stopped after round {rounds} of {wanted}; finish it first with `ease train`"
        )
    return Trained(run.history, run.config.training, run.config.model.temperature, run.config.seed)


def trained_hash(trained: Trained) -> str:
    """Names the trained state that an answer begins from, by the hash that its round recorded."""
    return trained.history.record(trained.training.rounds)["sha256"]["state.safetensors"]


def check_current(run: Run, stored: StoredAnswer) -> None:
    """Refuse an answer that was given before the run was trained further."""
    told = stored.record().get("trained_sha256")
    if told is not None and told != trained_hash(trained_of(run)):
        raise UserError(
            f"{stored.folder}: this answer began from a model that the run has been trained beyond; delete the folder "
            "and run `ease forget` again"
        )


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


def similarities(world: World, state: Params, positions: np.ndarray) -> Tensor:
    """Cosine of each pair under a state [n]."""
    return pair_similarity(*embed_pairs(world.model, state, world.activations, positions, world.device))


def answer_of(run: Run, request: Request, method: Unlearner) -> StoredAnswer:
    """Where a method's answer to a request lives; other settings of the method get another folder."""
    settings = method.model_dump(mode="json")
    label = method.name if method == type(method)() else f"{method.name}-{digest(settings)[:8]}"
    return StoredAnswer(run.folder / "requests" / request_id(request) / label)


def find_answer(run: Run, name: str) -> tuple[StoredAnswer, Request, Unlearner]:
    """The finished stored that `REQUEST` or `REQUEST/METHOD` names, e.g. `client-3` or `client-3/retrain`."""
    request_name, _, label = name.partition("/")
    stored = StoredAnswer(run.folder / "requests" / request_name / (label or "ease"))
    if not stored.done:
        known = sorted(
            str(p.parent.relative_to(run.folder / "requests")) for p in run.folder.glob("requests/*/*/record.json")
        )
        raise UserError(
            f"{name}: no finished request of that name in {run.folder}; finished: {', '.join(known) or 'none'}"
        )
    check_current(run, stored)
    record = stored.record()
    request = TypeAdapter(Request).validate_python(record["request"])
    return stored, request, make_method(record["method"]["method"], table=record["method"])


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


def continuation(stored: StoredAnswer, rounds: int, locked: bool) -> StoredAnswer:
    """Where further training after a request is kept."""
    return StoredAnswer(stored.folder / f"after-{rounds}-{'locked' if locked else 'free'}")


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
    resumed = any((stored.folder / "journal").glob("*.safetensors"))
    forget_peak_memory(world.device)
    metered = Metered(Journal(world.federation, stored.folder / "journal"))
    sets = evaluation_sets(world, request)
    rounds: list[dict[str, Any]] = []
    seconds: dict[str, float] = {}
    started = time.perf_counter()
    last: Step | None = None
    for step in _undone_if_refused(steps(metered), stored.folder if fresh else None):
        if last is None:
            write_json(begun, settings)
        seconds[step.phase] = seconds.get(step.phase, 0.0) + time.perf_counter() - started
        last = step
        metrics = measure(world, step.state, sets, draws=1) if observe else {}
        rounds.append(
            {"round": len(rounds), "phase": step.phase, "loss": step.loss, "metrics": metrics, "notes": step.notes}
        )
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
    write_json(
        stored.record_path,
        {
            **settings,
            "scenario": request.scope,
            "seed": seed,
            "resumed": resumed,
            "rounds": rounds,
            "metrics": metrics,
        },
    )
    shutil.rmtree(stored.folder / "journal", ignore_errors=True)


def forget_peak_memory(device: torch.device) -> None:
    """Start anew, so that the peak of earlier work in this process is not counted; Linux and CUDA only."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


def peak_memory(device: torch.device) -> int:
    """Most bytes this process has held since, on the GPU where it works there."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with suppress(OSError):
        fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(fields["VmHWM"].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


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
