"""Answers a stream of mixed requests, each released before the next, and compares the end with one retraining.

python benchmarks/stream.py --requests 20 --seed 0 --out results/stream
python benchmarks/stream.py experiments/main-flickr8k.toml --requests 8 --seed 0 --out results/stream-flickr8k \\
    --set run.data.path=flickr8k/dataset_flickr8k.json

Kinds take turns: single pairs, a client, single pairs, a class. What each names is drawn from what is left by then.
Requests go through the ledger, as people would hand them in; a killed run goes on where it was.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from ease.ledger.policy import load_policy
from ease.ledger.store import Draft, Ledger
from ease.ledger.work import work
from ease.methods import make_method
from ease.params import Params
from ease.requests.request import ClassRequest, ClientRequest, Request, SampleRequest, forget_mask, without
from ease.runs.answers import StoredAnswer, trained_of
from ease.runs.config import RunConfig
from ease.runs.evaluation import measure
from ease.runs.run import Run
from ease.runs.world import World
from ease.seeding import generator
from ease.show.figures import encode
from ease.show.stream import StreamResults, stream_figure
from ease.storage import write_json
from ease.studies.experiment import load_experiment

ROOT = Path(__file__).parents[1]
TURNS = ("sample", "client", "sample", "class")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", nargs="?", type=Path, default=ROOT / "experiments" / "stream.toml")
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--share", type=float, default=0.02, help="of all pairs that a request for single pairs names")
    parser.add_argument("--method", default="ease")
    parser.add_argument("--method-set", nargs="*", default=[], help="settings of the method")
    parser.add_argument("--set", nargs="*", default=[], dest="settings")
    args = parser.parse_args(words)
    torch.set_num_threads(1)
    config = load_experiment(args.experiment, args.settings).run.model_copy(update={"seed": args.seed})
    method = make_method(args.method, tuple(args.method_set)).model_dump(mode="json")
    results = stream(config, args.out, args.requests, args.share, method)
    write_json(args.out / "stream.json", results, sealed=False)
    (args.out / "stream.md").write_text(page(results))
    (args.out / "stream.svg").write_bytes(encode(stream_figure(drawn_from(results)), "svg"))
    print(page(results))


def stream(config: RunConfig, out: Path, count: int, share: float, method: dict[str, Any]) -> dict[str, Any]:
    """Train, answer one request after the other, retrain once without all of them, and measure everything."""
    run = Run.create(out / "run", config)
    world = World.open(config, run.known())
    for record in run.train(world) if not run.head.releases else ():
        print(f"round {record['round']}", flush=True)
    run, ledger = Run.load(out / "run"), Ledger(out / "run")
    policy = load_policy(run.folder, ["hold.retain_points=100"])  # falls are measured here, not judged
    for number in range(len(run.head.releases), count):
        asked = request_in_turn(world, run.head.gone, number, share, config.seed)
        entry, _ = ledger.add(Draft(asked, method, asked_by="benchmark", id=f"{number:03d}"))
        if entry.state == "submitted":
            ledger.approve(entry.id, "benchmark")
        for finished in work(run, policy, "benchmark", together=False, follow=lambda steps, *_: drain(steps)):
            print(f"request {number} ({asked.scope}): {finished.state} {finished.why}", flush=True)
            if finished.state != "done":
                raise SystemExit(finished.why)
    gone = run.head.gone[:count]
    answers = [StoredAnswer(run.folder / "requests" / release.answer) for release in run.head.releases[:count]]
    end = World(world.server, world.evaluator).without(*gone)
    retrained, retraining = retrain(run, end)
    sets = sets_of(world, gone)
    trained = measure(world, run.history.state(run.history.rounds()), sets)
    rows, spent, whole = [], 0.0, 0.0
    for number, (request, stored) in enumerate(zip(gone, answers, strict=True)):
        told = stored.record().metrics
        spent += told["cost/pairs_passed"]
        # Retraining passes every pair that is left in each epoch of each round.
        left = sum(len(shard.train) for shard in without(world.evaluator.shards, gone[: number + 1]))
        whole += left * config.training.rounds * config.training.local_epochs
        rows.append(
            {
                "kind": request.scope,
                "pairs": len(sets[f"forget/{number}"]),
                "seconds": told["cost/seconds"],
                "passed": told["cost/pairs_passed"],
                "share": spent / whole,
                "metrics": measure(world, stored.model(), sets),
            }
        )
    return {
        "config": config.model_dump(mode="json"),
        "trained": trained,
        "retrain": {**measure(world, retrained, sets), "seconds": retraining},
        "rows": rows,
        "sets": {name: len(positions) for name, positions in sets.items()},
    }


def drain(steps: Any) -> None:
    for _ in steps:
        pass


def request_in_turn(world: World, gone: Sequence[Request], number: int, share: float, seed: int) -> Request:
    """The next request, drawn from what is left; at least three clients and classes stay."""
    here = without(world.evaluator.shards, gone)
    rng = generator(seed, "stream", number)
    kind = TURNS[number % len(TURNS)]
    clients = [shard.client for shard in here if len(shard.train)]
    classes = sorted({int(label) for shard in here for label in shard.train_classes})
    if kind == "client" and len(clients) > 3:
        return ClientRequest(clients=(int(rng.choice(clients)),))
    if kind == "class" and len(classes) > 3:
        return ClassRequest(classes=(int(rng.choice(classes)),))
    ids = sorted(pair_id for shard in here for pair_id in shard.train_ids)
    total = sum(len(shard.train) for shard in world.evaluator.shards)
    chosen = rng.choice(ids, min(max(1, round(share * total)), len(ids) // 2), replace=False)
    return SampleRequest(ids=tuple(sorted(map(str, chosen))))


def sets_of(world: World, gone: Sequence[Request]) -> dict[str, np.ndarray]:
    """Pairs that each request took, those that are left at the end, and test pairs of classes that are left."""
    sets, test = {}, world.evaluator.test
    for number, request in enumerate(gone):
        shards = without(world.evaluator.shards, gone[:number])
        sets[f"forget/{number}"] = np.concatenate([shard.train[forget_mask(request, shard)] for shard in shards])
        if isinstance(request, ClassRequest):
            test = test[~np.isin(world.evaluator.classes_of(test), request.classes)]
    left = without(world.evaluator.shards, gone)
    return {**sets, "retain": np.concatenate([shard.train for shard in left]), "test": test}


def retrain(run: Run, world: World) -> tuple[Params, float]:
    """One training without all that was forgotten, kept, and its seconds."""
    path = run.folder.parent / "retrain.safetensors"
    told = run.folder.parent / "retrain.json"
    if not path.is_file():
        begun = perf_counter()
        steps = make_method("retrain").unlearn(trained_of(run), SampleRequest(ids=()), world.federation)
        *_, last = steps
        last.state.save(path)
        write_json(told, {"seconds": perf_counter() - begun}, sealed=False)
    return Params.load(path), json.loads(told.read_text())["seconds"]


def recall(metrics: dict[str, float], name: str) -> float:
    return metrics[f"{name}/recall@1"]


def drawn_from(results: dict[str, Any]) -> StreamResults:
    rows = results["rows"]
    count = range(len(rows))
    names = [*(f"forget/{number}" for number in count), "retain", "test"]
    return StreamResults(
        kinds=[row["kind"] for row in rows],
        forget=[[recall(rows[i]["metrics"], f"forget/{j}") for j in range(i + 1)] for i in count],
        before=[recall(results["trained"], f"forget/{number}") for number in count],
        retain=[recall(row["metrics"], "retain") for row in rows],
        test=[recall(row["metrics"], "test") for row in rows],
        shares=[row["share"] for row in rows],
        retrain={name: recall(results["retrain"], name) for name in names},
    )


def page(results: dict[str, Any]) -> str:
    """What each request's pairs stand at: trained, when it was closed, at the end, and after retraining."""
    rows, last = results["rows"], results["rows"][-1]["metrics"]
    lines = [
        f"R@1 in percent, galleries of {last['gallery']:.0f} pairs. Cost: pairs passed through the model so far, as a "
        "share of retraining after each request.",
        "",
        "| request | pairs | trained | when closed | at the end | retrain | retain | test | seconds | cost |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for number, row in enumerate(rows):
        name = f"forget/{number}"
        told = [recall(each, name) for each in (results["trained"], row["metrics"], last, results["retrain"])] + [
            recall(row["metrics"], part) for part in ("retain", "test")
        ]
        figures = " | ".join(f"{value:.1f}" for value in told)
        lines.append(
            f"| {number + 1} {row['kind']} | {row['pairs']} | {figures} | {row['seconds']:.1f} | {row['share']:.0%} |"
        )
    gaps = [recall(last, f"forget/{n}") - recall(results["retrain"], f"forget/{n}") for n in range(len(rows))]
    weights = [row["pairs"] for row in rows]
    beside = {part: recall(last, part) - recall(results["retrain"], part) for part in ("retain", "test")}
    lines += [
        "",
        f"At the end: forget {np.average(gaps, weights=weights):+.1f} from retrain's (mean over pairs; furthest "
        f"{max(gaps, key=abs):+.1f}), retain {beside['retain']:+.1f}, test {beside['test']:+.1f}; one retraining took "
        f"{results['retrain']['seconds']:.1f} s.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
