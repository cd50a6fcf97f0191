"""The training history on disk: the start state, and the state and the clients' updates of every round.

The history is a chain. A round's record holds the hash of the state that the round began from and the hashes of its
own files, and is sealed itself. If clients keep their updates, the server stores global states only. If the history is
thinned, a record lists the stored updates only.
"""

import hashlib
import math
import shutil
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field, field_validator

from ease.config import Config, validate
from ease.errors import Missing, UserError
from ease.federation.codec import encode_state
from ease.federation.container import content_hash
from ease.federation.fedavg import Round, SentUpdate
from ease.federation.protocol import Update
from ease.model.closed_form import Ridge
from ease.params import Block, Params
from ease.storage import read_json, read_some, sha256, write_atomic, write_json

REMEDY = "restore it or train again"
MISSING = f"missing from the history; {REMEDY}"
UPDATES = "updates.bin"
ROUNDS = "rounds"
DAMAGED = f"damaged (its hash is not the recorded one); {REMEDY}"
AT_CLIENTS = (
    'this run keeps updates at its clients (training.history = "client") and none at the server; use --method ease, '
    'retrain or another one that reads no stored updates, or train with training.history = "server"'
)
THINNED = (
    "this run stores only some of its clients' updates (training.history_every); use --method ease, retrain "
    "or another one that reads no stored updates, or train with it at 1"
)
STATE = "state.safetensors"
SUMS = "sums.safetensors"
AVERAGED = "averaged.safetensors"
"""The state of a round before the locks were applied, if it differs."""
LARGEST_HALF = 15
"""Largest power of two in half precision."""
MOST_SHIFTED = 300
"""Most powers of two that a change is shifted by. Single precision spans fewer."""

Count = Annotated[int, Field(strict=True, ge=0, lt=1 << 63)]
Checksum = Annotated[int, Field(strict=True, ge=-(1 << 63), lt=1 << 63)]
Client = Annotated[int, Field(ge=0, lt=1 << 63)]
"""A key of a JSON object, which is text there."""
Length = Annotated[float, Field(strict=True, ge=0)]


class StoredUpdate(Config):
    """Position of a client's update in `updates.bin`."""

    offset: Count
    bytes: Count
    sha256: str
    length: Length | None = None
    """Its norm, if it was measured."""
    exponent: Annotated[int, Field(strict=True, ge=-MOST_SHIFTED, le=MOST_SHIFTED)] | None = None
    """Power of two that it was multiplied by, if it is stored in half precision."""


class StoredRound(Config):
    """The file `round.json`: one round of a training."""

    round: Count
    loss: float | None = None
    start: str
    """The file of the state that the round began from, relative to the run."""
    start_sha256: str
    pairs: dict[Client, Count]
    """Client -> number of its training pairs, of the clients whose updates were averaged."""
    rejected: dict[Client, str] = Field(default_factory=dict)
    """Client -> why the round continued without it."""
    sha256: dict[str, str]
    """Hashes of the round's safetensors files."""
    updates: dict[Client, StoredUpdate] = Field(default_factory=dict)
    """Client -> its update, if the server stores it."""
    sent: dict[Client, SentUpdate] = Field(default_factory=dict)
    """Client -> norm and hash of its update, if only the client stores it."""
    moved: Length | None = None
    """Norm of the mean update, if it was measured."""
    ridge: Ridge = Ridge()
    """Regularisation of a closed-form head."""
    features: dict[Client, Checksum] = Field(default_factory=dict)
    """Client -> checksum of the features that its sums are of, for a closed-form head."""
    clipped: dict[Client, float] = Field(default_factory=dict)
    """Client -> the factor by which its update was shortened."""
    bytes_down: Count = 0
    bytes_up: Count = 0

    @field_validator("start")
    @classmethod
    def _in_the_run(cls, start: str) -> str:
        if not _is_path(start) or Path(start).is_absolute() or ".." in Path(start).parts:
            raise ValueError("names no file of the run")
        return start

    @field_validator("sha256")
    @classmethod
    def _in_the_round(cls, hashes: dict[str, str]) -> dict[str, str]:
        if not all(Path(name).name == name and _is_path(name) for name in hashes):
            raise ValueError("names a file outside the round")
        return hashes


