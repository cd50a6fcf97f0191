"""What a smaller history costs an answer: one training and request, with updates stored whole, halved and in part.

python benchmarks/retention.py [--every 2 4] [--seeds 0 1] [--small] [--write]

Generated scenes, the default model. The training is the same to the bit; only what is stored of it differs. `--every`
stores the updates of one round in so many: the leaving client or the remaining ones repeat the others. `--write` writes
the section `retention` of docs/benchmarks.md.
"""

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

from marked import write_section

from ease.federation.middleware import Guarded
from ease.methods import make_method
from ease.methods.base import Unlearner
from ease.methods.retrain import Retrain
from ease.params import Params
from ease.requests.request import ClientRequest
from ease.runs.answers import trained_of
from ease.runs.config import load_config
from ease.runs.evaluation import evaluation_sets, measure
from ease.runs.run import Run
from ease.runs.world import World

EASE, ERASER, OTHERS = "EASE", "FedEraser", "EASE, others repeat"
METHODS: dict[str, tuple[str, tuple[str, ...]]] = {
    EASE: ("ease", ()),
    ERASER: ("fed_eraser", ()),
    OTHERS: ("ease", ("contribution_source=remaining",)),
}
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


@dataclass(frozen=True)
class Answer:
    """Where a method ended, and what of the pairs is found there."""

    state: Params
    recalls: dict[str, float]


@dataclass(frozen=True)
class Kept:
    """A run by how its history is stored: its size, the trained state and answers by their titles."""

    bytes: int
    trained: Params
    answers: dict[str, Answer]


def ways(every: list[int]) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    """How a history is stored -> settings, and whose answers are compared; the whole one first."""
    found: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
        "whole": ((), (EASE, ERASER)),
        "halved": (('training.history_precision="float16"',), (EASE, ERASER)),
    }
    return found | {f"1 round in {each}": ((f"training.history_every={each}",), (EASE, OTHERS)) for each in every}


def answers(seed: int, rounds: int, sizes: tuple[str, ...], every: list[int]) -> tuple[dict[str, Kept], list[Answer]]:
    """By how the history is stored, what becomes of a request; and two retrainings in different order."""
    found: dict[str, Kept] = {}
    retrained: list[Answer] = []
    with tempfile.TemporaryDirectory(prefix="ease-retention-") as name:
        for way, (settings, titles) in ways(every).items():
            config = load_config(None, (*sizes, f"seed={seed}", f"training.rounds={rounds}", *settings))
            world = World.open(config)
            run = Run.create(Path(name) / way, config)
            for _ in run.train(world):
                pass
            request = ClientRequest(clients=(world.shards[3].client,))
            sets, sound = evaluation_sets(world, request), Guarded(world.federation, config.training)

            def answer(method: Unlearner) -> Answer:
                *_, last = method.unlearn(trained_of(run), request, sound)  # noqa: B023 called at once
                return Answer(last.state, measure(world, last.state, sets))  # noqa: B023

            size = sum(path.stat().st_size for path in run.folder.glob("rounds/*/*"))
            ends = {title: answer(make_method(*METHODS[title])) for title in titles}
            found[way] = Kept(size, run.history.state(rounds), ends)
            retrained = retrained or [answer(Retrain(order=order)) for order in (0, 1)]
    first = found["whole"].trained
    assert all(kept.trained == first for kept in found.values()), "the training itself must not differ"
    return found, retrained


def apart(one: Params, two: Params, start: Params) -> float:
    return (one - two).norm() / (two - start).norm()


def section(seeds: dict[int, tuple[dict[str, Kept], list[Answer]]], rounds: int, every: list[int], small: bool) -> str:
    """The part of docs/benchmarks.md."""
    sort = "240 pairs at 4 clients, projectors 64 and 32 wide" if small else "the default model"
    options = f"{' --small' if small else ''}{' --every ' + ' '.join(map(str, every)) if every else ''}"
    lines = [
        f"Generated scenes, {sort}, {rounds} rounds; client 3 leaves. The training is equal to the bit; "
        '`training.history_precision = "float16"` rounds what is stored of it, `training.history_every = k` stores '
        "the updates of one round in k. Then the leaving client repeats the other rounds, or the remaining clients do "
        "(`contribution_source=remaining`). Apart: distance to the answer from the whole history, "
        "as a share of how far that lies from the trained model; R@1 in points, less that of the whole. Beside it, how "
        "much two retrainings in different order differ. "
        f"`python benchmarks/retention.py{options} --rounds {rounds} "
        f"--seeds {' '.join(map(str, seeds))} --write`.",
        "",
        "| seed | stored | | apart | forget | retain | test | MiB of rounds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for seed, (found, retrained) in seeds.items():
        whole = found["whole"]
        rows = [
            (way, title, whole.answers[EASE if title == OTHERS else title], answer, f"{kept.bytes / 2**20:.1f}")
            for way, kept in found.items()
            if way != "whole"
            for title, answer in kept.answers.items()
        ]
        rows.append(("whole", "two retrainings", retrained[0], retrained[1], f"{whole.bytes / 2**20:.1f}"))
        for way, title, one, other, size in rows:
            gaps = [other.recalls[f"{kind}/recall@1"] - one.recalls[f"{kind}/recall@1"] for kind in KINDS]
            distance = f"{apart(other.state, one.state, whole.trained):.1e}"
            lines.append(
                "| " + " | ".join([str(seed), way, title, distance, *(f"{g:+.2f}" for g in gaps), size]) + " |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--every", nargs="*", type=int, default=[], help="also store one round in so many")
    parser.add_argument("--small", action="store_true", help="240 pairs at 4 clients, projectors alone: seconds")
    parser.add_argument("--write", action="store_true", help="write the table into docs/benchmarks.md")
    options = parser.parse_args()
    sizes = SMALL if options.small else ()
    found = {seed: answers(seed, options.rounds, sizes, options.every) for seed in options.seeds}
    reported = section(found, options.rounds, options.every, options.small)
    print(reported)
    if options.write:
        write_section(Path(__file__).parent.parent / "docs/benchmarks.md", "retention", reported)


if __name__ == "__main__":
    main()
