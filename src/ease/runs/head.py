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


class Extension(Config):
    """A closed-form head solved again after clients joined, whose sums were added to those of the training."""

    clients: tuple[int, ...]
    rounds: str = Field(pattern=r"^joined/client-[0-9]+/rounds$")
    """Folder of the round that the run continues from."""
    after_releases: int = Field(ge=0)
    """Number of releases before it."""


class ReleaseChain(Config):
    """All releases, oldest first, and where clients joined between them."""

    format: Literal[1] = 1
    releases: tuple[Release, ...] = ()
    extensions: tuple[Extension, ...] = ()
    """Oldest first. Empty if the run is trained by averaging, where further rounds train with new clients."""

    def first(self, count: int) -> "ReleaseChain":
        """The chain just before release number `count` was made, counted from 0."""
        there = tuple(each for each in self.extensions if each.after_releases <= count)
        return ReleaseChain(releases=self.releases[:count], extensions=there)

    def before(self, request: Request) -> "ReleaseChain":
        """The head at the time when a request was answered, without its own release and later ones."""
        return self.first(
            next((n for n, each in enumerate(self.releases) if each.request == request), len(self.releases))
        )

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
        placed = [(n, each.rounds) for n, each in enumerate(self.releases, start=1) if each.rounds]
        placed += [(each.after_releases, each.rounds) for each in self.extensions]
        return (ROUNDS, *(rounds for _, rounds in sorted(placed, key=lambda found: found[0])))

    def follows(self, rounds: int) -> Release | None:
        """The last release after this number of rounds; None if there is none or if clients joined since."""
        if self.extensions and self.extensions[-1].after_releases == len(self.releases):
            return None
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
