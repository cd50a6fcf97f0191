"""The training history on disk: start state, every round's state and every client's update, whole and hashed."""

import hashlib
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ease.errors import UserError
from ease.federation.fedavg import Round
from ease.federation.protocol import Update
from ease.params import Block, Params
from ease.storage import read_json, sha256, write_atomic, write_json

MISSING = "missing from the history; restore it or train again"
UPDATES = "updates.bin"
DAMAGED = "damaged (its hash is not the recorded one); restore it or train again"


@dataclass(frozen=True)
class History:
    """Reads and writes one run's history. A round counts once its `round.json` exists, which is written last."""

    folder: Path
    durable: bool = True
    """Wait for the disk after every file; only scratch histories need not."""

    @property
    def initial_path(self) -> Path:
        return self.folder / "initial.safetensors"

    def initial(self) -> Params:
        """w_0."""
        return Params.load(self.initial_path)

    def state_path(self, number: int) -> Path:
        return self.initial_path if number == 0 else self._round(number) / "state.safetensors"

    def state(self, number: int) -> Params:
        """The global state after a round; round 0 is w_0."""
        return Params.load(self.state_path(number))

    def start_path(self, number: int) -> Path:
        """The file of the state that a round began from: that of the round before, unless a request came between."""
        return self.folder / self.record(number)["start"]

    def start(self, number: int) -> Params:
        return Params.load(self.start_path(number))

    def update_path(self, number: int, client: int) -> Path:
        """The file that holds a client's update: all of a round, one after the other, each as `Params.save` writes."""
        return self._round(number) / UPDATES

    def update(self, number: int, client: int) -> Update:
        """A client's update as it was averaged in a round, refused if it is damaged."""
        change = Params.from_bytes(self._update_bytes(number, client))
        return Update(client, self.record(number)["pairs"][str(client)], change)

    def update_block(self, number: int, client: int, block: Block) -> dict[str, torch.Tensor]:
        """One block of a client's update."""
        change = Params.from_bytes(self._update_bytes(number, client))
        return {name: change[name] for name in block.tensors}

    def record(self, number: int) -> dict[str, Any]:
        path = self._round(number) / "round.json"
        return dict(_record(path, path.stat().st_mtime_ns if path.is_file() else 0))

    def rounds(self) -> int:
        """How many complete rounds there are, from the first without a gap."""
        number = 0
        while (self._round(number + 1) / "round.json").is_file():
            number += 1
        return number

    def clients(self, number: int) -> list[int]:
        """Clients whose updates made a round."""
        return [int(client) for client in self.record(number)["pairs"]]

    def columns(self, rounds: int) -> list[tuple[int, int]]:
        """Every stored update of the first rounds as (round, client), in order."""
        return [(number, client) for number in range(1, rounds + 1) for client in self.clients(number)]

    def append(self, finished: Round, extra: dict[str, Any], start: Path | None = None) -> dict[str, Any]:
        """Write a finished round; until its last file is in place, the round does not exist.

        `start` is the file of the state it began from; without one, that of the round before.
        """
        folder = self._round(finished.number)
        if folder.exists():
            shutil.rmtree(folder)  # what a killed process left behind
        try:
            return self._write(folder, finished, extra, start or self.state_path(finished.number - 1))
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)  # a full disk, say: leave no part of a round
            raise

    def _write(self, folder: Path, finished: Round, extra: dict[str, Any], start: Path) -> dict[str, Any]:
        finished.state.save(folder / "state.safetensors", self.durable)
        places: dict[str, dict[str, Any]] = {}
        write_atomic(folder / UPDATES, _packed(finished.updates, places), self.durable)
        record = {
            "round": finished.number,
            "loss": finished.loss,
            "start": start.relative_to(self.folder).as_posix(),
            "start_sha256": sha256(start),
            "pairs": {str(update.client): update.pairs for update in finished.updates},
            "rejected": {str(client): reason for client, reason in finished.rejected.items()},
            "sha256": {path.name: sha256(path) for path in sorted(folder.glob("*.safetensors"))},
            "updates": places,
            **({"clipped": {str(c): each for c, each in finished.clipped.items()}} if finished.clipped else {}),
            **extra,
        }
        write_json(folder / "round.json", record, self.durable)
        return record

    def verify(self) -> None:
        """Refuse a damaged history: every file must have the bytes it was written with."""
        for number in range(1, self.rounds() + 1):
            for name in self.record(number)["sha256"]:
                self._verify(number, name)
            for client in self.clients(number):
                self.verify_update(number, client)
        if self.rounds():
            self.verify_state(0)

    def verify_state(self, number: int) -> None:
        """Refuse a damaged global state; the start state is hashed in the first round's record."""
        if number > 0:
            self._verify(number, "state.safetensors")
        elif not self.initial_path.is_file():
            raise UserError(f"{self.initial_path}: {MISSING}")
        elif sha256(self.initial_path) != self.record(1)["start_sha256"]:
            raise UserError(f"{self.initial_path}: {DAMAGED}")

    def verify_update(self, number: int, client: int) -> None:
        self._update_bytes(number, client)

    def _update_bytes(self, number: int, client: int) -> bytes:
        """A client's part of a round's updates, refused if it is damaged."""
        path, place = self.update_path(number, client), self.record(number)["updates"].get(str(client))
        if place is None or not path.is_file():
            raise UserError(f"{path}: client {client}: {MISSING}" if place is None else f"{path}: {MISSING}")
        with path.open("rb") as file:
            file.seek(place["offset"])
            data = file.read(place["bytes"])
        if hashlib.sha256(data).hexdigest() != place["sha256"]:
            raise UserError(f"{path}: {DAMAGED} (client {client})")
        return data

    def _verify(self, number: int, name: str) -> None:
        path = self._round(number) / name
        if not path.is_file():
            raise UserError(f"{path}: {MISSING}")
        if sha256(path) != self.record(number)["sha256"][name]:
            raise UserError(f"{path}: {DAMAGED}")

    def _round(self, number: int) -> Path:
        return self.folder / "rounds" / f"{number:05d}"


def _packed(updates: Iterable[Update], places: dict[str, dict[str, Any]]) -> Iterator[bytes]:
    """Updates as bytes, one at a time; `places` is told where each lies and what its hash is."""
    offset = 0
    for update in updates:
        data = update.change.file_bytes()
        places[str(update.client)] = {
            "offset": offset,
            "bytes": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
        }
        offset += len(data)
        yield data


@lru_cache(maxsize=64)
def _record(path: Path, changed: int) -> dict[str, Any]:
    """Records of many clients are long, and are asked for once for each."""
    return read_json(path)


def read_block(path: Path, block: Block) -> dict[str, torch.Tensor]:
    """Read one block's tensors from a parameter file, and nothing else of it."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in block.tensors}
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: missing, damaged or truncated ({error}); restore it or train again") from error
