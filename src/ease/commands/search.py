"""`ease search`: finds pictures of a run by words, before and after forgetting."""

import re
from collections.abc import Iterator
from pathlib import Path

from rich.console import RenderableType
from rich.text import Text

from ease.commands.preview import shortened
from ease.config import Config
from ease.console import labelled, plain, status, table
from ease.errors import UserError
from ease.operations.ledger.names import answer_name
from ease.runs.run import Run
from ease.runs.using import Hit, SearchModels, check_sought
from ease.show.found import found_sheet
from ease.storage import digest, write_atomic

FOLDER = "searches"
MOST = 200
LONGEST_ID = 30
"""Letters of an id that a narrow screen keeps in one piece, to be copied."""


class SearchSummary(Config):
    """`ease search`: what each model found."""

    words: str
    found: dict[str, tuple[Hit, ...]]
    """Model -> its nearest pictures, nearest first."""
    page: Path | None
    """The page of pictures."""

    def render(self) -> Iterator[RenderableType]:
        for name, hits in self.found.items():
            rows: list[list[str | Text]] = [
                [
                    str(rank),
                    f"{hit.score:.2f}",
                    _whose(hit),
                    Text(shortened(hit.caption)),
                    Text(plain(hit.id), overflow="fold"),
                ]
                for rank, hit in enumerate(hits, start=1)
            ]
            found = table(f"“{self.words}”, {name}", ["", "cosine", "whose", "caption", "id"], rows, text_columns=5)
            found.columns[-1].min_width = min(LONGEST_ID, max((len(plain(hit.id)) for hit in hits), default=0))
            yield found
        gone = {name: sum(hit.forgotten for hit in hits) for name, hits in self.found.items()}
        if len(gone) > 1:
            yield labelled("forgotten pairs found", ", ".join(f"{count} {name}" for name, count in gone.items()))
        if self.page is not None:
            yield labelled("pictures", f"{self.page} (private)")


def _whose(hit: Hit) -> Text:
    return Text(f"{plain(hit.whose)}, forgotten", "yellow") if hit.forgotten else Text(plain(hit.whose))


def search_run(
    folder: Path, words: str, request: str | None, count: int, among: str, out: Path | None, quiet: bool
) -> SearchSummary:
    """Search by the run's model, or by the models before and after a request; write the pictures on a page."""
    run = Run.load(folder)
    request = None if request is None else answer_name(folder, request)
    if not 1 <= count <= MOST:
        raise UserError(f"-k {count}: choose 1 to {MOST}")
    check_sought(words)
    with status("preparing data and backbone", quiet):
        compared = SearchModels.of(run, request)
        found = compared.search(words, count, among)
    name = re.sub("[^a-z0-9]+", "-", words.lower()).strip("-")[:40] or "search"
    out = out or folder / FOLDER / f"{name}-{digest(words, request, count, among)[:6]}.html"
    page = found_sheet(f"Search: “{words}”", found, compared.world.evaluator.pairs.pixels, request is not None)
    write_atomic(out, page.encode())
    return SearchSummary(words=words, found={name: tuple(hits) for name, hits in found.items()}, page=out)
