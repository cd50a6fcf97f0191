"""How often the audit's verdict is wrong: fresh retrainings must pass, models that keep or lose too much must not.

    python benchmarks/verdict.py judge client --seed 0 --fresh 5 --methods ease,finetune --out results/verdict
    python benchmarks/verdict.py table results/verdict --figure docs/figures/verdict.svg

`judge` trains, answers and audits one request and writes one line for each judged model; `table` judges the stored
measures again and counts over all files.
Fresh retrainings are further orders of the data that the verdict has not seen. Models that keep a share of the forget
effect lie between such a fresh retraining and the trained model; below 0 they lie beyond it.
"""

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch

from ease.audit.band import prediction_band
from ease.audit.config import AuditConfig
from ease.audit.joint import JointTest
from ease.audit.verdict import Measure, judged_together
from ease.methods import make_method
from ease.methods.base import Unlearner
from ease.methods.retrain import Retrain
from ease.params import Params
from ease.runs.answers import answer_of, open_world
from ease.runs.audit import Audit
from ease.runs.config import load_config
from ease.runs.forget import forget
from ease.runs.resolve import request_id
from ease.runs.run import Run
from ease.seeding import generator
from ease.studies.scenarios import scenario_config, scenario_request

KEPT = (-0.5, -0.2, -0.1, 0.05, 0.1, 0.2, 0.5, 1.0)


def named_method(text: str) -> Unlearner:
    """A method by its name, and by its settings after colons."""
    name, *settings = text.split(":")
    return make_method(name, settings)


def judge(asked: argparse.Namespace) -> Iterator[dict[str, object]]:
    config = load_config(asked.config, (f"seed={asked.seed}", *asked.settings))
    run = Run.create(asked.work / f"{asked.scenario}-{asked.seed}", scenario_config(config, asked.scenario))
    world = open_world(run)
    for _ in run.train(world):
        pass
    request = scenario_request(world, asked.scenario, asked.seed)
    names = asked.methods.split(",")
    for method in (Retrain(), *map(named_method, names)):
        for _ in forget(run, world, request, method, observe=False):
            pass
    settings = AuditConfig(shadows=asked.shadows, retrains=asked.retrains, workers=1)
    for place, name in enumerate(names):
        answer = answer_of(run, request, named_method(name))
        audit = Audit.of(run, world, f"{request_id(request)}/{answer.folder.name}", settings)
        every = replace(audit, config=settings.model_copy(update={"retrains": asked.retrains + asked.fresh}))
        for _ in (every if place == 0 else audit).shadows():
            pass
        models = {name: answer.model()}
        if place == 0:
            orders = range(asked.retrains + 1, asked.retrains + asked.fresh + 1)
            fresh = [Params.load(audit.plan.retrain_path(order)) for order in orders]
            models |= {f"fresh retraining {order}": state for order, state in zip(orders, fresh, strict=True)}
            trained = audit.trained.final
            for first in fresh[:1]:
                models |= {f"keeps {share:+.0%}": first + share * (trained - first) for share in KEPT}
        for model, state in models.items():
            began = time.perf_counter()
            verdict = audit.instruments.measure(state).verdict
            joint = verdict.joint
            assert joint is not None
            yield {
                "scenario": asked.scenario,
                "seed": asked.seed,
                "shadows of": name,
                "model": model,
                "p": joint.p_value,
                "passed": verdict.passed,
                "reason": verdict.reason,
                "trace": [joint.trace.value, joint.trace.low, joint.trace.high],
                "power": joint.power,
                "smallest_caught": joint.smallest_caught,
                "outside": [each.title for each in verdict.outside],
                "measures": [
                    [each.name, each.value, each.before, each.resolution, each.retrained, each.kept]
                    for each in verdict.measures
                ],
                "seconds": time.perf_counter() - began,
            }


def judged_anew(found: dict[str, Any]) -> JointTest:
    """From the stored measures, by the test as it is now."""
    joint = judged_together([stored_measure(*each) for each in found["measures"]], generator(found["seed"], "joint"))
    assert joint is not None
    return joint


