"""The way that training, retraining and EASE take through the weights, in two dimensions.

    python benchmarks/paths.py --out docs/figures/paths.svg

The plane goes through the start, the trained and the retrained model, and what lies outside of it is left out: a number
beside each end says how much. Nothing is fitted to EASE.
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch

from ease.methods import make_method
from ease.params import Params
from ease.runs.answers import open_world, trained_of
from ease.runs.config import load_config
from ease.runs.run import Run
from ease.studies.scenarios import Scenario, scenario_config, scenario_request

SCENARIOS: tuple[Scenario, ...] = ("client", "class", "sample")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/figures/paths.svg"))
    parser.add_argument("--work", type=Path, default=Path("results/paths"))
    parser.add_argument("--set", action="append", default=[], dest="settings", help="a setting of the run; repeatable")
    asked = parser.parse_args()
    plt.rcParams["svg.hashsalt"] = "ease"
    figure, axes = plt.subplots(1, 3, figsize=(12, 4.2), layout="constrained")
    for scenario, axis in zip(SCENARIOS, axes, strict=True):
        draw(axis, scenario, asked.work, asked.settings)
        print(f"{scenario}: drawn", flush=True)
    axes[0].legend(frameon=False, fontsize=9)
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(asked.out, metadata={"Date": None})


def draw(axis: plt.Axes, scenario: Scenario, work: Path, settings: list[str]) -> None:
    run = Run.create(work / scenario, scenario_config(load_config(None, tuple(settings)), scenario))
    world = open_world(run)
    for _ in run.train(world):
        pass
    trained, request = trained_of(run), scenario_request(world, scenario, run.config.seed)

    def states(method: str) -> list[Params]:
        return [step.state for step in make_method(method).unlearn(trained, request, world.federation)]

    training = [trained.history.state(number) for number in range(trained.training.rounds + 1)]
    retraining, answered = [training[0], *states("retrain")], [training[-1], *states("ease")]
    start = flat(training[0])
    first = flat(retraining[-1]) - start
    first /= first.norm()
    second = flat(training[-1]) - start
    second -= (second @ first) * first
    second /= second.norm()
    for path, label, colour in (
        (training, "training on all pairs", "#777777"),
        (retraining, "retraining without them", "#1b7837"),
        (answered, "EASE: subtract, recover", "#b2182b"),
    ):
        away = torch.stack([flat(state) - start for state in path])
        places = torch.stack([away @ first, away @ second], dim=1)
        outside = float((away[-1].norm() ** 2 - places[-1].norm() ** 2).clamp_min(0).sqrt())
        x, y = places.numpy().T
        axis.plot(x, y, "o-", color=colour, label=label, markersize=3, linewidth=1.4)
        axis.annotate(
            f"{outside:.1f} outside",
            (x[-1], y[-1]),
            textcoords="offset points",
            xytext=(6, 4),
            fontsize=8,
            color=colour,
        )
    axis.set_title(f"{scenario} request")
    axis.set_xlabel("towards the retrained model")
    axis.set_ylabel("and across, towards the trained one")
    axis.set_aspect("equal", adjustable="datalim")
    axis.margins(0.18)
    axis.spines[["top", "right"]].set_visible(False)


def flat(state: Params) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([tensor.double().flatten().numpy() for tensor in state.tensors.values()]))


if __name__ == "__main__":
    main()
