"""A closed-form head beside models trained by FedAvg: recall, cost, memory, size, and whether lifted features help.

python benchmarks/exact.py compare [CONFIG] [--set KEY=VALUE ...]   recall and cost of both, before and after requests
python benchmarks/exact.py scale                                    memory for wide features and for many clients
python benchmarks/exact.py lift CONFIG [--set KEY=VALUE ...]        random features, judged on held-out training pairs

Each prints a table. Seconds are of processor time, so that other work on the machine counts little.
"""

import argparse
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ease.commands.compare import closed_form, model_words, traffic, trained_by_fedavg
from ease.federation.fedavg import TrainingConfig
from ease.federation.history import History
from ease.federation.middleware import Guarded
from ease.federation.protocol import Capabilities, LocalJob, Update
from ease.measures.retrieval import recall
from ease.methods import make_method
from ease.methods.base import Trained
from ease.methods.exact import Exact
from ease.model.closed_form import GRID, Ridge, Sums, on_grid, solve
from ease.params import Block, Params
from ease.requests.request import SampleRequest
from ease.runs.answers import answer_of, default_method, open_world, trained_of
from ease.runs.config import RunConfig, load_config
from ease.runs.evaluation import evaluation_sets, measure
from ease.runs.forget import forget
from ease.runs.run import Run
from ease.storage import sha256
from ease.studies.scenarios import Scenario, scenario_config, scenario_request
from ease.trainers import trainer_of
from ease.trainers.sums import FEATURES, RANKS, SUMS, checksum, sum_and_solve, wrapped

SCENARIOS: tuple[Scenario, ...] = ("client", "class", "sample")
SETS = ("forget", "retain", "test")


# --- recall and cost ---


def compare(config: RunConfig, folder: Path) -> Iterator[str]:
    """A table row for each model and request, as soon as it is known."""
    yield "| request | model | R@1: forget / retained / test | by | after | as retrained | s | MB down / up |"
    yield "|---|---|---|---|---|---|---|---|"
    trained: dict[str, Run] = {}
    for scenario in SCENARIOS:
        for make in (closed_form, trained_by_fedavg):
            made = make(scenario_config(config, scenario))
            name, words = f"{trainer_of(made.model)}-{made.partition.scheme}", model_words(made)
            if name not in trained:
                run = trained[name] = Run.create(folder / name, made)
                world = open_world(run)
                began = time.process_time()
                list(run.train(world))
                cost = f"{time.process_time() - began:.1f} | {_bytes(traffic(run))}"
                yield f"| {made.partition.scheme} training | {words} | | | | | {cost} |"
            yield from answers(trained[name], scenario, words)


def answers(run: Run, scenario: Scenario, words: str) -> Iterator[str]:
    world = open_world(run)
    request = scenario_request(world, scenario, run.config.seed)
    before = measure(world, trained_of(run).final, evaluation_sets(world, request))
    methods = (make_method("retrain"), default_method(run))
    for method in methods:
        began = time.process_time()
        list(forget(run, world, request, method, observe=False))
        seconds = time.process_time() - began
        stored, retrained = (answer_of(run, request, each) for each in (method, methods[0]))
        same = "yes" if sha256(stored.model_path) == sha256(retrained.model_path) else "no"
        found = stored.record().metrics
        cells = [scenario, words, _recalls(before), f"`{method.name}`", _recalls(found)]
        cells += ["" if method is methods[0] else same, f"{seconds:.1f}", _bytes(found)]
        yield f"| {' | '.join(cells)} |"


def _recalls(metrics: Mapping[str, float]) -> str:
    return " / ".join(f"{metrics[f'{part}/recall@1']:.1f}" for part in SETS)


def _bytes(metrics: Mapping[str, float]) -> str:
    return " / ".join(f"{metrics[f'cost/bytes_{way}'] / 1e6:.1f}" for way in ("down", "up"))


# --- memory and size ---


def layout(image: int, text: int, rank: int) -> Params:
    """A state of maps, in the layout of a model."""
    shapes = {"image": image, "text": text}
    tensors = {
        f"{side}.projector.0.{part}": torch.zeros(shape)
        for side, width in shapes.items()
        for part, shape in (("bias", (rank,)), ("weight", (rank, width)))
    }
    names = {side: tuple(name for name in tensors if name.startswith(side)) for side in shapes}
    return Params(tensors, tuple(Block(f"{s}.projector.0", s, "closed_form", names[s]) for s in ("image", "text")))


