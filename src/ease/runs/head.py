"""The releases of a run: results that became its model, one for each closed request."""

from functools import lru_cache
from pathlib import Path
from typing import Literal

from pydantic import Field

from ease.config import Config, validate
from ease.errors import UserError
from ease.federation.history import ROUNDS
from ease.requests.request import Request
from ease.storage import SMALL_JSON, identity, read_json, write_json

NAME, COUNT = "head.json", "releases.json"


class Release(Config):
    """A result that became the run's model. Its request is closed and its pairs are gone."""

    request: Request
    answer: str
    """REQUEST/METHOD in the run."""
    model_sha256: str
    after_round: int
    """Number of rounds that had been trained."""
    purged: bool = False
    """Whether everything before it was deleted."""
    rounds: str = Field("", pattern=r"^$|^requests/[^./\\][^/\\]*/[^./\\][^/\\]*/rounds$")
    """Folder of the rounds if the result is a training from the start that later requests continue; else empty."""


class ReleaseChain(Config):
    """All releases, oldest first."""

    format: Literal[1] = 1
    releases: tuple[Release, ...] = ()

    def before(self, request: Request) -> "ReleaseChain":
        """The head at the time when a request was answered, without its own release and later ones."""
        place = next((n for n, each in enumerate(self.releases) if each.request == request), len(self.releases))
        return ReleaseChain(releases=self.releases[:place])

    @property
    def gone(self) -> tuple[Request, ...]:
        return tuple(release.request for release in self.releases)

    @property
    def renewed(self) -> int:
        """Number of releases up to the last training from the start, which never saw their pairs."""
        return max((n for n, each in enumerate(self.releases, start=1) if each.rounds), default=0)

    @property
    def places(self) -> tuple[str, ...]:
        """Folders of the rounds of each training from the start; the run continues from the last one."""
        return (ROUNDS, *(each.rounds for each in self.releases if each.rounds))

    def follows(self, rounds: int) -> Release | None:
        """The last release after this number of rounds, or None."""
        return next((each for each in reversed(self.releases) if each.after_round == rounds), None)


def read_head(path: Path) -> ReleaseChain:
    """The stored head, or one without releases; the file is read again only after it was replaced."""
    return _read_head(path, *identity(path)) if path.is_file() else ReleaseChain()


@lru_cache(maxsize=16)
def _read_head(path: Path, *identity: int) -> ReleaseChain:
    return validate(ReleaseChain, read_json(path, most=SMALL_JSON), str(path))


def write_head(path: Path, head: ReleaseChain) -> None:
    write_json(path, head.model_dump(mode="json"))


class ReleaseCount(Config):
    """How many releases a run has had. A lost or older `head.json` would bring back what was forgotten."""

    format: Literal[1] = 1
    releases: int = Field(ge=0)


def count_releases(folder: Path, head: ReleaseChain) -> None:
    """Store how many releases there are, once the head names them."""
    counted = ReleaseCount(releases=len(head.releases)).model_dump(mode="json")
    path = folder / COUNT
    if not path.is_file() or read_json(path, most=SMALL_JSON) != counted:
        write_json(path, counted)


def check_head(folder: Path) -> None:
    """Refuse a run whose head is missing, or older than its last release."""
    path = folder / COUNT
    if not path.is_file():
        return
    counted = validate(ReleaseCount, read_json(path, most=SMALL_JSON), str(path)).releases
    if (found := len(read_head(folder / NAME).releases)) < counted:
        raise UserError(
            f"{folder / NAME}: names {found} of {counted} releases, so forgotten pairs would be used again; restore "
            "the file from a backup"
        )
