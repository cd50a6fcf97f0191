"""Measures forgetting against retraining: every scenario, several seeds, the retrain band, cost, ablation, durability.

python benchmarks/unlearning.py --work runs/bench
python benchmarks/unlearning.py --work runs/flickr --karpathy DATA/dataset_flickr8k.json --ablation --durability
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ease.audit.alignment import alignment_residual
from ease.commands.forget import scenario_config, scenario_request
from ease.forget import (
    continuation,
    evaluation_sets,
    forget,
    go_on,
    measure,
    outcome_of,
    request_id,
    similarities,
    trained_of,
)
from ease.methods import make_method
from ease.methods.base import Unlearner
from ease.run import Run, World, load_config
from ease.storage import write_json

ORDERS = (0, 1, 2)
"""Orders of the data in retraining; all of them, for the band, on the first seed alone."""
ABLATION = {
    "image side only": ("modalities=image",),
    "text side only": ("modalities=text",),
    "no decomposition (erase all)": ("entanglement=false",),
    "no lock": ("lock=off",),
    "projection alone": ("lock=projection",),
    "axis-aligned lock": ("lock=importance",),
    "lock on the client": ("lock_side=client",),
    "no displacement": ("displacement=0",),
    "same target for all": ("targets=level",),
    "reference = trained": ("reference=trained",),
    "delta = 0.3": ("delta=0.3",),
}
PHOTOS = (
    'data.name="karpathy"',
    'model.backbone="photos"',
    'model.lora="off"',
    "model.hidden=512",
    "training.batch_size=64",
)
FIGURES = [f"{part}/recall@{k}" for part in ("forget", "retain", "test") for k in (1, 5, 10)]


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    rows: list[dict[str, Any]] = []
    for seed in args.seeds:
        for scenario in args.scenarios:
            started = time.monotonic()
            for row in measure_scenario(args, scenario, seed):
                rows.append(row)
                write_json(args.work / "results.json", {"rows": rows})
            print(f"{scenario} seed {seed}: {time.monotonic() - started:.0f} s", flush=True)
    print(report(rows))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--work", type=Path, required=True, help="folder for runs and results; finished parts are reused"
    )
    parser.add_argument("--karpathy", type=Path, help="Karpathy JSON of real photographs; default: generated scenes")
    parser.add_argument("--scenarios", nargs="+", default=["client", "sample", "class"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--ablation", action="store_true")
    parser.add_argument(
        "--durability", action="store_true", help="ten further rounds, locked and free, against retrain"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--set", nargs="*", default=[], dest="settings")
    return parser.parse_args()


def measure_scenario(args: argparse.Namespace, scenario: Any, seed: int) -> Iterator[dict[str, Any]]:
    """One row for each method on one request of one run."""
    settings = (*PHOTOS, f'data.path="{args.karpathy}"') if args.karpathy else ()
    config = scenario_config(load_config(None, (*settings, *args.settings, f"seed={seed}")), scenario)
    run = Run.create(args.work / f"{config.partition.scheme}-{seed}", config)
    world = World.open(config)
    for _ in run.train(world):
        pass
    request, trained = scenario_request(world, scenario, seed), trained_of(run)
    sets = evaluation_sets(world, request)
    before = similarities(world, trained.final, sets["forget"])

    def row(method: str, metrics: dict[str, float], state: Any) -> dict[str, Any]:
        rho = alignment_residual(similarities(world, state, sets["forget"]), before, goal)
        return {"scenario": scenario, "method": method, "seed": seed, "metrics": {**metrics, "rho": rho}}

    def answer(method: Unlearner) -> tuple[dict[str, float], Any]:
        for _ in forget(run, world, request, method, observe=False):
            pass
        outcome = outcome_of(run, request, method)
        return outcome.record()["metrics"], outcome.model()

    orders = ORDERS if seed == args.seeds[0] else ORDERS[:1]
    retrained = {order: answer(make_method("retrain", (f"order={order}",))) for order in orders}
    goal = similarities(world, retrained[0][1], sets["forget"])
    yield row("trained", measure(world, trained.final, sets), trained.final)
    for order, (metrics, state) in retrained.items():
        yield row("retrain" if order == 0 else f"retrain, order {order}", metrics, state)
    for name in ("finetune", "ease"):
        yield row(name, *answer(make_method(name)))
    for label, changes in ABLATION.items() if args.ablation else ():
        yield row(label, *answer(make_method("ease", changes)))
    if args.durability:
        for name, method, locked in (("ease", "ease", True), ("ease", "ease", False), ("retrain", "retrain", False)):
            for _ in go_on(run, world, f"{request_id(request)}/{method}", 10, locked):
                pass
            after = continuation(outcome_of(run, request, make_method(method)), 10, locked)
            yield row(f"{name} + 10 rounds, {'locked' if locked else 'free'}", after.record()["metrics"], after.model())


def report(rows: Sequence[dict[str, Any]]) -> str:
    """Means over seeds as Markdown: recalls, the gap to retrain, the retrain band, cost as a share of retrain's."""
    lines = []
    for scenario in dict.fromkeys(row["scenario"] for row in rows):
        here = [row for row in rows if row["scenario"] == scenario]
        reference = {row["seed"]: row["metrics"] for row in here if row["method"] == "retrain"}
        band = {
            key: max(
                abs(row["metrics"][key] - reference[row["seed"]][key])
                for row in here
                if row["method"].startswith("retrain, order")
            )
            for key in FIGURES
        }
        lines += [f"\n### {scenario} request, mean of {len(reference)} seeds", ""]
        lines += [
            "| method | forget | retain | test | gap forget | gap retain | gap test | rho | bytes | time |",
            "|---|" + "---|" * 9,
        ]
        for method in dict.fromkeys(row["method"] for row in here):
            metrics = {row["seed"]: row["metrics"] for row in here if row["method"] == method}
            mean = {key: statistics.mean(m[key] for m in metrics.values()) for key in (*FIGURES, "rho")}
            gap = {key: statistics.mean(m[key] - reference[s][key] for s, m in metrics.items()) for key in FIGURES}
            cells = [_three(mean, part, "{:.1f}") for part in ("forget", "retain", "test")]
            cells += [_three(gap, part, "{:+.1f}") for part in ("forget", "retain", "test")]
            lines.append(
                f"| {method} | {' | '.join(cells)} | {mean['rho']:.2f} | {' | '.join(_costs(metrics, reference))} |"
            )
        lines += [
            "",
            "retrain band (largest |difference| of two other orders): "
            + "; ".join(f"{k} {v:.1f}" for k, v in band.items()),
        ]
    return "\n".join(lines)


def _three(values: dict[str, float], part: str, style: str) -> str:
    return " / ".join(style.format(values[f"{part}/recall@{k}"]) for k in (1, 5, 10))


def _costs(metrics: dict[int, dict[str, float]], reference: dict[int, dict[str, float]]) -> list[str]:
    """Bytes and seconds as shares of retrain's, in the same run."""
    if not all("cost/seconds" in m for m in metrics.values()):
        return ["", ""]
    total = ("cost/bytes_down", "cost/bytes_up")
    shares = [sum(m[k] for k in total) / sum(reference[s][k] for k in total) for s, m in metrics.items()]
    times = [m["cost/seconds"] / reference[s]["cost/seconds"] for s, m in metrics.items()]
    return [f"{100 * statistics.mean(part):.0f} %" for part in (shares, times)]


if __name__ == "__main__":
    print(json.dumps({"torch": torch.__version__}))
    main()
