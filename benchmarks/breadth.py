"""How near EASE comes to retraining on other ground: optimisers, numbers of clients, sizes of requests.

    python benchmarks/breadth.py [--only adam-client clients-50] [--config configs/flickr8k.toml] [--out FILE]

One line for each case, as soon as it is done; what the file holds already is not done again, and at the end all of it
is printed as a table. Gaps are to the mean of two retrainings, in points of recall, beside how far these lie from each
other. Choose seeds that nothing else was chosen by.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from gaps import KEYS

from ease.methods import make_method
from ease.requests.request import ClassRequest, ClientRequest, Request, SampleRequest
from ease.runs.answers import answer_of, open_world
from ease.runs.config import RunConfig, load_config
from ease.runs.forget import forget
from ease.runs.run import Run
from ease.runs.world import World
from ease.seeding import generator
from ease.studies.scenarios import Scenario, scenario_config, scenario_request

FIRST_SEED = 40
ADAM = ("training.optimiser=adam", "training.learning_rate=0.001")


@dataclass(frozen=True)
class Case:
    """A run and a request that differ from the usual ones."""

    scenario: Scenario
    settings: tuple[str, ...] = ()
    asks: Callable[[World, int], Request] | None = None
    """What is asked for; by default what studies ask for."""


def share_of_pairs(share: float) -> Callable[[World, int], Request]:
    def asks(world: World, seed: int) -> Request:
        ids = [pair_id for shard in world.shards for pair_id in shard.train_ids]
        chosen = generator(seed, "sample request").choice(ids, max(1, round(share * len(ids))), replace=False)
        return SampleRequest(ids=tuple(sorted(map(str, chosen))))

    return asks


def of_one_client(world: World, seed: int) -> Request:
    """A third of the pairs of the client of middle size."""
    by_size = sorted(world.shards, key=lambda shard: len(shard.train))
    ids = by_size[len(by_size) // 2].train_ids
    return SampleRequest(ids=tuple(sorted(ids[: len(ids) // 3])))


def two_clients(world: World, seed: int) -> Request:
    by_size = sorted(world.shards, key=lambda shard: len(shard.train))
    middle = len(by_size) // 2
    return ClientRequest(clients=tuple(sorted(shard.client for shard in by_size[middle - 1 : middle + 1])))


def two_classes(world: World, seed: int) -> Request:
    return ClassRequest(classes=(1, 4))


CASES = {
    "client": Case("client"),
    "class": Case("class"),
    "sample": Case("sample"),
    "adam-client": Case("client", ADAM),
    "adam-class": Case("class", ADAM),
    "adam-sample": Case("sample", ADAM),
    "full-sample": Case("sample", ("model.lora=full",)),
    "half-present-client": Case("client", ("training.participation=0.5",)),
    "half-present-class": Case("class", ("training.participation=0.5",)),
    "clients-4": Case("client", ("partition.clients=4",)),
    "clients-50": Case("client", ("partition.clients=50",)),
    "clients-50-sample": Case("sample", ("partition.clients=50",)),
    "two-clients": Case("client", (), two_clients),
    "two-classes": Case("class", (), two_classes),
    "one-percent": Case("sample", (), share_of_pairs(0.01)),
    "one-third": Case("sample", (), share_of_pairs(1 / 3)),
    "one-client": Case("sample", (), of_one_client),
}


def measured(case: Case, config: RunConfig, seed: int, work: Path) -> dict[str, object]:
    run = Run.create(work, scenario_config(config, case.scenario))
    world = open_world(run)
    for _ in run.train(world):
        pass
    request = (case.asks or (lambda world, seed: scenario_request(world, case.scenario, seed)))(world, seed)
    found = []
    for method in (make_method("retrain"), make_method("retrain", ("order=1",)), make_method("ease")):
        for _ in forget(run, world, request, method, observe=False):
            pass
        found.append(answer_of(run, request, method).record())
    first, second, ease = (record.metrics for record in found)
    return {
        "retrained": [round((first[key] + second[key]) / 2, 1) for key in KEYS],
        "ease": [round(ease[key] - (first[key] + second[key]) / 2, 1) for key in KEYS],
        "another": [round(second[key] - first[key], 1) for key in KEYS],
        "seconds": round(ease["cost/seconds"] / first["cost/seconds"], 2),
        "contribution": found[-1].contribution and found[-1].contribution.model_dump(mode="json"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--config", type=Path, help="TOML of the run")
    parser.add_argument(
        "--set", action="append", default=[], dest="settings", help="a setting of every run; repeatable"
    )
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED, help="each case has the next one")
    parser.add_argument("--out", type=Path, default=Path("results/breadth.jsonl"))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.touch()
    done = {line["case"]: line for line in map(json.loads, asked.out.read_text().splitlines())}
    for place, (name, case) in enumerate(CASES.items()):
        if name not in asked.only or name in done:
            continue
        seed = asked.first_seed + place
        config = load_config(asked.config, (f"seed={seed}", *asked.settings, *case.settings))
        with tempfile.TemporaryDirectory() as work:
            done[name] = {"case": name, "seed": seed, **measured(case, config, seed, Path(work) / "run")}
        with asked.out.open("a") as file:
            file.write(json.dumps(done[name]) + "\n")
        print(json.dumps(done[name]), flush=True)
    print("\n| case | retrained: forget R@1 / 5 / 10, retain, test | EASE | another retraining |\n|---|---|---|---|")
    for name, line in done.items():
        print(f"| {name} | {shown(line['retrained'], '.1f')} | {shown(line['ease'])} | {shown(line['another'])} |")


def shown(values: list[float], form: str = "+.1f") -> str:
    forget, rest = (" / ".join(format(each, form) for each in part) for part in (values[:3], values[3:]))
    return f"{forget}, {rest.replace(' / ', ', ')}"


if __name__ == "__main__":
    main()
