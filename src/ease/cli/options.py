"""Options that several commands share, and the decorator that adds `--json` and `--debug` and prints the summary."""

import functools
import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol, get_type_hints

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ease.methods.base import Unlearner


REFUTED = 1
"""Exit code of a check that failed."""


class Summary(Protocol):
    """Return value of a command: its fields are the JSON object, and it renders as tables for people."""

    def model_dump(self, *, mode: str) -> dict[str, Any]: ...

    def render(self) -> "Iterator[RenderableType]": ...


Result = Summary | tuple[Summary, int] | None
"""A summary, a summary with an exit code, or nothing if the command printed everything itself."""

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the full traceback of an error.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print the result without progress.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change one setting, e.g. training.rounds=5. Repeatable."),
]

Track = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="Send rounds and results to csv, tensorboard, mlflow or wandb. Repeatable."),
]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")]
Configuration = Annotated[Path | None, typer.Argument(help="TOML file. Without one, the defaults apply.")]
Federation = Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of the federation.")]
Certificate = Annotated[Path, typer.Argument(metavar="CERT", help="A certificate.")]

Method = Annotated[
    str | None,
    typer.Option(help="Unlearning method, see `ease methods`. By default `ease`, or `exact` where it applies."),
]
Clients = Annotated[
    list[str] | None, typer.Option(help="A client that withdraws: its number or the name of its site. Repeatable.")
]
Concepts = Annotated[
    list[str] | None,
    typer.Option(metavar="WORDS", help='Words that describe the pairs, such as "in the snow". Repeatable.'),
]
Classes = Annotated[
    list[str] | None, typer.Option("--class", metavar="N", help="A pseudo-class by its number. Repeatable.")
]
Samples = Annotated[Path | None, typer.Option(help="File with the ids of pairs, one per line.")]
Threshold = Annotated[
    float | None,
    typer.Option(min=-1, max=1, help="Least cosine between pairs and words. By default found from captions."),
]
Except = Annotated[
    list[str] | None,
    typer.Option(
        "--except",
        metavar="PHRASE",
        help='Phrase in which the words of --concept do not count, e.g. "hot dog" for dog. Repeatable.',
    ),
]
RequestName = Annotated[
    str, typer.Option(metavar="NAME", help="Name of a request by words or ids. By default one is made.")
]
By = Annotated[str | None, typer.Option(help="Who does this. By default the user of this machine.")]
Key = Annotated[Path | None, typer.Option(help="Your private key (`ease keys new`), which signs this step.")]


class Log(StrEnum):
    text = "text"
    json = "json"


LogFormat = Annotated[
    Log, typer.Option("--log-format", help="Print progress as text, or each event as a line of JSON with its date.")
]
Processes = Annotated[int | None, typer.Option(min=1, help="Runs at the same time. By default one per core.")]
CheckQuick = Annotated[
    bool, typer.Option("--quick", help="Check hashes and recorded figures only, without measuring again.")
]

SHARED = (
    inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Json),
    inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Debug),
)


TRACK = inspect.Parameter("track", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Track)


def command(function: Callable[..., Result]) -> Callable[..., None]:
    """The function as a command that also takes `--json` and `--debug` and prints the summary it returns."""
    return _command(function, SHARED)


def tracked(function: Callable[..., Result]) -> Callable[..., None]:
    """A command that also takes `--track` and sends its rounds and results there."""
    return _command(function, (*SHARED, TRACK))


def followed(trackers: list[str] | None) -> AbstractContextManager[None]:
    """Sends events to the named trackers; without any, nothing is imported."""
    if not trackers:
        return nullcontext()
    from ease.events import tracking

    return tracking(*trackers)


def service(function: Callable[..., None]) -> Callable[..., None]:
    """The function as a command that runs until it is stopped and prints no summary; it also takes `--debug`."""
    return _command(function, SHARED[1:])


def _command(function: Callable[..., Result], shared: tuple[inspect.Parameter, ...]) -> Callable[..., None]:
    own = inspect.signature(function).parameters
    added = [each for each in shared if each.name not in own]

    @functools.wraps(function)
    def run(**values: Any) -> None:
        as_json = values.get("as_json", False)
        if as_json and "quiet" in values:
            values["quiet"] = True
        with followed(values.get("track")):
            result = function(**{name: values[name] for name in own})
        summary, code = result if isinstance(result, tuple) else (result, 0)
        if summary is not None:
            print_summary(summary, as_json)
        if code:
            raise typer.Exit(code)

    hints = get_type_hints(function, include_extras=True) | {each.name: each.annotation for each in added}
    run.__annotations__ = {name: hint for name, hint in hints.items() if name != "return"}
    run.__signature__ = inspect.Signature([*own.values(), *added])  # type: ignore[attr-defined]
    return run


def print_summary(summary: Summary, as_json: bool) -> None:
    """Print a JSON object for machines or tables for people."""
    if as_json:
        print(json.dumps(summary.model_dump(mode="json"), allow_nan=False))
    else:
        from ease.console import show

        show(summary)


def chosen_method(name: str | None, settings: list[str] | None) -> "Unlearner | None":
    """The method that `--method` and `--set` name, or None if the run decides."""
    if name is None and not settings:
        return None
    from ease.methods import make_method

    return make_method(name or "ease", tuple(settings or ()))
