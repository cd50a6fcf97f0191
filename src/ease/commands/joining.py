"""`ease join`: adds a client with its consent to a run."""

from collections.abc import Iterator
from pathlib import Path

from rich.console import RenderableType

from ease.commands.requests import someone
from ease.config import Config
from ease.console import labelled, status
from ease.operations.joining import JoinRequest, join
from ease.operations.ledger.records import Consent
from ease.runs.resolve import read_ids
from ease.runs.run import Run
from ease.trainers import trainer_of


class GivenConsent(Consent):
    """A consent with its hash, which the run stores."""

    sha256: str


class JoinSummary(Config):
    """`ease join`: the client that joined."""

    run: Path
    added: bool
    """False if it had joined before."""
    client: int
    name: str | None
    """Name of its site."""
    training_pairs: int
    validation_pairs: int
    left_out: int
    """Pairs that stay out, because such pairs were forgotten."""
    consent: GivenConsent
    after_round: int
    after_releases: int
    owner: int | None
    """The client whose later pairs these are. Null for a new client."""
    model_sha256: str | None = None
    """The closed-form head with the sums of these pairs. Null if further rounds train with them."""

    def render(self) -> Iterator[RenderableType]:
        called = "" if self.name is None else f" ({self.name})"
        yield labelled("client", f"{self.client}{called} {'joined' if self.added else 'had joined already'}")
        yield labelled("pairs", f"{self.training_pairs} to train on, {self.validation_pairs} held out")
        if self.consent.returned:
            yield labelled("again", f"{self.consent.returned} of them had been forgotten before")
        if self.left_out:
            yield labelled("left out", f"{self.left_out} pairs of a kind that was forgotten", "yellow")
        yield labelled("consent", f"{self.consent.text} (by {self.consent.given_by}, {self.consent.time[:10]})")
        if self.model_sha256 is None:
            yield f"train with it: ease train --resume {self.run} --until ROUNDS"
        else:
            yield labelled("model", f"solved again with its sums: {self.model_sha256[:12]}")


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
    join_request = JoinRequest(consent, someone(by), site, ids, owner, again_after)
    with status("preparing data and backbone", quiet):
        joined = join(Run.load(folder), join_request)
    run = Run.load(folder)
    solved = run.history.state_sha256(1) if trainer_of(run.config.model) == "sums" else None
    holding, given = joined.holding, joined.consent
    assert holding.joined is not None  # only a client that joined has a consent
    return JoinSummary(
        run=folder,
        added=joined.added,
        client=holding.client,
        name=holding.name,
        training_pairs=len(holding.train_ids),
        validation_pairs=len(holding.validation_ids),
        left_out=joined.left_out,
        consent=GivenConsent(**dict(given), sha256=given.content_hash),
        after_round=holding.joined.after_round,
        after_releases=holding.joined.after_releases,
        owner=holding.joined.owner,
        model_sha256=solved,
    )
