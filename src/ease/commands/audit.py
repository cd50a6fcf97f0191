"""`ease audit`: trains the shadow models, takes every measure and prints the verdict."""

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import RenderableType
from rich.panel import Panel
from rich.text import Text

from ease.audit.config import AuditConfig
from ease.audit.deployed import DeployedAudit, audit_deployed, deployed_path
from ease.audit.exact import judge_identity
from ease.audit.next_steps import next_steps
from ease.audit.preflight import verdict_prospects
from ease.audit.quick_check import RULE, Level, QuickCheck, quick_check
from ease.audit.records import AuditRecord, PairRecord, Price
from ease.audit.runner import Audit, AuditBatch, check_audited, check_possible
from ease.audit.verdict import EVIDENCE, Identity, Measure
from ease.commands.forget import answer
from ease.commands.train import warn_about_threads
from ease.config import Config
from ease.console import duration, errors, labelled, megabytes, status, table, ticks_bar
from ease.errors import UserError
from ease.events import emit_artefact, emit_metrics
from ease.methods.base import Unlearner
from ease.methods.retrain import Retrain
from ease.operations.ledger.impact import seconds_per_round
from ease.operations.ledger.names import answer_name
from ease.requests.request import Request
from ease.runs.answers import StoredAnswer, find_answer, open_world
from ease.runs.run import Run
from ease.runs.world import World
from ease.storage import remove_leftovers
from ease.trainers import trainer_of

EXIT_CODES = {True: 0, False: 1, None: 3}
"""Exit code of `ease audit --exit-code` by whether the result passed. 2 is a user error in every command."""
PARTS = ("forget", "near", "retain", "test")


class AuditSummary(AuditRecord):
    """`ease audit`: the stored record, where it is, and what to do next."""

    id: str
    """REQUEST/METHOD, as `--request` takes it."""
    folder: Path
    """Folder of the result and its audit.json."""
    next_steps: tuple[str, ...]
    """Commands to continue with after a verdict that did not pass."""

    @classmethod
    def of(cls, record: AuditRecord, id: str, folder: Path) -> "AuditSummary":
        steps = next_steps(record, shlex.quote(str(folder.parent.parent.parent)), id)
        return cls(**dict(record), id=id, folder=folder, next_steps=steps)

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict.passed]

    def render(self) -> Iterator[RenderableType]:
        verdict = self.verdict
        yield Panel(
            Text(verdict.words),
            title=Text(f"Audit of {self.id} ({self.method_name})"),
            title_align="left",
            border_style="green" if verdict.passed else "yellow",
        )
        yield from (labelled("next", step, "bold") for step in self.next_steps)
        if self.relative is not None:
            yield labelled("relative", self.relative.words, "bold")
        for each in self.strata:
            words = each.test.words if each.test else f"{each.pairs} pairs, too few to see anything"
            yield labelled(each.name, words, "bold")
        if self.neighbours is not None:
            yield labelled("neighbours", f"crops with shortened captions are {self.neighbours.words}", "bold")
        yield from self._measured() if verdict.identity is None else [identity_table(verdict.identity)]
        costs = [_cost(name, price) for name, price in self.costs.totals.items()]
        yield table("Cost", ["", "answer", "retrain", "ratio"], costs)
        if self.costs.compute_matched_retrain:
            yield table(
                "Retraining stopped early, R@1",
                ["share of rounds", *PARTS],
                [
                    [share, *(f"{row[part]:.1f}" if part in row else "" for part in PARTS)]
                    for share, row in self.costs.compute_matched_retrain.items()
                ],
            )
        yield from (labelled("note", warning, "yellow") for warning in self.warnings)
        yield from (labelled("not tested", gap) for gap in self.not_tested)
        most = "" if verdict.identity else f"{EVIDENCE.capitalize()} is the most such measures can show. "
        yield f"{most}Kept in {self.folder / 'audit.json'}"

    def _measured(self) -> Iterator[RenderableType]:
        """The measures that the verdict rests on."""
        shown = [each for each in self.verdict.measures if each.inside is False or "recall@5" not in each.name]
        yield table(
            "Each measure beside retraining",
            ["", "before", "answer", "retrain", "band", ""],
            [_row(measure) for measure in shown],
            caption="band: where one more retrained model would fall (95 %)",
        )
        if self.pairs:
            yield table(
                f"Each pair in its gallery of {self.pair_galleries} pairs",
                ["pair", "", "before", "answer", "retrain", "retrained models"],
                [row for pair in self.pairs for row in _pair_rows(pair)],
                caption=f"gallery: {self.gallery.among}",
            )
        chance = ", ".join(f"R@{key.removeprefix('recall@')} {level:.1f}" for key, level in self.gallery.chance.items())
        yield labelled(
            "recall", f"in percent, both ways, in galleries of {self.gallery.pairs} pairs; by chance {chance}"
        )
        yield from (labelled(each.title, each.note) for each in shown if each.note and "recall" not in each.name)


