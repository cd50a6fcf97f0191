"""How often the audit's verdict is wrong: fresh retrainings must pass, models that keep or lose too much must not.

    python benchmarks/verdict.py judge client --seed 0 --fresh 5 --methods ease,finetune --out results/verdict
    python benchmarks/verdict.py table results/verdict

`judge` trains, answers and audits one request and writes one line for each judged model; `table` counts over all files.
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

import torch

from ease.audit.config import AuditConfig
from ease.methods import make_method
from ease.methods.retrain import Retrain
from ease.params import Params
from ease.runs.answers import answer_of, open_world
from ease.runs.audit import Audit
from ease.runs.config import load_config
from ease.runs.forget import forget
from ease.runs.resolve import request_id
from ease.runs.run import Run
from ease.studies.scenarios import scenario_config, scenario_request

KEPT = (-0.5, -0.2, -0.1, 0.05, 0.1, 0.2, 0.5, 1.0)


def judge(asked: argparse.Namespace) -> Iterator[dict[str, object]]:
    config = load_config(asked.config, (f"seed={asked.seed}", *asked.settings))
    run = Run.create(asked.work / f"{asked.scenario}-{asked.seed}", scenario_config(config, asked.scenario))
    world = open_world(run)
    for _ in run.train(world):
        pass
    request = scenario_request(world, asked.scenario, asked.seed)
    names = asked.methods.split(",")
    for method in (Retrain(), *(make_method(name.split(":")[0], name.split(":")[1:]) for name in names)):
        for _ in forget(run, world, request, method, observe=False):
            pass
    settings = AuditConfig(shadows=asked.shadows, retrains=asked.retrains, workers=1)
    for place, name in enumerate(names):
        method = make_method(name.split(":")[0], name.split(":")[1:])
        answer = answer_of(run, request, method)
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
            models |= {f"keeps {share:+.0%}": fresh[0] + share * (trained - fresh[0]) for share in KEPT}
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


def table(folder: Path) -> Iterator[str]:
    """Share that passed and the mean p-value, by kind of model."""
    rows = defaultdict(list)
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            found = json.loads(line)
            kind = "fresh retraining" if found["model"].startswith("fresh") else found["model"]
            rows[kind].append(found)
    yield "| model | judged | passed | cannot tell | median p |"
    yield "|---|---|---|---|---|"
    for kind, found in rows.items():
        passed = sum(each["passed"] is True for each in found)
        unknown = sum(each["passed"] is None for each in found)
        middle = sorted(each["p"] for each in found)[len(found) // 2]
        yield f"| {kind} | {len(found)} | {passed} | {unknown} | {middle:.3g} |"


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
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.command == "table":
        print("\n".join(table(asked.folder)))
        return
    asked.out.mkdir(parents=True, exist_ok=True)
    with (asked.out / f"{asked.scenario}-{asked.seed}.jsonl").open("w") as file:
        for found in judge(asked):
            print(json.dumps(found), file=file, flush=True)
            print(found["model"], f"p {found['p']:.3g}", found["reason"], f"{found['seconds']:.1f} s", flush=True)


if __name__ == "__main__":
    main()
