"""What a client keeps of the training on its own disk: the states it was sent and its own updates, whole and hashed.

Only the client's side of an engine reads it. The server learns of it what the client answers, and nothing else.
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
    """A kept round by the hashes of its files."""

    round: int
    start: Hash
    change: Hash


@dataclass(frozen=True)
class ClientHistory:
    """Reads and writes what one client keeps. A round counts once its `round.json` exists, which is written last."""

    client: int
    folder: Path

    def write(self, number: int, start: Params, change: Params) -> None:
        """Keep the state that a round began from and the client's own update, as they travel."""
        folder = self._round(number)
        if folder.exists():
            shutil.rmtree(folder)  # of a killed process: that round never came to its end
        contents = {"start": encode_state(start), "change": encode_state(change)}
        for name, data in contents.items():
            write_atomic(folder / f"{name}.state", data)
        hashes = {name: content_hash(data) for name, data in contents.items()}
        write_json(folder / "round.json", ClientRound(round=number, **hashes).model_dump(mode="json"))

    def start(self, number: int, name: str) -> Params:
        """The state that a round began from, which must be the one of this name."""
        return self._state(self._round(number) / "start.state", self._record(number, name).start)

    def change(self, number: int, name: str) -> Params:
        """The client's own update of a round, which must have begun from the state of this name."""
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
    """What a client keeps, in its own folder among those that stand for the clients' disks."""
    return ClientHistory(client, disks / f"{client:05d}")