def identity_table(found: Identity) -> RenderableType:
    """The hashes of an exact result next to those of retraining."""
    sides = (("sums", found.sums, found.retrain_sums), ("model", found.model, found.retrain_model))
    rows: list[list[str | Text]] = [
        [name, ours[:16], theirs[:16], Text("equal", "green") if ours == theirs else Text("other", "red")]
        for name, ours, theirs in sides
    ]
    return table("SHA-256 beside retraining", ["", "answer", "retrain", ""], rows)


def _row(measure: Measure) -> list[str | Text]:
    numbers = [_number(value, measure.digits) for value in (measure.before, measure.value, measure.retrain)]
    band = measure.band
    ends = f"{_number(band.low, measure.digits)}..{_number(band.high, measure.digits)}" if band else ""
    mark = {True: ("inside", "green"), False: ("outside", "red"), None: ("no band", "dim")}[measure.inside]
    return [measure.title, *numbers, ends, Text(*mark)]


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _pair_rows(pair: PairRecord) -> Iterator[list[str | Text]]:
    """Rank, margin and log-odds of a pair, and their range over retrained models."""
    for name, values, digits in pair.rows:
        spread = [value for model, value in values.items() if model.startswith("retrain")]
        shown = [f"{values[model]:.{digits}f}" for model in ("trained", "unlearned", "retrain")]
        span = f"{min(spread):.{digits}f}..{max(spread):.{digits}f}"
        yield [pair.id if name == "rank" else "", name, *shown, span]


def _cost(name: str, price: Price) -> list[str]:
    sides = (price.answer, price.retrain)
    if "bytes" in name:
        shown = [megabytes(side) for side in sides]
    elif name == "flops":
        shown = [f"{side / 1e12:.2f} TFLOP" for side in sides]
    elif "seconds" in name:
        shown = [f"{side:.1f} s" for side in sides]
    else:
        shown = [f"{side:,.0f}" for side in sides]
    return [name.replace("_", " "), *shown, f"{price.ratio:.0%}"]


class AuditsSummary(Config):
    """`ease audit` with several `--request`: audits of several results of one request."""

    audits: tuple[AuditSummary, ...]

    @property
    def exit_code(self) -> int:
        """The code for all of them: not passed if one did not pass, else undecided if one is undecided."""
        codes = {each.exit_code for each in self.audits}
        return next(code for code in (EXIT_CODES[False], EXIT_CODES[None], EXIT_CODES[True]) if code in codes)

    def render(self) -> Iterator[RenderableType]:
        for each in self.audits:
            yield from each.render()


def audit_run(folder: Path, name: str, config: AuditConfig, retrain: bool, quiet: bool) -> AuditSummary:
    """Audit a result of a run."""
    return audits_run(folder, (name,), config, retrain, quiet).audits[0]


def audits_run(folder: Path, names: Sequence[str], config: AuditConfig, retrain: bool, quiet: bool) -> AuditsSummary:
    """Audit several results of one request of a run with the same shadow models."""
    run = Run.load(folder)
    names = [answer_name(folder, name) for name in names]
    found = [find_answer(run, name) for name in names]
    request = found[0][1]
    strangers = [name for name, (_, asked, _) in zip(names, found, strict=True) if asked != request]
    if strangers or len({stored.folder for stored, _, _ in found}) < len(found):
        raise UserError(
            f"{strangers[0] if strangers else names[-1]}: audits share shadows where they are of different answers to "
            f"one request, and the first is {names[0]}; audit it by a command of its own"
        )
    warn_about_threads(run)
    with status("preparing data and backbone", quiet):
        world = open_world(run, request)
    if trainer_of(run.config.model) == "sums":
        return _identity_audit(run, world, found[0], names[0], config, quiet)
    check_possible(run, world, request, config)  # before the long work begins
    if retrain:
        answer(run, world, request, Retrain(), quiet)
    together = AuditBatch(tuple(Audit.of(run, world, name, config) for name in names))
    if (why := verdict_prospects(config)) and not quiet:
        errors.print(f"note: {why}", soft_wrap=True, markup=False, highlight=False)
    with run.locked():
        total = together.ticks_left()
        _tell_time(run, together, quiet)
        with ticks_bar("shadow models", total, quiet or not total) as advance:
            for ticks in together.shadows():
                advance(ticks)
        with status("attacks, distances and relearning", quiet):
            records = list(together.judge())
    for record, audited, asked in zip(records, together.audits, names, strict=True):
        measured = {each.name: each.value for each in record.verdict.measures}
        emit_metrics(run.folder, f"audit {asked}", measured)
        emit_artefact(run.folder, f"audit {asked}", audited.stored.audit_path)
    return AuditsSummary(
        audits=tuple(
            AuditSummary.of(record, name, audit.stored.folder)
            for record, name, audit in zip(records, names, together.audits, strict=True)
        )
    )


