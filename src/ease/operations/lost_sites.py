"""Sites that are gone for good: who recorded that, why, and what could not be deleted there."""

from collections.abc import Collection
from pathlib import Path
from typing import Literal

from pydantic import Field

from ease.config import Config, validate
from ease.errors import UserError
from ease.operations.ledger.records import check_text, now, stamp
from ease.runs.run import Run
from ease.storage import read_json, write_json

NAME = "lost_sites.json"
UNDELETED = "states that it was sent, its own updates, cached pictures and ids of its pairs"
"""Files that a site may keep because no purge reached them."""


class LostSite(Config):
    """The decision to purge without a site, which a person takes and answers for."""

    client: int
    time: str
    by: str
    why: str = Field(min_length=1)

    @property
    def what(self) -> str:
        """What could not be deleted, without the names and words of people."""
        return f"client {self.client}: {UNDELETED}"


class LostSites(Config):
    """Every site of a run that purges no longer wait for, in the order of the decisions."""

    format: Literal[1] = 1
    sites: tuple[LostSite, ...] = ()

    @property
    def clients(self) -> frozenset[int]:
        return frozenset(each.client for each in self.sites)


def read_lost_sites(folder: Path) -> LostSites:
    """Return the recorded decisions of a run; none where nobody took one."""
    path = folder / NAME
    return validate(LostSites, read_json(path), str(path)) if path.is_file() else LostSites()


def record_lost_sites(run: Run, clients: Collection[int], by: str, why: str) -> LostSites:
    """Store that sites are gone for good; a site that is recorded already keeps its first record."""
    if not run.config.remote:
        raise UserError(f'--lost-site: {run.folder} has no sites (engine = "{run.config.engine}")')
    if not why.strip():
        raise UserError("--lost-site: say with --reason why the site is gone for good")
    check_text("reason", why)
    check_text("by", by)
    known, recorded = run.known(), read_lost_sites(run.folder)
    held = set() if known is None else {holding.client for holding in known[0].clients}
    if unknown := sorted(set(clients) - held):
        raise UserError(f"--lost-site {unknown[0]}: no such client in {run.folder}")
    time = stamp(now())
    new = [LostSite(client=each, time=time, by=by, why=why) for each in sorted(set(clients) - recorded.clients)]
    found = LostSites(sites=(*recorded.sites, *new))
    if new:
        write_json(run.folder / NAME, found.model_dump(mode="json"))
    return found
