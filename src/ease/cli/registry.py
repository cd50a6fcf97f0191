"""The list of commands. A command's module is imported when the command is called, so that help stays fast.

`ease purge` is the function `purge` in `ease/cli/purge.py`, `ease request add` the function `add` in
`ease/cli/request.py`. A new command needs that function and a line here.
"""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Annotated, cast, get_type_hints

import click
import typer
from typer.core import TyperArgument, TyperGroup
from typer.models import ArgumentInfo

from ease import __version__
from ease.errors import UserError, did_you_mean

ABOUT = "Federated unlearning for image-text models: train, forget, and verify."
MAIN = {
    "train": "Train a model over several clients, or continue a run.",
    "forget": "Forget clients, concepts or single pairs.",
    "audit": "Test whether a result is indistinguishable from retraining.",
    "report": "Write one HTML page about a run and its audits.",
    "demo": "Train, forget and compare with retraining in one go.",
}
"""The commands that `ease --help` shows first, each with the first line of its own help."""
PANELS: dict[str, dict[str, str]] = {
    "Requests": {
        "request": "Submit and find requests, decide on them, keep the register.",
        "work": "Answer approved requests and release the results.",
        "release": "Accept a result, so that the run continues from it.",
        "join": "Add a client with new pairs and its consent.",
        "purge": "Delete what released requests left on disk.",
    },
    "Evidence": {
        "certificate": "Issue and countersign certificates.",
        "verify": "Check a certificate, or the log and ledger of a run.",
        "keys": "Make, list, revoke and rotate keys.",
    },
    "Use": {
        "export": "Write a model in a format that other tools read.",
        "search": "Find pictures by words.",
        "serve": "Serve a model and the queue of requests over HTTP.",
    },
    "Research": {
        "compare": "Find out which kind of model suits your data.",
        "bench": "Run an experiment: methods, requests and seeds in a grid.",
        "sweep": "Choose the settings of every method with the same budget.",
        "methods": "List the unlearning methods.",
    },
    "Federation": {
        "up": "Start a whole federation on this machine.",
        "server": "Run the server of a federation.",
        "node": "Work for one client, next to its data.",
        "status": "Show the nodes of a federation and the waiting requests.",
    },
    "Tools": {
        "doctor": "Check the installation, the machine and the cache.",
        "cache": "List and delete cached files.",
    },
}
"""The other commands by subject."""
GROUPS: dict[str, dict[str, str]] = {
    "request": {
        "add": "Submit a request.",
        "list": "List all requests in the order of work.",
        "show": "Show what a request touches, its cost and its steps.",
        "find": "Find what a run holds on a person.",
        "approve": "Approve a request, or the release of its result.",
        "refuse": "Refuse a request, with the reason for the letter.",
        "extend": "Extend a deadline, once and by two months at most.",
        "cancel": "Cancel a request that is not being worked on.",
        "due": "List what is overdue or due soon.",
        "letter": "Write the letter to the person who asked.",
        "notify": "Record that a recipient of an exported model was notified.",
        "export": "Write the register as CSV and as a page to print.",
    },
    "certificate": {
        "issue": "Certify the result of a request.",
        "sign": "Check a certificate and add a signature.",
        "attest": "Countersign how far the log and ledger of a run go.",
    },
    "keys": {
        "new": "Make a key pair that signs certificates.",
        "server": "Make the certificate of a federation's server.",
        "node": "Make the key of a client's node.",
        "admit": "Admit the node with this key as a client.",
        "list": "List a federation's keys and when its certificate ends.",
        "revoke": "Revoke the key of a client's node.",
        "rotate": "Replace the certificate of a federation's server.",
    },
    "cache": {
        "list": "List the cached files by kind.",
        "clear": "Delete cached files.",
    },
}
"""Commands of two words."""
DEFAULTS = {"certificate": "issue"}
"""Group -> the command that is meant if the next word is none of its commands: `ease certificate RUN` issues one."""
EVERY = MAIN | {name: about for panel in PANELS.values() for name, about in panel.items()}


