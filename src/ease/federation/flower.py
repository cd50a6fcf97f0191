"""A line over Flower: our messages go through its grid to the nodes of registered keys, and back.

Flower runs a stub at either end that passes bytes on. The stub at the server listens at a socket in the folder of the
federation; this process speaks to it and never to Flower. Who a node is, its registered key says.
"""

import json
import socket
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ease.errors import Disconnected, UserError
from ease.federation.container import LIMITS
from ease.federation.credentials import read_admitted
from ease.federation.remote import LATE
from ease.federation.wire import LENGTH, Ask, decode_answer, decode_present, encode, receive, send
from ease.storage import read_json

GRID = "grid.sock"
SERVER = "server.json"
DATABASE = Path("flower") / "link.db"
"""Flower's store of messages until they are fetched."""
GRACE = 30.0
"""Seconds in which nodes may reconnect at the start of a command, as after a restart of the server."""
LOOK = 1.0
SPEAKING = 10.0
"""Seconds in which the stub must say who is there."""
INTRODUCTION = 180.0
"""Seconds in which a connected node without a key must say who it is: Flower starts a process for its answer, and a
simulation all of Ray before the first."""


@dataclass
class Flower:
    """A line to the clients of the federation in a folder."""

    folder: Path
    _known: dict[int, int] = field(default_factory=dict)
    """Node -> client, where nodes have no keys and say themselves who they are."""
    _settled: bool = False

    def exchange(self, messages: Mapping[int, bytes], seconds: float | None) -> Iterator[tuple[int, bytes | str]]:
        until = None if seconds is None else time.monotonic() + seconds
        nodes = self._found(set(messages), until)
        for client in sorted(messages.keys() - nodes.keys()):
            yield client, "its node is not connected to the server"
        clients = {node: client for client, node in nodes.items()}
        for node, answer in self._sent({node: messages[client] for node, client in clients.items()}, until):
            yield clients[node], answer

    def nodes(self) -> list[dict[str, Any]]:
        """Nodes that are connected, as Flower lists them."""
        (answer,) = self._asked({"op": "nodes"}, b"", time.monotonic() + SPEAKING)
        return list(answer[0]["nodes"])

    def _found(self, clients: set[int], until: float | None) -> dict[int, int]:
        """Client -> node, of those that are connected; at first they are waited for."""
        patience = 0.0 if self._settled else _part(GRACE, until)
        self._settled, give_up = True, time.monotonic() + patience
        while True:
            found = self._identified(until)
            if clients <= found.keys() or time.monotonic() >= give_up:
                return {client: node for client, node in found.items() if client in clients}
            time.sleep(LOOK)

    def _identified(self, until: float | None = None) -> dict[int, int]:
        """Client -> node. A key is bound to one client; without keys (on one machine only) nodes identify
        themselves."""
        nodes = self.nodes()
        if not is_insecure(self.folder):
            keys = read_admitted(self.folder).by_key()
            return {keys[each["key"]]: int(each["node"]) for each in nodes if each["key"] in keys}
        new = [int(each["node"]) for each in nodes if int(each["node"]) not in self._known]
        hello = encode(Ask(kind="hello", client=0, nonce="0" * 32, run="0" * 32))
        for node, answer in self._sent(dict.fromkeys(new, hello), time.monotonic() + _part(INTRODUCTION, until)):
            if isinstance(answer, bytes) and (client := _claimed(answer)) is not None:
                self._known[node] = client
        there = {int(each["node"]) for each in nodes}
        return {client: node for node, client in self._known.items() if node in there}

    def _sent(self, messages: Mapping[int, bytes], until: float | None) -> Iterator[tuple[int, bytes | str]]:
        """Node -> its answer; after `until` a client without an answer is late."""
        if not messages:
            return
        waiting = set(messages)
        left = None if until is None else max(0.1, until - time.monotonic())
        header = {
            "op": "send",
            "seconds": left,
            "to": [{"node": node, "size": len(data)} for node, data in messages.items()],
        }
        try:
            for fields, data in self._asked(header, b"".join(messages.values()), until):
                waiting.discard(fields["node"])
                yield fields["node"], f"{fields['error']}" if fields["error"] else data
                if not waiting:
                    return
        except TimeoutError:
            pass
        for node in sorted(waiting):
            yield node, LATE

    def _asked(
        self, header: dict[str, Any], data: bytes, until: float | None
    ) -> Iterator[tuple[dict[str, Any], bytes]]:
        path, text = self.folder / GRID, json.dumps(header).encode()
        with socket.socket(socket.AF_UNIX) as line:
            try:
                line.connect(str(path))
                send(line, LENGTH.pack(len(text)) + text + data)
                while True:
                    answer = receive(line, LIMITS.total, "answer", until)
                    (length,) = LENGTH.unpack_from(answer)
                    end = LENGTH.size + length
                    yield json.loads(answer[LENGTH.size : end]), answer[end:]
                    if header["op"] == "nodes":
                        return
            except TimeoutError:
                raise
            except OSError as error:
                raise Disconnected(
                    f"{path}: the server of the federation is not there ({error.strerror or error}); start it with "
                    f"`ease server {self.folder}`, then run the same command again"
                ) from error


def _part(seconds: float, until: float | None) -> float:
    """So many seconds, but no more than half of what is left: the rest is for the work itself."""
    return seconds if until is None else min(seconds, (until - time.monotonic()) / 2)


def is_insecure(folder: Path) -> bool:
    """Whether the server of a federation was started without keys."""
    path = folder / SERVER
    if not path.is_file():
        raise UserError(f"{path}: missing; start the server of the federation with: ease server {folder}")
    return bool(read_json(path).get("insecure"))


def _claimed(answer: bytes) -> int | None:
    """The client that a node says it is of."""
    for decode in (decode_present, lambda data: decode_answer(data)[0]):
        try:
            return decode(answer).client
        except UserError:
            continue
    return None


def rewritten_database(folder: Path) -> list[tuple[str, str]]:
    """Write Flower's database anew, and return what may be left of delivered messages and why.

    Flower deletes a message once it is fetched, but SQLite leaves its bytes in free pages and in the write-ahead log.
    """
    path = folder / DATABASE
    if not path.is_file():
        return []
    try:
        with closing(sqlite3.connect(path, timeout=SPEAKING, isolation_level=None)) as connection:
            connection.execute("VACUUM")
            busy, *_ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    except sqlite3.Error as error:
        return [(str(DATABASE), f"may hold messages that Flower has delivered; it could not be rewritten ({error})")]
    return [(str(DATABASE), "may hold messages that Flower has delivered; it was in use")] if busy else []
