"""How often the relative test is wrong: fresh retrainings are closer to retrained models, others to the trained one.

    python benchmarks/relative.py --seeds 0,1 --out results/relative.jsonl
    python benchmarks/relative.py table results

For every request the model is retrained in several orders. Each of them in turn is judged beside the others, and so are
models that keep a share of the way from it to the trained model. What is finished is kept.
"""

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from quick_look import concepts, few

from ease.audit.relative import relative_test
from ease.audit.shadow_runs import gauge_of
from ease.audit.subjects import Subjects
from ease.methods.base import Trained
from ease.methods.retrain import Retrain
from ease.params import Params
from ease.requests.request import Request
from ease.runs.answers import open_world, trained_of
from ease.runs.config import load_config
from ease.runs.evaluation import evaluation_sets
from ease.runs.run import Run
from ease.runs.world import World
from ease.studies.scenarios import scenario_request

KEPT = (-0.5, 0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


def retrained(world: World, trained: Trained, request: Request, orders: int) -> Iterator[Params]:
    for order in range(orders):
        *_, last = Retrain(order=order).unlearn(trained, request, world.federation)
        yield last.state


def judged(world: World, trained: Trained, request: Request, orders: int, pool: int) -> Iterator[dict[str, Any]]:
    """One line for each retrained model and share of the way that is kept."""
    forget = evaluation_sets(world, request)["forget"]
    gauge, states = gauge_of(world, Subjects.of(world, request, pool)), list(retrained(world, trained, request, orders))

    def odds(state: Params) -> Any:
        return gauge.read(state, forget)["log_odds"]

    top, found = odds(trained.final), [odds(state) for state in states]
    for fresh, state in enumerate(states):
        others = {f"retrain-{n}": each for n, each in enumerate(found) if n != fresh}
        for share in KEPT:
            values = found[fresh] if share == 0 else odds(state + share * (trained.final - state))
            test = relative_test({**others, "trained": top, "unlearned": values})
            yield {
                "kept": share,
                "pairs": len(forget),
                "closer": test.closer if test else "no signal",
                "share": test.share.value if test else None,
            }


def study(asked: argparse.Namespace, seed: int, done: set[tuple[int, int]]) -> Iterator[dict[str, Any]]:
    run = Run.create(asked.work / f"{asked.data}-{seed}", load_config(asked.config, (f"seed={seed}", *asked.settings)))
    world = open_world(run)
    for _ in run.train(world):
        pass
    trained = trained_of(run)
    typical: list[tuple[str, Request]] = [
        ("client", scenario_request(world, "client", seed)),
        ("sample", scenario_request(world, "sample", seed)),
    ]
    requests = [*typical, *concepts(world, 1, seed), *list(few(world, 1, seed))[1:]]
    for number, (kind, request) in enumerate(requests):
        if (seed, number) not in done:
            for line in judged(world, trained, request, asked.orders, asked.pool):
                yield {"data": asked.data, "seed": seed, "number": number, "kind": kind, **line}


def table(folder: Path) -> Iterator[str]:
    counted: dict[tuple[str, float], Counter[str]] = defaultdict(Counter)
    for path in sorted(folder.rglob("*.jsonl")):
        for line in map(json.loads, path.read_text().splitlines()):
            kind = "few pairs" if line["kind"].endswith("pairs") else "many pairs"
            counted[kind, line["kept"]][line["closer"]] += 1
    yield "| Request | Share kept | Judged | Closer to retrained | Undecided | Closer to trained | No signal |"
    yield "|---|---|---|---|---|---|---|"
    for (kind, kept), here in sorted(counted.items()):
        cells = [here[each] for each in ("retrained", "undecided", "trained", "no signal")]
        yield f"| {kind} | {kept:+.0%} | {here.total()} | {' | '.join(map(str, cells))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="?", default="study", choices=("study", "table"))
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--config", type=Path, help="TOML of the run")
    parser.add_argument("--set", action="append", default=[], dest="settings", help="a setting of the run")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--orders", type=int, default=6, help="retrainings of each request")
    parser.add_argument("--pool", type=int, default=128)
    parser.add_argument("--data", default="scenes")
    parser.add_argument("--work", type=Path, default=Path("results/quick-look-runs"))
    parser.add_argument("--out", type=Path, default=Path("results/relative.jsonl"))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.command == "table":
        print("\n".join(table(asked.folder or asked.out.parent)))
        return
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.loads(line) for line in asked.out.read_text().splitlines()] if asked.out.is_file() else []
    done = {(line["seed"], line["number"]) for line in lines}
    with asked.out.open("a") as file:
        for seed in map(int, asked.seeds.split(",")):
            for line in study(asked, seed, done):
                print(json.dumps(line), file=file, flush=True)


if __name__ == "__main__":
    main()
