"""Where a run goes on from: the releases that closed requests made, one after the other."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from ease.config import Config, validate
from ease.federation.history import ROUNDS
from ease.requests.request import Request
from ease.storage import SMALL_JSON, read_json, write_json


class Release(Config):
    """An answer that became the run's model. From then on its request is closed and its pairs are gone."""

    request: Request
    answer: str
    """REQUEST/METHOD in the run."""
    model_sha256: str
    after_round: int
    """How many rounds had been trained by then."""
    purged: bool = False
    """Whether what was there before it is gone for good."""
    rounds: str = Field("", pattern=r"^$|^requests/[^./\\][^/\\]*/[^./\\][^/\\]*/rounds$")
    """Where the rounds lie if the answer is a training from the start that later requests go on from; else nothing."""


class Head(Config):
    """All releases, oldest first."""

    format: Literal[1] = 1
    releases: tuple[Release, ...] = ()

    def before(self, request: Request) -> "Head":
        """As it was when a request was answered: without its own release and those that came later."""
        place = next((n for n, each in enumerate(self.releases) if each.request == request), len(self.releases))
        return Head(releases=self.releases[:place])

    @property
    def gone(self) -> tuple[Request, ...]:
        return tuple(release.request for release in self.releases)

    @property
    def renewed(self) -> int:
        """How many releases there are up to the last training from the start: what they closed was never in it."""
        return max((n for n, each in enumerate(self.releases, start=1) if each.rounds), default=0)

    @property
    def places(self) -> tuple[str, ...]:
        """Where the rounds of each training from the start lie; the last is what the run goes on from."""
        return (ROUNDS, *(each.rounds for each in self.releases if each.rounds))

    def follows(self, rounds: int) -> Release | None:
        """The release that came after so many rounds and before the next one, if there was one: the last of them."""
        return next((each for each in reversed(self.releases) if each.after_round == rounds), None)


def read_head(path: Path) -> Head:
    """The stored head; a run that released nothing goes on from its training."""
    return validate(Head, read_json(path, most=SMALL_JSON), str(path)) if path.is_file() else Head()


def write_head(path: Path, head: Head) -> None:
    write_json(path, head.model_dump(mode="json"))
