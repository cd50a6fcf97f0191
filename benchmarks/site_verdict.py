"""How often the verdict on pairs that lie at their sites is wrong: by what clients tell of their own pairs alone.

    python benchmarks/site_verdict.py --seeds 0,1,2 --fresh 6

Clients are in this process; what they are asked and what they answer is what nodes do. Small generated worlds, client,
class and sample requests, ten retrained models each. Fresh retrainings are further orders of the data; models that keep
a share lie between the first of them and the trained model, below 0 beyond it.
"""

import argparse
import tempfile
from collections import defaultdict
from pathlib import Path

import torch

from ease.audit.at_sites import instruments_for
from ease.audit.config import AuditConfig
from ease.federation.middleware import Guarded
from ease.methods.retrain import Retrain
from ease.params import Params
from ease.requests.request import Request
from ease.runs.answers import open_world, trained_of
from ease.runs.config import load_config
from ease.runs.run import Run
from ease.studies.scenarios import scenario_config, scenario_request

SCENARIOS = ("client", "class", "sample")
KEPT = (-0.2, 0.1, 0.2, 0.5, 1.0)
WORLD = (
    "data.train=400",
    "data.validation=0",
    "data.test=80",
    "partition.clients=4",
    "partition.classes=4",
    "partition.validation_share=0.2",
    "training.rounds=6",
    "training.local_epochs=4",
    "training.batch_size=16",
    "model.hidden=64",
    "model.embedding=32",
    "gallery=80",
)


def judged(scenario: str, seed: int, fresh: int, folder: Path) -> dict[str, list[str]]:
    """Kind of model -> the reason of each verdict."""
    config = scenario_config(load_config(None, (f"seed={seed}", f"data.seed={seed}", *WORLD)), scenario)
    run = Run.create(folder, config)
    for _ in run.train(open_world(run)):
        pass
    world, trained = open_world(run), trained_of(run)
    request: Request = scenario_request(world, scenario, seed)
    sound = Guarded(world.federation, config.training, everyone=True)

    def retrained(order: int) -> Params:
        return [step.state for step in Retrain(order=order).unlearn(trained, request, sound)][-1]

    settings = AuditConfig()
    known = {f"retrain-{order}" if order else "retrain": retrained(order) for order in range(settings.retrains + 1)}
    there = instruments_for(world, request)(world, request, trained, known, sound, settings)
    further = [retrained(settings.retrains + 1 + place) for place in range(fresh)]
    tried = [("fresh retraining", state) for state in further]
    tried += [(f"keeps {share:.0%}", further[0] + share * (trained.final - further[0])) for share in KEPT]
    found = defaultdict(list)
    for name, state in tried:
        verdict = there.measure(state).verdict
        found[name].append(str(verdict.reason))
        print(scenario, seed, name, verdict.words, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--fresh", type=int, default=6)
    parser.add_argument("--scenarios", default=",".join(SCENARIOS))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    counted = defaultdict[str, list[str]](list)
    for seed in map(int, asked.seeds.split(",")):
        for scenario in asked.scenarios.split(","):
            with tempfile.TemporaryDirectory() as folder:
                for name, reasons in judged(scenario, seed, asked.fresh, Path(folder) / "run").items():
                    counted[name] += reasons
    print("| model | passed | refused | undecided |\n|---|---|---|---|")
    for name, reasons in counted.items():
        passed = sum(reason == "indistinguishable from retraining" for reason in reasons)
        unknown = sum(reason in ("no signal", "too few retrainings") for reason in reasons)
        print(f"| {name} | {passed} of {len(reasons)} | {len(reasons) - passed - unknown} | {unknown} |")


if __name__ == "__main__":
    main()
