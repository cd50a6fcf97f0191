"""Client answers kept on disk as they arrive, so that an interrupted method replays them and goes on, byte for byte.

Methods are deterministic functions of the answers they get. Keeping the answers therefore makes every method
resumable without a line of its own.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from ease.errors import UserError
from ease.federation.protocol import Federation, LocalJob, Update
from ease.params import Params, block_from
from ease.storage import read_note, read_tensors, write_tensors


class Journal:
    """A federation that answers from its folder where it can, and asks the one it wraps where it cannot."""

    def __init__(self, inner: Federation, folder: Path):
        self.inner = inner
        self.folder = folder
        self._calls = 0

    @property
    def clients(self) -> Sequence[int]:
        return self.inner.clients

    def run(self, params: Params, job: LocalJob, clients: Sequence[int]) -> Iterator[Update]:
        call, self._calls = self._calls, self._calls + 1
        device = next(iter(params.tensors.values())).device
        paths = {client: self.folder / f"{call:05d}-{client:05d}.safetensors" for client in clients}
        missing = [client for client, path in paths.items() if not path.is_file()]
        for client, path in paths.items():
            if client not in missing:
                yield self._stored(path, device)
        for update in self.inner.run(params, job, missing) if missing else ():
            write_update(paths[update.client], update)
            yield update

    def _stored(self, path: Path, device: torch.device) -> Update:
        try:
            return read_update(path, device)
        except (UserError, KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{path}: this stored answer is damaged; delete it and run the same command again"
            ) from error


def write_update(path: Path, update: Update) -> None:
    delta = {} if update.delta is None else {f"delta/{name}": tensor for name, tensor in update.delta.tensors.items()}
    values = {f"value/{name}": tensor for name, tensor in update.values.items()}
    blocks = None if update.delta is None else [vars(block) for block in update.delta.blocks]
    note = {"client": update.client, "pairs": update.pairs, "blocks": blocks}
    write_tensors(path, {**delta, **values}, note)


def read_update(path: Path, device: torch.device | str = "cpu") -> Update:
    """The update as it was answered: its change of the parameters on `device`, its values on the CPU."""
    note, tensors = read_note(path), read_tensors(path)
    delta = None
    if note["blocks"] is not None:
        blocks = tuple(block_from(fields) for fields in note["blocks"])
        delta = Params({name: tensors[f"delta/{name}"] for block in blocks for name in block.tensors}, blocks)
        delta = delta.to(device)
    values = {name.removeprefix("value/"): tensor for name, tensor in tensors.items() if name.startswith("value/")}
    return Update(note["client"], note["pairs"], delta, values)
