"""`ease report`: writes the records of a run, and a few of its pairs, to one page."""

import shlex
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from rich.console import RenderableType
from torch import Tensor

from ease import __version__
from ease.audit.records import AuditRecord, current_audit
from ease.config import Config
from ease.console import status
from ease.errors import UserError
from ease.measures.evaluate import embed_pairs
from ease.methods.retrain import Retrain
from ease.params import Params
from ease.runs.answers import StoredAnswer, open_world, start_hash, trained_of
from ease.runs.evaluation import evaluation_sets, measure
from ease.runs.records import read_record
from ease.runs.run import Run
from ease.runs.world import World
from ease.seeding import generator
from ease.show.answer import Pair, ReportedAnswer
from ease.show.overview import extent_of
from ease.show.page import Contents, page
from ease.show.sheet import data_address
from ease.storage import write_atomic
from ease.studies.records import BenchResults

MOST_RANKED = 500
"""Forget pairs among which the thumbnails are chosen."""
MOST_ILLUSTRATED = 8
"""Answers with thumbnails; more would make a page too heavy to send."""
MOVED, RESISTED = 8, 4
"""Thumbnails of pairs that came down most and least."""
EDGE = 96
"""Pixels of a thumbnail."""
PRIVATE = (
    "No pictures are shown: these are the very pairs that were to be forgotten, and a page is easily passed on. "
    "With --thumbnails they are."
)
NO_RUN = "No pictures are shown: the folder has no run.json, which says where the pairs come from."


class ReportSummary(Config):
    """`ease report`: the page and what it shows."""

    path: Path
    answers: int
    audited: int
    """How many of them have an audit."""
    compared: int | None
    """Models of an experiment. Null if there is none."""
    bytes: int

    def render(self) -> Iterator[RenderableType]:
        if self.answers or self.compared is None:
            yield f"{self.answers} answers, {self.audited} of them audited"
        if self.compared:
            yield f"{self.compared} models of an experiment"
        yield f"Open {self.path} ({self.bytes / 1e3:.0f} kB, self-contained)"


def report_run(folder: Path, out: Path | None, thumbnails: bool | None, quiet: bool) -> ReportSummary:
    """Write the page of a run, a request or an experiment; pictures only of generated scenes unless asked for."""
    requests, home = _find(folder)
    stored_answers = [
        StoredAnswer(path.parent) for request in requests for path in sorted(request.glob("*/record.json"))
    ]
    answers = [_answer(stored) for stored in stored_answers]
    path = folder / "results.json"
    results = read_record(BenchResults, path) if path.is_file() else None
    why_no_pairs = ""
    if (home / "run.json").is_file():
        run = Run.load(home)
        known = run.known()
        if known is not None:
            answers = [replace(each, extent=extent_of(known[0], each.record.request)) for each in answers]
        if thumbnails is None:
            thumbnails = run.config.data.name == "scenes"
            why_no_pairs = "" if thumbnails else PRIVATE
        if thumbnails:
            with status("ranking forgotten pairs", quiet):
                answers = with_thumbnails(run, stored_answers, answers)
    else:
        why_no_pairs = NO_RUN if thumbnails is not False else ""
    contents = Contents(folder.resolve().name, shlex.quote(str(home)), answers, results, why_no_pairs, __version__)
    out = out or folder / "report.html"
    content = page(contents).encode()
    write_atomic(out, content)
    audited = sum(answer.audit is not None for answer in answers)
    compared = len(results.rows) if results else None
    return ReportSummary(path=out, answers=len(answers), audited=audited, compared=compared, bytes=len(content))


def _find(folder: Path) -> tuple[list[Path], Path]:
    """The request folders that a folder contains, and their run."""
    if (folder / "record.json").is_file():
        raise UserError(
            f"{folder}: is one answer; name its request, {folder.parent}, which has the reference beside it"
        )
    if any(folder.glob("*/record.json")):
        return [folder], folder.parent.parent
    if any((folder / name).exists() for name in ("run.json", "requests", "results.json")):
        return sorted(folder.glob("requests/*")), folder
    raise UserError(f"{folder}: no run, request or results here; name a folder such as runs/first or results/main")


