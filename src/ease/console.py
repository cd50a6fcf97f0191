"""Terminal output: progress with time left, tables and one-line errors."""

import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import UTC, datetime, timedelta
from io import StringIO, TextIOBase
from itertools import count
from textwrap import fill
from typing import Any, Protocol, TextIO, TypeVar

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from ease.errors import UserError

SECONDS_BEFORE_PROGRESS = 2.0
ESTIMATE_SECONDS = 3600.0
"""Window of the estimate of the time left; a single round may take minutes."""

NARROW = 100
"""Columns below which a full progress line does not fit."""
LEAST_TEXT = 10
"""Characters that a column of text gets before numbers are broken."""

STEERING = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, line separators, direction marks and lone surrogates."""

Item = TypeVar("Item")


class Shown(Protocol):
    """A summary that can be printed."""

    def render(self) -> Iterator[RenderableType]: ...


def plain(text: str) -> str:
    """The text with control characters replaced by their escape codes, such as \\x1b."""
    return STEERING.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class Screen(Console):
    """A console that escapes control characters in everything it prints."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            if segment.control or segment.text == "\n" or not STEERING.search(segment.text):
                yield segment
            else:
                yield Segment("\n".join(map(plain, segment.text.split("\n"))), segment.style)


def stream(stderr: bool) -> Console:
    """The console of standard output or standard error. In a notebook it prints plain lines, as in a log file.

    Rich would make an output of its own of every line there, and Jupyter forces colour, which looks like a terminal.
    """
    notebook = Console().is_jupyter
    return Screen(stderr=stderr, force_jupyter=False, force_terminal=False if notebook else None)


screen = stream(stderr=False)
errors = stream(stderr=True)


class RoundProgress:
    """Progress over rounds: `step` counts one and shows its figures, `end` marks the rest as not needed."""

    def __init__(self, show: Callable[[str], None], end: Callable[[], None] = lambda: None):
        self._show = show
        self.end = end

    def step(self, **figures: str) -> None:
        self._show(plain("  ".join(f"{name} {value}" for name, value in figures.items())))


@contextmanager
def rounds_bar(title: str, total: int, done: int = 0, quiet: bool = False, first: str = "") -> Iterator[RoundProgress]:
    """A progress bar on the error stream, so that standard output stays clean for results; `first` is what it says
    until the first round is over."""
    title, first = plain(title), plain(first)
    if quiet:
        yield RoundProgress(lambda note: None)
        return
    if not errors.is_terminal:  # a log file: a line for each round instead of a bar
        numbers, begun = count(1), time.monotonic()

        def print_round(note: str) -> None:
            number = next(numbers)
            left = (time.monotonic() - begun) / number * (total - done - number)
            rest = f"left {timedelta(seconds=round(left))}  " if done + number < total else ""
            errors.print(
                f"{title} {done + number}/{max(total, done + number)}  {rest}{note}", soft_wrap=True, markup=False
            )

        yield RoundProgress(print_round)
        return
    with Progress(*_columns(), console=errors, transient=False, speed_estimate_period=ESTIMATE_SECONDS) as progress:
        try:
            task = progress.add_task(title, total=total, completed=done, note=first)

            def show(note: str) -> None:
                finished = int(progress.tasks[task].completed) + 1
                progress.update(task, completed=finished, total=max(total, finished), note=note)

            yield RoundProgress(show, lambda: progress.update(task, total=progress.tasks[task].completed))
        except UserError:
            progress.live.transient = True  # the error alone stays on the screen, as one line
            raise


def print_left_out(when: str, clients: Mapping[Any, str], quiet: bool) -> None:
    """Print the clients that a round left out, above the progress bar."""
    for client, reason in {} if quiet else clients.items():
        errors.print(f"{when}: without client {client}: {reason}", soft_wrap=True, markup=False, highlight=False)


@contextmanager
def ticks_bar(title: str, total: int, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """Show a bar over many small tasks; yields the function that counts finished ones."""
    if quiet:
        yield lambda ticks: None
    elif errors.is_terminal:
        with Progress(*_columns(), console=errors) as progress:
            task = progress.add_task(title, total=total, note="")
            yield lambda ticks: progress.update(task, advance=ticks)
    else:  # a log file: a line for each tenth
        done, printed = 0, 0

        def advance(ticks: int) -> None:
            nonlocal done, printed
            done += ticks
            if done * 10 // total > printed:
                printed = done * 10 // total
                errors.print(f"{title} {done}/{total}", soft_wrap=True, markup=False)

        yield advance


def _columns() -> list[ProgressColumn]:
    """The columns of a progress bar; on a narrow screen the figures get the space."""
    narrow = errors.width < NARROW
    return [
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=10 if narrow else 24),
        MofNCompleteColumn(),
        *([] if narrow else [TimeElapsedColumn()]),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", style="dim", markup=False),
    ]