@dataclass(frozen=True)
class History:
    """Reads and writes one run's history. A round counts once its `round.json` exists, which is written last."""

    folder: Path
    durable: bool = True
    """Wait for the disk after every file; only scratch histories need not."""
    updates: bool = True
    """Whether clients' updates are kept here; if not, each client keeps its own."""
    half: bool = False
    """Whether updates are written in half precision; what is there already is read as it was written."""
    place: str = ROUNDS
    """Subfolder of the rounds; a repeated training has its own."""
    keeps: frozenset[int] | None = None
    """Clients whose updates are kept; absent: all. Only scratch histories serve readers that need some rounds."""
    every: int = 1
    """Updates are kept of one round in so many."""

    @property
    def initial_path(self) -> Path:
        return self.folder / "initial.safetensors"

    def initial(self) -> Params:
        """w_0."""
        return Params.load(self.initial_path)

    def state_path(self, number: int) -> Path:
        return self.initial_path if number == 0 else self._round(number) / STATE

    def state(self, number: int) -> Params:
        """The global state after a round, or w_0 for round 0; a damaged file is refused."""
        if number > 0:
            return self._load(number, STATE)
        first = self.record_path(1)
        return _load(self.initial_path, self.record(1).start_sha256) if first.is_file() else self.initial()

    def state_sha256(self, number: int) -> str:
        """The recorded hash of the global state after a round."""
        return self.record(number).sha256[STATE]

    def start_path(self, number: int) -> Path:
        """The file of the state that a round began from: the previous round's, unless a release came between."""
        return self.folder / self.record(number).start

    def start(self, number: int) -> Params:
        """The state that a round began from; any other is refused."""
        return _load(self.start_path(number), self.record(number).start_sha256)

    def sums(self, number: int) -> Params:
        """The sums that the state of a round was solved from."""
        return self._load(number, SUMS)

    def sums_sha256(self, number: int) -> str:
        """The recorded hash of a round's sums, or nothing if it has none."""
        return self.record(number).sha256.get(SUMS, "")

    def ridge(self, number: int) -> Ridge:
        """The regularisation of the head that a round solved."""
        return self.record(number).ridge

    def features(self, number: int) -> dict[int, int]:
        """Client -> checksum of the features that its sums of a round are of."""
        return dict(self.record(number).features)

    def moved(self, number: int) -> Params:
        """The mean update of a round in double precision, computed from global states."""
        return self.moved_over([number])

    def moved_over(self, rounds: Iterable[int]) -> Params:
        """The sum of the mean updates of some rounds. For consecutive rounds only the first and the last state are
        read."""
        return _sum(self._way(first, last) for first, last in self._stretches(rounds))

    def moved_length(self, number: int) -> float:
        """The norm of a round's mean update."""
        moved = self.record(number).moved
        return self.moved(number).norm() if moved is None else moved

    def _way(self, first: int, last: int) -> Params:
        """The change from the start of one round to the end of another, before locks were applied."""
        after = self._load(last, AVERAGED if AVERAGED in self.record(last).sha256 else STATE)
        return after.zip(lambda new, old: new.double() - old.double(), self.start(first))

    def _stretches(self, rounds: Iterable[int]) -> Iterator[tuple[int, int]]:
        """First and last of consecutive rounds that each began from the state that the previous one made."""
        first = last = 0
        made: str | None = None
        for number in rounds:
            summary = self._summary(number)
            if first and not (number == last + 1 and made is not None and summary.start_sha256 == made):
                yield first, last
                first = 0
            first, last = first or number, number
            made = summary.made
        if first:
            yield first, last

    @property
    def thinned(self) -> bool:
        """Whether only some updates are stored."""
        return self.every > 1 or self.keeps is not None

    def stores(self, number: int, client: int) -> bool:
        """Whether the server stores a client's update of a round.

        The first round counts first, because it moves the model furthest.
        """
        return self.updates and (number - 1) % self.every == 0 and (self.keeps is None or client in self.keeps)

    def update_path(self, number: int, client: int) -> Path:
        """The file that holds all stored updates of a round, each as `Params.save` writes it."""
        return self._round(number) / UPDATES

    def update(self, number: int, client: int) -> Update:
        """A client's update as it was averaged in a round; a damaged one is refused."""
        return Update(client, self.record(number).pairs[client], self._change(number, client))

    def update_length(self, number: int, client: int) -> float:
        """The norm of a stored update."""
        stored = self.record(number).updates.get(client)
        return self.update(number, client).change.norm() if stored is None or stored.length is None else stored.length

    def sent_norm(self, number: int, client: int) -> float | None:
        """The norm, as averaged, of an update that only its client stores; None if the client sent none."""
        record = self.record(number)
        sent = record.sent.get(client)
        return None if sent is None else sent.norm * record.clipped.get(client, 1.0)

    def longest_sum(self, client: int, factors: Mapping[int, float]) -> float | None:
        """Largest norm that a sum of a client's updates can have, each times the factor of its round.

        A reported sum that is longer contains something that the client never sent. None: some norm is unknown.
        """
        norms = {number: self.sent_norm(number, client) for number in factors}
        if any(norm is None for norm in norms.values()):
            return None
        return sum(abs(factor) * (norms[number] or 0.0) for number, factor in factors.items())

    def is_sent(self, number: int, client: int, change: Params) -> bool:
        """Whether an update that a client sends again is bit-identical to the one that it sent in that round."""
        sent = self.record(number).sent.get(client)
        return sent is not None and sent.sha256 == content_hash(encode_state(change))

    def update_block(self, number: int, client: int, block: Block) -> dict[str, torch.Tensor]:
        """One block of a client's update."""
        change = self._change(number, client)
        return {name: change[name] for name in block.tensors}

    def _change(self, number: int, client: int) -> Params:
        change = Params.from_bytes(self._update_bytes(number, client))
        exponent = self.record(number).updates[client].exponent
        return change if exponent is None else whole(change, exponent)

    def record_path(self, number: int) -> Path:
        return self._round(number) / "round.json"

    def record(self, number: int) -> StoredRound:
        """The record of a finished round."""
        path = self.record_path(number)
        return _record(path, *_identity(path))

    def pairs(self, number: int) -> dict[int, int]:
        """Client -> number of its pairs, of the clients whose updates were averaged in a round."""
        summary = self._summary(number)
        return dict(zip(summary.clients, summary.pairs, strict=True))

    def _summary(self, number: int) -> "RoundSummary":
        path = self.record_path(number)
        return _summary(path, *_identity(path))

    def rounds(self) -> int:
        """Number of finished rounds, counted from the first up to a gap."""
        number = 0
        while (self._round(number + 1) / "round.json").is_file():
            number += 1
        return number

    def clients(self, number: int) -> list[int]:
        """Clients whose updates were averaged in a round."""
        return list(self._summary(number).clients)

    def columns(self, rounds: int) -> list[tuple[int, int]]:
        """Every update of the first rounds as (round, client), in order."""
        return [(number, client) for number in range(1, rounds + 1) for client in self.clients(number)]

    def append(
        self,
        finished: Round,
        bytes_down: int = 0,
        bytes_up: int = 0,
        start: Path | None = None,
        loss: float | None = None,
    ) -> StoredRound:
        """Write a finished round and return its record; the round counts once the record is in place.

        `start` is the file of the state it began from, by default the previous round's. `loss` replaces the round's own
        if its updates were computed again.
        """
        folder = self._round(finished.number)
        if folder.exists():
            shutil.rmtree(folder)  # left by a killed process
        try:
            hashes, updates = self._write_tensors(folder, finished)
            start, start_sha256 = self._start_of(finished.number, start)
            record = StoredRound(
                round=finished.number,
                loss=finished.loss if loss is None else loss,
                start=start.relative_to(self.folder).as_posix(),
                start_sha256=start_sha256,
                pairs={update.client: update.pairs for update in finished.updates},
                rejected=finished.rejected,
                sha256=hashes,
                updates=updates,
                sent=finished.sent,
                moved=finished.moved,
                ridge=finished.ridge or Ridge(),
                features=finished.features,
                clipped=finished.clipped,
                bytes_down=bytes_down,
                bytes_up=bytes_up,
            )
            write_json(folder / "round.json", record.model_dump(mode="json", exclude_defaults=True), self.durable)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)  # if the disk is full, for example
            raise
        return record

    def _write_tensors(self, folder: Path, finished: Round) -> tuple[dict[str, str], dict[int, StoredUpdate]]:
        """Write the states and the updates of a round; returns their hashes and where the updates are."""
        states = {STATE: finished.state, AVERAGED: finished.averaged, SUMS: finished.sums}
        hashes = {name: state.save(folder / name, self.durable) for name, state in states.items() if state is not None}
        updates: dict[int, StoredUpdate] = {}
        if self.updates:
            kept = [each for each in finished.updates if self.stores(finished.number, each.client)]
            if kept or not finished.updates:
                write_atomic(folder / UPDATES, _packed(kept, finished.lengths, updates, self.half), self.durable)
        return hashes, updates

    def _start_of(self, number: int, start: Path | None) -> tuple[Path, str]:
        """The file that a round began from and its hash, which the previous round's record has already."""
        before = self.state_path(number - 1)
        if start in (None, before) and self.record_path(number - 1).is_file():
            return before, self.state_sha256(number - 1)
        return start or before, sha256(start or before)

    def verify(self) -> None:
        """Refuse a damaged history: every file must have its recorded hash, and every round its start."""
        if self.rounds():
            _verify_file(self.initial_path, self.record(1).start_sha256)
        known: dict[Path, str] = {}
        for number in range(1, self.rounds() + 1):
            record = self.record(number)
            for name, expected in record.sha256.items():
                _verify_file(self._round(number) / name, expected)
                known[self._round(number) / name] = expected
            for client in self.clients(number):
                if self.stores(number, client):
                    self._update_bytes(number, client)
            start = self.start_path(number)
            if known.get(start) != record.start_sha256:
                _verify_file(start, record.start_sha256, f"not the state that round {number} began from; {REMEDY}")

    def _update_bytes(self, number: int, client: int) -> bytes:
        """A client's part of a round's updates; a damaged one is refused."""
        self.require_updates()
        path, stored = self.update_path(number, client), self.record(number).updates.get(client)
        if not self.stores(number, client):
            raise UserError(f"{path}: client {client}: not stored: {THINNED}")
        if stored is None or not path.is_file():
            raise UserError(f"{path}: client {client}: {MISSING}" if stored is None else f"{path}: {MISSING}")
        if stored.offset + stored.bytes > path.stat().st_size:
            raise UserError(f"{path}: {DAMAGED} (client {client})")
        with path.open("rb") as file:
            file.seek(stored.offset)
            data = file.read(stored.bytes)
        if hashlib.sha256(data).hexdigest() != stored.sha256:
            raise UserError(f"{path}: {DAMAGED} (client {client})")
        return data

    def require_updates(self) -> None:
        """Refuse a history that holds global states only."""
        if not self.updates:
            raise UserError(f"{self.folder}: {AT_CLIENTS}")

    def _load(self, number: int, name: str) -> Params:
        return _load(self._round(number) / name, self.record(number).sha256.get(name, "none"))

    def _round(self, number: int) -> Path:
        return self.folder / self.place / f"{number:05d}"


