"""What the commands do, with progress: library calls that end in a printable summary."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import RenderableType

from ease.audit.evaluate import recalls
from ease.audit.retrieval import GalleryRecall
from ease.console import errors, megabytes, rounds_bar, table
from ease.params import Params
from ease.run import Run, RunConfig, World
from ease.storage import write_json


@dataclass(frozen=True)
class TrainSummary:
    """What a training run reached."""

    folder: Path
    rounds: int
    loss: float
    recalls: dict[str, GalleryRecall]
    before: dict[str, GalleryRecall]
    bytes_down: int
    bytes_up: int
    parameters: int

    def as_json(self) -> dict[str, Any]:
        metrics: dict[str, float] = {}
        for name, result in self.recalls.items():
            metrics |= result.metrics(name)
        metrics |= {f"initial/{name}/recall@1": result["recall@1"].mean for name, result in self.before.items()}
        metrics |= {"cost/bytes_down": self.bytes_down, "cost/bytes_up": self.bytes_up}
        return {"run": str(self.folder), "rounds": self.rounds, "loss": self.loss, "parameters": self.parameters, "metrics": metrics}

    def render(self) -> Iterator[RenderableType]:
        size = next(iter(self.recalls.values())).size
        chance = next(iter(self.recalls.values())).chance
        labels = {"seen": "training pairs", "unseen": "held-out pairs, same clients", "test": "test pairs"}
        rows = [
            [labels[name], *(f"{result[f'recall@{k}'].mean:.1f}" for k in (1, 5, 10)), f"{self.before[name]['recall@1'].mean:.1f}"]
            for name, result in self.recalls.items()
        ]
        rows.append(["chance", *(f"{chance[k]:.1f}" for k in (1, 5, 10)), f"{chance[1]:.1f}"])
        yield table(
            f"Recall in percent after {self.rounds} rounds (galleries of {size} pairs)",
            ["", "R@1", "R@5", "R@10", "R@1 before training"],
            rows,
        )
        yield (
            f"{self.parameters:,} trained values; {megabytes(self.bytes_down)} sent to clients, "
            f"{megabytes(self.bytes_up)} received; loss {self.loss:.3f}; run kept in {self.folder}"
        )


def train_run(config: RunConfig, out: Path, quiet: bool) -> TrainSummary:
    """Train in a run directory, continuing what is there, and measure the result."""
    run = Run.create(out, config)
    with _status("preparing data and backbone", quiet):
        world = World.open(config)
    done = run.history.rounds()
    with rounds_bar("training", config.training.rounds, done, quiet) as bar:
        for record in run.train(world):
            rejected = {"rejected": ", ".join(record["rejected"])} if record["rejected"] else {}
            bar.step(loss=f"{record['loss']:.3f}", clients=str(len(record["pairs"])), **rejected)
    with _status("measuring recall", quiet):
        summary = _summarise(run, world)
    write_json(out / "summary.json", summary.as_json())
    return summary


def _summarise(run: Run, world: World) -> TrainSummary:
    history = run.history
    rounds = history.rounds()
    records = [history.record(number) for number in range(1, rounds + 1)]
    final = history.state(rounds)
    return TrainSummary(
        folder=run.folder,
        rounds=rounds,
        loss=records[-1]["loss"],
        recalls=recall_sets(world, final),
        before=recall_sets(world, history.initial()),
        bytes_down=sum(record["bytes_down"] for record in records),
        bytes_up=sum(record["bytes_up"] for record in records),
        parameters=final.size,
    )


def recall_sets(world: World, state: Params) -> dict[str, GalleryRecall]:
    """Recall on training pairs, on held-out pairs of the same clients and on test pairs."""
    sets = {
        "seen": np.concatenate([shard.train for shard in world.shards]),
        "unseen": np.concatenate([shard.validation for shard in world.shards]),
        "test": world.pairs.indices("test"),
    }
    sets = {name: positions for name, positions in sets.items() if len(positions) > 1}
    return recalls(world.model, state, world.activations, sets, world.config.gallery, world.device)


def _status(text: str, quiet: bool):
    """A spinner while something takes a moment."""
    from contextlib import nullcontext

    return nullcontext() if quiet else errors.status(text)
