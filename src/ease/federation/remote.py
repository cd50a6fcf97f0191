"""A federation whose clients are processes of their own: jobs are sent as bytes over a transport, and updates are
received.

A line only moves messages, over Unix sockets here and over Flower elsewhere. Rounds, checks and sums stay the same
code as in one process, and so do their bytes.
"""

import queue
import socket
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, TypeVar

from ease.errors import UserError
from ease.federation.check import refusal
from ease.federation.codec import decode_update, encode_job
from ease.federation.container import LIMITS
from ease.federation.node import pairs_hash
from ease.federation.protocol import Capabilities, LocalJob, Update, own_jobs
from ease.federation.wire import (
    JOB,
    Answer,
    Ask,
    Deal,
    DealReply,
    FoundPairs,
    Present,
    PurgeReply,
    PurgeRequest,
    Search,
    SearchReply,
    decode_answer,
    decode_present,
    encode,
    receive,
    send,
)
from ease.params import Params
from ease.requests.request import Request, SampleRequest

GREETING = 180.0
"""Seconds in which a node must say who it is; it does so at once, even while it works."""
SENDINGS = 2
"""Sendings of one job: a node that lost parts of it reports that and receives them again."""


class Transport(Protocol):
    """Moves messages to clients and back. Whom an answer is from is the line's word, not the answer's."""

    def exchange(self, messages: Mapping[int, bytes], seconds: float | None) -> Iterator[tuple[int, bytes | str]]:
        """Each client's answer as it comes in, or in words why there is none; each client once, nothing after
        `seconds`."""
        ...


@dataclass(frozen=True)
class Sockets:
    """A line over one Unix socket for each client."""

    paths: Mapping[int, Path]

    def exchange(self, messages: Mapping[int, bytes], seconds: float | None) -> Iterator[tuple[int, bytes | str]]:
        until = None if seconds is None else time.monotonic() + seconds
        came: queue.SimpleQueue[tuple[int, bytes | str]] = queue.SimpleQueue()

        def ask(client: int, message: bytes) -> None:
            came.put((client, spoken(self.paths[client], message, until)))

        for client, message in messages.items():
            threading.Thread(target=ask, args=(client, message), daemon=True).start()
        for _ in messages:
            yield came.get()


def node_socket(folder: Path, client: int) -> Path:
    """Socket of a client's node, in the folder of a federation."""
    return folder / "nodes" / f"{client}.sock"


def spoken(path: Path, message: bytes, until: float | None) -> bytes | str:
    """What answers at a socket, or in words why nothing does."""
    with socket.socket(socket.AF_UNIX) as line:
        try:
            line.settimeout(None if until is None else max(0.001, until - time.monotonic()))
            line.connect(str(path))
            send(line, message)
            return receive(line, LIMITS.total, "answer", until)
        except TimeoutError:
            return LATE
        except (FileNotFoundError, ConnectionRefusedError):
            return f"no node answers at {path}; start it with `ease node`"
        except OSError as error:
            return f"its node went away ({error.strerror or error})"
        except UserError as error:
            return str(error)


LATE = "it did not answer in time"