def _answer(stored: StoredAnswer) -> ReportedAnswer:
    written = datetime.fromtimestamp(stored.record_path.stat().st_mtime, UTC)
    name = f"{stored.folder.parent.name}/{stored.folder.name}"
    answer = ReportedAnswer(name, stored.record(), date=f"{written.day} {written:%B %Y}")
    if not stored.audit_path.is_file():
        return answer
    # Records that were copied without their models cannot be checked against them, and are taken at their word.
    audit = current_audit(stored) if stored.model_path.is_file() else read_record(AuditRecord, stored.audit_path)
    if audit is None:
        return replace(
            answer, why_no_audit="The model has changed since it was audited, so the verdict no longer holds."
        )
    return replace(answer, audit=audit)


# Thumbnails


def with_thumbnails(
    run: Run, stored_answers: list[StoredAnswer], answers: list[ReportedAnswer]
) -> list[ReportedAnswer]:
    """The same answers, some with pairs they forgot and what was found of them before: audited ones first, and
    retraining never."""
    able = [
        (answer.audit is None, answer.name)
        for stored, answer in zip(stored_answers, answers, strict=True)
        if stored.model_path.is_file() and not answer.is_reference
    ]
    chosen = {name for _, name in sorted(able)[:MOST_ILLUSTRATED]}
    if not chosen:
        return answers
    world, trained, begun = open_world(run), trained_of(run).start, start_hash(run)
    return [
        _illustrated(world, trained, begun, stored, answer) if answer.name in chosen else answer
        for stored, answer in zip(stored_answers, answers, strict=True)
    ]


def _illustrated(
    world: World, trained: Params, begun: str, stored: StoredAnswer, answer: ReportedAnswer
) -> ReportedAnswer:
    sets = evaluation_sets(world, answer.record.request)
    if not len(sets["forget"]):  # their photographs have vanished
        return answer
    rng = generator(world.config.seed, "thumbnails")
    forget = np.sort(rng.permutation(sets["forget"])[:MOST_RANKED])
    gallery = np.concatenate([forget, np.sort(rng.permutation(sets["test"])[: len(forget)])])
    models = {"trained": trained, "unlearned": stored.model()}
    reference = StoredAnswer(stored.folder.parent / Retrain.name)
    if reference.done:
        models["retrain"] = reference.model()
    ranks = {
        name: own_ranks(
            *embed_pairs(world.server.model, state, world.evaluator.activations, gallery, world.server.device)
        )[: len(forget)]
        for name, state in models.items()
    }
    order = (ranks["trained"] - ranks["unlearned"]).argsort(kind="stable")
    moved, resisted = order[:MOVED], order[MOVED:][::-1][:RESISTED]
    pairs = [
        Pair(
            image=data_address(world.evaluator.pairs.pixels[forget[i]], EDGE),
            caption=world.evaluator.pairs.captions[forget[i]][0],
            ranks={name: float(values[i]) for name, values in ranks.items()},
            resisted=held,
        )
        for chosen, held in ((moved, False), (resisted, True))
        for i in chosen
    ]
    # Once a request is closed, the run continues from its result, and the model before it is another one.
    began_here = answer.audit is None and answer.record.trained_sha256 == begun
    before = measure(world, trained, sets)["forget/recall@1"] if began_here else None
    return replace(answer, pairs=pairs, gallery=len(gallery), before=before)


def own_ranks(image: Tensor, text: Tensor) -> np.ndarray:
    """Rank of each picture's own captions among those of all pairs, by the best caption of each pair [n].

    Ties count half: in a collapsed model, where all are alike, every pair has the middle rank and not the first.
    """
    scores = (image @ text.flatten(0, 1).T).view(len(image), *text.shape[:2]).amax(2)
    own = scores.diagonal()[:, None]
    ties = (scores == own).sum(1) - 1
    return (1 + (scores > own).sum(1) + ties / 2).numpy()
