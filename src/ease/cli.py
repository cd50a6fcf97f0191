"""The command line: each command is thin, over one library call. Heavy imports wait until a command needs them."""

import io
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol, cast, get_type_hints

import click
import typer
from typer.core import TyperArgument, TyperGroup
from typer.models import ArgumentInfo

from ease import __version__
from ease.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ease.commands.audit import AuditsSummary, AuditSummary


class Summary(Protocol):
    """What a command ends with: an object for machines, tables for people."""

    def as_json(self) -> dict[str, Any]: ...

    def render(self) -> "Iterator[RenderableType]": ...


class Scenario(StrEnum):
    client = "client"
    class_ = "class"
    sample = "sample"


class ExportFormat(StrEnum):
    peft = "peft"
    safetensors = "safetensors"
    onnx = "onnx"


def _explain_arguments(command: click.Command) -> None:
    """Give arguments the words back that typer sets and click, from 8.5 on, overwrites."""
    told = {} if command.callback is None else get_type_hints(command.callback, include_extras=True)
    for each in command.params:
        for info in getattr(told.get(each.name or ""), "__metadata__", ()):
            if isinstance(each, TyperArgument) and isinstance(info, ArgumentInfo):
                each.help = info.help


class Commands(TyperGroup):
    """Commands of which a misspelt one is answered with the one that was perhaps meant."""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        for command in self.commands.values():
            _explain_arguments(command)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        # click and typer each add a suggestion of their own, so that both are shown.
        if not args[0].startswith("-") and self.get_command(ctx, args[0]) is None and not ctx.resilient_parsing:
            raise UserError(
                f"{args[0]}: no such command{did_you_mean(args[0], self.commands)}; "
                f"choose one of: {', '.join(self.commands)}"
            )
        return super().resolve_command(ctx, args)


class SearchAmong(StrEnum):
    all = "all"
    train = "train"
    test = "test"


class Certificates(Commands):
    """`ease certificate RUN ...` issues one; other words after it say what else to do with one."""

    default = "issue"

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] != "--help" and not self._misspelt(args[0]):
            args = [self.default, *args]
        return super().parse_args(ctx, args)

    def _misspelt(self, word: str) -> bool:
        """Whether a word is rather a command than a run, which is a folder."""
        return bool(did_you_mean(word, self.commands)) and not Path(word).exists()


INTERRUPTED = 130
"""Exit code of a process that Ctrl-C ended."""
REFUTED = 1
"""Exit code of a check that found something that does not hold."""
MISTAKE = 2
"""Exit code of what the user can mend."""

EXIT_CODES = {
    0: "Done. Of `verify` and `certificate sign`: nothing contradicts it; of `doctor`: everything works; of "
    "`audit --exit-code`: passed.",
    REFUTED: "`verify`, `certificate sign`: something does not hold, and each reason is told. `doctor`: something does "
    "not work. `audit --exit-code`: not passed. With a traceback: a fault of this program.",
    MISTAKE: "A mistake in the command, its settings or its files, or too little disk or memory: one line says which.",
    3: "`audit --exit-code`: it cannot be told.",
    INTERRUPTED: "Stopped by Ctrl-C; the same command goes on from there.",
}
"""Every code a command ends with, as the reference tells it."""

LACK = re.compile(
    r"allocate memory|out of memory|bad alloc|start new thread|failed to map segment|std::bad_alloc|exception set",
    re.I,
)
"""How Python, torch, the loader of libraries and CUDA say it; and C code that goes on after it could not allocate."""
OUT_OF_MEMORY = (
    "not enough memory: close other programs, raise the limit (ulimit -v) or make less work of it "
    "(training.batch_size, gallery, fewer pairs); --debug shows where it ran out"
)
LEAST_MEMORY = 1 << 30
"""Bytes of address space below which torch cannot be loaded; it then fails anywhere, or waits for ever."""

