"""Answers a stream of mixed requests, each released before the next, and compares the end with retrainings.

python benchmarks/stream.py --requests 20 --seed 0 --out results/stream
python benchmarks/stream.py experiments/stream-flickr8k.toml --requests 8 --seed 0 --out results/stream-flickr8k \\
    --set run.data.path=flickr8k/dataset_flickr8k.json
python benchmarks/stream.py --read results/stream*/stream.json    # one line for each

Kinds take turns: single pairs of a client, a client, single pairs of another client, a class. What each names is drawn
from what is left by then. Requests go through the ledger, as people would hand them in; with `--at-once 5` five are
handed in before the queue is worked, and those of one kind are answered together. A killed run goes on where it was.
"""

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure

from ease.federation.history import History
from ease.methods import make_method
from ease.operations.ledger.policy import load_policy
from ease.operations.ledger.records import Draft
from ease.operations.ledger.store import Ledger
from ease.operations.ledger.work import work
from ease.params import Params
from ease.requests.request import SampleRequest, without
from ease.runs.answers import StoredAnswer, trained_of
from ease.runs.config import RunConfig
from ease.runs.evaluation import measure
from ease.runs.run import Run
from ease.runs.world import World
from ease.show.figures import COLOURS, FIXED, PANEL_INCHES, RECALL, STYLE, encode
from ease.storage import write_json
from ease.studies.experiment import load_experiment
from ease.studies.streams import requests_in_turn, sets_of

ROOT = Path(__file__).parents[1]


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", nargs="?", type=Path, default=ROOT / "experiments" / "stream.toml")
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--read", type=Path, nargs="*", help="only show finished ones, one line each")
    parser.add_argument("--retrains", type=int, default=2, help="retrainings without all that is gone, in other orders")
    parser.add_argument("--at-once", type=int, default=1, help="requests that are handed in before the queue is worked")
    parser.add_argument("--share", type=float, default=0.01, help="of all pairs that a request for single pairs names")
    parser.add_argument("--method", default="ease")
    parser.add_argument("--method-set", nargs="*", default=[], help="settings of the method")
    parser.add_argument("--policy-set", nargs="*", default=[], help="settings of policy.toml")
    parser.add_argument("--set", nargs="*", default=[], dest="settings")
    args = parser.parse_args(words)
    if args.read:
        print(table([json.loads(path.read_text()) for path in args.read]))
        return
    if args.out is None or args.retrains < 2:
        parser.error(
            "name a folder with --out, and at least two --retrains: their spread is what a gap is held against"
        )
    torch.set_num_threads(1)
    config = load_experiment(args.experiment, args.settings).run.model_copy(update={"seed": args.seed})
    method = make_method(args.method, tuple(args.method_set)).model_dump(mode="json")
    asked = Asked(args.requests, args.at_once, args.share, args.retrains)
    results = stream(config, args.out, asked, method, args.policy_set)
    write_json(args.out / "stream.json", results, sealed=False)
    (args.out / "stream.md").write_text(page(results))
    (args.out / "stream.svg").write_bytes(encode(stream_figure(drawn_from(results)), "svg"))
    print(page(results))


@dataclass(frozen=True)
class Asked:
    """What the stream is made of."""

    count: int
    at_once: int
    share: float
    retrains: int


