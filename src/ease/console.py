"""What people see: progress with time left, tables, and one-line errors."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

screen = Console()
errors = Console(stderr=True)


class RoundProgress:
    """A bar over rounds; `step` moves it and shows the latest figures."""

    def __init__(self, progress: Progress | None, task: Any):
        self._progress, self._task = progress, task

    def step(self, **figures: str) -> None:
        if self._progress is not None:
            note = "  ".join(f"{name} {value}" for name, value in figures.items())
            self._progress.update(self._task, advance=1, note=note)


@contextmanager
def rounds_bar(title: str, total: int, done: int = 0, quiet: bool = False) -> Iterator[RoundProgress]:
    """A progress bar on the error stream, so that standard output stays clean for results."""
    if quiet:
        yield RoundProgress(None, None)
        return
    columns = [
        TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(),
        TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), TextColumn("[dim]{task.fields[note]}"),
    ]
    with Progress(*columns, console=errors, transient=False) as progress:
        yield RoundProgress(progress, progress.add_task(title, total=total, completed=done, note=""))


def table(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]], caption: str | None = None) -> Table:
    """A table whose first column is text and whose others are numbers."""
    result = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    for index, column in enumerate(columns):
        result.add_column(column, justify="left" if index == 0 else "right", no_wrap=index == 0)
    for row in rows:
        result.add_row(*row)
    return result


def megabytes(count: float) -> str:
    return f"{count / 1e6:.1f} MB"
