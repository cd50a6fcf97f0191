"""The history that a client stores on its own disk: the states it was sent and its own updates, with their hashes.

Only the client's side of an engine reads it. The server learns about it only through answers.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from ease.config import Config, validate
from ease.errors import ClientError, UserError
from ease.federation.codec import Hash, decode_state, encode_state
from ease.federation.container import content_hash
from ease.params import Params
from ease.storage import read_json, write_atomic, write_json

ALTERNATIVES = (
    'restore it, use --method retrain or a run trained with training.history = "server", or, if it is this client that '
    "leaves, let the others report (--method ease --set contribution_source=remaining)"
)


class ClientRound(Config):
    """The file `round.json` of a client: the hashes of a round's files."""

    round: int
    start: Hash
    change: Hash


@dataclass(frozen=True)
class ClientHistory:
    """Reads and writes the history of one client. A round is complete once its `round.json`, the last file, exists."""

    client: int
    folder: Path

    def write(self, number: int, start: Params, change: Params) -> None:
        """Store the state that a round started from and the client's update, in the encoding of messages."""
        folder = self._round(number)
        if folder.exists():
            shutil.rmtree(folder)  # left by a killed process, whose round was never complete
        contents = {"start": encode_state(start), "change": encode_state(change)}
        for name, data in contents.items():
            write_atomic(folder / f"{name}.state", data)
        hashes = {name: content_hash(data) for name, data in contents.items()}
        write_json(folder / "round.json", ClientRound(round=number, **hashes).model_dump(mode="json"))

    def start(self, number: int, name: str) -> Params:
        """The state that a round started from, which must have this hash."""
        return self._state(self._round(number) / "start.state", self._record(number, name).start)

    def change(self, number: int, name: str) -> Params:
        """The client's own update of a round, which must have started from the state with this hash."""
        return self._state(self._round(number) / "change.state", self._record(number, name).change)

    def _record(self, number: int, name: str) -> ClientRound:
        path = self._round(number) / "round.json"
        try:
            record = validate(ClientRound, read_json(path), str(path))
        except UserError as error:
            raise self._lost(path, "missing or damaged") from error
        if record.start != name:
            raise self._lost(path, "of another training than the server's")
        return record

    def _state(self, path: Path, expected: str) -> Params:
        try:
            data = path.read_bytes()
        except OSError as error:
            raise self._lost(path, "missing") from error
        if content_hash(data) != expected:
            raise self._lost(path, "damaged (its hash is not the recorded one)")
        return decode_state(data, str(path))

    def _lost(self, path: Path, what: str) -> ClientError:
        return ClientError(f"{path}: {what}, so client {self.client} cannot report its updates; {ALTERNATIVES}")

    def _round(self, number: int) -> Path:
        return self.folder / "rounds" / f"{number:05d}"


def client_history(disks: Path, client: int) -> ClientHistory:
    """The history of a client in its own folder of `disks`."""
    return ClientHistory(client, disks / f"{client:05d}")
