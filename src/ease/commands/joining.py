"""What `ease join` does: a client with its consent joins a run, and what became of its pairs is said."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from ease.commands.requests import someone
from ease.console import labelled, status
from ease.operations.joining import Joined, Wish, join
from ease.runs.resolve import read_ids
from ease.runs.run import Run


@dataclass(frozen=True)
class JoinSummary:
    """A client that joined."""

    folder: Path
    joined: Joined

    def as_json(self) -> dict[str, Any]:
        holding, consent = self.joined.holding, self.joined.consent
        assert holding.joined is not None  # that is why we are here
        return {
            "run": str(self.folder),
            "added": self.joined.added,
            "client": holding.client,
            "name": holding.name,
            "training_pairs": len(holding.train_ids),
            "validation_pairs": len(holding.validation_ids),
            "left_out": self.joined.left_out,
            "consent": {**consent.model_dump(mode="json"), "sha256": consent.content_hash},
            **holding.joined.model_dump(mode="json", include={"after_round", "after_releases", "owner"}),
        }

    def render(self) -> Iterator[RenderableType]:
        holding, consent = self.joined.holding, self.joined.consent
        called = "" if holding.name is None else f" ({holding.name})"
        said = "joined" if self.joined.added else "had joined already"
        yield labelled("client", f"{holding.client}{called} {said}")
        yield labelled("pairs", f"{len(holding.train_ids)} to train on, {len(holding.validation_ids)} held out")
        if consent.returned:
            yield labelled("again", f"{consent.returned} of them had been forgotten before")
        if self.joined.left_out:
            yield labelled("left out", f"{self.joined.left_out} pairs of a kind that was forgotten", "yellow")
        yield labelled("consent", f"{consent.text} (by {consent.given_by}, {consent.time[:10]})")
        yield f"train on with it: ease train --resume {self.folder} --until ROUNDS"


def join_run(
    folder: Path,
    consent: str,
    by: str | None,
    site: str | None,
    samples: Path | None,
    owner: str | None,
    again_after: str | None,
    quiet: bool,
) -> JoinSummary:
    ids = frozenset[str]() if samples is None else frozenset(read_ids(samples))
    wish = Wish(consent, someone(by), site, ids, owner, again_after)
    with status("preparing data and backbone", quiet):
        return JoinSummary(folder, join(Run.load(folder), wish))
