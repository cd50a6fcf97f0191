"""`ease request find`: lists every pair of a person that a run holds."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import RenderableType

from ease.config import Config
from ease.console import labelled, status, table
from ease.errors import UserError
from ease.operations.find import HeldPair, held_pairs, matching_ids, pairs_like
from ease.operations.lost_sites import read_lost_sites
from ease.runs.resolve import read_ids
from ease.runs.run import Run


class FindSummary(Config):
    """`ease request find`: every pair that was found, with the closed requests that name it."""

    run: Path
    pairs: tuple[HeldPair, ...]
    not_asked: tuple[int, ...]
    """Sites that are gone for good, which could not be asked for the picture."""

    def render(self) -> Iterator[RenderableType]:
        if self.not_asked:
            names = ", ".join(map(str, self.not_asked))
            yield labelled("not asked for the picture", f"clients {names}, whose sites are gone for good", "yellow")
        if not self.pairs:
            yield f"{self.run} holds no such pair in any split or at any site"
            return
        rows = [
            [each.id, each.split.replace("_", "-"), _whose(each), ", ".join(each.closed), each.match]
            for each in self.pairs
        ]
        columns = ["id", "split", "client", "closed by", "found by"]
        yield table(f"{len(rows)} pairs", columns, rows, text_columns=5)
        if any(not each.closed for each in self.pairs):
            yield f"Request their removal with: ease request add {self.run} --samples FILE"


def _whose(pair: HeldPair) -> str:
    if pair.client is None:
        return ""
    return str(pair.client) if pair.name is None else f"{pair.client} ({pair.name})"


def find_pairs(folder: Path, patterns: Sequence[str], ids: Path | None, image: Path | None, quiet: bool) -> FindSummary:
    """Look for pairs by parts of ids, by a list of ids and by a picture, all together."""
    if not patterns and ids is None and image is None:
        raise UserError("name a PATTERN, a list with --ids or a picture with --image")
    run = Run.load(folder)
    known = run.known()
    members = None if known is None else known[0]
    found = matching_ids(members, patterns) if members is not None else set()
    # A whole id is looked for even if it was purged, because its mark is still known.
    named = held_pairs(run, found | set(patterns) | (set() if ids is None else read_ids(ids, "--ids")))
    if image is None:
        return FindSummary(run=folder, pairs=named, not_asked=())
    with status("looking at pictures", quiet):
        shown = pairs_like(run, image)
    seen = {each.id for each in named}
    more = (each for each in shown if each.id not in seen)
    lost = read_lost_sites(folder).clients
    return FindSummary(run=folder, pairs=(*named, *more), not_asked=tuple(sorted(lost)))
