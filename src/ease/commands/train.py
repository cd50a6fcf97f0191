"""What `ease train` does, with progress: library calls that end in a printable summary."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import RenderableType

from ease.audit.preflight import audit_prospects
from ease.console import errors, labelled, megabytes, rounds_bar, status, table, tell_left_out
from ease.data.features import cached_cut
from ease.data.report import DataReport
from ease.errors import UserError
from ease.federation.fedavg import Round
from ease.measures.evaluate import recalls
from ease.measures.retrieval import GalleryRecall
from ease.params import Params
from ease.runs.answers import open_world, release_only_result
from ease.runs.config import RunConfig
from ease.runs.forget import check_trains_on
from ease.runs.run import Run
from ease.runs.world import World
from ease.storage import write_json
from ease.trainers import trainer_of


@dataclass(frozen=True)
class TrainSummary:
    """What a training run reached."""

    folder: Path
    rounds: int
    loss: float | None
    """Of the last round; a closed-form head has none."""
    recalls: dict[str, GalleryRecall]
    before: dict[str, GalleryRecall]
    bytes_down: int
    bytes_up: int
    parameters: int
    data: DataReport | None = None
    """What was odd in the files; None for generated data."""
    prospects: str = ""
    """Why an audit would be refused, where it would."""
    advice: str = ""
    """Whether another kind of model may suit better."""

    def as_json(self) -> dict[str, Any]:
        metrics: dict[str, float] = {}
        for name, result in self.recalls.items():
            metrics |= result.metrics(name)
        metrics |= {f"initial/{name}/recall@1": result["recall@1"].mean for name, result in self.before.items()}
        metrics |= {"cost/bytes_down": self.bytes_down, "cost/bytes_up": self.bytes_up}
        return {
            "run": str(self.folder),
            "rounds": self.rounds,
            "loss": self.loss,
            "parameters": self.parameters,
            "metrics": metrics,
            **({"data": {**self.data.splits, **self.data.counts()}} if self.data else {}),
            **({"prospects": self.prospects} if self.prospects else {}),
            **({"advice": self.advice} if self.advice else {}),
        }

    def render(self) -> Iterator[RenderableType]:
        size = next(iter(self.recalls.values())).size
        chance = next(iter(self.recalls.values())).chance
        labels = {"seen": "training pairs", "unseen": "held-out pairs, same clients", "test": "test pairs"}
        rows = [
            [
                labels[name],
                *(f"{result[f'recall@{k}'].mean:.1f}" for k in (1, 5, 10)),
                f"{self.before[name]['recall@1'].mean:.1f}",
            ]
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
            f"{megabytes(self.bytes_up)} received; "
            + ("solved from sums" if self.loss is None else f"loss {self.loss:.3f}")
            + (f"; run kept in {self.folder}" if self.folder.exists() else "")
        )
        if self.prospects:
            yield labelled("audit", self.prospects, "yellow")
        if self.advice:
            yield labelled("model", self.advice)


FROZEN = (
    "its towers are frozen, so a closed-form head could take its place, for which forgetting is exact; "
    "`ease compare` tries both on your data"
)


def train_run(config: RunConfig, out: Path, quiet: bool) -> TrainSummary:
    """Train in a run directory, continuing what is there, and measure the result."""
    run = Run.plan(out, config)
    released = release_only_result(run)
    if released and not quiet:
        errors.print(
            f"going on from {released.answer}: what it forgot is not trained on again", soft_wrap=True, markup=False
        )
    with status("preparing data and backbone", quiet):
        world = open_world(run)
        report = _data_report(world)
    for line in report.lines() if report and not quiet else ():  # before training, while it can still be corrected
        errors.print(line, soft_wrap=True, markup=False, highlight=False)
    tell_threads(run)
    run = Run.create(out, config)  # only now, so that a configuration that cannot work leaves nothing behind
    done = run.history.rounds()
    with rounds_bar("training", run.config.training.rounds, done, quiet) as bar:
        for finished in run.train(world):
            bar.step(**({} if quiet else _figures(world, finished)))
            tell_left_out(f"round {finished.number}", finished.rejected, quiet)
    with status("measuring recall", quiet):
        advice = FROZEN if config.model.lora == "off" and trainer_of(config.model) == "fedavg" else ""
        summary = replace(_summarise(run, world), data=report, prospects=audit_prospects(world), advice=advice)
    write_json(out / "summary.json", summary.as_json())
    return summary


def train_more(folder: Path, until: int, quiet: bool) -> TrainSummary:
    """Go on with a run until it has so many rounds; the same call again finds them there."""
    config = Run.load(folder).config
    check_trains_on(Run.load(folder), f"--until {until}")
    if until < config.training.rounds:
        raise UserError(f"--until {until}: {folder} has {config.training.rounds} rounds; name more")
    grown = config.training.model_copy(update={"rounds": until})
    return train_run(config.model_copy(update={"training": grown}), folder, quiet)


def tell_threads(run: Run) -> None:
    """Say it where another number of threads would give other bytes."""
    if note := run.threads_note():
        errors.print(note, soft_wrap=True, markup=False, highlight=False)


def tell_unfinished(run: Run) -> None:
    """Print a line if training stopped early and the last finished round is used."""
    if note := run.unfinished_note():
        errors.print(note, soft_wrap=True, markup=False, highlight=False)


def _data_report(world: World) -> DataReport | None:
    """What was odd in the files of the data; nothing for generated data."""
    pairs = world.evaluator.pairs
    return pairs.report and replace(pairs.report, cut_captions=cached_cut(pairs, world.server.backbone))


def _figures(world: World, finished: Round) -> dict[str, str]:
    """A round in a few words, with the recall on pairs no client trained on."""
    figures = {"clients": str(len(finished.updates)), "loss": "-" if finished.loss is None else f"{finished.loss:.3f}"}
    held_out = np.concatenate([shard.validation for shard in world.shards])
    if len(held_out) > 1:
        seen = world.evaluator
        unseen = recalls(seen.model, finished.state, seen.activations, {"unseen": held_out}, 200, seen.device, draws=1)
        figures["unseen R@1"] = f"{unseen['unseen']['recall@1'].mean:.1f}"
    if finished.rejected:
        figures["left out"] = ", ".join(map(str, finished.rejected))
    return figures


def _summarise(run: Run, world: World) -> TrainSummary:
    history = run.history
    rounds = history.rounds()
    records = [history.record(number) for number in range(1, rounds + 1)]
    final = history.state(rounds)
    return TrainSummary(
        folder=run.folder,
        rounds=rounds,
        loss=records[-1].loss,
        recalls=recall_sets(world, final),
        before=recall_sets(world, history.initial()),
        bytes_down=sum(record.bytes_down for record in records),
        bytes_up=sum(record.bytes_up for record in records),
        parameters=final.size,
    )


def recall_sets(world: World, state: Params) -> dict[str, GalleryRecall]:
    """Recall on training pairs, on held-out pairs of the same clients and on test pairs."""
    sets = {
        "seen": world.evaluator.data(np.concatenate([shard.train for shard in world.shards])),
        "unseen": np.concatenate([shard.validation for shard in world.shards]),
        "test": world.evaluator.test,
    }
    sets = {name: positions for name, positions in sets.items() if len(positions) > 1}
    seen = world.evaluator
    return recalls(seen.model, state, seen.activations, sets, world.config.gallery, seen.device)