class Simulated:
    """Clients whose features are drawn from their number when they are asked, and never kept."""

    capabilities = Capabilities()

    def __init__(self, clients: int, pairs: int, image: int, text: int, forgotten: int = 1):
        self.clients = range(clients)
        self.pairs, self.image, self.text, self.forgotten = pairs, image, text, forgotten
        self.members = Ids(clients, pairs)

    def run(self, params: Params, job: LocalJob, clients: Sequence[int]) -> Iterator[Update]:
        for client in clients:
            values = {RANKS: torch.tensor(0)} if job.objective == RANKS else self.sums(job, client)
            yield Update(client, self.pairs, None, values)

    def sums(self, job: LocalJob, client: int) -> dict[str, Tensor]:
        cut = int(job.request is not None and client < self.forgotten)
        rows = {"all": slice(None), "forget": slice(0, cut), "retain": slice(cut, None)}[job.data]
        rest = slice(cut, None) if job.data == "forget" else slice(0)
        rng = torch.Generator().manual_seed(client)
        meaning = torch.randn(self.pairs, 8, generator=rng)
        image = meaning @ MIXING[:, : self.image] + 0.5 * torch.randn(self.pairs, self.image, generator=rng)
        words = meaning[:, None] + 0.5 * torch.randn(self.pairs, 5, 8, generator=rng)
        text = words @ MIXING[:, : self.text] + 0.5 * torch.randn(self.pairs, 5, self.text, generator=rng)
        image, text = on_grid(image), on_grid(text)
        checksums = [wrapped(checksum(image[part], text[part], b"")) for part in (rows, rest)]
        return {SUMS: Sums.of(image[rows], text[rows]).packed, FEATURES: torch.tensor(checksums)}


MIXING = torch.randn(8, 2048, generator=torch.Generator().manual_seed(0))


class Ids(Mapping[int, Sequence[str]]):
    """Who holds which ids, without a list of a million of them."""

    def __init__(self, clients: int, pairs: int):
        self.count, self.pairs = clients, pairs

    def __getitem__(self, client: int) -> Sequence[str]:
        return [f"{client}-{number}" for number in range(self.pairs)]

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))

    def __len__(self) -> int:
        return self.count


def peak() -> float:
    """Largest memory of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def simulate(clients: int, pairs: int, image: int, text: int) -> dict[str, float]:
    """Train and forget one pair of client 0; the answer must be what retraining gives."""
    torch.set_num_threads(1)
    config, start = TrainingConfig(rounds=1, history="client"), layout(image, text, 256)
    federation = Guarded(Simulated(clients, pairs, image, text), config)
    base = peak()
    request = SampleRequest(ids=("0-0",))
    with tempfile.TemporaryDirectory() as folder:
        history = History(Path(folder), updates=False)
        start.save(history.initial_path)
        seconds: dict[str, float] = {}
        began = time.process_time()
        round_ = sum_and_solve(start, federation, config, 0, 0.07, range(clients))
        history.append(round_)
        seconds["train"], began = time.process_time() - began, time.process_time()
        step = next(iter(Exact().unlearn(Trained(history, config, 0.07, 0), request, federation)))
        seconds["forget"] = time.process_time() - began
        top = peak()
        again = sum_and_solve(start, federation, config, 0, 0.07, range(clients), request, history)
    assert step.round is not None and step.round.sums == again.sums and step.state == again.state
    return {"base": base, "peak": top, **seconds}


def scale() -> Iterator[str]:
    yield "| features | clients | pairs | memory before / at most, MB | train, s | forget one pair, s |"
    yield "|---|---|---|---|---|---|"
    sizes = [(96, 96, 100), (96, 96, 1000), (96, 96, 10_000), (768, 768, 10), (1280, 384, 10), (1280, 1280, 10)]
    for image, text, clients in sizes:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found = pool.apply(simulate, (clients, 100, image, text))
        yield (
            f"| {image} and {text} | {clients:,} | {clients * 100:,} | {found['base']:.0f} / {found['peak']:.0f} "
            f"| {found['train']:.1f} | {found['forget']:.1f} |"
        )


# --- lifted features ---


def lift(config: RunConfig, width: int, seeds: Sequence[int]) -> Iterator[str]:
    """Held-out recall of clients' own pairs with and without random features; test pairs are not looked at."""
    made = closed_form(config)
    with tempfile.TemporaryDirectory() as folder:
        world = open_world(Run.create(Path(folder) / "run", made))
    seen = world.evaluator.activations
    train = np.concatenate([shard.train for shard in world.shards])
    held_out = np.concatenate([shard.validation for shard in world.shards])
    yield f"{len(train)} training pairs, {len(held_out)} held-out pairs of the clients, galleries of all of them."
    yield "\n| features | image, text strength | R@1 / 5 / 10 | seconds of the solve |\n|---|---|---|---|"
    for name, build in {"as they are": None, "ReLU": relu, "Fourier": fourier}.items():
        for seed in seeds if build else (0,):
            maps = [
                build(side.shape[-1], width, seed + 100 * number) if build else (lambda x: x)
                for number, side in enumerate((seen.pooled_image, seen.pooled_text))
            ]
            total, image, text = lifted(seen, train, held_out, maps)
            best: tuple[float, str] = (-1.0, "")
            for strengths in ((0.3, 0.1), (0.3, 0.3), (1.0, 0.3), (3.0, 1.0)):
                found, seconds = solved_recall(total, image, text, Ridge(image=strengths[0], text=strengths[1]))
                recalls = " / ".join(f"{found[k]:.1f}" for k in (1, 5, 10))
                line = f"| {name}, seed {seed} | {strengths[0]:g}, {strengths[1]:g} | {recalls} | {seconds:.1f} |"
                best = max(best, (sum(found.values()), line))
            yield best[1]


