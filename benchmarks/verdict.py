"""How often the audit's verdict is wrong: fresh retrainings must pass, models that keep or lose too much must not.

    python benchmarks/verdict.py all --processes 16 --out results/verdict
    python benchmarks/verdict.py judge client --seed 0 --fresh 5 --methods ease,finetune --out results/verdict
    python benchmarks/verdict.py table results/verdict --figure docs/figures/verdict.svg

`judge` trains, answers and audits one request and writes one line for each judged model; `all` does so for the requests
behind docs/error-rates.md, each in a process of its own with one thread; `table` judges the stored measures again and
prints the tables of that page. Finished work is kept: run the same command again to resume.
Fresh retrainings are further orders of the data that the verdict has not seen. Models that keep a share of the forget
effect lie between such a fresh retraining and the trained model; below 0 they lie beyond it.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ease.audit.band import prediction_band
from ease.audit.config import AuditConfig
from ease.audit.joint import JointTest
from ease.audit.runner import Audit, AuditBatch
from ease.audit.verdict import Measure, Verdict, judged_together
from ease.methods import make_method
from ease.methods.base import Unlearner
from ease.methods.retrain import Retrain
from ease.params import Params
from ease.runs.answers import answer_of, open_world
from ease.runs.config import load_config
from ease.runs.forget import forget
from ease.runs.resolve import request_id
from ease.runs.run import Run
from ease.seeding import generator
from ease.studies.scenarios import scenario_config, scenario_request

SCENARIOS = ("client", "class", "sample")
KEPT = (-0.5, -0.2, -0.1, 0.05, 0.1, 0.2, 0.5, 1.0)


def named_method(text: str) -> Unlearner:
    """A method by its name, and by its settings after colons."""
    name, *settings = text.split(":")
    return make_method(name, settings)


def judge(asked: argparse.Namespace, done: set[str]) -> Iterator[dict[str, object]]:
    """One line for each model that is not `done` yet, as (method whose shadows attack it)/(model)."""
    began = time.perf_counter()

    def note(part: str) -> None:
        print(f"{asked.scenario} {asked.seed}: {part} after {time.perf_counter() - began:.0f} s", flush=True)

    config = load_config(asked.config, (f"seed={asked.seed}", *asked.settings))
    names = asked.methods.split(",")
    folder = f"{asked.data}-{asked.scenario}-{asked.seed}-{names[0].split(':')[0]}"
    run = Run.create(asked.work / folder, scenario_config(config, asked.scenario))
    world = open_world(run)
    for _ in run.train(world):
        pass
    note("trained")
    request = scenario_request(world, asked.scenario, asked.seed)
    for method in (Retrain(), *map(named_method, names)):
        for _ in forget(run, world, request, method, observe=False):
            pass
    note("answered")
    settings = AuditConfig(shadows=asked.shadows, retrains=asked.retrains, pool=asked.pool, workers=1)
    answers = [answer_of(run, request, named_method(name)) for name in names]
    audits = [Audit.of(run, world, f"{request_id(request)}/{each.folder.name}", settings) for each in answers]
    every = replace(audits[0], config=audits[0].config.model_copy(update={"retrains": asked.retrains + asked.fresh}))
    for _ in AuditBatch((every, *audits[1:])).shadows():
        pass
    note("shadows made")
    for place, (name, answer, audit) in enumerate(zip(names, answers, audits, strict=True)):
        models = {name: answer.model()}
        if place == 0:
            orders = range(asked.retrains + 1, asked.retrains + asked.fresh + 1)
            fresh = [Params.load(audit.plan.retrain_path(order)) for order in orders]
            models |= {f"fresh retraining {order}": state for order, state in zip(orders, fresh, strict=True)}
            trained = audit.trained.final
            for first in fresh[:1]:
                models |= {f"keeps {share:+.0%}": first + share * (trained - first) for share in KEPT}
        if place:
            audits[0].lend(audit)
        models = {model: state for model, state in models.items() if f"{name}/{model}" not in done}
        for model, found in zip(models, audit.instruments.measure_each(list(models.values())), strict=True):
            verdict, joint = found.verdict, found.verdict.joint
            assert joint is not None
            yield {
                "data": asked.data,
                "scenario": asked.scenario,
                "seed": asked.seed,
                "shadows": asked.shadows,
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
            }
    note("judged")


def everything(processes: int, out: Path, work: Path, shadows: int) -> Iterator[list[str]]:
    """What the tables of docs/error-rates.md are made of, the longest first.

    Four methods on seed 0, two of them in a process, and fresh retrainings of seeds that no choice was made by.
    """
    common = ["--shadows", str(shadows), "--out", str(out), "--work", str(work)]
    for methods in ("ease,fed_eraser", "not,finetune"):
        for scenario in reversed(SCENARIOS):
            yield ["judge", scenario, "--seed", "0", "--fresh", "0", "--methods", methods, *common]
    seeds = [(seed, scenario) for seed in range(5, 13) for scenario in reversed(SCENARIOS)]
    for seed, scenario in seeds[: max(processes - 6, 10)]:
        yield ["judge", scenario, "--seed", str(seed), "--fresh", "4", "--methods", "ease,finetune", *common]


def run_all(asked: argparse.Namespace) -> int:
    """Every request in a process of its own, so many at a time; returns how many failed."""
    # Each with one thread, and with freed memory kept: giving it back after every step costs a tenth.
    kept = {name: str(1 << 32) for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")}
    alone = {**os.environ, **kept, "OMP_NUM_THREADS": "1"}
    waiting = list(everything(asked.processes, asked.out, asked.work, asked.shadows))
    running: list[subprocess.Popen[bytes]] = []
    failed = 0
    while waiting or running:
        while waiting and len(running) < asked.processes:
            running.append(subprocess.Popen([sys.executable, __file__, *waiting.pop(0)], env=alone))
        time.sleep(0.5)
        failed += sum(bool(each.poll()) for each in running)
        running = [each for each in running if each.poll() is None]
    return failed


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
    """How often each kind of model passed, over all files; then what each method's answers were told."""
    rows, answers = defaultdict(list), defaultdict(list)
    for path in sorted(folder.rglob("*.jsonl")):
        for line in path.read_text().splitlines():
            found = json.loads(line)
            joint = judged_anew(found)
            if found["model"] == found["shadows of"]:
                answers[found["model"], found.get("data", "scenes"), found["scenario"]].append((found["seed"], joint))
            kind = "fresh retraining" if found["model"].startswith("fresh") else found["model"]
            rows[kind].append(joint)
    yield "| model | judged | passed | undecided | median p | share kept, median |"
    yield "|---|---|---|---|---|---|"
    for kind, found in sorted(rows.items(), key=lambda row: _order(row[0])):
        verdicts = [Verdict(measures=(), joint=joint).passed for joint in found]
        middle, kept = median(each.p_value for each in found), median(each.trace.value for each in found)
        counts = f"{len(found)} | {verdicts.count(True)} | {verdicts.count(None)}"
        yield f"| {kind} | {counts} | {middle:.2g} | {kept:+.1%} |"
    columns = sorted({key[1:] for key in answers})
    yield ""
    yield f"| | {' | '.join(f'{scenario}, {data}' for data, scenario in columns)} |"
    yield "|---" * (len(columns) + 1) + "|"
    for method in dict.fromkeys(key[0] for key in answers):
        cells = ("; ".join(_cell(*each) for each in sorted(answers.get((method, *c), []), key=_seed)) for c in columns)
        yield f"| {method} | {' | '.join(cells)} |"
    if figure:
        draw({kind: (sum(not each.passed for each in found), len(found)) for kind, found in rows.items()}, figure)


