"""Answers a stream of mixed requests, each released before the next, and compares the end with one retraining.

python benchmarks/stream.py --requests 20 --seed 0 --out results/stream
python benchmarks/stream.py experiments/main-flickr8k.toml --requests 8 --seed 0 --out results/stream-flickr8k \\
    --set run.data.path=flickr8k/dataset_flickr8k.json

Kinds take turns: single pairs of a client, a client, single pairs of another client, a class. What each names is drawn
from what is left by then. Requests go through the ledger, as people would hand them in; with `--at-once 5` five are
handed in before the queue is worked, and those of one kind are answered together. A killed run goes on where it was.
"""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from ease.federation.history import History
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
    parser.add_argument("--at-once", type=int, default=1, help="requests that are handed in before the queue is worked")
    parser.add_argument("--share", type=float, default=0.02, help="of all pairs that a request for single pairs names")
    parser.add_argument("--method", default="ease")
    parser.add_argument("--method-set", nargs="*", default=[], help="settings of the method")
    parser.add_argument("--policy-set", nargs="*", default=[], help="settings of policy.toml")
    parser.add_argument("--set", nargs="*", default=[], dest="settings")
    args = parser.parse_args(words)
    torch.set_num_threads(1)
    config = load_experiment(args.experiment, args.settings).run.model_copy(update={"seed": args.seed})
    method = make_method(args.method, tuple(args.method_set)).model_dump(mode="json")
    results = stream(config, args.out, args.requests, args.at_once, args.share, method, args.policy_set)
    write_json(args.out / "stream.json", results, sealed=False)
    (args.out / "stream.md").write_text(page(results))
    (args.out / "stream.svg").write_bytes(encode(stream_figure(drawn_from(results)), "svg"))
    print(page(results))


def stream(
    config: RunConfig,
    out: Path,
    count: int,
    at_once: int,
    share: float,
    method: dict[str, Any],
    policy_settings: Sequence[str] = (),
) -> dict[str, Any]:
    """Train, answer one request after the other, retrain twice without all of them, and measure everything."""
    run = Run.create(out / "run", config)
    world = World.open(config, run.known())
    for record in run.train(world) if not run.head.releases else ():
        print(f"round {record['round']}", flush=True)
    run, ledger = Run.load(out / "run"), Ledger(out / "run")
    policy = load_policy(
        run.folder, ["hold.retain_points=100", *policy_settings]
    )  # falls are measured here, not judged
    asked = requests_in_turn(world, count, share, config.seed)
    for number in range(0, count, at_once):
        for place, request in enumerate(asked[number : number + at_once], start=number):
            entry, _ = ledger.add(Draft(request, method, asked_by="benchmark", id=f"{place:03d}"))
            if entry.state == "submitted":
                ledger.approve(entry.id, "benchmark")
        for finished in work(run, policy, "benchmark", together=at_once > 1, follow=lambda steps, *_: drain(steps)):
            print(f"requests {', '.join(finished.ids)}: {finished.state} {finished.why}", flush=True)
            if finished.state != "done":
                raise SystemExit(finished.why)
    answers = [StoredAnswer(run.folder / "requests" / release.answer) for release in run.head.releases]
    gone = run.head.gone
    end = World(world.server, world.evaluator).without(*gone)
    retrained = [retrain(run, end, order) for order in range(2)]
    sets, first = sets_of(world, asked), History(run.folder)
    rows, spent, whole = [], Spent(), Spent()
    for number, (request, stored) in enumerate(zip(gone, answers, strict=True)):
        told = stored.record().metrics
        closed = {each.id for each in ledger.entries() if each.outcome.get("release") == number + 1}
        left = without(world.evaluator.shards, gone[: number + 1])
        for _ in closed:  # each of them alone would have been a retraining
            whole += retraining_of(
                run, first, sum(len(shard.train) for shard in left), sum(bool(len(s.train)) for s in left)
            )
        spent += Spent(
            told["cost/pairs_passed"], told["cost/bytes_up"] + told["cost/bytes_down"], len(stored.record().rounds)
        )
        rows.append(
            {
                "kind": request.scope,
                "trained_again": bool(run.head.releases[number].rounds),
                "closed": sorted(int(each) for each in closed),
                "seconds": told["cost/seconds"],
                "share": spent.over(whole),
                "metrics": measure(world, stored.model(), sets),
            }
        )
    return {
        "config": config.model_dump(mode="json"),
        "requests": [{"kind": each.scope, "pairs": len(sets[f"forget/{n}"])} for n, each in enumerate(asked)],
        "trained": measure(world, first.state(first.rounds()), sets),
        "retrain": {**measure(world, retrained[0][0], sets), "seconds": retrained[0][1]},
        "again": measure(world, retrained[1][0], sets),
        "rows": rows,
        "sets": {name: len(positions) for name, positions in sets.items()},
    }


@dataclass(frozen=True)
class Spent:
    """Pairs through the model, bytes sent, synchronous rounds."""

    passed: float = 0.0
    bytes: float = 0.0
    rounds: float = 0.0

    def __add__(self, other: "Spent") -> "Spent":
        return Spent(self.passed + other.passed, self.bytes + other.bytes, self.rounds + other.rounds)

    def over(self, other: "Spent") -> dict[str, float]:
        return {name: value / asdict(other)[name] for name, value in asdict(self).items()}


