"""How near EASE comes to retraining on one request, now and ten rounds later, beside how near two retrainings come.

    python benchmarks/gaps.py sample --seed 0 --after --variant "" --variant share=0.8 --set engine=vectorized

Gaps are to the mean of two retrainings, in points of recall; rho and KS are means over both.
"""

import argparse
from itertools import pairwise
from pathlib import Path

import torch
from scipy.stats import ks_2samp

from ease.measures.alignment import alignment_residual
from ease.methods import make_method
from ease.methods.base import Unlearner
from ease.params import Params
from ease.runs.answers import StoredAnswer, answer_of, continuation, open_world, trained_of
from ease.runs.config import load_config
from ease.runs.evaluation import evaluation_sets, measure, similarities
from ease.runs.forget import forget, train_further
from ease.runs.resolve import request_id
from ease.runs.run import Run
from ease.studies.scenarios import scenario_config, scenario_request

KEYS = ("forget/recall@1", "forget/recall@5", "forget/recall@10", "retain/recall@1", "test/recall@1")
TRAFFIC = ("cost/bytes_down", "cost/bytes_up")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenario", choices=("client", "class", "sample"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--after", action="store_true", help="train ten rounds more, free and locked")
    parser.add_argument("--variant", action="append", help="settings of EASE, parted by commas; repeatable")
    parser.add_argument("--beside", action="append", default=[], help="another method to answer it by; repeatable")
    parser.add_argument("--config", type=Path, help="TOML of the run")
    parser.add_argument("--set", action="append", default=[], dest="settings", help="a setting of the run; repeatable")
    parser.add_argument("--work", type=Path, default=Path("results/gaps"))
    asked = parser.parse_args()
    torch.set_num_threads(1)

    config = load_config(asked.config, (f"seed={asked.seed}", *asked.settings))
    config = scenario_config(config, asked.scenario)
    run = Run.create(asked.work / f"{asked.scenario}-{asked.seed}", config)
    world = open_world(run)
    for _ in run.train(world):
        pass
    request = scenario_request(world, asked.scenario, asked.seed)
    sets = evaluation_sets(world, request)

    def answered(method: Unlearner) -> StoredAnswer:
        for _ in forget(run, world, request, method, observe=False):
            pass
        return answer_of(run, request, method)

    def later(stored: StoredAnswer, locked: bool) -> dict[str, float]:
        for _ in train_further(run, world, f"{request_id(request)}/{stored.folder.name}", 10, locked):
            pass
        return measure(world, continuation(stored, 10, locked).model(), sets)

    def held(state: Params) -> torch.Tensor:
        return similarities(world, state, sets["forget"])

    retrained = [answered(make_method("retrain", (f"order={order}",))) for order in (0, 1)]
    metrics = [stored.record().metrics for stored in retrained]
    goals, before = [held(stored.model()) for stored in retrained], held(trained_of(run).start)
    for one, two in pairwise(goals):
        rho, ks = alignment_residual(two, before, one), ks_2samp(one.numpy(), two.numpy()).statistic
        print(f"two retrainings: {shown(metrics[1], metrics[0])}  rho {rho:.3f}  KS {ks:.3f}", flush=True)
    mean = {key: (metrics[0][key] + metrics[1][key]) / 2 for key in KEYS}
    answers = []
    variants = [("ease", variant) for variant in asked.variant or [""]]
    for name, variant in (*variants, *((name, "") for name in asked.beside)):
        stored = answered(make_method(name, tuple(part for part in variant.split(",") if part)))
        answers.append(stored)
        found, state = stored.record().metrics, held(stored.model())
        rho = sum(alignment_residual(state, before, goal) for goal in goals) / 2
        ks = sum(ks_2samp(state.numpy(), goal.numpy()).statistic for goal in goals) / 2
        share = sum(found[key] for key in TRAFFIC) / sum(metrics[0][key] for key in TRAFFIC)
        seconds = found["cost/seconds"] / metrics[0]["cost/seconds"]
        print(
            f"{name} {variant or 'default'}: {shown(found, mean)}  rho {rho:.3f}  KS {ks:.3f}  bytes {share:.0%}  "
            f"seconds {seconds:.0%}  {stored.record().rounds[-1].notes}",
            flush=True,
        )
    if asked.after:
        goal = later(retrained[0], False)
        for locked in (False, True):
            print(f"ten rounds later, {'locked' if locked else 'free'}: {shown(later(answers[0], locked), goal)}")


def shown(found: dict[str, float], goal: dict[str, float]) -> str:
    """Differences of recall: forget R@1, R@5 and R@10, retain R@1, test R@1."""
    gaps = [f"{found[key] - goal[key]:+.1f}" for key in KEYS]
    return f"forget {' / '.join(gaps[:3])}, retain {gaps[3]}, test {gaps[4]}"


if __name__ == "__main__":
    main()
