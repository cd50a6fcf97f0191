"""Messages between server and nodes, and their transport over a Unix socket.

A message is one container and its hash: a short header, and other encodings (job, parts, update) as tensors. The hash
reveals flipped bits. On a socket the length comes first, so that a message that is too long is refused unread.
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
"""Text from a node for people: short, and without control characters."""


class Deal(Config):
    """How a client divides pairs that only it knows: into classes, and into training and held-out pairs."""

    classes: int = Field(ge=1, le=1 << 20)
    class_seed: int
    seed: int
    validation_share: float = Field(ge=0, lt=1)
    closed: tuple[int, ...] = ()
    """Classes that were forgotten before the client joined; its pairs of these classes are left out."""
    dry_run: bool = False
    """Whether the node only answers and stores nothing."""


class PurgeRequest(Config):
    """Pairs of closed requests, by salted marks. The node deletes what it stores of them, and their ids."""

    salt: str = Field(pattern=r"^[0-9a-f]{32}$")
    marks: tuple[Annotated[str, Field(pattern=r"^gone-[0-9a-f]{24}$")], ...]
    """Salted hashes of ids of its own pairs."""
    leaves: bool
    """Whether its client has left, so that its rounds are deleted too."""
    dry_run: bool = False
    """Whether the node only answers if it would do it."""


class Search(Config):
    """Words to search for, and the number of rows of their query."""

    words: str = Field(min_length=1, max_length=LONGEST)
    rows: Literal[2, 3]


class Ask(Config):
    """A message of the server to a node.

    `hello` asks for its state. `task` brings a job and the parts of it that the node lacks. If pairs are on site,
    `groups` asks for sums of groups of pairs, and `join` for the pairs of a run by the classes of given centres.
    `purge` makes the node delete what it stores of closed requests. `search` asks which pairs some words fit, and
    `find` which pairs show a picture.
    """

    kind: Literal["hello", "groups", "join", "task", "purge", "search", "find"]
    client: int = Field(ge=0)
    nonce: str = Field(pattern=r"^[0-9a-f]{32}$")
    """Identifies the message: a node handles it once, and its answer must repeat it."""
    run: str = Field(pattern=r"^[0-9a-f]{32}$")
    """The run whose stored rounds and closed requests are used."""
    cohort: int = Field(1, ge=1)
    """How many clients get the job, as claimed by the server."""
    parts: tuple[Hash, ...] = ()
    """Parts of the job, sent with it or earlier. Other states that it names are stored by the client."""
    gone: tuple[Request, ...] = ()
    """Closed requests: the job must not use the pairs that they name."""
    renewed: int = Field(0, ge=0)
    """How many of them were closed before the retraining whose rounds a job may repeat."""
    deal: Deal | None = None
    purge: PurgeRequest | None = None
    search: Search | None = None
    picture: str | None = Field(None, pattern=r"^[0-9a-f]{32}$")
    """Hash of the pixels of a picture to find."""


class Present(Config):
    """The answer to `hello`: the state of a node."""

    kind: Literal["present"] = "present"
    client: int = Field(ge=0)
    nonce: str
    version: str
    backbone: str
    """Hash of the frozen weights under its model."""
    pairs: str
    """Hash of the ids of its training pairs, in their order."""
    parts: tuple[Hash, ...]
    """Parts that it stores, so that they need not be sent."""
    threads: int
    jobs: int
    refused: int
    busy: bool
    last: float | None
    """Seconds since it last answered a job."""


class Answer(Config):
    """The answer to `task`: an update among the tensors, the parts that the node lacks, or why it refuses."""

    kind: Literal["answer"] = "answer"
    client: int = Field(ge=0)
    nonce: str
    missing: tuple[Hash, ...] = ()
    refused: str = ""


class DealReply(Config):
    """The answer to `groups` and `join`: sums and counts among the tensors, or the client's pairs in the run."""

    kind: Literal["deal"] = "deal"
    client: int = Field(ge=0)
    nonce: str
    holding: Holding | None = None


class PurgeReply(Config):
    """The answer to `purge`: what the node deleted and what it still stores, each with the reason."""

    kind: Literal["purged"] = "purged"
    client: int = Field(ge=0)
    nonce: str
    removed: tuple[tuple[Words, Words], ...] = Field((), max_length=MOST_LINES)
    stayed: tuple[tuple[Words, Words], ...] = Field((), max_length=MOST_LINES)


class SearchReply(Config):
    """The answer to `search`: whether each pair contains the words, and its cosine to them, as tensors."""

    kind: Literal["matched"] = "matched"
    client: int = Field(ge=0)
    nonce: str


class FoundPairs(Config):
    """The answer to `find`: ids of pairs that show the picture."""

    kind: Literal["found"] = "found"
    client: int = Field(ge=0)
    nonce: str
    ids: tuple[str, ...] = Field((), max_length=MOST_LINES)


def encode(header: Config, blobs: Mapping[str, bytes] | None = None) -> bytes:
    """A message with its hash; `blobs` are encodings inside it."""
    message = pack(header, {name: as_tensor(data) for name, data in (blobs or {}).items()})
    return message + hashlib.sha256(message).digest()


def _whole(data: bytes, what: str, limits: Limits) -> bytes:
    """The container, checked against the hash behind it."""
    if len(data) > limits.total:
        raise UserError(f"{what}: {len(data)} bytes, and at most {limits.total} are accepted")
    message, expected = data[:-SEAL], data[-SEAL:]
    if hashlib.sha256(message).digest() != expected:
        raise UserError(f"{what}: it was altered or cut on the way, or is none of this tool; send it once more")
    return message


def decode_ask(data: bytes, limits: Limits = LIMITS) -> tuple[Ask, bytes, dict[str, bytes]]:
    """The message, its job if it has one, and the parts that came with it, by name."""
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
    """The header of an answer without tensors."""
    header, tensors = unpack(_whole(data, "answer", limits), kind, "answer", limits)
    require(not tensors, "answer", "it has tensors that belong to nothing")
    return header


def decode_search_reply(data: bytes, limits: Limits = LIMITS) -> tuple[SearchReply, dict[str, bytes]]:
    header, tensors = unpack(_whole(data, "answer", limits), SearchReply, "answer", limits)
    blobs = _blobs(tensors, "answer")
    require(blobs.keys() == {SAYS, NEAR}, "answer", "it does not contain the requested arrays")
    return header, blobs


def numbers_of(array: np.ndarray) -> bytes:
    """Numbers as bytes: eight to each, whichever machine writes them."""
    return np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<")).tobytes()


def numbers_in(data: bytes, kind: Literal["<f8", "<i8"], rows: int, what: str) -> np.ndarray:
    """The numbers of such bytes, in a given number of rows."""
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