def stream(
    config: RunConfig, out: Path, wanted: Asked, method: dict[str, Any], policy_settings: Sequence[str] = ()
) -> dict[str, Any]:
    """Train, answer one request after the other, retrain without all of them, and measure everything."""
    count, at_once = wanted.count, wanted.at_once
    run = Run.create(out / "run", config)
    world = World.open(config, run.known())
    for record in run.train(world) if not run.head.releases else ():
        print(f"round {record['round']}", flush=True)
    run, ledger = Run.load(out / "run"), Ledger(out / "run")
    policy = load_policy(
        run.folder, ["hold.retain_points=100", "release=at_once", *policy_settings]
    )  # falls are measured here, not judged
    asked = requests_in_turn(world, count, config.seed, wanted.share)
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
    retrained = [retrain(run, end, order) for order in range(wanted.retrains)]
    sets, first = sets_of(world, asked), History(run.folder)
    rows, spent, whole = [], Spent(), Spent()
    for number, (request, stored) in enumerate(zip(gone, answers, strict=True)):
        reported = stored.record().metrics
        closed = {each.id for each in ledger.entries() if each.outcome.release == number + 1}
        left = without(world.evaluator.shards, gone[: number + 1])
        for _ in closed:  # each of them alone would have been a retraining
            whole += retraining_of(
                run, first, sum(len(shard.train) for shard in left), sum(bool(len(s.train)) for s in left)
            )
        spent += Spent(
            reported["cost/pairs_passed"],
            reported["cost/bytes_up"] + reported["cost/bytes_down"],
            len(stored.record().rounds),
        )
        rows.append(
            {
                "kind": request.scope,
                "trained_again": bool(run.head.releases[number].rounds),
                "closed": sorted(int(each) for each in closed),
                "seconds": reported["cost/seconds"],
                "share": spent.over(whole),
                "metrics": measure(world, stored.model(), sets),
            }
        )
    return {
        "config": config.model_dump(mode="json"),
        "requests": [{"kind": each.scope, "pairs": len(sets[f"forget/{n}"])} for n, each in enumerate(asked)],
        "trained": measure(world, first.state(first.rounds()), sets),
        "retrained": [{**measure(world, model, sets), "seconds": seconds} for model, seconds in retrained],
        "method": method,
        "policy": policy.model_dump(mode="json"),
        "at_once": at_once,
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
    sent = sum(record.bytes_up + record.bytes_down for record in records)
    there = sum(len(record.pairs) for record in records) / len(records)
    return Spent(pairs * len(rounds) * training.local_epochs, sent * min(1.0, clients / there), len(rounds))


def drain(steps: Any) -> None:
    for _ in steps:
        pass


def retrain(run: Run, world: World, order: int) -> tuple[Params, float]:
    """One training without all that was forgotten, kept, and its seconds; another `order` has other random numbers."""
    path, reported = (run.folder.parent / f"retrain-{order}.{ending}" for ending in ("safetensors", "json"))
    if not path.is_file():
        begun, trained = perf_counter(), trained_of(run)
        seeded = dataclasses.replace(trained, seed=trained.seed + 1000 * order)
        *_, last = make_method("retrain").unlearn(seeded, SampleRequest(ids=()), world.federation)
        last.state.save(path)
        write_json(reported, {"seconds": perf_counter() - begun}, sealed=False)
    return Params.load(path), json.loads(reported.read_text())["seconds"]


def recall(metrics: dict[str, float], name: str) -> float:
    return metrics[f"{name}/recall@1"]


def reference(retrained: Sequence[dict[str, float]], name: str) -> float:
    """What retraining gives, by the mean of some."""
    return float(np.mean([recall(each, name) for each in retrained]))


@dataclass(frozen=True)
class Gaps:
    """How far a model's recalls lie from the mean of retrainings."""

    requests: list[float]
    """Of each request's pairs."""
    forget: float
    """Over all forgotten pairs."""
    retain: float
    test: float

    @classmethod
    def of(cls, results: dict[str, Any], model: dict[str, float], retrained: Sequence[dict[str, float]]) -> "Gaps":
        def gap(name: str) -> float:
            return recall(model, name) - reference(retrained, name)

        requests = [gap(f"forget/{number}") for number in range(len(results["requests"]))]
        weights = [each["pairs"] for each in results["requests"]]
        return cls(requests, float(np.average(requests, weights=weights)), gap("retain"), gap("test"))

    @property
    def distance(self) -> float:
        return float(np.mean(np.abs(self.requests)))

    @property
    def furthest(self) -> float:
        return max(self.requests, key=abs)

    @property
    def near(self) -> int:
        """Requests within three points."""
        return sum(abs(each) <= 3 for each in self.requests)


def compared(results: dict[str, Any]) -> tuple[Gaps, list[Gaps]]:
    """The last release beside all retrainings, and each retraining beside the others."""
    models = results["retrained"]
    others = [Gaps.of(results, each, [one for one in models if one is not each]) for each in models]
    return Gaps.of(results, results["rows"][-1]["metrics"], models), others


def table(found: Sequence[dict[str, Any]]) -> str:
    """One line for each stream: gaps to retraining in points of R@1, in brackets those of one more retraining."""
    lines = [
        "| seed | requests | gone | trained again at | forget | distance of a request | within 3 | furthest | retain "
        "| test | computing / bytes / rounds |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for results in found:
        (end, others), rows = compared(results), results["rows"]
        gone, left = sum(each["pairs"] for each in results["requests"]), results["sets"]["retain"]

        def usual(name: str, others: list[Gaps] = others) -> float:
            return float(np.mean([abs(getattr(each, name)) for each in others]))

        cells = [
            f"{results['config']['seed']}",
            f"{len(end.requests)}, {results['at_once']} at once",
            f"{gone / (gone + left):.0%}",
            ", ".join(str(row["closed"][-1] + 1) for row in rows if row["trained_again"]) or "never",
            f"{end.forget:+.1f} ({usual('forget'):.1f})",
            f"{end.distance:.1f} ({usual('distance'):.1f})",
            f"{end.near} ({usual('near'):.0f})",
            f"{end.furthest:+.1f} ({usual('furthest'):.1f})",
            f"{end.retain:+.1f} ({usual('retain'):.1f})",
            f"{end.test:+.1f} ({usual('test'):.1f})",
            shares(rows[-1]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def shares(row: dict[str, Any]) -> str:
    return " / ".join(f"{row['share'][name]:.0%}" for name in ("passed", "bytes", "rounds"))


def drawn_from(results: dict[str, Any]) -> "StreamResults":
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
        retrain={name: reference(results["retrained"], name) for name in names},
    )


def page(results: dict[str, Any]) -> str:
    """What each request's pairs stand at: trained, when it was closed, at the end, and after retraining."""
    rows, last = results["rows"], results["rows"][-1]["metrics"]
    lines = [
        f"R@1 in percent, galleries of {last['gallery']:.0f} pairs. Cost until then, as a share of retraining after "
        "each request: pairs passed through the model / bytes / synchronous rounds.",
        "",
        "| request | pairs | trained | when closed | at the end | retrain (spread) | retain | test | seconds | cost |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        for number in row["closed"]:
            name, asked = f"forget/{number}", results["requests"][number]
            reported = [recall(each, name) for each in (results["trained"], row["metrics"], last)]
            others = [recall(each, name) for each in results["retrained"]]
            figures = " | ".join(f"{value:.1f}" for value in reported)
            first = number == row["closed"][0]
            again = " (trained again)" if row["trained_again"] else ""
            beside = [f"{recall(row['metrics'], part):.1f}" for part in ("retain", "test")] if first else ["", ""]
            cost = shares(row) if first else ""
            seconds = f"{row['seconds']:.1f}" if first else ""
            lines.append(
                f"| {number + 1} {asked['kind']}{again} | {asked['pairs']} | {figures} | "
                f"{np.mean(others):.1f} ({np.std(others, ddof=1):.1f}) | "
                f"{' | '.join(beside)} | {seconds} | {cost} |"
            )
    seconds = [each["seconds"] for each in results["retrained"]]
    return "\n".join(
        [
            *lines,
            "",
            f"The end beside the mean of {len(seconds)} retrainings; in brackets, each of them beside the others:",
            "",
            table([results]),
            "",
            f"One retraining took {np.mean(seconds):.1f} s.",
            "",
        ]
    )


KINDS = {"client": "o", "class": "s", "sample": "^"}
COSTS = {"passed": "pairs computed", "bytes": "bytes sent", "rounds": "rounds"}


@dataclass(frozen=True)
class StreamResults:
    """What was measured after each request."""

    kinds: Sequence[str]
    """Of each request: client, class or sample."""
    closed: Sequence[int]
    """Of each request: which answer closed it."""
    forget: Sequence[Sequence[float]]
    """[after answer i][request j] recall@1 of j's pairs."""
    retain: Sequence[float]
    """Recall@1 after each answer of the pairs that are left at the end."""
    test: Sequence[float]
    shares: Mapping[str, Sequence[float]]
    """Kind of cost -> until each answer, as a share of retraining after each request."""
    retrain: Mapping[str, float]
    """`forget/0`, ..., `retain` and `test` of one retraining without all."""


def stream_figure(results: StreamResults) -> Figure:
    """Three panels over the number of requests: return, erosion, cost."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(3 * PANEL_INCHES, 2.2), layout="constrained")
        back, erosion, cost = figure.subplots(1, 3)
        places = [sum(closed <= answer for closed in results.closed) for answer in range(len(results.forget))]
        for number, (kind, closed) in enumerate(zip(results.kinds, results.closed, strict=True)):
            later = [each[number] - results.retrain[f"forget/{number}"] for each in results.forget[closed:]]
            back.plot(places[closed:], later, marker=KINDS[kind], color=COLOURS[number % len(COLOURS)], linewidth=0.8)
        back.axhline(0, color=FIXED["Retrain"], linestyle="--", linewidth=1)
        back.set(title="return of the forgotten", xlabel="requests", ylabel=f"forget {RECALL} less retrain's")
        for colour, part, values in zip(COLOURS, ("retain", "test"), (results.retain, results.test), strict=False):
            erosion.plot(places, values, marker="o", color=colour, label=part)
            erosion.axhline(results.retrain[part], color=colour, linestyle="--", linewidth=1)
        erosion.set(title="erosion (dashed: retrain)", xlabel="requests", ylabel=RECALL, ylim=(-3, 103))
        erosion.legend()
        for colour, (name, shares) in zip(COLOURS, results.shares.items(), strict=False):
            cost.plot(places, [100 * share for share in shares], marker="o", color=colour, label=COSTS[name])
        cost.axhline(25, color=FIXED["Retrain"], linestyle=":", linewidth=1)
        cost.legend()
        cost.set(title="cost so far", xlabel="requests", ylabel="share of retraining each time (%)")
        cost.set_ylim(bottom=0)
        return figure


if __name__ == "__main__":
    main()
