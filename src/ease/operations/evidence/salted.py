"""Requests and pairs under names that can be traced back to ids only with the run's salt."""

import hmac
import secrets
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from ease.errors import UserError
from ease.operations.evidence.canonical import hashed
from ease.requests.request import REQUESTS, Request, SampleRequest, untrained_in
from ease.runs.resolve import named_ids, request_id
from ease.runs.run import Run
from ease.storage import exclusive, read_bytes, write_atomic

SALT_BYTES = 32
BUSY_SECONDS = 30.0
"""How long to wait for another process to finish its line."""


def evidence_folder(run: Run) -> Path:
    return run.folder / "evidence"


def locked_evidence(run: Run) -> AbstractContextManager[None]:
    """Hold the run's evidence for this process; others wait, for a line is written quickly."""
    busy = f"{evidence_folder(run)}: another process keeps the log to itself; run the same command again"
    return exclusive(evidence_folder(run) / ".lock", busy, BUSY_SECONDS)


def salt_path(run: Run) -> Path:
    return evidence_folder(run) / "salt"


def salt_of(run: Run) -> bytes:
    """The run's secret, made on first use. Without it, guessed ids could be tried against the hashes."""
    path = salt_path(run)
    if not path.is_file():
        if (evidence_folder(run) / "head.json").is_file():
            raise UserError(f"{path}: missing, and no hash of a pair can be traced without it; restore it")
        with locked_evidence(run):
            if not path.is_file():
                write_atomic(path, secrets.token_hex(SALT_BYTES).encode())
    try:
        salt = bytes.fromhex(read_bytes(path, 2 * SALT_BYTES).decode())
    except ValueError as error:
        raise UserError(f"{path}: damaged; restore it, for no hash of a pair can be traced without it") from error
    if len(salt) != SALT_BYTES:
        raise UserError(f"{path}: cut short; restore it, for no hash of a pair can be traced without it")
    return salt


def hidden(run: Run, pair_id: str) -> str:
    """A pair's name in the log and in certificates."""
    return _hidden(salt_of(run), pair_id)


def _hidden(salt: bytes, text: str) -> str:
    return hmac.digest(salt, text.encode("utf-8", "surrogatepass"), "sha256").hex()


def public_name(run: Run, request: Request | str) -> str:
    """A request's name for others. That of a sample request is a hash of its ids, so it is hashed with the salt.

    A request that was answered goes by the name of its folder, which stays when a purge puts marks for ids.
    """
    name = request if isinstance(request, str) else request_id(request)
    return f"sample-{_hidden(salt_of(run), name)[:16]}" if name.startswith("sample-") else name


def redacted(run: Run, request: Request, folder: str | None = None) -> dict[str, Any]:
    """A request as others may read it: of pairs their number and hashes, never an id."""
    salt, known = salt_of(run), run.known()
    if isinstance(request, SampleRequest):
        ids = list(request.ids)
    else:
        ids = [] if known is None else named_ids(known[0], request)
    pairs = sorted({_hidden(salt, each) for each in ids})
    splits = {} if known is None else {"train": named_ids(known[0], request), **untrained_in(request, known[0])}
    table = request.model_dump(mode="json", exclude={"ids"})
    for name in ("words", "unless"):  # which may be a person's name, and certificates and logs stay
        if table.get(name):
            table[name] = [_hidden(salt, each)[:16] for each in table[name]]
    return {
        **table,
        "name": public_name(run, folder or request),
        "pairs": len(pairs),
        "pairs_sha256": hashed(pairs),
        "splits": {split: len(named) for split, named in splits.items()},
    }


def without_ids(run: Run, value: Any) -> Any:
    """The value as JSON for other readers: every request redacted and every id of a pair hashed."""
    if isinstance(value, BaseModel):
        return without_ids(run, value.model_dump(mode="json"))
    if isinstance(value, Mapping):
        try:
            return redacted(run, REQUESTS.validate_python(dict(value)))
        except ValidationError:
            return {str(key): _field(run, key, each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [without_ids(run, each) for each in value]
    return value


def _field(run: Run, key: Any, value: Any) -> Any:
    if key == "ids" and isinstance(value, list | tuple | set | frozenset):
        return sorted(hidden(run, str(each)) for each in value)
    return without_ids(run, value)