app = typer.Typer(
    cls=Commands,
    help="Federated unlearning for image-text models: train, forget, and show that it is forgotten.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)

certificates = typer.Typer(
    cls=Certificates,
    help="Signed evidence of what was forgotten: `ease certificate RUN --request ID` issues it, `sign` adds to it.",
    no_args_is_help=True,
)
keys = typer.Typer(cls=Commands, help="Keys that sign certificates, and keys of a federation.", no_args_is_help=True)
app.add_typer(certificates, name="certificate")
app.add_typer(keys, name="keys")
requests = typer.Typer(
    cls=Commands,
    help="Requests as people hand them in: who asked, until when, what it touches, and every step.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
app.add_typer(requests, name="request")
cache = typer.Typer(
    cls=Commands, help="Files that can be made again: what there is, and deleting it.", no_args_is_help=True
)
app.add_typer(cache, name="cache")

Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change one setting, e.g. training.rounds=5. Repeatable."),
]
Method = Annotated[
    str | None,
    typer.Option(help="How to forget; `ease methods` lists the ways. By default `ease`, or `exact` where it applies."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, only the result.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the full traceback of an error.")]

Concepts = Annotated[
    list[str] | None,
    typer.Option(metavar="WORDS", help='Words for what is in the pairs, such as "in the snow". Repeatable.'),
]
Classes = Annotated[
    list[str] | None, typer.Option("--class", metavar="N", help="A pseudo-class by its number. Repeatable.")
]
Threshold = Annotated[
    float | None,
    typer.Option(min=-1, max=1, help="How near pairs must be to the words (cosine); by default found from captions."),
]
RequestName = Annotated[
    str, typer.Option(metavar="NAME", help="What to call a request by words or ids; by default a name is made.")
]


def _tell_version(asked: bool) -> None:
    if asked:
        print(f"ease {__version__}")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Tell the version and end.")
    ] = False,
) -> None:
    """Federated unlearning for image-text models: train, forget, and show that it is forgotten."""


@app.command()
def train(
    config: Annotated[Path | None, typer.Argument(help="TOML file; without one, the defaults.")] = None,
    out: Annotated[Path | None, typer.Option(help="Run directory. An interrupted run there is continued.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with this run; with --after, beside it, on trial.")] = None,
    after: Annotated[
        str | None, typer.Option(help="The request to go on from, e.g. client-3 or client-3/retrain.")
    ] = None,
    until: Annotated[int | None, typer.Option(min=1, help="How many rounds the resumed run has in the end.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds to go on for on trial.")] = 10,
    lock: Annotated[bool, typer.Option("--lock/--no-lock", help="Keep the request's directions locked.")] = True,
    settings: Settings = None,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train a model over the clients and keep the history that unlearning needs.

    Example: `ease train configs/scenes.toml --out runs/first --set training.rounds=10`

    More rounds from where a run is, with all who joined: `ease train --resume runs/first --until 25`

    Watch whether a forgotten client comes back: `ease train --resume runs/first --after client-3 --rounds 10 --no-lock`
    """
    from ease.commands.train import train_more, train_run

    if resume is not None or after is not None:
        from ease.commands.forget import continue_run

        if resume is None or config is not None or out is not None or settings:
            raise UserError("--resume RUN goes with --until alone, or with --after REQUEST, --rounds and --lock")
        if (after is None) == (until is None) or (after is None and not lock):
            raise UserError("--resume RUN: say --until ROUNDS to go on, or --after REQUEST to see what would come back")
        if until is not None:
            _finish(train_more(resume, until, quiet or as_json), as_json)
        elif after is not None:
            _finish(continue_run(resume, after, rounds, lock, quiet or as_json), as_json)
        return
    from ease.runs.config import load_config

    if out is None:
        raise UserError("--out: name the run directory, for example --out runs/first")
    _finish(train_run(load_config(config, tuple(settings or ())), out, quiet or as_json), as_json)


@app.command()
def forget(
    run: Annotated[Path, typer.Argument(help="Run directory of a finished training.")],
    client: Annotated[
        list[str] | None, typer.Option(help="A client that withdraws: its number or the name of its site. Repeatable.")
    ] = None,
    concept: Concepts = None,
    class_: Classes = None,
    samples: Annotated[Path | None, typer.Option(help="File with the ids of pairs, one a line.")] = None,
    canaries: Annotated[
        bool, typer.Option("--canaries", help="The canaries that were planted (data.canaries), wherever they are.")
    ] = False,
    threshold: Threshold = None,
    name: RequestName = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Forget nothing: show whose pairs these are, and list their ids.")
    ] = False,
    method: Method = None,
    settings: Settings = None,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Forget clients, concepts, single pairs or all of these together; the new model and its record go into the run.

    Examples: `ease forget runs/first --client 3`, `ease forget runs/first --concept "on the beach" --dry-run`,
    `ease forget runs/first --client 3 --samples ids.txt --name farewell`
    """
    from ease.methods import make_method
    from ease.runs.resolve import Wanted

    unlearner = make_method(method or "ease", tuple(settings or ())) if method or settings else None
    wanted = Wanted(client or [], class_ or [], concept or [], samples, canaries, name, threshold)
    if dry_run:
        from ease.commands.preview import preview_run

        _finish(preview_run(run, wanted, unlearner, quiet or as_json), as_json)
        return
    from ease.commands.forget import forget_run

    _finish(forget_run(run, wanted, unlearner, quiet or as_json), as_json)


@app.command()
def release(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    request: Annotated[str, typer.Option(help="The answer to go on from, e.g. client-3 or client-3/finetune.")],
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Make an answer the model that the run goes on from: its request is closed and its pairs are gone for good.

    Further requests, more rounds and exports then start from it.

    Example: `ease release runs/first --request client-3`
    """
    from ease.commands.forget import release_run

    _finish(release_run(run, request), as_json)


RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")]
RequestId = Annotated[str, typer.Argument(metavar="ID", help="The request, as `ease request list` calls it.")]
By = Annotated[str | None, typer.Option(help="Who does so; by default the user of this machine.")]


@requests.command("add")
def request_add(
    run: RunFolder,
    client: Annotated[list[str] | None, typer.Option(help="A client that withdraws. Repeatable.")] = None,
    concept: Concepts = None,
    class_: Classes = None,
    samples: Annotated[Path | None, typer.Option(help="File with the ids of pairs, one a line.")] = None,
    by: By = None,
    ground: Annotated[str, typer.Option(help='On what ground, e.g. "GDPR art. 17(1)(b)".')] = "",
    reason: Annotated[str, typer.Option(help="Why, in a few words.")] = "",
    priority: Annotated[int, typer.Option(help="Larger goes first.")] = 0,
    due: Annotated[str | None, typer.Option(metavar="DATE", help="Answer until then; by default in a month.")] = None,
    threshold: Threshold = None,
    name: RequestName = "",
    id: Annotated[str | None, typer.Option(help="Its number in the ledger; by default made from its content.")] = None,
    approve: Annotated[bool, typer.Option("--approve", help="Approve it at once.")] = False,
    method: Method = None,
    settings: Settings = None,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Hand a request in. The same one again changes nothing.

    Example: `ease request add runs/first --client 3 --by "site 3" --ground "GDPR art. 17" --approve`
    """
    from ease.commands.requests import add_request
    from ease.methods import make_method
    from ease.runs.resolve import Wanted

    unlearner = make_method(method or "ease", tuple(settings or ())) if method or settings else None
    wanted = Wanted(client or [], class_ or [], concept or [], samples, name=name, threshold=threshold)
    told = (by, ground, reason, priority, due, id, approve)
    _finish(add_request(run, wanted, unlearner, *told, quiet or as_json), as_json)


@requests.command("list")
def request_list(run: RunFolder, as_json: Json = False, debug: Debug = False) -> None:
    """List all requests in the order in which they are worked on; overdue ones are marked.

    Example: `ease request list runs/first`
    """
    from ease.commands.requests import list_requests

    _finish(list_requests(run), as_json)


@requests.command("show")
def request_show(run: RunFolder, id: RequestId, as_json: Json = False, debug: Debug = False) -> None:
    """Show a request: what it touches and will cost, before anything is computed, and every step it took.

    Example: `ease request show runs/first client-3-1f2e3d`
    """
    from ease.commands.requests import show_request

    _finish(show_request(run, id), as_json)


@requests.command("approve")
def request_approve(run: RunFolder, id: RequestId, by: By = None, as_json: Json = False, debug: Debug = False) -> None:
    """Let a request be worked on; where its new model is held, let that model be released.

    Example: `ease request approve runs/first client-3-1f2e3d`
    """
    from ease.commands.requests import approve_request

    _finish(approve_request(run, id, by), as_json)


@requests.command("cancel")
def request_cancel(
    run: RunFolder,
    id: RequestId,
    by: By = None,
    reason: Annotated[str, typer.Option(help="Why, in a few words.")] = "",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Take a request back that is not being worked on.

    Example: `ease request cancel runs/first client-3-1f2e3d --reason "asked by mistake"`
    """
    from ease.commands.requests import cancel_request

    _finish(cancel_request(run, id, by, reason), as_json)


@app.command()
def work(
    run: RunFolder,
    together: Annotated[bool, typer.Option("--together", help="Answer all that wait by one excision.")] = False,
    by: By = None,
    settings: Settings = None,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Answer approved requests one after the other and release each answer; then purge, if the policy says so.

    Settings are those of policy.toml, such as hold.retain_points and purge.after_days.

    Example: `ease work runs/first --together --set hold.retain_points=1`
    """
    from ease.commands.requests import work_run
    from ease.operations.ledger.policy import load_policy

    _finish(work_run(run, load_policy(run, tuple(settings or ())), by, together, quiet or as_json), as_json)


@app.command()
def join(
    run: RunFolder,
    consent: Annotated[str, typer.Option(help="Who agreed to what, in words; kept in the ledger.")],
    site: Annotated[str | None, typer.Option(help="Only pairs that the data say are of this site.")] = None,
    samples: Annotated[Path | None, typer.Option(help="Only pairs of this list of ids, one a line.")] = None,
    of: Annotated[str | None, typer.Option(metavar="CLIENT", help="The client whose later pairs these are.")] = None,
    again_after: Annotated[
        str | None, typer.Option(metavar="CLIENT", help="The client that left, whose purged pairs the consent covers.")
    ] = None,
    by: By = None,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Add pairs that came to the data since the training, as a new client, with a consent; then train on.

    Example: `ease join runs/first --site clinic-4 --consent "clinic 4 agrees, form 12 of 3 May" --by "dr. a"`
    """
    from ease.commands.joining import join_run

    _finish(join_run(run, consent, by, site, samples, of, again_after, quiet or as_json), as_json)


@app.command()
def purge(
    run: RunFolder,
    older_than: Annotated[
        float, typer.Option(min=0, metavar="DAYS", help="Only what was released so many days ago.")
    ] = 0.0,
    lost_site: Annotated[
        list[str] | None,
        typer.Option(metavar="CLIENT", help="A site that is gone for good: recorded, and not waited for. Repeatable."),
    ] = None,
    reason: Annotated[str, typer.Option(help="With --lost-site: why it is gone for good.")] = "",
    by: By = None,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Remove what released requests left on disk, or make it again as if their pairs had never been there.

    `purge.json` lists what went, what was made again, and what stayed and why. It cannot be undone: audit first.

    A site that is gone for good is recorded once with who decided and why. Later purges pass, and certificates list
    what could not be deleted there.

    Example: `ease purge runs/first --older-than 30`
    """
    from ease.commands.requests import purge_run

    _finish(purge_run(run, older_than, lost_site or (), by, reason, quiet or as_json), as_json)


@app.command()
def audit(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    request: Annotated[
        list[str],
        typer.Option(help="The answer to audit, e.g. client-3 or client-3/finetune; several share their shadows."),
    ],
    shadows: Annotated[int, typer.Option(min=4, help="Shadow models, an even number. More make sharper attacks.")] = 16,
    retrains: Annotated[int, typer.Option(min=1, help="Further retrainings that an answer is compared with.")] = 9,
    fpr: Annotated[float, typer.Option(help="False positive rate at which found members are told.")] = 0.01,
    attack: Annotated[
        str, typer.Option(help="What forget pairs are judged by: bavaria, or the strongest before unlearning.")
    ] = "bavaria",
    pool: Annotated[int, typer.Option(min=16, help="Unseen pairs that every statistic is measured against.")] = 512,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes that train shadows.")] = None,
    retrain: Annotated[bool, typer.Option("--retrain", help="Run the retraining first if it is missing.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Only ask the clients how strongly forget pairs are held: no verdict.")
    ] = False,
    exit_code: Annotated[
        bool, typer.Option("--exit-code", help="Exit with 0: passed, 1: not passed, 3: cannot tell (2: an error).")
    ] = False,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Is it really forgotten? Recall, alignment, membership attacks, relearning and cost, all beside retraining.

    Examples: `ease audit runs/first --request client-3 --retrain`, `ease audit runs/first --request client-3 --quick`
    """
    from ease.audit.config import AuditConfig
    from ease.commands.audit import audit_run, audits_run, quick_run
    from ease.config import validate

    if quick:
        if exit_code or retrain:
            raise UserError("--quick gives no verdict and compares with no retraining: leave --exit-code and --retrain")
        if len(request) > 1:
            raise UserError("--quick looks at one answer: name one --request")
        _finish(quick_run(run, request[0], quiet or as_json), as_json)
        return

    values = {"shadows": shadows, "retrains": retrains, "fpr": fpr, "pool": pool, "workers": workers, "attack": attack}
    config = validate(AuditConfig, values, "ease audit")
    silent = quiet or as_json
    if len(request) == 1:
        summary: AuditSummary | AuditsSummary = audit_run(run, request[0], config, retrain, silent)
    else:
        summary = audits_run(run, request, config, retrain, silent)
    _finish(summary, as_json)
    if exit_code:
        raise typer.Exit(summary.exit_code)


@app.command()
def report(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Run directory, one request folder in it, or an experiment's.")
    ],
    out: Annotated[Path | None, typer.Option(help="The page; by default report.html in DIR.")] = None,
    thumbnails: Annotated[
        bool | None,
        typer.Option(
            "--thumbnails/--no-thumbnails",
            help="Show some of the forgotten pictures; by default only generated ones: a page is easily passed on.",
        ),
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write one self-contained HTML page: the verdict, every measure, and the pictures behind them.

    Example: `ease report runs/first --out report.html`
    """
    from ease.commands.report import report_run

    _finish(report_run(folder, out, thumbnails, quiet or as_json), as_json)


@certificates.command("issue")
def certificate(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    request: Annotated[str, typer.Option(help="The answer to certify, e.g. client-3 or client-3/finetune.")],
    html: Annotated[bool, typer.Option("--html", help="Write a page beside it, for people; it checks itself.")] = False,
    out: Annotated[Path | None, typer.Option(help="The file; by default certificate.json beside the answer.")] = None,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Certify an answered request: models, code, settings, figures and verdict, logged and signed.

    Example: `ease certificate runs/first --request client-3 --html`
    """
    from ease.commands.evidence import certify_run

    _finish(certify_run(run, request, html, out, quiet or as_json), as_json)


@certificates.command("sign")
def sign(
    certificate: Annotated[Path, typer.Argument(metavar="CERT", help="A certificate.")],
    key: Annotated[Path, typer.Option(help="The private key of whoever signs; `ease keys new` makes one.")],
    run: Annotated[Path | None, typer.Option(help="The run, to compute everything again before signing.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Check hashes and recorded figures; measure nothing.")] = False,
    html: Annotated[bool, typer.Option("--html", help="Write a page beside it, with both signatures.")] = False,
    out: Annotated[Path | None, typer.Option(help="The file; by default CERT itself.")] = None,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Add a signature to a certificate, after checking all that can be checked from here.

    Example: `ease certificate sign certificate.json --key client.key --run runs/first`
    """
    from ease.commands.evidence import VerifySummary, sign_certificate

    summary = sign_certificate(certificate, key, run, quick, html, out, quiet or as_json)
    _finish(summary, as_json)
    if isinstance(summary, VerifySummary):
        raise typer.Exit(REFUTED)


@app.command()
def verify(
    certificate: Annotated[Path, typer.Argument(metavar="CERT", help="A certificate.")],
    run: Annotated[Path | None, typer.Option(help="The run that it is about, to compute everything again.")] = None,
    key: Annotated[
        list[str] | None,
        typer.Option(metavar="[NAME=]FILE", help="A public key that must have signed. Repeatable."),
    ] = None,
    model: Annotated[Path | None, typer.Option(help="A model file that it should be about.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Check hashes and recorded figures; measure nothing.")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Check a certificate: signatures, the run's log, and every hash and figure, computed again from the run.

    Exit code 0 if nothing contradicts it, 1 if something does, each with its reason.

    Example: `ease verify certificate.json --run runs/first --key hospital=hospital.pub`
    """
    from ease.commands.evidence import verify_certificate

    summary = verify_certificate(certificate, run, key or [], model, quick, quiet or as_json)
    _finish(summary, as_json)
    if not summary.found.holds:
        raise typer.Exit(REFUTED)


@keys.command("new")
def new_keys(
    file: Annotated[Path, typer.Argument(help="Where the private key goes; the public one lies beside it, as .pub.")],
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Make a key pair (Ed25519).

    Example: `ease keys new client.key`
    """
    from ease.commands.evidence import make_keys

    _finish(make_keys(file), as_json)


@keys.callback()
def about_keys() -> None:
    """Keys that sign certificates, and keys of a federation."""


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="Run directory of a finished training.")],
    request: Annotated[
        str | None, typer.Option(help="The request whose model to take, e.g. client-3; without one, the trained model.")
    ] = None,
    form: Annotated[ExportFormat, typer.Option("--format", help="What to write.")] = ExportFormat.safetensors,
    out: Annotated[Path | None, typer.Option(help="Folder to write to; by default exports/ in the run.")] = None,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write a model in a form that other tools read.

    Example: `ease export runs/first --request client-3 --format peft --out adapter`
    """
    from ease.commands.export import export_run

    _finish(export_run(run, request, form.value, out, quiet or as_json), as_json)


@app.command()
def search(
    run: Annotated[Path, typer.Argument(help="Run directory of a finished training.")],
    words: Annotated[str, typer.Argument(help='What to look for, such as "a dog in the snow".')],
    request: Annotated[
        str | None, typer.Option(help="Compare the models before and after this request, e.g. client-3.")
    ] = None,
    count: Annotated[int, typer.Option("-k", "--count", help="Pictures that each model finds.")] = 5,
    among: Annotated[SearchAmong, typer.Option(help="The pairs to search among.")] = SearchAmong.all,
    out: Annotated[Path | None, typer.Option(help="The page of pictures; by default in searches/ of the run.")] = None,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Find pictures by words with a model of the run, or with the two before and after a request, side by side.

    Example: `ease search runs/first "a red kite" --request client-3`
    """
    from ease.commands.search import search_run

    _finish(search_run(run, words, request, count, among.value, out, quiet or as_json), as_json)


@app.command()
def serve(
    folder: Annotated[Path, typer.Argument(metavar="RUN|EXPORT", help="Run directory, or a folder of `ease export`.")],
    request: Annotated[
        str | None, typer.Option(help="Show the models before and after this open request side by side, e.g. client-3.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0: any that is free.")] = 8400,
    public: Annotated[
        bool, typer.Option("--public", help="Allow a --host that others can reach; pictures are then not shown.")
    ] = False,
    keyless: Annotated[
        bool, typer.Option("--no-key", help="Answer every user of this machine, without a key.")
    ] = False,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Serve a model over HTTP until Ctrl-C: a page to search by words, /search, /encode, /health and /openapi.json.

    A run is served as its last release left it: what is forgotten is never found. The server listens on this machine
    only, and answers whoever has the key that it prints. It needs the serve extra.

    Example: `ease serve runs/first --request client-3`
    """
    from ease.commands.serve import serve_model

    serve_model(folder, request, host, port, public, keyless, as_json, quiet or as_json)


@app.command()
def demo(
    scenario: Annotated[Scenario, typer.Option(help="What is forgotten.")] = Scenario.client,
    out: Annotated[
        Path | None, typer.Option(help="Keep the run here; by default it goes to a temporary folder.")
    ] = None,
    settings: Settings = None,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train on generated scenes with the shipped tiny model, forget, and compare with retraining.

    Example: `ease demo --scenario class`
    """
    import tempfile

    from ease.commands.forget import demo_run
    from ease.runs.config import load_config

    config = load_config(None, tuple(settings or ()))
    with tempfile.TemporaryDirectory(prefix="ease-demo-") as temporary:
        trained, compared = demo_run(config, scenario.value, out or Path(temporary) / "run", quiet or as_json)
    if not as_json:
        _finish(trained, as_json)
    _finish(compared, as_json)


@app.command()
def bench(
    experiment: Annotated[
        Path | None, typer.Argument(help="TOML file of an experiment, such as those in experiments/.")
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder of runs and results. What is finished there is not done again.")
    ] = Path("results"),
    quick: Annotated[
        bool, typer.Option("--quick", help="A small version that takes minutes; its figures prove nothing.")
    ] = False,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Runs at the same time; default: one for each core.")
    ] = None,
    tables: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Only write the tables and figures of DIR/results.json anew.")
    ] = None,
    settings: Settings = None,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Run an experiment: a grid of methods, requests and seeds, with tables and figures beside retraining.

    Examples: `ease bench experiments/main.toml --quick`, `ease bench experiments/main.toml --set seeds=[0]`,
    `ease bench --tables results/main`
    """
    from ease.commands.bench import bench_run, write_tables
    from ease.studies.experiment import load_experiment

    if (experiment is None) == (tables is None):
        raise UserError("name an experiment's TOML file, or a folder of results with --tables")
    if experiment is None:
        assert tables is not None  # seen above
        _finish(write_tables(tables), as_json)
        return
    name = experiment.stem + ("-quick" if quick else "")
    loaded = load_experiment(experiment, tuple(settings or ()), quick)
    _finish(bench_run(loaded, name, out, processes, quiet or as_json), as_json)


@app.command()
def sweep(
    source: Annotated[Path, typer.Argument(help="A run directory, or an experiment's TOML file.")],
    out: Annotated[Path, typer.Option(help="TOML file for the chosen settings.")],
    budget: Annotated[
        int, typer.Option(min=1, help="Settings that are tried of every method; the first are its defaults.")
    ] = 8,
    work: Annotated[
        Path | None,
        typer.Option(help="Folder of an experiment's runs, the same as --out of `ease bench`; default: results."),
    ] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Runs at the same time; default: one for each core.")
    ] = None,
    settings: Settings = None,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Choose every method's settings with the same budget, on a request that is not reported, without retraining.

    Example: `ease sweep experiments/main.toml --out experiments/tuned/scenes.toml`
    """
    from ease.commands.sweep import sweep_run

    _finish(sweep_run(source, out, budget, work, processes, tuple(settings or ()), quiet or as_json), as_json)


@app.command()
def node(
    config: Annotated[Path | None, typer.Argument(help="TOML file of the run; the same as the server's.")] = None,
    id: Annotated[int, typer.Option("--id", min=0, help="The client this is the node of.")] = 0,
    data: Annotated[Path | None, typer.Option(help="Where the data are on this machine, instead of data.path.")] = None,
    server: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Connect to this server; without, a socket alone.")
    ] = None,
    key: Annotated[Path | None, typer.Option(help="Private key of this node (`ease keys node`).")] = None,
    ca: Annotated[Path | None, typer.Option(help="Certificate that the server is known by (ca.crt).")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="No TLS and no key, on this machine alone.")] = False,
    folder: Annotated[
        Path | None, typer.Option(help="Its own disk: what it was sent and keeps; by default beside the socket.")
    ] = None,
    socket: Annotated[
        Path | None, typer.Option(help="Where it listens; by default in the folder of the federation.")
    ] = None,
    policy: Annotated[
        Path | None, typer.Option(help="TOML file: which objectives, how often, in what company.")
    ] = None,
    group: Annotated[str | None, typer.Option(help="A group of this machine that may speak to it, too.")] = None,
    audit: Annotated[
        bool, typer.Option("--audit", help="Show what the node of --folder was asked so far, and end.")
    ] = False,
    settings: Settings = None,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Work for one client, beside its data, until stopped: jobs come in as bytes over a Unix socket.

    Example: `ease node site.toml --id 3 --data /srv/photos --server fed.example.org:8000 --key node.key --ca ca.crt`
    """
    from ease.commands.federation import Upstream, asked_of_node, run_node
    from ease.runs.config import load_config

    if audit:
        if folder is None:
            raise UserError("--audit: name the folder of the node with --folder")
        _finish(asked_of_node(folder), as_json)
        return
    changes = (*(settings or ()), *((f"data.path={data}",) if data else ()))
    if server is not None and not insecure and (key is None or ca is None):
        raise UserError("--server: name the key of this node with --key and the server's certificate with --ca")
    upstream = None if server is None else Upstream(server, None if insecure else key, None if insecure else ca)
    run_node(load_config(config, changes), id, folder, socket, policy, group, upstream, quiet)


FederationFolder = Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of the federation.")]


@app.command()
def server(
    folder: FederationFolder = Path("federation"),
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen at.")] = 8000,
    insecure: Annotated[bool, typer.Option("--insecure", help="No TLS and no keys, on this machine alone.")] = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Keep the server of a federation up until stopped: nodes connect to it, and runs with engine = "flower" use it.

    Example: `ease server federation --host 0.0.0.0 --port 8000`
    """
    from ease.commands.federation import run_server

    run_server(folder, host, port, insecure, quiet)


@app.command()
def up(
    config: Annotated[Path | None, typer.Argument(help="TOML file; without one, the defaults.")] = None,
    nodes: Annotated[int | None, typer.Option(min=2, help="Clients; by default as the configuration says.")] = None,
    folder: Annotated[Path, typer.Option(help="Folder of the federation.")] = Path("federation"),
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="By default a free one.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="No TLS and no keys.")] = False,
    flower: Annotated[bool, typer.Option("--flower/--sockets", help="With Flower between, or sockets alone.")] = True,
    simulation: Annotated[
        bool,
        typer.Option("--simulation", help="With Flower's simulation between, which needs Ray; no TLS and no keys."),
    ] = False,
    settings: Settings = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Start a whole federation on this machine, for a first try: server, nodes and keys. Ctrl-C ends it.

    Example: `ease up --nodes 3`
    """
    from ease.commands.federation import run_up
    from ease.runs.config import load_config

    changes = (*(settings or ()), *((f"partition.clients={nodes}",) if nodes else ()))
    source = [*((str(config),) if config else ()), *(part for each in changes for part in ("--set", each))]
    folder, insecure = folder.absolute(), insecure or simulation
    run_up(load_config(config, changes), source, folder, port, insecure, flower, simulation, quiet)


@app.command("status")
def federation_status(
    folder: FederationFolder = Path("federation"),
    run: Annotated[Path | None, typer.Option(help="A run to tell of as well: its round, bytes and requests.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Look again every few seconds, until stopped.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Tell how a federation stands: nodes, when they last worked, round, bytes, waiting requests and their deadlines.

    Example: `ease status federation --run runs/first --watch`
    """
    import time

    from ease.commands.federation import WATCHING, federation_status

    _finish(federation_status(folder, run), as_json)
    with suppress(KeyboardInterrupt):  # which is how a watch ends
        while watch:
            time.sleep(WATCHING)
            told = federation_status(folder, run)
            if not as_json and sys.stdout.isatty():
                typer.clear()  # one screen that changes, not a roll of them
            _finish(told, as_json)


@keys.command("server")
def server_keys(
    folder: FederationFolder,
    host: Annotated[
        list[str] | None, typer.Option(help="Name or address that nodes reach the server under. Repeatable.")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Make the certificate of a federation's server, and ca.crt, by which nodes know it.

    Example: `ease keys server federation --host fed.example.org`
    """
    from ease.commands.federation import server_keys

    _finish(server_keys(folder, list(dict.fromkeys([*(host or ()), "localhost", "127.0.0.1"]))), as_json)


@keys.command("node")
def node_key(
    file: Annotated[Path, typer.Argument(help="Where the private key goes; the public one lies beside it, as .pub.")],
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Make the key of a client's node, at the client.

    Example: `ease keys node node.key`
    """
    from ease.commands.federation import node_key

    _finish(node_key(file), as_json)


@keys.command("admit")
def admit_key(
    folder: FederationFolder,
    file: Annotated[Path, typer.Argument(help="Public key of the client's node.")],
    id: Annotated[int, typer.Option("--id", min=0, help="The client that it speaks for.")],
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Let the node with this key speak as a client, at the server; no other key can.

    Example: `ease keys admit federation node.key.pub --id 3`
    """
    from ease.commands.federation import admit_key

    _finish(admit_key(folder, id, file), as_json)


@app.command()
def methods(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the manual's page, with all settings.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """List the ways to forget: what each needs, how many rounds it takes and where it comes from.

    Example: `ease methods --markdown > docs/methods.md`
    """
    from ease.commands.methods import MethodsSummary, methods_page

    if markdown and as_json:
        raise UserError("--markdown and --json: choose one of them")
    if markdown:
        print(methods_page(), end="")
    else:
        _finish(MethodsSummary(), as_json)


@app.command()
def doctor(quiet: Quiet = False, as_json: Json = False, debug: Debug = False) -> None:
    """Look at the installation, the machine and the cache, and try a small run: what works here, and what does not.

    Exit code 0 if everything works, 1 if something does not.

    Example: `ease doctor`
    """
    from ease.commands.doctor import doctor as examine

    summary = examine(quiet or as_json)
    _finish(summary, as_json)
    if not summary.healthy:
        raise typer.Exit(REFUTED)


@cache.command("list")
def cache_list(as_json: Json = False, debug: Debug = False) -> None:
    """List what the cache holds: of what kind, how much, since when, and whether it is private.

    Example: `ease cache list`
    """
    from ease.commands.cache import list_cache

    _finish(list_cache(), as_json)


@cache.command("clear")
def cache_clear(
    parts: Annotated[
        list[str] | None, typer.Argument(metavar="[PART]...", help="As `ease cache list` calls them; without one, all.")
    ] = None,
    older_than: Annotated[
        float, typer.Option(min=0, metavar="DAYS", help="Only what was written so many days ago.")
    ] = 0.0,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Delete cached files: the copies of pictures and captions too. What is needed again is made again.

    Examples: `ease cache clear`, `ease cache clear pixels activations --older-than 30`
    """
    from ease.commands.cache import clear_cache

    _finish(clear_cache(parts or [], older_than), as_json)


@lru_cache
def _program() -> click.Group:
    """The whole command line. Making it from all signatures takes longer than many a command, so it is made once."""
    return cast(click.Group, typer.main.get_command(app))


def commands(group: click.Group | None = None, above: str = "") -> dict[str, click.Command]:
    """Every command that does something, by the words that call it, such as `request add`."""
    found: dict[str, click.Command] = {}
    for name, command in (group or _program()).commands.items():
        words = f"{above} {name}".strip()
        found |= commands(command, words) if isinstance(command, click.Group) else {words: command}
    return found


def _finish(summary: Summary, as_json: bool) -> None:
    """Print a command's result: a JSON object for machines, tables for people."""
    if as_json:
        print(json.dumps(summary.as_json(), allow_nan=False))
    else:
        from ease.console import show

        show(summary)


def main() -> None:
    """Run a command; a user's mistake is one line and exit code 2."""
    # A terminal or a pipe may know fewer letters than we write; then some are question marks.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="replace")
    # Threads that wait spin for a while by default. On a busy machine a spinning thread holds the core that the thread
    # it waits for needs, which multiplies the processor time. OpenMP reads this when torch is loaded, in children too.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    interrupted = _hear_interrupts()
    try:
        _check_memory()
        _check_here()
        code = _program()(prog_name="ease", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        code = MISTAKE
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Exception as error:
        if "--debug" in sys.argv:
            raise
        if interrupted:  # compiled code may make an error of its own of an interrupt
            code = INTERRUPTED
        elif isinstance(error, UserError | click.ClickException | OSError):
            _complain(error)
            code = MISTAKE
        elif isinstance(error, MemoryError | RuntimeError | ImportError | SystemError) and _lacks_memory(error):
            _complain(UserError(OUT_OF_MEMORY))
            code = MISTAKE
        else:
            raise
    if code == INTERRUPTED:
        print("\nstopped; run the same command again to continue", file=sys.stderr)
    raise SystemExit(code if isinstance(code, int) else 0)


def _hear_interrupts() -> list[int]:
    """Ctrl-C raises KeyboardInterrupt as ever; the list tells afterwards whether it came."""
    heard: list[int] = []

    def hear(number: int, _: object) -> None:
        heard.append(number)
        raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, hear)  # where a shell ignores it for a background job, it stays ignored
    return heard


def _check_here() -> None:
    """Relative paths are meant from where the user stands; that folder may have been deleted meanwhile."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise UserError("the folder that this terminal is in has been deleted or moved; go to another: cd ~") from None


def _check_memory() -> None:
    """A limit of memory (`ulimit -v`) that nothing can run under is told before anything is loaded."""
    try:
        import resource
    except ImportError:  # Windows has no such limits
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < LEAST_MEMORY:
        raise UserError(
            f"not enough memory: the limit is {limit >> 20} MiB (ulimit -v) and loading torch alone takes more than "
            f"{LEAST_MEMORY >> 20}; raise it"
        )


def _lacks_memory(error: BaseException) -> bool:
    """Whether an error, or what it came from, is that memory or threads ran out."""
    if isinstance(error, MemoryError) or LACK.search(str(error)):
        return True
    cause = error.__cause__ or error.__context__
    return cause is not None and _lacks_memory(cause)


def _complain(error: UserError | click.ClickException | OSError) -> None:
    """One line on the error stream, whatever the message holds."""
    from rich.text import Text

    from ease.console import errors

    message = error.format_message() if isinstance(error, click.ClickException) else str(error)
    errors.print(
        Text("error: ", style="bold red").append(" ".join(message.split()), style="not bold default"), soft_wrap=True
    )
