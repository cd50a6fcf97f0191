"""At the server: a process with access to the socket sends messages to nodes and receives their answers as they arrive.

Flower's grid is called from one thread only; other threads read the calls.
"""

import os
import queue
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp

from ease_stub.pipe import packed, receive, send, unpacked, unwrapped, wrapped

app = ServerApp()
POLL_SECONDS = 0.2
LIVES_SECONDS = 5.0
"""How often to see whether the link is there while nothing is asked."""
LONGEST_SECONDS = 12 * 3600.0


@dataclass
class Call:
    """What one speaker asked, and the messages that are on their way for it."""

    line: socket.socket
    header: dict[str, Any]
    data: bytes
    waiting: dict[str, int] = field(default_factory=dict)
    """Message -> node."""
    left: bool = False

    def say(self, header: dict[str, Any], data: bytes = b"") -> None:
        try:
            send(self.line, packed(header, data))
        except OSError:
            self.left = True


@app.main()
def main(grid: Grid, context: Context) -> None:
    path = Path(str(context.run_config["socket"]))
    path.unlink(missing_ok=True)
    asked: queue.SimpleQueue[Call] = queue.SimpleQueue()
    with socket.socket(socket.AF_UNIX) as line:
        mask = os.umask(0o177)
        line.bind(str(path))
        os.umask(mask)
        line.listen(16)
        threading.Thread(target=attend_all, args=(line, asked), daemon=True).start()
        try:
            turn(grid, asked)
        finally:
            path.unlink(missing_ok=True)


def attend_all(line: socket.socket, asked: "queue.SimpleQueue[Call]") -> None:
    while True:
        try:
            speaker, _ = line.accept()
        except OSError:
            return
        threading.Thread(target=attend, args=(speaker, asked), daemon=True).start()


def attend(speaker: socket.socket, asked: "queue.SimpleQueue[Call]") -> None:
    """Read what is asked, then wait until the speaker leaves."""
    try:
        call = Call(speaker, *unpacked(receive(speaker)))
        asked.put(call)
        while speaker.recv(1):
            pass
        call.left = True
    except (OSError, ValueError):
        speaker.close()


def turn(grid: Grid, asked: "queue.SimpleQueue[Call]") -> None:
    """Push messages and pull answers for ever; an error of the link ends this and the run."""
    calls: list[Call] = []
    looked = time.monotonic()
    while True:
        try:
            call = asked.get(timeout=POLL_SECONDS if calls else LIVES_SECONDS)
        except queue.Empty:
            pass
        else:
            begin(grid, call)
            calls.append(call)
        if not calls and time.monotonic() - looked > LIVES_SECONDS:
            looked = time.monotonic()
            list(grid.get_node_ids())
        for call in calls:
            collect(grid, call)
        for call in [each for each in calls if each.left or not each.waiting]:
            calls.remove(call)
            close(call.line)


def begin(grid: Grid, call: Call) -> None:
    """List the connected nodes, or send messages to nodes."""
    if call.header.get("op") == "nodes":
        call.say({"nodes": [describe_node(node) for node in grid.get_nodes()]})
        return
    seconds, place, there = float(call.header.get("seconds") or LONGEST_SECONDS), 0, set(grid.get_node_ids())
    for target in call.header["to"]:
        node, data = int(target["node"]), call.data[place : place + int(target["size"])]
        place += len(data)
        if node not in there:
            call.say({"node": node, "error": "its node is not connected to the server"})
            continue
        message = Message(wrapped(data), dst_node_id=node, message_type="train", ttl=seconds)
        (sent,) = list(grid.push_messages([message])) or [None]
        if sent is None:
            call.say({"node": node, "error": "Flower did not take the message"})
        else:
            call.waiting[sent] = node


def collect(grid: Grid, call: Call) -> None:
    for reply in list(grid.pull_messages(list(call.waiting))) if call.waiting else ():
        node = call.waiting.pop(reply.metadata.reply_to_message_id, None)
        if node is None:
            continue
        if reply.has_error():
            reason = f"Flower error {reply.error.code}: {reply.error.reason}"
            call.say({"node": node, "error": reason})
            continue
        try:
            data = unwrapped(reply.content)
        except (KeyError, TypeError, AttributeError):
            call.say({"node": node, "error": "its answer is none of this tool"})
        else:
            call.say({"node": node, "error": ""}, data)


def describe_node(node: Any) -> dict[str, Any]:
    return {
        "node": node.node_id,
        "key": bytes(node.public_key).hex(),
        "name": node.name,
        "online_until": node.online_until,
        "status": node.status,
    }


def close(line: socket.socket) -> None:
    with suppress(OSError):
        line.shutdown(socket.SHUT_RDWR)
    line.close()
