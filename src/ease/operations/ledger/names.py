"""One id for a request: commands that take an answer also take the id that its request has in the ledger."""

from pathlib import Path

from ease.errors import UserError
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
