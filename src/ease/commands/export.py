"""`ease export`: writes a model in a format that other tools read."""

from collections.abc import Iterator
from pathlib import Path

from rich.console import RenderableType

from ease.commands.requests import someone
from ease.commands.train import warn_if_unfinished
from ease.config import Config
from ease.console import labelled, megabytes, status
from ease.operations.ledger.names import answer_name
from ease.operations.recipients import record_recipient
from ease.runs.export import Format, export
from ease.runs.run import Run
from ease.show.model_card import model_card
from ease.storage import sha256


class ExportSummary(Config):
    """`ease export`: the files of a model."""

    request: str | None
    """The request whose model this is. Null for the trained model."""
    format: Format
    files: tuple[Path, ...]
    folder: Path
    recipient: str | None
    """Who is recorded to have it."""

    def render(self) -> Iterator[RenderableType]:
        for path in self.files:
            yield f"{path}  {megabytes(path.stat().st_size)}"
        if self.recipient is not None:
            yield labelled("recorded", f"{self.recipient} has this model")
        if any(path.name == "load.py" for path in self.files):
            yield labelled("try it", f'cd {self.folder} && python load.py "a few words"')


def export_run(
    folder: Path,
    request: str | None,
    form: Format,
    out: Path | None,
    quiet: bool,
    recipient: str | None = None,
    by: str | None = None,
) -> ExportSummary:
    """Export the trained model of a run or the result of a request, by default into the run."""
    run = Run.load(folder)
    warn_if_unfinished(run)
    request = None if request is None else answer_name(folder, request)
    out = out or folder / "exports" / (request or "trained") / form
    with status("exporting", quiet):
        files = tuple(export(run, request, form, out, model_card(run, request)))
    if recipient is not None:
        hashes = {path.relative_to(out).as_posix(): sha256(path) for path in files}
        record_recipient(run, recipient, someone(by), form, request, hashes)
    return ExportSummary(request=request, format=form, files=files, folder=out, recipient=recipient)
