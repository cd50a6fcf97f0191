"""Which share of what the forget pairs wrote has to go, by recall, beside the one that clients measure.

    python benchmarks/shares.py sample --seed 0 --shares 0.84 0.9 0.96 1.0
    python benchmarks/shares.py sample --of-clients 1 --part 0.33 --shares 0.78 0.86 0.94

EASE is run with the correction before its last round forced to each share; gaps are to the mean of three retrainings,
in points of recall. The right share is where the mean gap of forget R@1, R@5 and R@10 crosses 0. It looks at retrained
models, so it is for choosing what `ease.methods.ease.calibration` takes for usual, never for an answer.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ease.methods import make_method
from ease.methods.base import Unlearner
from ease.methods.ease import Ease
from ease.methods.ease.calibration import usual_recovery
from ease.params import Params
from ease.requests.request import Request, SampleRequest
from ease.runs.answers import open_world, trained_of
from ease.runs.config import load_config
from ease.runs.evaluation import evaluation_sets, measure
from ease.runs.run import Run
from ease.runs.world import World
from ease.seeding import generator
from ease.studies.scenarios import scenario_config, scenario_request

FORGET = ("forget/recall@1", "forget/recall@5", "forget/recall@10")
KEYS = (*FORGET, "retain/recall@1", "test/recall@1")


class Forced(Ease):
    """EASE whose last correction goes to a given share, whatever clients measure."""

    last: float

    def _right_share(self, *given: Any) -> tuple[float, dict[str, Any]]:
        wanted, told = super()._right_share(*given)
        return self.last, told | {"share": self.last, "wanted": wanted}


def of_clients(world: World, count: int, part: float, seed: int) -> Request:
    """Some pairs of clients of middle size."""
    by_size = sorted(world.shards, key=lambda shard: len(shard.train))
    first, rng = (len(by_size) - count + 1) // 2, generator(seed, "pairs of clients")
    chosen = [
        rng.choice(shard.train_ids, max(1, round(part * len(shard.train))), replace=False)
        for shard in by_size[first : first + count]
    ]
    return SampleRequest(ids=tuple(sorted(map(str, np.concatenate(chosen)))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenario", choices=("client", "class", "sample"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shares", type=float, nargs="+", default=(0.84, 0.9, 0.96, 1.0))
    parser.add_argument("--of-clients", type=int, help="sample: pairs of so many clients of middle size alone")
    parser.add_argument("--part", type=float, default=0.5, help="share of the pairs of those clients")
    parser.add_argument("--recovery", type=float, help="rounds of it as a share of the training's; default: as usual")
    parser.add_argument("--config", type=Path, help="TOML of the run")
    parser.add_argument("--set", action="append", default=[], dest="settings", help="a setting of the run; repeatable")
    parser.add_argument("--work", type=Path, default=Path("results/shares"))
    asked = parser.parse_args()
    torch.set_num_threads(1)

    config = load_config(asked.config, (f"seed={asked.seed}", *asked.settings))
    run = Run.create(asked.work / f"{asked.scenario}-{asked.seed}", scenario_config(config, asked.scenario))
    world = open_world(run)
    for _ in run.train(world):
        pass
    trained, request = trained_of(run), scenario_request(world, asked.scenario, asked.seed)
    if asked.of_clients:
        request = of_clients(world, asked.of_clients, asked.part, asked.seed)
    sets = evaluation_sets(world, request)

    def answer(method: Unlearner) -> tuple[Params, dict[str, Any]]:
        *_, last = method.unlearn(trained, request, world.federation)
        return last.state, last.notes

    def recalls(state: Params) -> np.ndarray:
        found = measure(world, state, sets)
        return np.array([found[key] for key in KEYS])

    recovery = asked.recovery or usual_recovery(asked.scenario == "client")
    goal = np.mean([recalls(answer(make_method("retrain", (f"order={order}",)))[0]) for order in range(3)], axis=0)
    gaps = []
    for share in asked.shares:
        state, notes = answer(Forced(last=share, recovery_share=recovery))
        gaps.append(recalls(state) - goal)
        print(f"share {share:g}: {np.round(gaps[-1], 1).tolist()}, EASE by itself {notes['wanted']:.3f}", flush=True)
    slope, at_zero = np.polyfit(np.mean(np.array(gaps)[:, : len(FORGET)], axis=1), asked.shares, 1)
    print(f"right share {at_zero:.3f}; a tenth of it more lowers forget recall by {-0.1 / slope:.1f} points")


if __name__ == "__main__":
    main()