def _identity_audit(
    run: Run,
    world: World,
    found: tuple[StoredAnswer, Request, Unlearner],
    name: str,
    config: AuditConfig,
    quiet: bool,
) -> AuditsSummary:
    """Audit an exact result by comparing its hashes with those of retraining, which takes a second."""
    stored, request, method = found
    check_audited(name, method)
    answer(run, world, request, Retrain(), quiet)
    with run.locked():
        remove_leftovers(stored.folder)
        record = judge_identity(run, stored, request, config)
    return AuditsSummary(audits=(AuditSummary.of(record, name, stored.folder),))


def _tell_time(run: Run, audit: AuditBatch, quiet: bool) -> None:
    """Print how long the training of shadows will take, estimated from the rounds of the run."""
    (shadows, orders), each = audit.missing(), seconds_per_round(run)
    if quiet or each is None or not (shadows or orders):
        return
    seconds = (len(shadows) + len(orders)) * run.training.rounds * each / audit.processes()
    errors.print(
        f"{len(shadows)} shadow models and {len(orders)} retrainings are to be trained, about {duration(seconds)}; "
        "what is finished is kept if you stop",
        soft_wrap=True,
        markup=False,
        highlight=False,
    )


class QuickSummary(QuickCheck):
    """`ease audit --quick`: the quick check, and what to know before relying on it."""

    id: str
    """REQUEST/METHOD, as `--request` takes it."""
    folder: Path
    """Folder of the result."""
    rule: str = RULE
    """When something counts as found."""
    notes: tuple[str, ...]
    """Limits of this check."""

    def render(self) -> Iterator[RenderableType]:
        yield Panel(
            Text(self.words),
            title=Text(f"Quick look at {self.id} ({self.method_name})"),
            title_align="left",
            border_style="yellow" if self.found else "dim",
        )
        rows = [_level_row("before", self.before), _level_row("answer", self.after)]
        yield table(
            "Mean log-odds of pairs",
            ["", "forget", "held out", "expected", "gap", "98 % interval"],
            rows,
            caption="expected: where retraining would leave the forget pairs, by held-out pairs as hard as they\n"
            "gap: forget pairs above that",
        )
        yield labelled("rule", self.rule)
        yield from (labelled("note", note, "yellow") for note in self.notes)


def _level_row(name: str, level: Level) -> list[str | Text]:
    gap = level.gap
    numbers = [f"{value:.2f}" for value in (level.forget, level.held_out, level.expected)]
    return [name, *numbers, f"{gap.value:+.2f}", f"{gap.low:+.2f}..{gap.high:+.2f}"]


def quick_run(folder: Path, name: str, quiet: bool) -> QuickSummary:
    """Check a result of a run by membership scores, without training anything."""
    run = Run.load(folder)
    name = answer_name(folder, name)
    stored, request, _ = find_answer(run, name)
    with status("preparing data and backbone", quiet):
        world = open_world(run, request)
    with status("asking clients", quiet):
        found = quick_check(run, world, name)
        return QuickSummary(**dict(found), id=name, folder=stored.folder, notes=found.limits)


class DeployedSummary(DeployedAudit):
    """`ease audit --deployed`: forget pairs under every form in which a model is deployed."""

    id: str
    """REQUEST/METHOD, as `--request` takes it."""
    path: Path
    """The stored file."""

    def render(self) -> Iterator[RenderableType]:
        rows = [
            [
                each.form,
                f"{each.forget:.2f}",
                f"{each.unseen:.2f}",
                f"{each.auc.value:.2f}",
                f"{each.came_back.value:+.3f} [{each.came_back.low:+.3f}, {each.came_back.high:+.3f}]",
            ]
            for each in self.forms
        ]
        yield table(f"Deployed forms: {self.id}", ["form", "forget", "unseen", "AUC", "returned"], rows)
        yield self.words


def deployed_run(folder: Path, name: str, quiet: bool) -> DeployedSummary:
    """Score forget pairs by the deployed forms of an answer's model."""
    run = Run.load(folder)
    name = answer_name(folder, name)
    with status("exporting and scoring", quiet):
        found = audit_deployed(run, name)
    path = deployed_path(find_answer(run, name)[0])
    return DeployedSummary(**{each: getattr(found, each) for each in DeployedAudit.model_fields}, id=name, path=path)
