"""Forgetting one client: public recipes in PyTorch alone beside ours, on one stored training, in turns.

make bench-peers        or: python benchmarks/unlearning.py --peers .venv-peers/bin/python [--write]

Generated scenes with projectors alone, ten clients. Public recipes get the stored training in memory and the batches
that ours draw; ours read the history from disk, check every answer and average in double precision. Retraining is the
same work for both and must end in the same weights. `--write` writes the section `unlearning` of docs/benchmarks.md.
"""

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from marked import write_section
from peers import HERE, Contender, distance

from ease.federation.middleware import Guarded
from ease.methods import make_method
from ease.methods.base import Trained
from ease.params import Params
from ease.requests.request import ClientRequest
from ease.runs.answers import trained_of
from ease.runs.config import load_config
from ease.runs.evaluation import evaluation_sets, measure
from ease.runs.run import Run
from ease.runs.world import World
from ease.seeding import generator

TOLERANCE = 1e-3
"""Largest distance of two retrainings, as a share of the way: what rounding grows to in so many rounds."""
OURS = ("retrain", "fed_eraser", "fed_recover", "ease")
PUBLIC = ("retrain", "fed_eraser", "fed_recover")
TITLES = {"retrain": "retraining", "fed_eraser": "FedEraser", "fed_recover": "FedRecover", "ease": "EASE"}


def write_work(folder: Path, world: World, trained: Trained, leaving: int) -> None:
    """The federation and its stored training as arrays, with the batches of every stream that a recipe uses."""
    training, activations = trained.training, world.evaluator.activations
    captions, arrays = activations.pooled_text.shape[1], {}
    start = trained.initial
    plan: dict[str, list[int]] = {}
    calibration = math.ceil(make_method("fed_eraser").calibration_ratio * training.local_epochs)
    streams = {"train": training.local_epochs, "retrain-0": training.local_epochs, "fed_eraser": calibration}
    for stream, epochs in streams.items():
        for number in range(1, training.rounds + 1):
            job = training.job(number, trained.seed, trained.temperature, stream)
            for place, shard in enumerate(world.shards):
                rng, rows, lines, sizes = generator(trained.seed, stream, number, shard.client), [], [], []
                for _ in range(epochs):
                    order = rng.permutation(np.arange(len(shard.train)))
                    for batch in np.array_split(order, job.batch_count(len(order))):
                        rows.append(shard.train[batch])
                        lines.append(rows[-1] * captions + rng.integers(captions, size=len(batch)))
                        sizes.append(len(batch))
                key = f"{stream}/{number}/{place}"
                arrays[f"{key}/rows"], arrays[f"{key}/lines"] = np.concatenate(rows), np.concatenate(lines)
                plan[key] = np.cumsum(sizes)[:-1].tolist()
    about = {
        "names": list(start.tensors),
        "plan": plan,
        "pairs": [len(shard.train) for shard in world.shards],
        "rounds": training.rounds,
        "epochs": training.local_epochs,
        "rate": training.learning_rate,
        "temperature": trained.temperature,
    }
    arrays |= {f"start/{name}": tensor.numpy() for name, tensor in start.tensors.items()}
    image, text = activations.pooled_image, activations.pooled_text.reshape(-1, activations.pooled_text.shape[-1])
    np.savez(folder / "work.npz", image=image, text=text, about=np.array(json.dumps(about)), **arrays)
    history, rounds = trained.history, range(1, training.rounds + 1)
    places = {shard.client: place for place, shard in enumerate(world.shards)}
    columns = [(number, client) for number in rounds for client in history.clients(number)]
    np.savez(
        folder / "past.npz",
        leaving=np.array(places[leaving]),
        states=np.stack([_flat(history.state(number)) for number in (0, *rounds)]),
        columns=np.array([(number, places[client]) for number, client in columns]),
        **{f"{number}/{places[client]}": _flat(history.update(number, client).change) for number, client in columns},
    )


def _flat(state: Params) -> np.ndarray:
    return np.concatenate([tensor.flatten().numpy() for tensor in state.tensors.values()])


