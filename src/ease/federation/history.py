"""The training history on disk: start state, every round's state and every client's update, whole and hashed."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ease.errors import UserError
from ease.federation.fedavg import Round
from ease.federation.protocol import Update
from ease.params import Block, Params
from ease.storage import read_json, sha256, write_json

MISSING = "missing from the history; restore it or train again"
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
        return self._round(number) / f"client-{client:05d}.safetensors"

    def update(self, number: int, client: int) -> Update:
        """A client's update as it was averaged in a round, refused if it is damaged."""
        self.verify_update(number, client)
        pairs = self.record(number)["pairs"][str(client)]
        return Update(client, pairs, Params.load(self.update_path(number, client)))

    def record(self, number: int) -> dict[str, Any]:
        return read_json(self._round(number) / "round.json")

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
        for update in finished.updates:
            assert update.delta is not None  # only such updates are averaged
            update.delta.save(self.update_path(finished.number, update.client), self.durable)
        record = {
            "round": finished.number,
            "loss": finished.loss,
            "start": start.relative_to(self.folder).as_posix(),
            "start_sha256": sha256(start),
            "pairs": {str(update.client): update.pairs for update in finished.updates},
            "rejected": {str(client): reason for client, reason in finished.rejected.items()},
            "sha256": {path.name: sha256(path) for path in sorted(folder.glob("*.safetensors"))},
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
        self._verify(number, self.update_path(number, client).name)

    def _verify(self, number: int, name: str) -> None:
        path = self._round(number) / name
        if not path.is_file():
            raise UserError(f"{path}: {MISSING}")
        if sha256(path) != self.record(number)["sha256"][name]:
            raise UserError(f"{path}: {DAMAGED}")

    def _round(self, number: int) -> Path:
        return self.folder / "rounds" / f"{number:05d}"


def read_block(path: Path, block: Block) -> dict[str, torch.Tensor]:
    """Read one block's tensors from a parameter file, and nothing else of it."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in block.tensors}
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: missing, damaged or truncated ({error}); restore it or train again") from error
