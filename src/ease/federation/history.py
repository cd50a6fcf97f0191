"""The training history on disk: start state, every round's state and every client's update, whole and hashed.

It is a chain: a round's record holds the hash of the state it began from, which the round before has made, and the
hashes of its own files; a seal covers the record itself. Where clients keep their updates themselves, it holds global
states alone; where only some are to be kept, a round tells of those and no others.
"""

import hashlib
import math
import shutil
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from ease.config import validate
from ease.errors import UserError
from ease.federation.codec import encode_state
from ease.federation.container import content_hash
from ease.federation.fedavg import Round
from ease.federation.protocol import Update
from ease.model.closed_form import Ridge
from ease.params import Block, Params
from ease.seeding import generator
from ease.storage import read_json, read_some, sha256, write_atomic, write_json

MISSING = "missing from the history; restore it or train again"
UPDATES = "updates.bin"
ROUNDS = "rounds"
DAMAGED = "damaged (its hash is not the recorded one); restore it or train again"
AT_CLIENTS = (
    'this run keeps updates at its clients (training.history = "client") and none at the server; use --method ease, '
    'retrain or another one that reads no stored updates, or train with training.history = "server"'
)
THINNED = (
    "this run stores only some of its clients' updates (training.history_every, training.history_share); use --method "
    "ease, retrain or another one that reads no stored updates, or train with both at 1"
)
STATE = "state.safetensors"
SUMS = "sums.safetensors"
AVERAGED = "averaged.safetensors"
"""The state of a round before what is held was taken back, where it is needed and another one."""


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
    """Where the rounds lie under the folder: a training that was made again has a place of its own."""
    keeps: frozenset[int] | None = None
    """Clients whose updates are kept; absent: all. Only scratch histories are for readers that ask for some alone."""
    every: int = 1
    """Updates are kept of one round in so many."""
    share: float = 1.0
    """Chance of an update to be kept in such a round."""
    seed: int = 0
    """That the chance is drawn by."""

    @property
    def initial_path(self) -> Path:
        return self.folder / "initial.safetensors"

    def initial(self) -> Params:
        """w_0."""
        return Params.load(self.initial_path)

    def state_path(self, number: int) -> Path:
        return self.initial_path if number == 0 else self._round(number) / STATE

    def state(self, number: int) -> Params:
        """The global state after a round; round 0 is w_0."""
        return Params.load(self.state_path(number))

    def start_path(self, number: int) -> Path:
        """The file of the state that a round began from: that of the round before, unless a request came between."""
        return self.folder / str(self.record(number)["start"])

    def start(self, number: int) -> Params:
        """The state that a round began from, and no other."""
        path = self.start_path(number)
        _verify_file(path, self.record(number)["start_sha256"])
        return Params.load(path)

    def sums(self, number: int) -> Params:
        """The sums that the state of a round was solved from."""
        self._verify(number, SUMS)
        return Params.load(self._round(number) / SUMS)

    def sums_sha256(self, number: int) -> str:
        """The hash of their file; empty where a round has none."""
        return str(self.record(number)["sha256"].get(SUMS, ""))

    def ridge(self, number: int) -> Ridge:
        """How strongly the head that a round solved is regularised."""
        return validate(Ridge, self.record(number).get("ridge", {}), str(self.record_path(number)))

    def moved(self, number: int) -> Params:
        """The mean update of a round, in double precision, from global states alone."""
        return self.moved_over([number])

    def moved_over(self, rounds: Iterable[int]) -> Params:
        """What some rounds did, added up. Of rounds that follow on each other only the two ends are read."""
        return _sum(self._way(first, last) for first, last in self._stretches(rounds))

    def moved_length(self, number: int) -> float:
        """How far a round moved the model, as its record tells."""
        told = self.record(number).get("moved")
        return self.moved(number).norm() if told is None else float(told)

    def _way(self, first: int, last: int) -> Params:
        """From the state that a round began from to the one that another made, before anything was held."""
        after = AVERAGED if AVERAGED in self.record(last)["sha256"] else STATE
        self._verify(last, after)
        return Params.load(self._round(last) / after).zip(
            lambda new, old: new.double() - old.double(), self.start(first)
        )

    def _stretches(self, rounds: Iterable[int]) -> Iterator[tuple[int, int]]:
        """First and last of rounds each of which began from what the one before it made, and from nothing else."""
        first = last = 0
        made: str | None = None
        for number in rounds:
            brief = self._brief(number)
            if first and not (number == last + 1 and made is not None and brief.start_sha256 == made):
                yield first, last
                first = 0
            first, last = first or number, number
            made = brief.made
        if first:
            yield first, last

    @property
    def thinned(self) -> bool:
        """Whether some updates are left out of what is kept."""
        return self.every > 1 or self.share < 1 or self.keeps is not None

    def stores(self, number: int, client: int) -> bool:
        """Whether a client's update of a round is to be here.

        Counted from the first round, which moved the model furthest: a neighbour can stand for it least. It is decided
        for each update by itself, so that neither more rounds nor who else takes part or leaves changes it.
        """
        if not self.updates or (number - 1) % self.every or not (self.keeps is None or client in self.keeps):
            return False
        return self.share == 1 or float(generator(self.seed, "history", number, client).random()) < self.share

    def update_path(self, number: int, client: int) -> Path:
        """The file that holds a client's update: all of a round, one after the other, each as `Params.save` writes."""
        return self._round(number) / UPDATES

    def update(self, number: int, client: int) -> Update:
        """A client's update as it was averaged in a round, refused if it is damaged."""
        return Update(client, self.record(number)["pairs"][str(client)], self._change(number, client))

    def update_length(self, number: int, client: int) -> float:
        """Norm of a stored update, as the round's record tells."""
        told = self.record(number)["updates"].get(str(client), {}).get("length")
        return self.update(number, client).change.norm() if told is None else float(told)

    def sent_norm(self, number: int, client: int) -> float | None:
        """Norm of an update that only its client keeps, as it was averaged; None if the client sent none or the round
        is from before norms were recorded."""
        record = self.record(number)
        told = record.get("seen", {}).get(str(client))
        return None if told is None else float(told["norm"]) * record.get("clipped", {}).get(str(client), 1.0)

    def longest_sum(self, client: int, factors: Mapping[int, float]) -> float | None:
        """Largest norm that a sum of a client's updates can have, each times the factor of its round.

        A reported sum that is longer contains something that the client never sent. None: some norm is unknown.
        """
        norms = {number: self.sent_norm(number, client) for number in factors}
        if any(norm is None for norm in norms.values()):
            return None
        return sum(abs(factor) * (norms[number] or 0.0) for number, factor in factors.items())

    def is_sent(self, number: int, client: int, change: Params) -> bool:
        """Whether an update that a client sends again is, to the bit, the one that it sent in that round."""
        told = self.record(number).get("seen", {}).get(str(client))
        return told is not None and told["sha256"] == content_hash(encode_state(change))

    def update_block(self, number: int, client: int, block: Block) -> dict[str, torch.Tensor]:
        """One block of a client's update."""
        change = self._change(number, client)
        return {name: change[name] for name in block.tensors}

    def _change(self, number: int, client: int) -> Params:
        change = Params.from_bytes(self._update_bytes(number, client))
        exponent = self.record(number)["updates"][str(client)].get("exponent")
        return change if exponent is None else whole(change, exponent)

    def record_path(self, number: int) -> Path:
        return self._round(number) / "round.json"

    def record(self, number: int) -> dict[str, Any]:
        path = self.record_path(number)
        return dict(_record(path, *_identity(path)))

    def pairs(self, number: int) -> dict[int, int]:
        """Client -> pairs, of those whose updates made a round."""
        brief = self._brief(number)
        return dict(zip(brief.clients, brief.pairs, strict=True))

    def _brief(self, number: int) -> "Brief":
        path = self.record_path(number)
        return _brief(path, *_identity(path))

    def rounds(self) -> int:
        """How many complete rounds there are, from the first without a gap."""
        number = 0
        while (self._round(number + 1) / "round.json").is_file():
            number += 1
        return number

    def clients(self, number: int) -> list[int]:
        """Clients whose updates made a round."""
        return list(self._brief(number).clients)

    def columns(self, rounds: int) -> list[tuple[int, int]]:
        """Every update that made the first rounds as (round, client), in order."""
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
        finished.state.save(folder / STATE, self.durable)
        if finished.averaged is not None:
            finished.averaged.save(folder / AVERAGED, self.durable)  # the state no longer tells the mean update
        if finished.sums is not None:
            finished.sums.save(folder / SUMS, self.durable)
        places: dict[str, dict[str, Any]] = {}
        if self.updates:
            kept = [each for each in finished.updates if self.stores(finished.number, each.client)]
            if kept or not finished.updates:
                write_atomic(folder / UPDATES, _packed(kept, finished.lengths, places, self.half), self.durable)
        record = {
            "round": finished.number,
            "loss": finished.loss,
            "start": start.relative_to(self.folder).as_posix(),
            "start_sha256": sha256(start),
            "pairs": {str(update.client): update.pairs for update in finished.updates},
            "rejected": {str(client): reason for client, reason in finished.rejected.items()},
            "sha256": {path.name: sha256(path) for path in sorted(folder.glob("*.safetensors"))},
            "updates": places,
            **({"seen": {str(client): each for client, each in finished.seen.items()}} if finished.seen else {}),
            **({} if finished.moved is None else {"moved": finished.moved}),
            **({} if finished.ridge is None else {"ridge": finished.ridge.model_dump(mode="json")}),
            **({"clipped": {str(c): each for c, each in finished.clipped.items()}} if finished.clipped else {}),
            **extra,
        }
        write_json(folder / "round.json", record, self.durable)
        return record

    def verify(self) -> None:
        """Refuse a damaged history: every file must have the bytes it was written with, and every round its start."""
        if self.rounds():
            self.verify_state(0)
        for number in range(1, self.rounds() + 1):
            record = self.record(number)
            for name in record["sha256"]:
                self._verify(number, name)
            for client in self.clients(number):
                if self.stores(number, client):
                    self.verify_update(number, client)
            other = f"not the state that round {number} began from; restore it or train again"
            _verify_file(self.start_path(number), record["start_sha256"], other)

    def verify_state(self, number: int) -> None:
        """Refuse a damaged global state; the start state is hashed in the first round's record."""
        if number > 0:
            self._verify(number, STATE)
        else:
            _verify_file(self.initial_path, self.record(1)["start_sha256"])

    def verify_update(self, number: int, client: int) -> None:
        self._update_bytes(number, client)

    def _update_bytes(self, number: int, client: int) -> bytes:
        """A client's part of a round's updates, refused if it is damaged."""
        self.require_updates()
        path, place = self.update_path(number, client), self.record(number)["updates"].get(str(client))
        if not self.stores(number, client):
            raise UserError(f"{path}: client {client}: not stored: {THINNED}")
        if place is None or not path.is_file():
            raise UserError(f"{path}: client {client}: {MISSING}" if place is None else f"{path}: {MISSING}")
        if place["offset"] + place["bytes"] > path.stat().st_size:
            raise UserError(f"{path}: {DAMAGED} (client {client})")
        with path.open("rb") as file:
            file.seek(place["offset"])
            data = file.read(place["bytes"])
        if hashlib.sha256(data).hexdigest() != place["sha256"]:
            raise UserError(f"{path}: {DAMAGED} (client {client})")
        return data

    def require_updates(self) -> None:
        """Refuse a history that holds global states alone."""
        if not self.updates:
            raise UserError(f"{self.folder}: {AT_CLIENTS}")

    def _verify(self, number: int, name: str) -> None:
        _verify_file(self._round(number) / name, self.record(number)["sha256"].get(name))

    def _round(self, number: int) -> Path:
        return self.folder / self.place / f"{number:05d}"