def stored_measure(
    name: str, value: float, before: float | None, resolution: float, retrained: list[float], kept: list[list[float]]
) -> Measure:
    at_most = name.startswith(("rho", "ks/", "relearn/"))
    return Measure(
        name=name,
        value=value,
        retrain=retrained[0],
        before=before,
        band=prediction_band(retrained, at_most, resolution),
        retrained=retrained,
        kept=kept,
        resolution=resolution,
    )


def table(folder: Path, figure: Path | None) -> Iterator[str]:
    """How often each kind of model passed, over all files."""
    rows = defaultdict(list)
    for path in sorted(folder.rglob("*.jsonl")):
        for line in path.read_text().splitlines():
            found = json.loads(line)
            kind = "fresh retraining" if found["model"].startswith("fresh") else found["model"]
            rows[kind].append(judged_anew(found))
    yield "| model | judged | passed | median p | share kept, median |"
    yield "|---|---|---|---|---|"
    for kind, found in rows.items():
        passed = sum(each.passed for each in found)
        middle, kept = median(each.p_value for each in found), median(each.trace.value for each in found)
        yield f"| {kind} | {len(found)} | {passed} | {middle:.2g} | {kept:+.1%} |"
    if figure:
        draw({kind: np.mean([not each.passed for each in found]) for kind, found in rows.items()}, figure)


def draw(refused: dict[str, float], figure: Path) -> None:
    """Share of models refused over the share of the forget effect that they keep."""
    planted = {kind: float(kind.removeprefix("keeps ").rstrip("%")) for kind in refused if kind.startswith("keeps")}
    points = sorted([(share, refused[kind]) for kind, share in planted.items()] + [(0.0, refused["fresh retraining"])])
    plt.rcParams["svg.hashsalt"] = "ease"
    drawn, axis = plt.subplots(figsize=(6, 3.2), layout="constrained")
    axis.plot(*zip(*points, strict=True), marker="o", color="#0b6e99")
    axis.axhline(0.05, color="0.5", linestyle="--", linewidth=1)
    axis.set(xlabel="share of the forget effect kept, percent", ylabel="refused", ylim=(0, 1.05), xscale="symlog")
    axis.set_xticks([-50, -20, -10, 0, 5, 10, 20, 50, 100], ["-50", "-20", "-10", "0", "5", "10", "20", "50", "100"])
    drawn.savefig(figure, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    judging = commands.add_parser("judge")
    judging.add_argument("scenario", choices=("client", "class", "sample"))
    judging.add_argument("--seed", type=int, default=0)
    judging.add_argument("--fresh", type=int, default=5, help="retrainings that are put through the verdict")
    judging.add_argument("--retrains", type=int, default=9)
    judging.add_argument("--shadows", type=int, default=16)
    judging.add_argument("--methods", default="ease", help="parted by commas; settings after colons: ease:replay=1.0")
    judging.add_argument("--config", type=Path, help="TOML of the run")
    judging.add_argument("--set", action="append", default=[], dest="settings", help="a setting of the run")
    judging.add_argument("--work", type=Path, default=Path("results/verdict-runs"))
    judging.add_argument("--out", type=Path, default=Path("results/verdict"))
    counting = commands.add_parser("table")
    counting.add_argument("folder", type=Path)
    counting.add_argument("--figure", type=Path, help="an SVG of how often which share is refused")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.command == "table":
        print("\n".join(table(asked.folder, asked.figure)))
        return
    asked.out.mkdir(parents=True, exist_ok=True)
    with (asked.out / f"{asked.scenario}-{asked.seed}.jsonl").open("w") as file:
        for found in judge(asked):
            print(json.dumps(found), file=file, flush=True)
            print(found["model"], f"p {found['p']:.3g}", found["reason"], f"{found['seconds']:.1f} s", flush=True)


if __name__ == "__main__":
    main()