def _seed(entry: tuple[int, JointTest]) -> int:
    return entry[0]


def _order(kind: str) -> tuple[int, float, str]:
    share = float(kind.removeprefix("keeps ").rstrip("%")) if kind.startswith("keeps") else 0.0
    return (0 if kind.startswith("fresh") else 1 if share else 2), share, kind


def _cell(seed: int, joint: JointTest) -> str:
    """A verdict in a cell of a table."""
    said = {True: "**passed**", False: "refused", None: "undecided"}[Verdict(measures=(), joint=joint).passed]
    trace = joint.trace
    return f"seed {seed}: {said}, p {joint.p_value:.2g}, kept {trace.value:.1%} [{trace.low:.1%}, {trace.high:.1%}]"


def draw(refused: dict[str, tuple[int, int]], figure: Path) -> None:
    """Share of models that are refused, with 95 % intervals and counts, for each share of the effect that they keep.

    `refused` has the number of refused and of judged models of each kind.
    """
    from matplotlib import rc_context  # not needed where models are judged
    from matplotlib.figure import Figure
    from scipy.stats import binomtest

    from ease.show.figures import STYLE, encode

    kinds = sorted((_order(kind)[1], kind) for kind in refused if kind.startswith(("fresh", "keeps")))
    with rc_context(STYLE):
        drawn = Figure(figsize=(5.2, 2.6), layout="constrained")
        axis = drawn.subplots()
        for place, (share, kind) in enumerate(kinds):
            count, judged = refused[kind]
            value, interval = count / judged, binomtest(count, judged).proportion_ci(0.95, "wilson")
            spread = [[max(0.0, value - interval.low)], [max(0.0, interval.high - value)]]
            colour = "#d55e00" if share == 0 else "#0072b2"
            axis.errorbar([place], [value], spread, fmt="o", color=colour, capsize=3)
            axis.text(place, 1.1, f"{count} of {judged}", ha="center", fontsize=7)
        axis.axhline(0.05, color="#b0b0b0", linestyle="--", linewidth=1)
        axis.set_xticks(range(len(kinds)), ["retrained" if share == 0 else f"{share:+.0f} %" for share, _ in kinds])
        axis.set(xlabel="share of the forget effect kept", ylabel="share refused", ylim=(-0.03, 1.18))
        axis.set_xlim(-0.6, len(kinds) - 0.4)
        axis.set_yticks([0, 0.25, 0.5, 0.75, 1])
        figure.write_bytes(encode(drawn, "svg"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    judging, every = commands.add_parser("judge"), commands.add_parser("all")
    judging.add_argument("scenario", choices=SCENARIOS)
    judging.add_argument("--seed", type=int, default=0)
    judging.add_argument("--fresh", type=int, default=5, help="retrainings that are put through the verdict")
    judging.add_argument("--retrains", type=int, default=9)
    judging.add_argument("--shadows", type=int, default=16)
    judging.add_argument("--methods", default="ease", help="parted by commas; settings after colons: ease:replay=1.0")
    judging.add_argument("--config", type=Path, help="TOML of the run")
    judging.add_argument("--set", action="append", default=[], dest="settings", help="a setting of the run")
    judging.add_argument("--pool", type=int, default=AuditConfig().pool)
    judging.add_argument("--data", default="scenes", help="what tables call the data")
    every.add_argument("--processes", type=int, default=16)
    every.add_argument("--shadows", type=int, default=8)
    for each in (judging, every):
        each.add_argument("--work", type=Path, default=Path("results/verdict-runs"))
        each.add_argument("--out", type=Path, default=Path("results/verdict"))
    counting = commands.add_parser("table")
    counting.add_argument("folder", type=Path)
    counting.add_argument("--figure", type=Path, help="an SVG of how often which share is refused")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.command == "table":
        print("\n".join(table(asked.folder, asked.figure)))
        return
    if asked.command == "all":
        sys.exit(run_all(asked))
    asked.out.mkdir(parents=True, exist_ok=True)
    first = asked.methods.split(",")[0].split(":")[0]
    path = asked.out / f"{asked.data}-{asked.scenario}-{asked.seed}-{first}.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    with path.open("a") as file:
        for found in judge(asked, {f"{each['shadows of']}/{each['model']}" for each in lines}):
            print(json.dumps(found), file=file, flush=True)
            print(found["model"], f"p {found['p']:.3g}", found["reason"], flush=True)


if __name__ == "__main__":
    main()
