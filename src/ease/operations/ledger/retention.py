"""Purge as the ledger knows it: what was released long enough ago, and no id of it in the ledger either."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from ease.operations.evidence import attest
from ease.operations.ledger.records import now, stamp
from ease.operations.ledger.store import REDACTED, Ledger
from ease.operations.ledger.work import worker_lock
from ease.operations.lost_sites import record_lost_sites
from ease.operations.purge import PLAN, PurgePass, purge
from ease.requests.tombstones import read_tombstones
from ease.runs.head import ReleaseChain
from ease.runs.run import PURGING, Run


@dataclass(frozen=True)
class Override:
    """The decision of a person to purge without sites that are gone for good."""

    clients: tuple[int, ...]
    by: str
    why: str


def purge_released(folder: Path, older_than_days: float = 0.0, override: Override | None = None) -> Iterator[PurgePass]:
    """Purge every release that is old enough and has none before it that is not; an interrupted purge resumes."""
    run, ledger = Run.load(folder, purging=True), Ledger(folder)
    with worker_lock(folder):
        ledger.check_idle()
        if override is not None:
            record_lost_sites(run, override.clients, override.by, override.why)
        old = stamp(now() - timedelta(days=older_than_days))
        if not (folder / PURGING / PLAN).is_file():
            attest(run)  # hashes of what is about to be rewritten or removed
        times = _released_at(run, run.head, ledger)
        until = next((place for place, time in enumerate(times) if time > old), len(times))
        for done in purge(folder, until, stamp(now())):
            attest(run)  # one line for each pass, wherever a process dies
            yield done
        if ledger.exists:
            stones = read_tombstones(folder)
            renamed = [(entry, stones.renamed(entry.request)) for entry in ledger.entries()]
            ledger.rename({entry.id: request for entry, request in renamed if request != entry.request})
        attest(run)


def redact_closed(folder: Path, older_than_days: float) -> list[str]:
    """Remove names and words of requests that were closed so long ago; return their ids."""
    ledger, old = Ledger(folder), stamp(now() - timedelta(days=older_than_days))
    if not ledger.exists:
        return []
    closed = {each.request: each.time for each in ledger.events() if each.before != each.after}
    ids = [
        each.id
        for each in ledger.entries()
        if not each.is_open and closed[each.id] <= old and any(getattr(each, name) for name in REDACTED)
    ]
    if ids:
        ledger.redact(ids)
    return ids


def _released_at(run: Run, head: ReleaseChain, ledger: Ledger) -> list[str]:
    """When each release was made, by the ledger, or by its answer's record where someone released it by hand."""
    noted = {}
    for entry in ledger.entries():
        if entry.outcome.release is not None:
            moves = [each for each in ledger.events(entry.id) if each.before != each.after]
            noted[entry.outcome.release] = moves[-1].time
    paths = [run.model_path(release).parent / "record.json" for release in head.releases]
    written = [stamp(datetime.fromtimestamp(path.stat().st_mtime, UTC)) if path.is_file() else "" for path in paths]
    times = [noted.get(number, time) for number, time in enumerate(written, start=1)]
    return ["" if release.purged else time for release, time in zip(head.releases, times, strict=True)]