@dataclass
class Remote:
    """The engine over a line. Every client that is asked has one answer: its own update, or why there is none."""

    line: Transport
    holdings: Mapping[int, Sequence[str]]
    """Client -> ids of its training pairs when the run was trained."""
    members: Mapping[int, Collection[str]]
    """The same without what is gone."""
    run_name: str
    gone: tuple[Request, ...] = ()
    renewed: int = 0
    """Number of closed requests before the training from which the run continues."""
    backbone: str = ""
    """Hash of the frozen weights that nodes must have."""
    deadline: float | None = None
    """Seconds that each client has for each message; absent: as long as it takes."""
    held_out: Mapping[int, Sequence[str]] = field(default_factory=dict)
    """Client -> ids of its pairs that it never trains on."""
    capabilities = Capabilities(concurrent=True, keeps_deadline=True, remote=True)
    sent: int = 0
    received: int = 0
    """Bytes of whole messages, as they went over the line."""
    _parts: dict[int, set[str]] = field(default_factory=dict)
    """Client -> parts that its node has, so far as is known."""

    @property
    def clients(self) -> Sequence[int]:
        return sorted(self.members)

    def run(self, params: Params, job: LocalJob, clients: Sequence[int]) -> Iterator[Update]:
        yield from self.perform(params, own_jobs(self, job, clients))

    def perform(self, state: Params, jobs: Mapping[int, LocalJob]) -> Iterator[Update]:
        refused = self._greet(jobs)
        yield from (refusal(client, reason) for client, reason in refused.items())
        waiting = {client: encode_job(job, state) for client, job in jobs.items() if client not in refused}
        for sending in range(SENDINGS):
            again: dict[int, tuple[bytes, dict[str, bytes]]] = {}
            nonces = {client: uuid.uuid4().hex for client in waiting}
            messages = {
                client: self._task(client, nonces[client], len(jobs), *encoded) for client, encoded in waiting.items()
            }
            for client, data in self.exchange(messages, self.deadline):
                try:
                    answer, update = self._opened(client, data, nonces[client])
                except UserError as error:
                    self._parts.pop(client, None)  # what it has is asked once more before the next job
                    yield refusal(client, str(error))
                    continue
                self._parts[client] |= waiting[client][1].keys()
                if update is not None:
                    yield update
                elif sending + 1 < SENDINGS:
                    self._parts[client] -= set(answer.missing)
                    again[client] = waiting[client]
                else:
                    yield refusal(client, "its node does not keep what it is sent")
            waiting = again

    def present(self) -> dict[int, Present | str]:
        """The status of every node, or the reason why there is none."""
        return self._greeted(self.clients)

    def _greet(self, clients: Collection[int]) -> dict[int, str]:
        """Find out what nodes have that were not asked before; whose node cannot be worked with, and why."""
        new, refused = [client for client in clients if client not in self._parts], {}
        for client, reply in (self._greeted(new) if new else {}).items():
            reason = reply if isinstance(reply, str) else self._objection(client, reply)
            if reason:
                refused[client] = reason
            elif not isinstance(reply, str):
                self._parts[client] = set(reply.parts)
        return refused

    def _greeted(self, clients: Sequence[int]) -> dict[int, Present | str]:
        nonces = {client: uuid.uuid4().hex for client in clients}
        messages = {
            client: encode(Ask(kind="hello", client=client, nonce=nonces[client], run=self.run_name))
            for client in clients
        }
        found: dict[int, Present | str] = {}
        # A greeting has a deadline of its own: a node that hangs takes no time from the jobs of the others.
        for client, data in self.exchange(messages, min(GREETING, self.deadline or GREETING)):
            try:
                found[client] = self._introduced(client, data, nonces[client])
            except UserError as error:
                found[client] = str(error)
        return found

    def _objection(self, client: int, reply: Present) -> str:
        """Why the numbers of a node would not be those of this run."""
        if self.backbone and reply.backbone != self.backbone:
            return "its backbone has other weights than the server's; give both the same"
        if reply.pairs != pairs_hash(self.holdings[client]):
            return "it holds other training pairs than this run knows of; give it the run's configuration and data"
        return ""

    def _introduced(self, client: int, data: bytes | str, nonce: str) -> Present:
        if isinstance(data, str):
            raise UserError(data)
        check_willing(data)
        reply = decode_present(data)
        check_sender(client, reply.client, reply.nonce == nonce)
        return reply

    def _opened(self, client: int, data: bytes | str, nonce: str) -> tuple[Answer, Update | None]:
        """The answer to a job, if it is one to this job and of this client."""
        if isinstance(data, str):
            raise UserError(data)
        answer, encoded = decode_answer(data)
        if answer.refused:
            raise UserError(f"its node refuses: {answer.refused}")
        check_sender(client, answer.client, answer.nonce == nonce)
        update = None if encoded is None else decode_update(encoded, "update")
        if update is not None:
            check_sender(client, update.client, True)
        return answer, update

    def gone_of(self, client: int) -> tuple[Request, ...]:
        """Closed requests as sent to a client: only its own single pairs."""
        own = {*self.holdings[client], *self.held_out.get(client, ())}
        return tuple(
            SampleRequest(ids=tuple(each for each in request.ids if each in own))
            if isinstance(request, SampleRequest)
            else request
            for request in self.gone
        )

    def ask(
        self,
        kind: Literal["groups", "join", "purge", "search", "find"],
        client: int,
        cohort: int,
        deal: Deal | None = None,
        purge: PurgeRequest | None = None,
        search: Search | None = None,
        picture: str | None = None,
    ) -> Ask:
        """A message to a client that is not a job."""
        return Ask(
            kind=kind,
            client=client,
            nonce=uuid.uuid4().hex,
            run=self.run_name,
            cohort=cohort,
            gone=self.gone_of(client),
            deal=deal,
            purge=purge,
            search=search,
            picture=picture,
        )

    def _task(self, client: int, nonce: str, cohort: int, job: bytes, parts: Mapping[str, bytes]) -> bytes:
        lacking = {name: data for name, data in parts.items() if name not in self._parts[client]}
        ask = Ask(
            kind="task",
            client=client,
            nonce=nonce,
            run=self.run_name,
            cohort=cohort,
            parts=tuple(sorted(parts)),
            gone=self.gone_of(client),
            renewed=self.renewed,
        )
        return encode(ask, {JOB: job, **lacking})

    def exchange(self, messages: Mapping[int, bytes], seconds: float | None) -> Iterator[tuple[int, bytes | str]]:
        """Send messages, count bytes and yield the replies that arrive within so many seconds."""
        if not messages:
            return
        self.sent += sum(map(len, messages.values()))
        for client, data in self.line.exchange(messages, seconds):
            self.received += len(data) if isinstance(data, bytes) else 0
            yield client, data


Reply = TypeVar("Reply", DealReply, PurgeReply, SearchReply, FoundPairs)


def collected(
    remote: Remote,
    asks: Mapping[int, Ask],
    blobs: Mapping[str, bytes],
    decode: Callable[[bytes], tuple[Reply, dict[str, bytes]]],
) -> tuple[dict[int, tuple[Reply, dict[str, bytes]]], dict[int, str]]:
    """Every client's answer to a message that is not a job, with its blobs, and the reason for each missing answer."""
    found: dict[int, tuple[Reply, dict[str, bytes]]] = {}
    reasons: dict[int, str] = {}
    for client, data in remote.exchange({client: encode(ask, blobs) for client, ask in asks.items()}, remote.deadline):
        try:
            if isinstance(data, str):
                raise UserError(data)
            check_willing(data)
            reply, brought = decode(data)
            check_sender(client, reply.client, reply.nonce == asks[client].nonce)
            found[client] = reply, brought
        except UserError as error:
            reasons[client] = str(error)
    return found, reasons


def check_willing(data: bytes) -> None:
    """Raise what a node says where it refuses; what else it says is for others to read."""
    try:
        answer, _ = decode_answer(data)
    except UserError:
        return
    raise UserError(f"its node refuses: {answer.refused}")


def check_sender(client: int, reply: int, fresh: bool) -> None:
    if reply != client:
        raise UserError(f"it answered as client {reply}")
    if not fresh:
        raise UserError("it answered another message than the one it was sent")
