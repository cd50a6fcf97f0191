"""How often a quick look accuses a model that was retrained, and how often it finds one that forgot nothing.

    python benchmarks/quick_look.py --seeds 0,1,2 --out results/scenes.jsonl
    python benchmarks/quick_look.py --config configs/flickr8k.toml --data photographs --out results/photos.jsonl
    python benchmarks/quick_look.py table results

Requests are concepts (words that enough captions have), few pairs drawn at random, the typical client and a tenth of
all pairs. Every retrained model is looked at twice: beside the held-out pairs that the request would have named, and
beside all held-out pairs of the same clients. What is finished is kept.
"""

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ease.audit.membership_scores import measure_scores
from ease.audit.quick_check import SAME_CLIENTS, compare, held_out_like, only
from ease.data.words import telling
from ease.errors import UserError
from ease.methods.base import Trained, forget_clients
from ease.methods.retrain import Retrain
from ease.params import Params
from ease.requests.request import Request, SampleRequest
from ease.runs.answers import open_world, trained_of
from ease.runs.config import load_config
from ease.runs.resolve import RequestOptions, parse_request
from ease.runs.run import Run
from ease.runs.world import World
from ease.seeding import generator
from ease.studies.scenarios import scenario_request

FEW = (3, 5, 10)
SHARES = (0.01, 0.2)
"""Concepts name at least and at most this share of all pairs."""


def concepts(world: World, count: int, seed: int) -> list[tuple[str, Request]]:
    """Random words among those that a fair share of the pairs have in a caption."""
    positions = [position for shard in world.shards for position in shard.train.tolist()]
    captions = [world.evaluator.pairs.captions[position] for position in positions]
    held = Counter(word for each in captions for word in {word for text in each for word in telling(text)})
    usual = sorted(word for word, pairs in held.items() if SHARES[0] <= pairs / len(positions) <= SHARES[1])
    found: list[tuple[str, Request]] = []
    for word in generator(seed, "concepts").permutation(usual).tolist():
        try:
            request = parse_request(world, RequestOptions(concepts=(word,))).request
        except UserError:
            continue
        if isinstance(request, SampleRequest) and len(request.ids) <= SHARES[1] * len(positions):
            found.append(("concept", request))
        if len(found) == count:
            break
    return found


def few(world: World, each: int, seed: int) -> Iterator[tuple[str, Request]]:
    """Lists of few pairs, drawn at random."""
    ids = sorted(pair_id for shard in world.shards for pair_id in shard.train_ids)
    for size in FEW:
        for draw in range(each):
            chosen = generator(seed, "few pairs", size, draw).choice(ids, size, replace=False)
            yield f"{size} pairs", SampleRequest(ids=tuple(sorted(chosen.tolist())))


def looks(world: World, trained: Trained, request: Request, models: dict[str, Params]) -> Iterator[dict[str, Any]]:
    """One line for each model and comparison; `abstains` says why there is no gap."""
    holders = forget_clients(request, world.federation)

    def scores(state: Params) -> Any:
        return measure_scores(trained, state, request, world.federation, holders)

    start, found = scores(trained.initial), {name: scores(state) for name, state in models.items()}
    for rule in ("matched", "all"):
        for name, each in found.items():
            line: dict[str, Any] = {"rule": rule, "model": name}
            try:
                matches = held_out_like(world, request) if rule == "matched" else None
                first = {client: of for client, of in only(start, matches).items() if len(of["forget"])}
                level = compare(only(each, matches), first)
                line |= {
                    "gap": [level.gap.value, level.gap.low, level.gap.high],
                    "pairs": [sum(len(of[side]) for of in first.values()) for side in ("forget", "held_out")],
                }
            except UserError as error:
                line["abstains"] = str(error)
            yield line


def study(asked: argparse.Namespace, seed: int, done: set[tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    config = load_config(asked.config, (f"seed={seed}", *asked.settings))
    run = Run.create(asked.work / f"{asked.data}-{seed}", config)
    world = open_world(run)
    for _ in run.train(world):
        pass
    trained = trained_of(run)
    requests = [*concepts(world, asked.concepts, seed), *few(world, asked.few, seed)]
    requests += [(scenario, scenario_request(world, scenario, seed)) for scenario in ("client", "sample")]
    for number, (kind, request) in enumerate(requests):
        if (seed, number) in done:
            continue
        models = {"trained": trained.final}
        for order in range(asked.orders if kind in ("client", "sample") else 1):
            for step in Retrain(order=order).unlearn(trained, request, world.federation):
                models[f"retrained {order}"] = step.state
        common = {"data": asked.data, "seed": seed, "number": number, "kind": kind}
        words = getattr(request, "words", ())
        for line in looks(world, trained, request, models):
            yield {**common, "words": words, **line}


def table(folder: Path) -> Iterator[str]:
    """Error rates with n, for each kind of request and comparison."""
    counted: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    for path in sorted(folder.rglob("*.jsonl")):
        for line in map(json.loads, path.read_text().splitlines()):
            kind = "few pairs" if line["kind"].endswith("pairs") else line["kind"]
            here = counted[line["data"], kind, line["rule"]]
            model = line["model"].split()[0]
            here[f"{model}"] += 1
            if "gap" not in line:
                here[f"{model} abstains"] += 1
            elif not line["gap"][1] <= 0 <= line["gap"][2]:
                here[f"{model} found"] += 1
    yield "| Data | Request | Held-out pairs | Retrained models | Accused | Abstained | Trained models found |"
    yield "|---|---|---|---|---|---|---|"
    for (data, kind, rule), here in sorted(counted.items()):
        looked = here["retrained"] - here["retrained abstains"]
        share = f"{here['retrained found']} ({here['retrained found'] / looked:.1%})" if looked else "0"
        seen = here["trained"] - here["trained abstains"]
        against = "those the request would have named" if rule == "matched" else f"all {SAME_CLIENTS}"
        yield (
            f"| {data} | {kind} | {against} | {looked} | {share} | {here['retrained abstains']} | "
            f"{here['trained found']} of {seen} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="?", default="study", choices=("study", "table"))
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--config", type=Path, help="TOML of the run")
    parser.add_argument("--set", action="append", default=[], dest="settings", help="a setting of the run")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--concepts", type=int, default=20)
    parser.add_argument("--few", type=int, default=4, help="lists of each of the sizes")
    parser.add_argument("--orders", type=int, default=2, help="retrainings of the client and the sample request")
    parser.add_argument("--data", default="scenes", help="what the table calls the data")
    parser.add_argument("--work", type=Path, default=Path("results/quick-look-runs"))
    parser.add_argument("--out", type=Path, default=Path("results/quick-look/scenes.jsonl"))
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