def _sum(parts: Iterable[Params]) -> Params:
    found = iter(parts)
    total = next(found)
    for each in found:
        total = total + each
    return total


def _verify_file(path: Path, expected: str | None, otherwise: str = DAMAGED) -> None:
    if not path.is_file():
        raise UserError(f"{path}: {MISSING}")
    if sha256(path) != expected:
        raise UserError(f"{path}: {otherwise}")


def _packed(
    updates: Iterable[Update], lengths: Mapping[int, float], places: dict[str, dict[str, Any]], half: bool
) -> Iterator[bytes]:
    """Updates as bytes, one at a time; `places` is told where each lies, its hash and how long it is."""
    offset = 0
    for update in updates:
        change, exponent = halved(update.change) if half else (update.change, None)
        data = change.file_bytes()
        places[str(update.client)] = {
            "offset": offset,
            "bytes": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
            **({"length": lengths[update.client]} if update.client in lengths else {}),
            **({} if exponent is None else {"exponent": exponent}),
        }
        offset += len(data)
        yield data


LARGEST_HALF = 15
"""Power of two up to which half precision goes."""
MOST_SHIFTED = 300
"""Powers of two that a change may be shifted by: more than single precision spans."""


def halved(change: Params) -> tuple[Params, int]:
    """Single precision as half, shifted by a power of two so that its largest value just fits, and that power.

    Changes are small, and many of their values would be below what half precision tells from zero.
    """
    largest = max((float(t.abs().max()) for t in change.tensors.values() if t.numel()), default=0.0)
    exponent = LARGEST_HALF - math.frexp(largest)[1] if largest else 0
    single = torch.float32

    def rounded(tensor: torch.Tensor) -> torch.Tensor:
        return torch.ldexp(tensor.double(), torch.tensor(exponent)).half() if tensor.dtype == single else tensor

    return change.map(rounded), exponent