def _sum(parts: Iterable[Params]) -> Params:
    found = iter(parts)
    total = next(found)
    for each in found:
        total = total + each
    return total


def _load(path: Path, expected: str) -> Params:
    """A state whose hash is recorded; the file is read once."""
    if not path.is_file():
        raise UserError(f"{path}: {MISSING}")
    return Params.load(path, expected, REMEDY)


def _verify_file(path: Path, expected: str, otherwise: str = DAMAGED) -> None:
    if not path.is_file():
        raise UserError(f"{path}: {MISSING}")
    if sha256(path) != expected:
        raise UserError(f"{path}: {otherwise}")


def _packed(
    updates: Iterable[Update], lengths: Mapping[int, float], places: dict[int, StoredUpdate], half: bool
) -> Iterator[bytes]:
    """Updates as bytes, one at a time; `places` receives where each is, its hash and its norm."""
    offset = 0
    for update in updates:
        change, exponent = halved(update.change) if half else (update.change, None)
        data = change.file_bytes()
        places[update.client] = StoredUpdate(
            offset=offset,
            bytes=len(data),
            sha256=hashlib.sha256(data).hexdigest(),
            length=lengths.get(update.client),
            exponent=exponent,
        )
        offset += len(data)
        yield data


def halved(change: Params) -> tuple[Params, int]:
    """The change in half precision, multiplied by a power of two so that its largest value just fits, and that power.

    Without it many values would round to zero, because changes are small.
    """
    largest = max((float(t.abs().max()) for t in change.tensors.values() if t.numel()), default=0.0)
    exponent = LARGEST_HALF - math.frexp(largest)[1] if largest else 0
    single = torch.float32

    def rounded(tensor: torch.Tensor) -> torch.Tensor:
        return torch.ldexp(tensor.double(), torch.tensor(exponent)).half() if tensor.dtype == single else tensor

    return change.map(rounded), exponent


