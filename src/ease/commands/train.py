"""`ease train`: trains with progress and returns a summary."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import RenderableType

from ease.audit.preflight import audit_prospects
from ease.config import Config
from ease.console import errors, labelled, megabytes, print_left_out, rounds_bar, status, table
from ease.data.features import cached_cut
from ease.data.report import DataReport
from ease.errors import UserError
from ease.events import emit_artefact, emit_metrics, emit_round, emit_start
from ease.federation.fedavg import Round
from ease.measures.evaluate import recalls
from ease.measures.retrieval import GalleryRecall
from ease.operations.ledger.names import check_accepted
from ease.params import Params
from ease.runs.answers import open_world, release_only_result
from ease.runs.config import RunConfig
from ease.runs.forget import check_trains_on
from ease.runs.records import Metrics
from ease.runs.run import Run
from ease.runs.world import World
from ease.storage import write_json
from ease.trainers import trainer_of

SETS = {"seen": "training pairs", "unseen": "held-out pairs, same clients", "test": "test pairs"}
"""Sets of pairs whose recall is measured, as tables name them."""


class TrainSummary(Config):
    """A finished training: `ease train`, and `summary.json` of a run."""

    run: Path
    """Its folder."""
    rounds: int
    loss: float | None
    """Mean training loss of the last round. A closed-form head has none."""
    parameters: int
    """Number of trained values."""
    metrics: Metrics
    """`seen/`, `unseen/` and `test/` recall in percent, `initial/` the same before training, `cost/` bytes."""
    data: dict[str, int] | None = None
    """Pairs of each split and what was odd in the files. Null for generated data."""
    prospects: str = ""
    """Why an audit would be refused. Empty if it would not."""
    advice: str = ""
    """Whether another kind of model may suit better. Empty if not."""
    notes: tuple[str, ...] = ()
    """What to know before forgetting, such as a model at chance level."""

    def render(self) -> Iterator[RenderableType]:
        metrics = self.metrics
        sets = {name: label for name, label in SETS.items() if f"{name}/recall@1" in metrics}
        rows = [
            [
                label,
                *(f"{metrics[f'{name}/recall@{k}']:.1f}" for k in (1, 5, 10)),
                f"{metrics[f'initial/{name}/recall@1']:.1f}",
            ]
            for name, label in sets.items()
        ]
        first = next(iter(sets))
        chance = [f"{metrics[f'{first}/recall@{k}/chance']:.1f}" for k in (1, 5, 10)]
        rows.append(["chance", *chance, chance[0]])
        size = metrics[f"{first}/gallery_pairs"]
        rounds = "1 round" if self.rounds == 1 else f"{self.rounds} rounds"
        yield table(
            f"Recall in percent after {rounds} (galleries of {size:.0f} pairs)",
            ["", "R@1", "R@5", "R@10", "R@1 before training"],
            rows,
        )
        yield (
            f"{self.parameters:,} trained values; {megabytes(metrics['cost/bytes_down'])} sent to clients, "
            f"{megabytes(metrics['cost/bytes_up'])} received; "
            + ("solved from sums" if self.loss is None else f"loss {self.loss:.3f}")
            + (f"; run kept in {self.run}" if self.run.exists() else "")
        )
        yield from (labelled("note", note, "yellow") for note in self.notes)
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
    if (out / "run.json").is_file() and run.history.rounds() < config.training.rounds:
        for name in run.unreleased():
            check_accepted(out, name)
    released = release_only_result(run)
    if released and not quiet:
        errors.print(
            f"continuing from {released.answer}: what it forgot is not trained on again", soft_wrap=True, markup=False
        )
    with status("preparing data and backbone", quiet):
        world = open_world(run)
        report = _data_report(world)
    for line in report.lines() if report and not quiet else ():  # before training, while it can still be corrected
        errors.print(line, soft_wrap=True, markup=False, highlight=False)
    warn_about_threads(run)
    run = Run.create(out, config)  # only now, so that a configuration that cannot work leaves nothing behind
    done = run.history.rounds()
    emit_start(out, "training", config.model_dump(mode="json"))
    with rounds_bar("training", run.config.training.rounds, done, quiet) as bar:
        for finished in run.train(world):
            bar.step(**({} if quiet else _figures(world, finished)))
            emit_round(out, "training", finished.number, {"loss": finished.loss, "clients": len(finished.updates)})
            print_left_out(f"round {finished.number}", finished.rejected, quiet)
    with status("measuring recall", quiet):
        summary = _summary(run, world, report)
    write_json(out / "summary.json", summary.model_dump(mode="json"))
    reached = {name: value for name, value in summary.metrics.items() if name.endswith(("@1", "@5", "@10"))}
    emit_metrics(out, "training", reached)
    emit_artefact(out, "training", out / "summary.json")
    return summary


def training_notes(metrics: Metrics, gallery: int) -> Iterator[str]:
    """What to know before forgetting: a smaller gallery than configured, and a model that learned nothing."""
    if "seen/gallery_pairs" not in metrics:  # training pairs stay at their sites
        return
    size, chance = metrics["seen/gallery_pairs"], metrics["seen/recall@10/chance"]
    if size != gallery:
        yield f"recall is measured in galleries of {size:.0f} pairs, not gallery = {gallery}"
    if metrics["seen/recall@10/low"] <= chance:
        yield (
            f"recall of training pairs is at chance (R@10 {metrics['seen/recall@10']:.1f}, by chance {chance:.1f}): "
            "there is nothing to forget; train more rounds or raise training.learning_rate"
        )


def train_more(folder: Path, until: int, quiet: bool) -> TrainSummary:
    """Continue a run until it has this many rounds. Calling it again changes nothing."""
    config = Run.load(folder).config
    check_trains_on(Run.load(folder), f"--until {until}")
    if until < config.training.rounds:
        raise UserError(f"--until {until}: {folder} has {config.training.rounds} rounds; name more")
    grown = config.training.model_copy(update={"rounds": until})
    return train_run(config.model_copy(update={"training": grown}), folder, quiet)


def warn_about_threads(run: Run) -> None:
    """Print a warning if another number of threads would give other bytes."""
    if note := run.threads_note():
        errors.print(note, soft_wrap=True, markup=False, highlight=False)


def warn_if_unfinished(run: Run) -> None:
    """Print a line if training stopped early and the last finished round is used."""
    if note := run.unfinished_note():
        errors.print(note, soft_wrap=True, markup=False, highlight=False)


def _data_report(world: World) -> DataReport | None:
    """The report on the data files. None for generated data."""
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


def _summary(run: Run, world: World, report: DataReport | None) -> TrainSummary:
    history = run.history
    records = [history.record(number) for number in range(1, history.rounds() + 1)]
    final = history.state(len(records))
    metrics: Metrics = {}
    for name, found in recall_sets(world, final).items():
        metrics |= found.metrics(name)
    for name, found in recall_sets(world, history.initial()).items():
        metrics[f"initial/{name}/recall@1"] = found["recall@1"].mean
    for key in ("bytes_down", "bytes_up"):
        metrics[f"cost/{key}"] = sum(getattr(record, key) for record in records)
    frozen = run.config.model.lora == "off" and trainer_of(run.config.model) == "fedavg"
    return TrainSummary(
        run=run.folder,
        rounds=len(records),
        loss=records[-1].loss,
        parameters=final.size,
        metrics=metrics,
        data=None if report is None else {**report.splits, **report.counts()},
        prospects=audit_prospects(world),
        advice=FROZEN if frozen else "",
        notes=tuple(training_notes(metrics, run.config.gallery)),
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