def whole(change: Params, exponent: int) -> Params:
    """What `halved` was given, but for its rounding."""

    def restored(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype != torch.float16:
            return tensor
        return torch.ldexp(tensor.double(), torch.tensor(-exponent)).float()

    return change.map(restored)


@lru_cache(maxsize=64)
def _record(path: Path, *identity: int) -> dict[str, Any]:
    """Records of many clients are long, and are asked for once for each."""
    found: dict[str, Any] = read_json(path)
    if not _is_record(found):
        raise UserError(f"{path}: not the record of a round; restore it or train again")
    return found


@dataclass(frozen=True)
class Brief:
    """What sums over all rounds need of a record, in little space."""

    clients: Sequence[int]
    pairs: Sequence[int]
    start_sha256: str
    made: str | None
    """Hash of the state that the next round begins from; None if something was held before."""


@lru_cache(maxsize=4096)
def _brief(path: Path, *identity: int) -> Brief:
    """A client request goes over all rounds several times; places and hashes of updates are most of a record."""
    found = _record(path, *identity)
    made = None if AVERAGED in found["sha256"] else found["sha256"].get(STATE)
    clients, pairs = array("q", map(int, found["pairs"])), array("q", found["pairs"].values())
    return Brief(clients, pairs, found["start_sha256"], made)


def _identity(path: Path) -> tuple[int, ...]:
    """Tells a file from one that was written in its place."""
    found = path.stat() if path.is_file() else None
    return (found.st_mtime_ns, found.st_ino, found.st_size) if found else ()


def _is_record(found: Any) -> bool:
    """Whether it has what is read of a record, each of its kind, and begins from a file of the run itself."""
    if not isinstance(found, dict):
        return False
    pairs, hashes, start = found.get("pairs"), found.get("sha256"), found.get("start")
    return (
        isinstance(pairs, dict)
        and all(client.isdecimal() and len(client) < 19 for client in pairs)
        and all(type(count) is int and 0 <= count < 2**63 for count in pairs.values())
        and isinstance(hashes, dict)
        and all(isinstance(value, str) for value in hashes.values())
        and all(Path(name).name == name and _can_be_a_path(name) for name in hashes)
        and isinstance(start, str)
        and _can_be_a_path(start)
        and not Path(start).is_absolute()
        and ".." not in Path(start).parts
        and isinstance(found.get("start_sha256"), str)
        and isinstance(found.get("updates"), dict)
        and all(_is_place(place) for place in found["updates"].values())
        and _is_length(found.get("moved"))
    )


def _can_be_a_path(text: str) -> bool:
    """Whether a file system would look for it at all."""
    return text.isprintable() and len(text) <= 1000 and all(len(part.encode()) <= 255 for part in Path(text).parts)


def _is_place(found: Any) -> bool:
    """Whether it says where an update lies, and its hash."""
    if not isinstance(found, dict) or not isinstance(found.get("sha256"), str):
        return False
    shifted = found.get("exponent", 0)
    if type(shifted) is not int or abs(shifted) > MOST_SHIFTED or not _is_length(found.get("length")):
        return False
    return all(type(found.get(name)) is int and found[name] >= 0 for name in ("offset", "bytes"))


def _is_length(found: Any) -> bool:
    """Whether it is the norm of something, or was not told."""
    return found is None or (type(found) in (int, float) and math.isfinite(found) and found >= 0)


def read_block(path: Path, block: Block) -> dict[str, torch.Tensor]:
    """Read one block's tensors from a parameter file, and nothing else of it."""
    return read_some(path, block.tensors)
