"""`ease bench` on an experiment with `requests`: all methods on one stream of requests, as a leaderboard."""

from collections.abc import Iterator
from pathlib import Path

from rich.console import RenderableType

from ease.console import labelled, rounds_bar, table
from ease.runs.records import write_record
from ease.runs.workers import default_processes
from ease.show.leaderboard import as_csv
from ease.show.stream_board import StreamStanding, as_html, caption, cell, standings
from ease.storage import write_atomic
from ease.studies.experiment import Experiment
from ease.studies.records import StreamResults
from ease.studies.streams import jobs_of, stream_results, streams

SHOWN = {
    "verdict": "closer to",
    "distance": "forget",
    "returned": "return",
    "retain_gap": "retain",
    "test_gap": "test",
    "pairs_share": "pairs",
    "bytes_share": "bytes",
}
"""Columns on a screen of 80 columns; all are in the files."""


class StreamSummary(StreamResults):
    """`ease bench` on a stream: the stored results, the leaderboard and the files."""

    standings: tuple[StreamStanding, ...]
    folder: Path
    files: tuple[Path, ...]

    def render(self) -> Iterator[RenderableType]:
        rows = [[each.method, *(cell(each, column) for column in SHOWN)] for each in self.standings]
        title = f"{len(self.reference.kinds)} requests one after the other"
        yield table(title, ["", *SHOWN.values()], rows, caption=caption(self))
        yield from (
            labelled(each.method, f"stopped at {each.stopped}", "yellow") for each in self.standings if each.stopped
        )
        if self.reduced:
            yield labelled(
                "caveat", "made smaller by --quick: the figures show that it runs, not how methods compare", "yellow"
            )
        yield f"written to {self.folder}: {', '.join(path.name for path in self.files)}"


def stream_run(experiment: Experiment, name: str, out: Path, processes: int | None, quiet: bool) -> StreamSummary:
    """Do what is missing of a stream study, then write the leaderboard."""
    first, methods = jobs_of(experiment, out)
    total = sum(job.notes for job in (first, *methods))
    with rounds_bar(name, total, quiet=quiet, first="training") as bar:
        for note in streams(experiment, out, processes or default_processes(experiment.run.device)):
            bar.step(done=note)
        bar.end()
    folder, found = out / name, stream_results(experiment, out)
    ranked = standings(found)
    files = (folder / "stream.json", folder / "leaderboard.csv", folder / "leaderboard.html")
    write_record(files[0], found)
    write_atomic(files[1], as_csv(ranked, StreamStanding).encode())
    write_atomic(files[2], as_html(ranked, found).encode())
    return StreamSummary(**dict(found), standings=ranked, folder=folder, files=files)