def with_progress(items: Iterable[Item], total: int, label: str) -> Iterator[Item]:
    """Pass items through and show a bar on a terminal if they take more than two seconds."""
    if not errors.is_terminal:
        yield from items
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=errors, transient=True)
    task = bar.add_task(label, total=total)
    begun, shown = time.monotonic(), False
    try:
        for item in items:
            yield item
            bar.advance(task)
            if not shown and time.monotonic() - begun > SECONDS_BEFORE_PROGRESS:
                bar.start()
                shown = True
    finally:
        if shown:
            bar.stop()


class Folding(Table):
    """A table that breaks text where it is too wide, and cuts nothing: numbers stay whole as long as text has room."""

    text_columns = 1
    """How many columns, from the left, hold text."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        self._fit(options.max_width)
        return super().__rich_console__(console, options)

    def _fit(self, width: int) -> None:
        """Decide what is broken; a table that fits stays as it is."""
        cells = [[_longest(str(cell)) for cell in (column.header, *column.cells)] for column in self.columns]
        room = width - 3 * len(self.columns) - 1
        if sum(max(each) for each in cells) <= room:
            return
        for place, column in enumerate(self.columns):
            column.no_wrap = place >= self.text_columns
            if column.no_wrap:  # words of the heading go below each other, so that it is as narrow as the numbers
                words = str(column.header).split()
                widest = max([*cells[place][1:], *map(len, words), 1])
                column.header = fill(str(column.header), widest, break_long_words=False, break_on_hyphens=False)
                room -= widest
        if room < LEAST_TEXT * self.text_columns:
            for column in self.columns:
                column.no_wrap = False
        elif self.text_columns > 1 and max(cells[0]) <= room // 2:
            self.columns[0].no_wrap = True  # an id that can be copied


def _longest(text: str) -> int:
    """Cells of the longest line."""
    return max(map(cell_len, text.splitlines()), default=0)


def table(
    title: str,
    columns: Iterable[str],
    rows: Iterable[Iterable[str | Text]],
    caption: str | None = None,
    text_columns: int = 1,
) -> Table:
    """A table with text in the first columns and numbers in the others.

    Strings are shown as they are, brackets too: labels and paths are the user's. Styled text is a Text.
    """
    result = Folding(
        title=escape(plain(title)), title_justify="left", caption=escape(caption or ""), caption_justify="left"
    )
    result.text_columns = text_columns
    for index, column in enumerate(columns):
        result.add_column(escape(plain(column)), justify="left" if index < text_columns else "right", overflow="fold")
    for row in rows:
        result.add_row(*(Text(plain(cell)) if isinstance(cell, str) else cell for cell in row))
    return result


def megabytes(count: float) -> str:
    return f"{count / 1e6:.1f} MB"


def disk(count: float) -> str:
    """A size on disk, rounded for people."""
    return megabytes(count) if count < 1e9 else f"{count / 1e9:.0f} GB"


def duration(seconds: float) -> str:
    """A duration, rounded for people."""
    if seconds < 120:
        return f"{max(seconds, 1):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def status(text: str, quiet: bool) -> AbstractContextManager[object]:
    """A spinner for the time of a block."""
    return nullcontext() if quiet else errors.status(escape(plain(text)))


def as_text(shown: Shown) -> str:
    """A summary as plain text."""
    return _recorded(shown).export_text().rstrip()


def _recorded(shown: Shown) -> Console:
    """A console that records a summary without printing it."""
    recorder = Screen(width=100, record=True, file=StringIO(), force_jupyter=False)
    show(shown, recorder)
    return recorder


def show(shown: Shown, on: Console = screen) -> None:
    """Print a summary. Strings are not wrapped, so that paths can be copied."""
    for part in shown.render():
        on.print(plain(part) if isinstance(part, str) else part, soft_wrap=isinstance(part, str | Text), markup=False)


class JsonLines(TextIOBase):
    """A stream that writes each line it is given as JSON with its date."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self._begun = ""

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            if line.strip():
                self.event(line.strip())
        return len(text)

    def event(self, event: str, **values: Any) -> None:
        line = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event, **values}
        self.stream.write(json.dumps(line, default=str) + "\n")
        self.stream.flush()

    def flush(self) -> None:
        self.stream.flush()


def log_as_json() -> None:
    """Write everything that goes to the error stream from here on as lines of JSON with their dates."""
    if not isinstance(sys.stderr, JsonLines):
        sys.stderr = JsonLines(sys.stderr)


def log_event(event: str, **values: Any) -> None:
    """Print one line of JSON with the date on the error stream, for programs that collect logs."""
    (sys.stderr if isinstance(sys.stderr, JsonLines) else JsonLines(sys.stderr)).event(event, **values)


def labelled(label: str, text: str, style: str = "dim") -> Text:
    """A line with a styled label."""
    return Text.assemble((f"{plain(label)}:", style), f" {plain(text)}")