def relu(inputs: int, width: int, seed: int) -> Callable[[Tensor], Tensor]:
    weight, bias = _drawn(inputs, width, seed)
    return lambda x: torch.cat([x, F.layer_norm((x @ weight + bias).relu(), (width,))], dim=-1)


def fourier(inputs: int, width: int, seed: int) -> Callable[[Tensor], Tensor]:
    weight, bias = _drawn(inputs, width, seed)
    return lambda x: torch.cat([x, F.layer_norm((x @ weight + 3.2 * bias).cos(), (width,))], dim=-1)


def _drawn(inputs: int, width: int, seed: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    weight = torch.randn(inputs, width, generator=rng) / inputs**0.5
    return weight, torch.randn(width, generator=rng)


def lifted(
    seen: Any, train: np.ndarray, held_out: np.ndarray, maps: Sequence[Callable[[Tensor], Tensor]]
) -> tuple[Sums, Tensor, Tensor]:
    """Sums over training pairs, and the features of held-out pairs."""

    def side(number: int, rows: np.ndarray) -> Tensor:
        pooled = torch.from_numpy(np.array((seen.pooled_image, seen.pooled_text)[number][rows]))
        return maps[number](F.layer_norm(pooled, pooled.shape[-1:]))

    total: Sums | None = None
    for start in range(0, len(train), 512):
        rows = train[start : start + 512]
        part = Sums.of((side(0, rows).double() * GRID).round(), (side(1, rows).double() * GRID).round())
        total = part if total is None else total + part
    assert total is not None
    return total, side(0, held_out), side(1, held_out)


def solved_recall(total: Sums, image: Tensor, text: Tensor, ridge: Ridge) -> tuple[dict[int, float], float]:
    """R@k of held-out pairs among themselves, mean of both directions, and the seconds of the solve."""
    state = layout(image.shape[-1], text.shape[-1], 256)
    began = time.process_time()
    solved = solve(total, ridge, state)
    seconds = time.process_time() - began
    picture, words = (
        F.normalize(each @ solved[f"{name}.projector.0.weight"].T + solved[f"{name}.projector.0.bias"], dim=-1)
        for name, each in (("image", image), ("text", text))
    )
    return dict(recall(picture, words).mean), seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("compare", "scale", "lift"))
    parser.add_argument("config", nargs="?", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--width", type=int, default=512, help="Random features a side.")
    given = parser.parse_args()
    if given.what == "scale":
        rows = scale()
    elif given.what == "lift":
        rows = lift(load_config(given.config, tuple(given.set)), given.width, (0, 1))
    else:
        config = load_config(given.config, ("model.lora=off", *given.set))
        rows = compare(config, Path(tempfile.mkdtemp(prefix="ease-exact-")))
    for row in rows:
        print(row, flush=True)


if __name__ == "__main__":
    main()
