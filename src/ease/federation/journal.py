"""Client answers kept on disk as they arrive, so that an interrupted method replays them and resumes, byte for byte.

Methods are deterministic functions of the answers they get. Keeping the answers therefore makes every method
resumable without a line of its own. An answer is kept with the key of the work it belongs to, above all the hash of the
model that the work began from: one that was given on the way from another model is never taken for it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ease.errors import UserError
from ease.federation.codec import decode_update, encode_update
from ease.federation.protocol import Federation, LocalJob, Middleware, Update
from ease.params import Params
from ease.storage import read_json, read_sealed, write_json, write_sealed

SUFFIX = ".update"
REFUSED = ".refused"
"""Store which clients were left out and why, so that a resumed method leaves out the same clients."""


class Journal(Middleware):
    """A federation that answers from its folder where it can, and asks the one it wraps where it cannot."""

    def __init__(self, inner: Federation, folder: Path, key: str = ""):
        super().__init__(inner)
        self.folder = folder
        self.key = key
        self._calls = 0
        self._refusals: dict[Path, str] = {}

    def run(self, params: Params, job: LocalJob, clients: Sequence[int]) -> Iterator[Update]:
        self._keep_refusals()
        call, self._calls = self._calls, self._calls + 1
        device = next(iter(params.tensors.values())).device
        paths = {client: self.folder / f"{call:05d}-{client:05d}{SUFFIX}" for client in clients}
        refused = {client: path.with_suffix(REFUSED) for client, path in paths.items()}
        missing = []
        for client, path in paths.items():
            update = self._stored(path, device) if path.is_file() else None
            if update is None and refused[client].is_file():
                update = self._left_out(refused[client], client)
            if update is None:
                missing.append(client)
            else:
                yield update
        for update in self.inner.run(params, job, missing) if missing else ():
            if not update.refused:
                write_update(paths[update.client], update, self.key)
            elif update.client in refused:
                self._refusals[refused[update.client]] = update.refused
            yield update

    def _keep_refusals(self) -> None:
        """Only once the method has gone on with what it got: one that stopped for want of answers asks again."""
        for path, reason in self._refusals.items():
            write_json(path, {"key": self.key, "reason": reason})
        self._refusals = {}

    def _left_out(self, path: Path, client: int) -> Update | None:
        """A refusal that was kept, unless under another key."""
        kept = read_json(path)
        return Update(client, 0, None, refused=str(kept.get("reason"))) if kept.get("key") == self.key else None

    def _stored(self, path: Path, device: torch.device) -> Update | None:
        try:
            return read_update(path, device, self.key)
        except UserError as error:
            raise UserError(
                f"{path}: this stored answer is damaged; delete it and run the same command again"
            ) from error


def write_update(path: Path, update: Update, key: str = "") -> None:
    write_sealed(path, f"{key}\n".encode() + encode_update(update))


def read_update(path: Path, device: torch.device | str = "cpu", key: str = "") -> Update | None:
    """The update as it was answered: its change of the parameters on `device`, its values on the CPU.

    None if it was kept under another key.
    """
    kept, _, message = read_sealed(path).partition(b"\n")
    if kept != key.encode():
        return None
    update = decode_update(message, str(path))
    return update if update.delta is None else replace(update, delta=update.delta.to(device))