def compare(peers: str, threads: int, repeats: int, rounds: int) -> dict[str, Any]:
    """Seconds of everyone in turn; recalls of what each ends in; and whether retraining is the same work."""
    torch.set_num_threads(threads)
    settings = ('model.lora="off"', "model.hidden=128", f"training.rounds={rounds}", 'device="cpu"')
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="ease-unlearning-") as name:
        folder, config = Path(name), load_config(None, settings)
        world = World.open(config)
        run = Run.create(folder / "run", config)
        for _ in run.train(world):
            pass
        trained, leaving = trained_of(run), world.shards[3].client
        request = ClientRequest(clients=(leaving,))
        write_work(folder, world, trained, leaving)
        pythons = {"peers": peers, "own": sys.executable}
        contenders = {
            f"public_{recipe}": Contender(
                f"public_{recipe}", pythons, folder, threads, ("peers", ("public_recipes.py", recipe))
            )
            for recipe in PUBLIC
        }
        sound = Guarded(world.federation, config.training)
        ends: dict[str, Params] = {}

        def ours(method: str) -> float:
            began = time.perf_counter()
            for step in make_method(method).unlearn(trained_of(run), request, sound):
                ends[f"ours_{method}"] = step.state
            return time.perf_counter() - began

        try:
            for repeat in range(repeats + 1):
                for key, each in contenders.items():
                    seconds = each.go()["whole"]
                    if repeat:  # the first time warms up
                        found.setdefault(key, {"seconds": []})["seconds"].append(seconds)
                for method in OURS:
                    seconds = ours(method)
                    if repeat:
                        found.setdefault(f"ours_{method}", {"seconds": []})["seconds"].append(seconds)
            for key, each in contenders.items():
                weights = {n: torch.from_numpy(value) for n, value in each.weights().items()}
                ends[key] = trained.start.replace(weights)
        finally:
            for each in contenders.values():
                each.close()
        sets = evaluation_sets(world, request)
        for key, state in ends.items():
            found[key]["recall"] = {n: v for n, v in measure(world, state, sets).items() if n.endswith("recall@1")}
        arrays = {key: {n: t.numpy() for n, t in state.tensors.items()} for key, state in ends.items()}
        way = distance(arrays["ours_retrain"], {n: t.numpy() for n, t in trained.initial.tensors.items()})
        found["apart"] = distance(arrays["public_retrain"], arrays["ours_retrain"]) / way
    return found


def section(found: dict[str, Any], threads: int, rounds: int) -> str:
    """The part of docs/benchmarks.md."""
    base = statistics.median(found["public_retrain"]["seconds"])
    reference = found["ours_retrain"]["recall"]
    lines = [
        f"Generated scenes, only projectors, 10 clients, {rounds} rounds, client 3 leaves; {threads} threads, "
        f"medians of {len(found['ours_ease']['seconds'])} in turns. Public recipes have the stored training in memory; "
        "ours read it from disk, check every answer and average in double precision. Retraining is the same work for "
        f"both: the weights lie {found['apart']:.0e} of the way apart. Gaps: R@1 in points to that retraining. "
        "`python benchmarks/unlearning.py --write`.",
        "",
        "| | s, PyTorch alone | s, ours | of retraining alone | forget | retain | test |",
        "|---|---|---|---|---|---|---|",
    ]
    for method, title in TITLES.items():
        public, own = found.get(f"public_{method}"), found[f"ours_{method}"]
        seconds = [statistics.median(each["seconds"]) if each else None for each in (public, own)]
        shares = " / ".join(f"{100 * each / base:.0f} %" for each in seconds if each is not None)
        reported = [f"{each:.2f}" if each is not None else "" for each in seconds]
        gaps = []
        for kind in ("forget", "retain", "test"):
            both = [
                each["recall"][f"{kind}/recall@1"] - reference[f"{kind}/recall@1"] for each in (public, own) if each
            ]
            gaps.append(" / ".join(f"{gap:+.1f}" for gap in both))
        lines.append("| " + " | ".join([title, *reported, shares, *gaps]) + " |")
    lines += ["", "If a cell has two figures, the first belongs to the public recipe and the second to ours."]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default=str(HERE.parent / ".venv-peers/bin/python"), help="python of the peers")
    parser.add_argument("--threads", type=int, default=int(os.environ.get("OMP_NUM_THREADS", 0)) or os.cpu_count() or 1)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--write", action="store_true", help="write the table into docs/benchmarks.md")
    options = parser.parse_args()
    found = compare(options.peers, options.threads, options.repeats, options.rounds)
    if found["apart"] > TOLERANCE:
        raise SystemExit(f"retraining: the weights lie {found['apart']:.1e} of the way apart: not the same work")
    reported = section(found, options.threads, options.rounds)
    print(reported)
    if options.write:
        write_section(HERE.parent / "docs/benchmarks.md", "unlearning", reported)


if __name__ == "__main__":
    main()
