"""Which share of the forget contribution has to be subtracted, measured against retraining.

    python benchmarks/shares.py measure class --seed 60 --out results/shares
    python benchmarks/shares.py fit results/shares --write

`measure` trains, retrains in two orders, subtracts several shares, recovers from each and writes one line per share and
recovery round. `fit` reads these lines, prints the share at which each quantity equals its retrained value, and with
`--write` puts the means into src/ease/assets/share_prior.toml. It looks at retrained models, so it chooses constants
and is never part of an answer. Use other seeds for reporting.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch
from scipy.stats import ks_2samp

from ease.audit.membership_scores import measure_scores
from ease.federation.fedavg import average, participants
from ease.measures.alignment import alignment_residual
from ease.methods import make_method
from ease.methods.base import Trained, forget_clients, retained_clients
from ease.methods.ease.contribution import ForgetContribution, contribution_of
from ease.methods.ease.method import CLIENT_RECOVERY, REPLAY_RECOVERY, final_loss, halved
from ease.params import Params
from ease.requests.request import Request
from ease.runs.answers import open_world, trained_of
from ease.runs.config import load_config
from ease.runs.evaluation import evaluation_sets, measure, similarities
from ease.runs.run import Run
from ease.runs.world import World
from ease.studies.scenarios import scenario_config, scenario_request

PRIOR = Path(__file__).parents[1] / "src" / "ease" / "assets" / "share_prior.toml"
HEADER = """\
# Share of the forget contribution that EASE subtracts (docs/method.md): the number of the request's kind, plus
# `per_loss` times the final training loss, plus `adam` if clients train with Adam.
# Refit with: python benchmarks/shares.py fit results/shares --write
"""
FORGET = ("forget/recall@1", "forget/recall@5", "forget/recall@10")
KINDS = ("client", "class", "sample")
KEYS = (*FORGET, "retain/recall@1", "test/recall@1")


@dataclass(frozen=True)
class Bench:
    """One request with its retrained references."""

    world: World
    trained: Trained
    request: Request
    references: tuple[Params, ...]

    @classmethod
    def of(cls, scenario: Any, seed: int, config: Path | None, settings: Sequence[str], work: Path) -> "Bench":
        loaded = scenario_config(load_config(config, (f"seed={seed}", *settings)), scenario)
        run = Run.create(work, loaded)
        world = open_world(run)
        for _ in run.train(world):
            pass
        trained, request = trained_of(run), scenario_request(world, scenario, seed)
        states = []
        for order in (0, 1):
            *_, last = make_method("retrain", (f"order={order}",)).unlearn(trained, request, world.federation)
            states.append(last.state)
        return cls(world, trained, request, tuple(states))

    def values(self, state: Params) -> dict[str, float]:
        """Recalls, mean similarity and mean membership score of the forget pairs."""
        sets = evaluation_sets(self.world, self.request)
        found = measure(self.world, state, sets)
        federation = self.world.federation
        holders = forget_clients(self.request, federation)
        scores = measure_scores(self.trained, state, self.request, federation, holders)
        forget = torch.cat([values["forget"] for values in scores.values()])
        similarity = similarities(self.world, state, sets["forget"])
        tests = similarities(self.world, state, sets["test"])
        return {key: found[key] for key in KEYS} | {
            "similarity": float(similarity.mean()),
            "test similarity": float(tests.mean()),
            "score": float(forget.mean()),
        }

    def distances(self, state: Params) -> dict[str, float]:
        """rho and KS to the retrained models, means over both."""
        forget = evaluation_sets(self.world, self.request)["forget"]
        before, now = (similarities(self.world, each, forget) for each in (self.trained.start, state))
        goals = [similarities(self.world, each, forget) for each in self.references if each is not state]
        return {
            "rho": float(np.mean([float(alignment_residual(now, before, goal)) for goal in goals])),
            "ks": float(np.mean([ks_2samp(now.numpy(), goal.numpy()).statistic for goal in goals])),
        }

    def row(self, state: Params) -> dict[str, float]:
        return self.values(state) | self.distances(state)

    def contribution(self, **settings: Any) -> ForgetContribution:
        return contribution_of(self.trained, self.request, self.world.federation, **settings)

    def recovery(self, state: Params, rounds: int) -> Iterator[tuple[Params, float | None]]:
        """Plain FedAvg rounds on retained pairs, as `ease` runs them; the state and the loss after each."""
        trained, federation = self.trained, self.world.federation
        clients, training = retained_clients(self.request, federation), trained.training
        for number in range(1, rounds + 1):
            job = training.job(number, trained.seed, trained.temperature, "ease", request=self.request, data="retain")
            drawn = participants(clients, training, trained.seed, number)
            finished = average(state, federation.run(halved(state), job, drawn), training, number)
            state = finished.state
            yield state, finished.loss


def measured(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    name = f"{asked.scenario}-{asked.seed}-{asked.label}"
    bench = Bench.of(asked.scenario, asked.seed, asked.config, asked.settings, asked.out / "runs" / name)
    common = {
        "scenario": asked.scenario,
        "seed": asked.seed,
        "label": asked.label,
        "optimiser": bench.trained.training.optimiser,
        "training_rounds": bench.trained.training.rounds,
    }
    yield {**common, "model": "trained", **bench.row(bench.trained.start)}
    for order, state in enumerate(bench.references):
        yield {**common, "model": f"retrain {order}", **bench.row(state)}
    total = bench.contribution(precision=asked.precision).total
    for share in asked.shares:
        start = bench.trained.base_state - share * total
        for number, (state, loss) in enumerate(bench.recovery(start, asked.rounds), start=1):
            fields = {"share": share, "round": number, "loss": loss, "final_loss": final_loss(bench.trained)}
            yield {**common, "model": "ease", **fields, **bench.row(state)}


def right_shares(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each request, the share at which recall and membership scores equal their retrained values, averaged."""
    requests = defaultdict(list)
    for row in rows:
        requests[row["optimiser"], row["scenario"], row["label"], row["seed"]].append(row)
    found = []
    for (optimiser, kind, label, seed), each in sorted(requests.items()):
        share = CLIENT_RECOVERY if kind == "client" else REPLAY_RECOVERY
        last = max(1, round(share * each[0]["training_rounds"]))
        retrained = [row for row in each if row["model"].startswith("retrain")]
        ours = sorted((row for row in each if row.get("round") == last), key=lambda row: row["share"])
        crossings = [crossing(ours, retrained, keys) for keys in (FORGET, ("score",))]
        found.append(
            {
                "kind": kind,
                "adam": float(optimiser == "adam"),
                "loss": ours[0]["final_loss"],
                "share": float(np.mean(crossings)),
                "name": f"{label} {seed}",
            }
        )
    return found