def retraining_of(run: Run, first: History, pairs: int, clients: int) -> Spent:
    """What a retraining with so many pairs and clients costs: every pair in each epoch of each round."""
    training, rounds = run.config.training, range(1, first.rounds() + 1)
    records = [first.record(number) for number in rounds]
    sent = sum(record["bytes_up"] + record["bytes_down"] for record in records)
    there = sum(len(record["pairs"]) for record in records) / len(records)
    return Spent(pairs * len(rounds) * training.local_epochs, sent * min(1.0, clients / there), len(rounds))


def drain(steps: Any) -> None:
    for _ in steps:
        pass


def requests_in_turn(world: World, count: int, share: float, seed: int) -> list[Request]:
    """Requests one after the other, each drawn from what those before it leave."""
    asked: list[Request] = []
    for number in range(count):
        asked.append(request_in_turn(world, asked, number, share, seed))
    return asked


def request_in_turn(world: World, gone: Sequence[Request], number: int, share: float, seed: int) -> Request:
    """The next request, drawn from what is left; at least three clients and classes stay."""
    here = [shard for shard in without(world.evaluator.shards, gone) if len(shard.train)]
    rng = generator(seed, "stream", number)
    kind = TURNS[number % len(TURNS)]
    classes = sorted({int(label) for shard in here for label in shard.train_classes})
    if kind == "client" and len(here) > 3:
        return ClientRequest(clients=(int(rng.choice([shard.client for shard in here])),))
    if kind == "class" and len(classes) > 3:
        return ClassRequest(classes=(int(rng.choice(classes)),))
    ids = sorted(here[int(rng.integers(len(here)))].train_ids)
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


def retrain(run: Run, world: World, order: int) -> tuple[Params, float]:
    """One training without all that was forgotten, kept, and its seconds; another `order` has other random numbers."""
    path, told = (run.folder.parent / f"retrain-{order}.{ending}" for ending in ("safetensors", "json"))
    if not path.is_file():
        begun, trained = perf_counter(), trained_of(run)
        seeded = dataclasses.replace(trained, seed=trained.seed + 1000 * order)
        *_, last = make_method("retrain").unlearn(seeded, SampleRequest(ids=()), world.federation)
        last.state.save(path)
        write_json(told, {"seconds": perf_counter() - begun}, sealed=False)
    return Params.load(path), json.loads(told.read_text())["seconds"]


def recall(metrics: dict[str, float], name: str) -> float:
    return metrics[f"{name}/recall@1"]


def drawn_from(results: dict[str, Any]) -> StreamResults:
    rows, requests = results["rows"], results["requests"]
    names = [*(f"forget/{number}" for number in range(len(requests))), "retain", "test"]
    closed = {number: place for place, row in enumerate(rows) for number in row["closed"]}
    return StreamResults(
        kinds=[each["kind"] for each in requests],
        closed=[closed[number] for number in range(len(requests))],
        forget=[[recall(row["metrics"], f"forget/{number}") for number in range(len(requests))] for row in rows],
        retain=[recall(row["metrics"], "retain") for row in rows],
        test=[recall(row["metrics"], "test") for row in rows],
        shares={name: [row["share"][name] for row in rows] for name in ("passed", "bytes", "rounds")},
        retrain={name: recall(results["retrain"], name) for name in names},
    )


def page(results: dict[str, Any]) -> str:
    """What each request's pairs stand at: trained, when it was closed, at the end, and after retraining."""
    rows, last = results["rows"], results["rows"][-1]["metrics"]
    lines = [
        f"R@1 in percent, galleries of {last['gallery']:.0f} pairs. Cost until then, as a share of retraining after "
        "each request: pairs passed through the model / bytes / synchronous rounds.",
        "",
        "| request | pairs | trained | when closed | at the end | retrain, twice | retain | test | seconds | cost |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        for number in row["closed"]:
            name, asked = f"forget/{number}", results["requests"][number]
            told = [recall(each, name) for each in (results["trained"], row["metrics"], last)]
            twice = " / ".join(f"{recall(results[each], name):.1f}" for each in ("retrain", "again"))
            figures = " | ".join(f"{value:.1f}" for value in told)
            first = number == row["closed"][0]
            again = " (trained again)" if row["trained_again"] else ""
            beside = [f"{recall(row['metrics'], part):.1f}" for part in ("retain", "test")] if first else ["", ""]
            cost = " / ".join(f"{share:.0%}" for share in row["share"].values()) if first else ""
            seconds = f"{row['seconds']:.1f}" if first else ""
            lines.append(
                f"| {number + 1} {asked['kind']}{again} | {asked['pairs']} | {figures} | {twice} | "
                f"{' | '.join(beside)} | {seconds} | {cost} |"
            )
    names = [f"forget/{number}" for number in range(len(results["requests"]))]
    weights = [each["pairs"] for each in results["requests"]]
    for label, one in (("At the end", last), ("Another retraining", results["again"])):
        gaps = [recall(one, name) - recall(results["retrain"], name) for name in names]
        beside = {part: recall(one, part) - recall(results["retrain"], part) for part in ("retain", "test")}
        lines += [
            "",
            f"{label}: forget {np.average(gaps, weights=weights):+.1f} from retrain's (mean over pairs; mean distance "
            f"of a request {np.mean(np.abs(gaps)):.1f}, furthest {max(gaps, key=abs):+.1f}), retain "
            f"{beside['retain']:+.1f}, test {beside['test']:+.1f}.",
        ]
    return "\n".join([*lines, "", f"One retraining took {results['retrain']['seconds']:.1f} s.", ""])


if __name__ == "__main__":
    main()
