"""Measures whether forgotten pairs come back: ten further rounds after EASE, locked and free, and after retraining.

python benchmarks/durability.py --work results
python benchmarks/durability.py --work results --scenarios client --set training.rounds=30
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ease.methods import make_method
from ease.runs.answers import answer_of, continuation
from ease.runs.config import load_config
from ease.runs.forget import forget, train_further
from ease.runs.resolve import request_id
from ease.runs.run import Run
from ease.runs.world import World
from ease.storage import write_json
from ease.studies.experiment import run_folder
from ease.studies.scenarios import scenario_config, scenario_request

ROUNDS = 10
CASES = (("ease", True), ("ease", False), ("retrain", False))
PARTS = ("forget", "retain", "test")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--work", type=Path, required=True, help="folder of the runs, the same as --out of `ease bench`"
    )
    parser.add_argument("--scenarios", nargs="+", default=["client", "class", "sample"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--set", nargs="*", default=[], dest="settings")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    print("| scenario | seed | model | forget R@1 | retain R@1 | test R@1 |\n|---|---|---|---|---|---|")
    for seed in args.seeds:
        for scenario in args.scenarios:
            for row in measure(args.work, args.settings, scenario, seed):
                rows.append(row)
                recalls = " | ".join(f"{row['metrics'][f'{part}/recall@1']:.1f}" for part in PARTS)
                print(f"| {scenario} | {seed} | {row['model']} | {recalls} |", flush=True)
                write_json(args.work / "durability.json", {"rows": rows})


def measure(work: Path, settings: list[str], scenario: Any, seed: int) -> Iterator[dict[str, Any]]:
    """Each answer, and what further training makes of it."""
    config = scenario_config(load_config(None, (*settings, f"seed={seed}")), scenario)
    run, world = Run.create(run_folder(work, config), config), World.open(config)
    for _ in run.train(world):
        pass
    request = scenario_request(world, scenario, seed)
    for name, locked in CASES:
        method = make_method(name)
        for _ in forget(run, world, request, method, observe=False):
            pass
        for _ in train_further(run, world, f"{request_id(request)}/{name}", ROUNDS, locked):
            pass
        answered = answer_of(run, request, method)
        for model, outcome in (
            (name, answered),
            (f"{name} + {ROUNDS} rounds, {'locked' if locked else 'free'}", continuation(answered, ROUNDS, locked)),
        ):
            yield {"scenario": scenario, "seed": seed, "model": model, "metrics": outcome.record().metrics}


if __name__ == "__main__":
    main()
