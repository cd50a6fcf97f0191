"""What a history in half precision costs an answer: one training and request, with updates stored whole and halved.

python benchmarks/retention.py [--seeds 0 1] [--small] [--write]

Generated scenes, the default model. The training is the same to the bit; only what is stored of it differs. `--write`
writes the section `retention` of docs/benchmarks.md.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from marked import write_section

from ease.federation.checked import checked
from ease.methods import make_method
from ease.methods.retrain import Retrain
from ease.params import Params
from ease.requests.request import ClientRequest
from ease.runs.answers import trained_of
from ease.runs.config import load_config
from ease.runs.evaluation import evaluation_sets, measure
from ease.runs.run import Run
from ease.runs.world import World

METHODS = {"ease": "EASE", "fed_eraser": "FedEraser"}
SMALL = (
    'model.lora="off"',
    "model.hidden=64",
    "model.embedding=32",
    "data.train=240",
    "data.validation=40",
    "data.test=20",
    "gallery=20",
    "partition.clients=4",
    "partition.classes=3",
)
KINDS = ("forget", "retain", "test")


def answers(seed: int, rounds: int, sizes: tuple[str, ...]) -> dict[str, Any]:
    """The end of each method by each precision, its recalls, and the size of the history; and another retraining."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="ease-retention-") as name:
        for precision in ("float32", "float16"):
            settings = (f"seed={seed}", f"training.rounds={rounds}", f'training.history_precision="{precision}"')
            config = load_config(None, (*sizes, *settings))
            world = World.open(config)
            run = Run.create(Path(name) / precision, config)
            for _ in run.train(world):
                pass
            request = ClientRequest(clients=(world.shards[3].client,))
            sets = evaluation_sets(world, request)
            size = sum(path.stat().st_size for path in run.folder.glob("rounds/*/*"))
            sound = checked(world.federation, config.training)
            kept: dict[str, Any] = {"bytes": size, "trained": run.history.state(rounds)}
            for method in (*METHODS, *(["retrain"] if precision == "float32" else [])):
                *_, last = make_method(method).unlearn(trained_of(run), request, sound)
                kept[method] = last.state, measure(world, last.state, sets)
            found[precision] = kept
        *_, last = Retrain(order=1).unlearn(trained_of(run), request, sound)
        found["other"] = last.state, measure(world, last.state, sets)
    assert found["float32"]["trained"] == found["float16"]["trained"], "the training itself must not differ"
    return found


def apart(one: Params, two: Params, start: Params) -> float:
    return (one - two).norm() / (two - start).norm()


def section(seeds: dict[int, dict[str, Any]], rounds: int, small: bool) -> str:
    """The part of docs/benchmarks.md."""
    sort = "240 pairs at 4 clients, projectors 64 and 32 wide" if small else "the default model"
    lines = [
        f"Generated scenes, {sort}, {rounds} rounds; client 3 leaves. The training is equal to the bit; "
        '`training.history_precision = "float16"` rounds what is stored of it. Apart: distance of the two answers, as '
        "a share of how far the answer lies from the trained model; R@1 in points, halved less whole. Beside it, how "
        "much two retrainings in different order differ. "
        f"`python benchmarks/retention.py{' --small' if small else ''} --rounds {rounds} --write`.",
        "",
        "| seed | | apart | forget | retain | test |",
        "|---|---|---|---|---|---|",
    ]
    for seed, found in seeds.items():
        whole, half = found["float32"], found["float16"]
        pairs = [(title, whole[method], half[method]) for method, title in METHODS.items()]
        pairs.append(("two retrainings", whole["retrain"], found["other"]))
        for title, (state, recalls), (other, others) in pairs:
            gaps = [others[f"{kind}/recall@1"] - recalls[f"{kind}/recall@1"] for kind in KINDS]
            cells = [str(seed), title, f"{apart(other, state, whole['trained']):.1e}", *(f"{gap:+.2f}" for gap in gaps)]
            lines.append("| " + " | ".join(cells) + " |")
    sizes = [[found[each]["bytes"] / 2**20 for each in ("float32", "float16")] for found in seeds.values()]
    lines += ["", f"Rounds on disk: {sizes[0][0]:.1f} MiB whole, {sizes[0][1]:.1f} MiB halved (states stay whole)."]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--small", action="store_true", help="240 pairs at 4 clients, projectors alone: seconds")
    parser.add_argument("--write", action="store_true", help="write the table into docs/benchmarks.md")
    options = parser.parse_args()
    sizes = SMALL if options.small else ()
    found = {seed: answers(seed, options.rounds, sizes) for seed in options.seeds}
    told = section(found, options.rounds, options.small)
    print(told)
    if options.write:
        write_section(Path(__file__).parent.parent / "docs/benchmarks.md", "retention", told)


if __name__ == "__main__":
    main()
