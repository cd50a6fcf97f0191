"""What server and nodes say to each other, and how it goes over a Unix socket.

Every message is one container, a short header and bytes of other encodings (job, parts, update) as its tensors, and
the hash of it all: a bit that flips on the way is never taken for another number.
On a socket it comes after its length, so that one that is too long is refused before a byte of it is read.
"""

import hashlib
import socket
import struct
import time
from collections.abc import Mapping
from typing import Annotated, Literal, TypeVar

import numpy as np
import torch
from pydantic import Field

from ease.config import Config
from ease.data.membership import Holding
from ease.data.words import LONGEST
from ease.errors import UserError
from ease.federation.codec import Hash
from ease.federation.container import LIMITS, Limits, pack, require, unpack
from ease.requests.request import Request

LENGTH = struct.Struct(">Q")
SEAL = hashlib.sha256().digest_size
PIECE = 1 << 20
JOB = "job"
UPDATE = "update"
CENTRES, SUMS, COUNTS = "centres", "sums", "counts"
QUERY, SAYS, NEAR = "query", "says", "near"
MOST_LINES = 64
Words = Annotated[str, Field(max_length=300, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]
"""What a node says to people: short, and nothing that a terminal would take for more than letters."""


class Deal(Config):
    """How a client that alone knows its pairs is to deal them: into classes, and into training and held-out ones."""

    classes: int = Field(ge=1, le=1 << 20)
    class_seed: int
    seed: int
    validation_share: float = Field(ge=0, lt=1)
    closed: tuple[int, ...] = ()
    """Classes that were forgotten before the client came: its pairs of those stay out."""
    dry_run: bool = False
    """Nothing is kept of it yet."""


class PurgeRequest(Config):
    """What a node is to keep by its mark alone from now on."""

    salt: str = Field(pattern=r"^[0-9a-f]{32}$")
    marks: tuple[Annotated[str, Field(pattern=r"^gone-[0-9a-f]{24}$")], ...]
    """Of pairs of its own, made with the salt; of no other pair, and no id."""
    leaves: bool
    """Its client has left: what it keeps of its rounds goes too."""
    dry_run: bool = False
    """Nothing is done yet; it says whether it would be."""


class Search(Config):
    """Words, and how many rows the query has that comes with them."""

    words: str = Field(min_length=1, max_length=LONGEST)
    rows: Literal[2, 3]


class Ask(Config):
    """The server asks a node who it is (`hello`), or gives its client a job (`task`).

    The job comes with it, and so do those of the job's parts that the node lacks. Where pairs lie apart, a run begins
    with two more: what groups a client's pairs form, alone or around centres that come along (`groups`), and which
    pairs it takes part with, each in the class of the nearest of those centres (`join`). When closed requests are
    purged, a node drops what it keeps of them (`purge`). It can be asked which of its pairs some words fit (`search`),
    and which of them show a picture (`find`).
    """

    kind: Literal["hello", "groups", "join", "task", "purge", "search", "find"]
    client: int = Field(ge=0)
    nonce: str = Field(pattern=r"^[0-9a-f]{32}$")
    """Names this message: a node does it once, and an answer to another one is no answer."""
    run: str = Field(pattern=r"^[0-9a-f]{32}$")
    """Whose kept states and closed requests are meant."""
    cohort: int = Field(1, ge=1)
    """How many clients are given the job, by the server's word."""
    parts: tuple[Hash, ...] = ()
    """What the job comes with, sent now or earlier; other states that it names are the client's own."""
    gone: tuple[Request, ...] = ()
    """Requests that are closed: the job may not touch what they name."""
    renewed: int = Field(0, ge=0)
    """How many of them came before the training from the start whose rounds a job may repeat."""
    deal: Deal | None = None
    purge: PurgeRequest | None = None
    search: Search | None = None
    picture: str | None = Field(None, pattern=r"^[0-9a-f]{32}$")
    """Hash of the pixels of a picture that is looked for."""


class Present(Config):
    """What a node tells of itself."""

    kind: Literal["present"] = "present"
    client: int = Field(ge=0)
    nonce: str
    version: str
    backbone: str
    """Hash of the frozen weights under its model."""
    pairs: str
    """Hash of the ids of its training pairs, in their order."""
    parts: tuple[Hash, ...]
    """What it holds and need not be sent."""
    threads: int
    jobs: int
    refused: int
    busy: bool
    last: float | None
    """Seconds since it last answered a job."""


class Answer(Config):
    """What a node gives back: an update among the tensors, the parts it lacks, or why it refuses."""

    kind: Literal["answer"] = "answer"
    client: int = Field(ge=0)
    nonce: str
    missing: tuple[Hash, ...] = ()
    refused: str = ""


class DealReply(Config):
    """What a node says of its pairs: sums and counts of groups among the tensors, or what it takes part with."""

    kind: Literal["deal"] = "deal"
    client: int = Field(ge=0)
    nonce: str
    holding: Holding | None = None


class PurgeReply(Config):
    """What a node no longer keeps of closed requests, and what it still does: one thing and why, each."""

    kind: Literal["purged"] = "purged"
    client: int = Field(ge=0)
    nonce: str
    removed: tuple[tuple[Words, Words], ...] = Field((), max_length=MOST_LINES)
    stayed: tuple[tuple[Words, Words], ...] = Field((), max_length=MOST_LINES)


class SearchReply(Config):
    """Of each pair that a node still holds, whether it says some words and how near it is to them, as tensors."""

    kind: Literal["matched"] = "matched"
    client: int = Field(ge=0)
    nonce: str


class FoundPairs(Config):
    """Ids of a node's pairs that show a picture."""

    kind: Literal["found"] = "found"
    client: int = Field(ge=0)
    nonce: str
    ids: tuple[str, ...] = Field((), max_length=MOST_LINES)


def encode(header: Config, blobs: Mapping[str, bytes] | None = None) -> bytes:
    """A message with other encodings inside it."""
    message = pack(header, {name: as_tensor(data) for name, data in (blobs or {}).items()})
    return message + hashlib.sha256(message).digest()


def _whole(data: bytes, what: str, limits: Limits) -> bytes:
    """The container, if it is the one that was sent."""
    if len(data) > limits.total:
        raise UserError(f"{what}: {len(data)} bytes, and at most {limits.total} are accepted")
    message, told = data[:-SEAL], data[-SEAL:]
    if hashlib.sha256(message).digest() != told:
        raise UserError(f"{what}: it was altered or cut on the way, or is none of this tool; send it once more")
    return message


def decode_ask(data: bytes, limits: Limits = LIMITS) -> tuple[Ask, bytes, dict[str, bytes]]:
    """What is asked, the job and the parts that came with it, by name; a `hello` brings neither."""
    header, tensors = unpack(_whole(data, "message", limits), Ask, "message", limits)
    blobs = _blobs(tensors, "message")
    require((JOB in blobs) == (header.kind == "task"), "message", "a task brings a job, and nothing else does")
    require((header.deal is not None) == (header.kind in ("groups", "join")), "message", "it says not how to deal")
    require((header.purge is not None) == (header.kind == "purge"), "message", "it says not what to drop")
    require((header.search is not None) == (header.kind == "search"), "message", "it says not what to look for")
    require((header.picture is not None) == (header.kind == "find"), "message", "it says not which picture to find")
    return header, blobs.pop(JOB, b""), blobs


def decode_answer(data: bytes, limits: Limits = LIMITS) -> tuple[Answer, bytes | None]:
    header, tensors = unpack(_whole(data, "answer", limits), Answer, "answer", limits)
    blobs = _blobs(tensors, "answer")
    require(blobs.keys() <= {UPDATE}, "answer", "it has tensors that belong to nothing")
    said = [bool(blobs), bool(header.missing), bool(header.refused)]
    require(sum(said) == 1, "answer", "it is not one of an update, a list of what is missing and a refusal")
    return header, blobs.get(UPDATE)


def decode_present(data: bytes, limits: Limits = LIMITS) -> Present:
    return _bare(data, Present, limits)


def decode_deal_reply(data: bytes, limits: Limits = LIMITS) -> tuple[DealReply, dict[str, bytes]]:
    header, tensors = unpack(_whole(data, "answer", limits), DealReply, "answer", limits)
    blobs = _blobs(tensors, "answer")
    wanted = set() if header.holding is not None else {SUMS, COUNTS}
    require(blobs.keys() == wanted, "answer", "it is neither groups nor a holding")
    return header, blobs


def decode_purge_reply(data: bytes, limits: Limits = LIMITS) -> PurgeReply:
    return _bare(data, PurgeReply, limits)


def decode_found(data: bytes, limits: Limits = LIMITS) -> FoundPairs:
    return _bare(data, FoundPairs, limits)


Header = TypeVar("Header", bound=Config)


def _bare(data: bytes, kind: type[Header], limits: Limits) -> Header:
    """An answer that brings nothing along."""
    header, tensors = unpack(_whole(data, "answer", limits), kind, "answer", limits)
    require(not tensors, "answer", "it has tensors that belong to nothing")
    return header


def decode_search_reply(data: bytes, limits: Limits = LIMITS) -> tuple[SearchReply, dict[str, bytes]]:
    header, tensors = unpack(_whole(data, "answer", limits), SearchReply, "answer", limits)
    blobs = _blobs(tensors, "answer")
    require(blobs.keys() == {SAYS, NEAR}, "answer", "it does not say what was asked for")
    return header, blobs


def numbers_of(array: np.ndarray) -> bytes:
    """Numbers as bytes: eight to each, whichever machine writes them."""
    return np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<")).tobytes()


def numbers_in(data: bytes, kind: Literal["<f8", "<i8"], rows: int, what: str) -> np.ndarray:
    """The same back, in so many rows of any width."""
    require(rows >= 0 and len(data) % (8 * max(1, rows)) == 0, what, "its numbers do not fill its rows")
    return np.frombuffer(data, kind).reshape(rows, -1 if rows else 0).astype(kind[1:])


def as_tensor(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())


def _blobs(tensors: Mapping[str, torch.Tensor], what: str) -> dict[str, bytes]:
    plain = all(tensor.dtype == torch.uint8 and tensor.dim() == 1 for tensor in tensors.values())
    require(plain, what, "its parts are not plain bytes")
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


# --- on a socket ---


def send(line: socket.socket, data: bytes) -> None:
    line.sendall(LENGTH.pack(len(data)))
    line.sendall(data)


def receive(line: socket.socket, most: int, what: str, until: float | None = None) -> bytes:
    """The next message; a length beyond `most` is refused before anything of it is read.

    `until` is when, on the monotonic clock, to give up with a TimeoutError, however slowly bytes come in.
    """
    (length,) = LENGTH.unpack(_exactly(line, LENGTH.size, what, until))
    if length > most:
        raise UserError(f"{what}: {length} bytes, and at most {most} are accepted")
    return _exactly(line, length, what, until)


def _exactly(line: socket.socket, length: int, what: str, until: float | None) -> bytes:
    found = bytearray()
    while len(found) < length:
        if until is not None:
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError
            line.settimeout(left)
        piece = line.recv(min(PIECE, length - len(found)))
        if not piece:
            raise ConnectionError(f"{what}: the line was cut after {len(found)} of {length} bytes")
        found += piece
    return bytes(found)