def whole(change: Params, exponent: int) -> Params:
    """The inverse of `halved`, except for rounding."""

    def restored(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype != torch.float16:
            return tensor
        return torch.ldexp(tensor.double(), torch.tensor(-exponent)).float()

    return change.map(restored)


@lru_cache(maxsize=64)
def _record(path: Path, *identity: int) -> StoredRound:
    """A stored record, parsed once; those of many clients are long."""
    try:
        return validate(StoredRound, read_json(path), f"{path}: not the record of a round")
    except Missing:
        raise
    except UserError as error:
        raise UserError(f"{error}; {REMEDY}") from error


@dataclass(frozen=True)
class RoundSummary:
    """The part of a record that sums over all rounds need, in little space."""

    clients: Sequence[int]
    pairs: Sequence[int]
    start_sha256: str
    made: str | None
    """Hash of the state that the next round begins from; None if locks changed it."""


@lru_cache(maxsize=4096)
def _summary(path: Path, *identity: int) -> RoundSummary:
    """A summary record. Client requests go over all rounds several times, and full records are long."""
    found = _record(path, *identity)
    made = None if AVERAGED in found.sha256 else found.sha256.get(STATE)
    return RoundSummary(array("q", found.pairs), array("q", found.pairs.values()), found.start_sha256, made)


def _identity(path: Path) -> tuple[int, ...]:
    """Identifies a file until another one replaces it."""
    found = path.stat() if path.is_file() else None
    return (found.st_mtime_ns, found.st_ino, found.st_size) if found else ()


def _is_path(text: str) -> bool:
    """Whether a file system can have a file of this name."""
    return text.isprintable() and len(text) <= 1000 and all(len(part.encode()) <= 255 for part in Path(text).parts)


def read_block(path: Path, block: Block) -> dict[str, torch.Tensor]:
    """Read one block's tensors from a parameter file, and nothing else of it."""
    return read_some(path, block.tensors)
