"""`ease forget`, `ease release` and `ease train --after`: answer a request and compare models before and after."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from pydantic import Field
from rich.console import RenderableType

from ease.audit.preflight import audit_prospects
from ease.audit.quick_check import QuickCheck, check_answer
from ease.commands.preview import look, print_preview, when_answered
from ease.commands.train import warn_about_threads, warn_if_unfinished
from ease.console import labelled, megabytes, print_left_out, rounds_bar, status, table
from ease.errors import UserError
from ease.events import emit_artefact, emit_metrics, emit_round, emit_start
from ease.methods.base import Unlearner
from ease.methods.retrain import Retrain
from ease.operations.evidence import attest
from ease.operations.ledger.names import answer_name, check_decided
from ease.requests.request import ClientRequest, Request, in_words
from ease.runs.answers import (
    Snapshot,
    StoredAnswer,
    answer_of,
    check_method,
    check_named,
    continuation,
    default_method,
    find_answer,
    open_world,
    release,
)
from ease.runs.evaluation import evaluation_sets, measure
from ease.runs.forget import forget, train_further
from ease.runs.head import Release
from ease.runs.records import AnswerRecord, ContributionNotes, Metrics, SpectrumNotes
from ease.runs.resolve import RequestOptions, check_options, check_request, parse_request, request_id
from ease.runs.run import Run
from ease.runs.world import World
from ease.storage import check_writable
from ease.trainers import trainer_of

BARS = "▁▂▃▄▅▆▇█"
MOST_BARS = 12


class ForgetSummary(AnswerRecord):
    """`ease forget`, and `ease train --resume --after`: the stored record, where it is, and the model before."""

    id: str
    """The request, as `--request` takes it."""
    meaning: str
    """The request in words."""
    folder: Path
    """Folder of the model and its record."""
    before: Metrics
    """Metrics of the model before the request."""
    labels: tuple[str, str]
    """Names of the two models in the table."""
    check: QuickCheck | None = None
    """The quick check. Null if there is none."""
    why_no_check: str = ""
    """Why there is no quick check. Empty if there is one, or if the method is exact."""
    prospects: str = ""
    """Why an audit would be refused. Empty if it would not."""
    answered: str = Field("", exclude=True)
    """When the request was answered before. It is not written, so that the same command prints the same object."""

    def render(self) -> Iterator[RenderableType]:
        if self.spectrum is not None:
            yield spectrum_table(self.spectrum)
        if self.contribution is not None:
            yield contribution_line(self.contribution)
        if self.answered:
            yield labelled("answered already", f"{self.answered}; this is that result, nothing was computed again")
        # The number of a client is in the id already, its name is not.
        nameless = isinstance(self.request, ClientRequest) and self.meaning == in_words(self.request)
        yield table(
            f"Request {self.id}{'' if nameless else f', {self.meaning}'}: recall in percent "
            f"(galleries of {self.metrics['gallery']:.0f} pairs)",
            ["", "forget R@1/5/10", "retain R@1/5/10", "test R@1/5/10"],
            [_recall_row(*each) for each in zip(self.labels, (self.before, self.metrics), strict=True)],
        )
        yield (
            f"{self.metrics['cost/seconds']:.1f} s; {megabytes(self.metrics['cost/bytes_down'])} sent, "
            f"{megabytes(self.metrics['cost/bytes_up'])} received; model and record in {self.folder}"
        )
        if self.certified:
            yield labelled("certified", self.certified, "bold")
        if self.method_name == "exact":
            yield (
                "This is the model that retraining gives, bit for bit: the sums of the forget pairs were subtracted. "
                "Check it with `ease audit`"
            )
        elif self.method_name != "retrain" and self.labels[1] == self.method_name:
            yield "Compare with the reference: the same command with --method retrain"
        if self.check is not None:
            yield labelled("quick check, no verdict", self.check.words)
        if self.why_no_check:
            yield labelled("no quick check", self.why_no_check)
        if self.prospects:
            yield labelled("audit", self.prospects, "yellow")


def _recall_row(name: str, metrics: dict[str, float]) -> list[str]:
    sets = ("forget", "retain", "test")
    return [name, *(" / ".join(recalled(metrics, f"{part}/recall@{k}") for k in (1, 5, 10)) for part in sets)]


def recalled(metrics: Mapping[str, float], key: str) -> str:
    """A figure, or a dash where there is none: photographs that have vanished cannot be looked for."""
    return f"{metrics[key]:.1f}" if key in metrics else "-"


def spectrum_table(found: SpectrumNotes) -> RenderableType:
    """The entanglement spectrum: how many directions each block has, how many go, and at what price."""
    rows = [
        [
            block.short_name,
            str(block.forget_directions),
            str(block.excised),
            bars(block.cosines),
            f"{block.forget_energy:.2f}",
            f"{block.retain_damage:.2f}",
        ]
        for block in found.blocks
    ]
    columns = ["block", "directions", "unique", "cosines", "eta_f", "eta_r"]
    caption = f"reference: {found.reference}, delta: {found.delta}"
    return table("Entanglement of forget updates with retained updates", columns, rows, caption=caption)


def contribution_line(found: ContributionNotes) -> RenderableType:
    """The share of the contribution that was subtracted, and who replayed for it."""
    text = f"{found.share:.0%} of the forget contribution"
    if found.replaying_clients:
        who = "client" if found.replaying_clients == 1 else "clients"
        text += f"; {found.replaying_clients} {who} replayed {found.replayed_rounds} rounds"
    return labelled("subtracted", text)


def bars(cosines: Sequence[float]) -> str:
    """Cosines as a line of bars, thinned evenly to what fits a narrow screen."""
    shown = np.linspace(0, len(cosines) - 1, min(len(cosines), MOST_BARS)).round().astype(int)
    return "".join(BARS[min(len(BARS) - 1, int(cosines[index] * len(BARS)))] for index in shown)


def forget_run(folder: Path, wanted: RequestOptions, method: Unlearner | None, quiet: bool) -> ForgetSummary:
    """Answer a request on a finished run, by its usual method where none is given."""
    run = Run.load(folder)
    method = method or default_method(run)
    snapshot = Snapshot.of(run)  # refuses a run without a finished round before the long work begins
    check_method(run, method)
    check_writable(folder, "results are written to the run: make it writable, or copy it elsewhere")
    check_options(run, wanted)
    warn_about_threads(run)
    warn_if_unfinished(run)
    with status("preparing data and backbone", quiet):
        world = open_world(run)
        resolved = parse_request(world, wanted)
        request = resolved.request
        if request in world.gone:  # answered once more, by another method: from where the first answer began
            world, snapshot = open_world(run, request), Snapshot.of(run, request)
        check_request(world, request)
        check_named(run, request)
        world = world.erasing(request)
        seen = look(run, world, resolved, method)
    print_preview(seen, quiet)
    answer(run, world, request, method, quiet, snapshot)
    stored = answer_of(run, request, method)
    prospects = "" if isinstance(method, Retrain) else audit_prospects(world, request)
    with status("quick check", quiet):
        return _summary(snapshot, world, stored, request, method, prospects, seen.answered)


def summary_of(folder: Path, name: str) -> ForgetSummary:
    """The summary of an earlier result."""
    run = Run.load(folder)
    stored, request, method = find_answer(run, name)
    snapshot, world = Snapshot.of(run, request), open_world(run, request)
    return _summary(snapshot, world, stored, request, method, "", when_answered(stored))


def _summary(
    snapshot: Snapshot,
    world: World,
    stored: StoredAnswer,
    request: Request,
    method: Unlearner,
    prospects: str,
    answered: str,
) -> ForgetSummary:
    before = measure(world, snapshot.trained.start, evaluation_sets(world, request))
    check, why = _looked_at(snapshot, world, stored, request, method)
    return ForgetSummary(
        **dict(stored.record()),
        id=request_id(request),
        meaning=in_words(request, world.server.membership.names),
        folder=stored.folder,
        before=before,
        labels=("trained", method.name),
        check=check,
        why_no_check=why,
        prospects=prospects,
        answered=answered,
    )


def _looked_at(
    snapshot: Snapshot, world: World, stored: StoredAnswer, request: Request, method: Unlearner
) -> tuple[QuickCheck | None, str]:
    """The quick check of a result, or why there is none. The result is valid without it.

    An exact answer is the retrained model, so that a look could find nothing but chance.
    """
    run = snapshot.run
    if trainer_of(run.config.model) == "sums":
        return None, ""
    try:
        return check_answer(run, world, stored, request, method, snapshot.trained), ""
    except UserError as error:
        return None, str(error)


class ReleaseSummary(Release):
    """`ease release`: the result that the run continues from."""

    def render(self) -> Iterator[RenderableType]:
        yield (
            f"The run continues from {self.answer}: {request_id(self.request)} is closed after round {self.after_round}"
        )


def release_run(folder: Path, name: str) -> ReleaseSummary:
    """Close a request with its result, from which the run then continues."""
    run = Run.load(folder)
    answer = answer_name(folder, name)
    check_decided(folder, answer)
    made = release(run, answer)
    attest(run)
    return ReleaseSummary(**dict(made))


def answer(
    run: Run, world: World, request: Request, method: Unlearner, quiet: bool, snapshot: Snapshot | None = None
) -> None:
    """Run a method on a request, with a bar over its rounds."""
    total = method.rounds(run.training, request)
    # An earlier result is returned at once: a progress bar would not move.
    activity = f"{request_id(request)}/{method.name}"
    emit_start(run.folder, activity, method.model_dump(mode="json"))
    with rounds_bar(f"{method.name:9}", total, 0, quiet or answer_of(run, request, method).done) as bar:
        for number, (step, metrics) in enumerate(forget(run, world, request, method, snapshot=snapshot), 1):
            emit_round(run.folder, activity, number, {"loss": step.loss, **metrics})
            bar.step(phase=step.phase, **{"forget R@1": recalled(metrics, "forget/recall@1")})
            print_left_out(f"{method.name}, {step.phase}", step.notes.get("rejected", {}), quiet)
        bar.end()
    stored = answer_of(run, request, method)
    emit_metrics(run.folder, activity, stored.record().metrics)
    emit_artefact(run.folder, activity, stored.model_path)


def continue_run(folder: Path, after: str, rounds: int, locked: bool, quiet: bool) -> ForgetSummary:
    """Continue training after a request and measure whether forgotten pairs are recognised again."""
    run = Run.load(folder)
    stored, request, _ = find_answer(run, after)
    warn_about_threads(run)
    with status("preparing data and backbone", quiet):
        world = open_world(run, request)
    with rounds_bar("training on", rounds, 0, quiet) as bar:
        for step, metrics in train_further(run, world, after, rounds, locked):
            print_left_out(step.phase, step.notes.get("rejected", {}), quiet)
            bar.step(**{f"{part} R@1": recalled(metrics, f"{part}/recall@1") for part in ("forget", "test")})
    record = continuation(stored, rounds, locked).record()
    labels = ("after the request", f"{rounds} rounds later, {'locked' if record.locked else 'free'}")
    return ForgetSummary(
        **dict(record),
        id=request_id(request),
        meaning=in_words(request, world.server.membership.names),
        folder=continuation(stored, rounds, locked).folder,
        before=stored.record().metrics,
        labels=labels,
    )
