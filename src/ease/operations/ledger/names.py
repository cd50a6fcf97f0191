"""One id for a request: commands that take an answer also take the id that its request has in the ledger, and accept
none on which the ledger still has to decide."""

from pathlib import Path

from ease.errors import UserError
from ease.operations.ledger.records import Entry
from ease.operations.ledger.store import Ledger


def answer_name(folder: Path, name: str) -> str:
    """Return the answer of the request with this id; any other name is returned as it is."""
    ledger = Ledger(folder)
    entry = next((each for each in ledger.entries() if each.id == name), None) if ledger.exists else None
    if entry is None:
        return name
    if entry.outcome.answer is None:
        if (folder / "requests" / name).is_dir():
            return name
        hint = "; answer it with `ease work`" if entry.is_open else ""
        raise UserError(f"{name}: is {entry.state} and has no answer{hint}")
    return entry.outcome.answer


def check_decided(folder: Path, name: str) -> None:
    """Refuse to accept an answer by hand while its request in the ledger waits for a decision or for `ease work`."""
    for entry in _of_answer(folder, name):
        if entry.is_open:
            raise UserError(
                f"{name}: answers {entry.id}, which is {entry.state}; decide with `ease request approve {folder} "
                f"{entry.id}` (or refuse, or cancel), then run `ease work {folder}`"
            )


def check_accepted(folder: Path, name: str) -> None:
    """Refuse to build on a result that nobody accepted, or that was refused or cancelled."""
    check_decided(folder, name)
    for entry in _of_answer(folder, name):
        if entry.state in ("refused", "cancelled"):
            raise UserError(
                f"{name}: answers {entry.id}, which was {entry.state}; delete {folder / 'requests' / name}, or accept "
                f"it with `ease release {folder} --request {name}`"
            )


def _of_answer(folder: Path, name: str) -> list[Entry]:
    """Requests of the ledger that an answer, or another answer to the same, is of."""
    ledger, wanted = Ledger(folder), name.partition("/")[0]
    entries = ledger.entries() if ledger.exists else []
    return [each for each in entries if (each.outcome.answer or "").partition("/")[0] == wanted]