def crossing(ours: Sequence[dict[str, Any]], retrained: Sequence[dict[str, Any]], keys: Sequence[str]) -> float:
    """The share at which the mean of some quantities equals that of retrained models, by linear interpolation."""
    goal = np.mean([[row[key] for key in keys] for row in retrained])
    shares = [row["share"] for row in ours]
    gaps = [float(np.mean([row[key] for key in keys]) - goal) for row in ours]
    for (one, before), (two, after) in pairwise(zip(shares, gaps, strict=True)):
        if before * after <= 0 and before != after:
            return float(one + (two - one) * before / (before - after))
    slope, offset = np.polyfit(shares, gaps, 1)
    return float(-offset / slope)


def fit(asked: argparse.Namespace) -> None:
    """Least squares: one number for each kind, one for Adam, one times the final loss."""
    rows = [json.loads(line) for path in sorted(asked.out.glob("*.jsonl")) for line in path.read_text().splitlines()]
    found = right_shares(rows)
    design = np.array([[*(float(one["kind"] == kind) for kind in KINDS), one["loss"], one["adam"]] for one in found])
    shares = np.array([one["share"] for one in found])
    numbers, *_ = np.linalg.lstsq(design, shares, rcond=None)
    for one, residual in zip(found, shares - design @ numbers, strict=True):
        print(f"{one['kind']:7}{one['name']:14} loss {one['loss']:.3f}  share {one['share']:.3f}  {residual:+.3f}")
    by_kind = design[:, : len(KINDS)]
    constants, *_ = np.linalg.lstsq(by_kind, shares, rcond=None)
    print(
        f"spread of residuals {(shares - design @ numbers).std():.3f}, of constants alone "
        f"{(shares - by_kind @ constants).std():.3f}, n = {len(found)}"
    )
    prior = dict(zip((*KINDS, "per_loss", "adam"), (round(float(number), 3) for number in numbers), strict=True))
    print(prior)
    if asked.write:
        PRIOR.write_text(HEADER + tomli_w.dumps(prior))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(required=True)
    one = parts.add_parser("measure")
    one.add_argument("scenario", choices=("client", "class", "sample"))
    one.add_argument("--seed", type=int, default=60)
    one.add_argument("--shares", type=float, nargs="+", default=(0.7, 0.8, 0.9, 1.0))
    one.add_argument("--rounds", type=int, default=4, help="rounds of recovery")
    one.add_argument("--precision", default="auto", help="of replays")
    one.add_argument("--config", type=Path, help="TOML of the run")
    one.add_argument("--label", default="scenes", help="names the world in the results")
    one.add_argument("--set", action="append", default=[], dest="settings", help="a setting of the run; repeatable")
    one.add_argument("--out", type=Path, default=Path("results/shares"))
    both = parts.add_parser("fit")
    both.add_argument("out", type=Path)
    both.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if not hasattr(asked, "scenario"):
        fit(asked)
        return
    asked.out.mkdir(parents=True, exist_ok=True)
    path = asked.out / f"{asked.label}-{asked.scenario}-{asked.seed}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in measured(asked)))


if __name__ == "__main__":
    main()