class Lazy(TyperGroup):
    """A group of commands, each imported when it is called. Help and completion only read the list."""

    above = ""
    listed: Mapping[str, str] = EVERY

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.listed)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command for a list: its name and summary."""
        return click.Command(cmd_name, help=self.listed[cmd_name]) if cmd_name in self.listed else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = click.utils.make_str(args[0])
        if name in self.listed:
            return name, load(f"{self.above} {name}".strip()), args[1:]
        # Without this, click and typer would each add a suggestion of their own.
        if not name.startswith("-") and not ctx.resilient_parsing:
            raise UserError(
                f"{name}: no such command{did_you_mean(name, self.listed)}; choose one of: {', '.join(self.listed)}"
            )
        return super().resolve_command(ctx, args)


class Root(Lazy):
    """All commands, with help that fits one screen."""

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from rich.text import Text

        from ease.console import screen

        for line in _overview():
            screen.print(Text.from_markup(line), soft_wrap=True)


class Nested(Lazy):
    """Commands of two words, such as `request add`."""

    def __init__(self, name: str):
        self.above, self.listed = name, GROUPS[name]
        about = f"{EVERY[name]}\n\n`ease {name} COMMAND --help` describes a command and shows an example."
        super().__init__(name=name, help=about, no_args_is_help=True, rich_markup_mode="markdown")

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if self.above in DEFAULTS and args and args[0] not in (*self.listed, "--help") and not self._misspelt(args[0]):
            args = [DEFAULTS[self.above], *args]
        return super().parse_args(ctx, args)

    def _misspelt(self, word: str) -> bool:
        """Whether a word is more likely a command than a run, which is a folder."""
        return bool(did_you_mean(word, self.listed)) and not Path(word).exists()


def _overview() -> Iterator[str]:
    """The lines of `ease --help`."""
    yield f"[bold]Usage:[/] ease COMMAND [ARGUMENTS] [OPTIONS]\n\n{ABOUT}\n"
    yield from (f"  [cyan]{name:12}[/]{about}" for name, about in MAIN.items())
    yield ""
    yield from (f"[bold]{panel:14}[/][cyan]{'  '.join(names)}[/]" for panel, names in PANELS.items())
    yield ""
    yield "ease COMMAND --help      describes a command and shows an example"
    yield "ease --commands          lists every command with a one-line summary"
    yield "ease --version           prints the version"
    yield "ease --install-completion, --show-completion     complete words in this shell"


def _print_version(asked: bool) -> None:
    if asked:
        print(f"ease {__version__}")
        raise typer.Exit


def _print_commands(asked: bool) -> None:
    if not asked:
        return
    for panel, listed in {"Main": MAIN, **PANELS}.items():
        print(f"{panel}")
        for name, about in listed.items():
            inner = {f"{name} {word}": each for word, each in GROUPS.get(name, {}).items()}
            print("".join(f"  {words:19}{each}\n" for words, each in (inner or {name: about}).items()), end="")
    raise typer.Exit


app = typer.Typer(
    cls=Root, help=ABOUT, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="markdown"
)


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    commands: Annotated[
        bool, typer.Option("--commands", callback=_print_commands, is_eager=True, help="List every command.")
    ] = False,
) -> None:
    """Federated unlearning for image-text models: train, forget, and verify."""


@lru_cache
def program() -> click.Group:
    """The whole command line."""
    return cast(click.Group, typer.main.get_command(app))


@lru_cache
def load(words: str) -> click.Command:
    """The command that these words call, from its module; a group for the first word of two."""
    if words in GROUPS:
        return Nested(words)
    module, name = words.split()[0], words.split()[-1]
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")
    found = import_module(f"ease.cli.{module}")
    alone.command(name)(getattr(found, f"{name}_", None) or getattr(found, name))
    made = typer.main.get_command(alone)
    _explain_arguments(made)
    return made


def _explain_arguments(command: click.Command) -> None:
    """Restore the help texts of arguments, which click overwrites from 8.5 on."""
    hints = {} if command.callback is None else get_type_hints(command.callback, include_extras=True)
    for each in command.params:
        for info in getattr(hints.get(each.name or ""), "__metadata__", ()):
            if isinstance(each, TyperArgument) and isinstance(info, ArgumentInfo):
                each.help = info.help


def commands() -> dict[str, click.Command]:
    """Every command that does something, by the words that call it, such as `request add`."""
    words = [f"{name} {word}".strip() for name in EVERY for word in GROUPS.get(name, {"": ""})]
    return {each: load(each) for each in words}


def summaries() -> dict[str, str]:
    """The one-line summary of every command that does something."""
    return {
        f"{name} {word}".strip(): inner
        for name, about in EVERY.items()
        for word, inner in GROUPS.get(name, {"": about}).items()
    }
